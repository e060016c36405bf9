#define _GNU_SOURCE
#include "server.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "audit.h"
#include "hostlist.h"

enum {
    SLOTS = 128,       /* connections at a time; when all only wait, the oldest gives way, */
    GRACE_MS = 250,    /* but not before that: who has just connected is about to send */
    READ_MS = 2000,    /* for a client to send its line */
    QUEUE_MS = 30000,  /* for a request to be started */
    IDLE_MS = 30000,   /* to look whether we are still wanted, where nothing says so */
    WORK_MS = 130000,  /* for a worker; its programs have their own, shorter limits */
    STATE_WORKERS = 3, /* a site's check that hangs for one node must not hold up the others */
    COMMENT_WORKERS = 1,
    OVER = 3, /* exit status of a worker: the job does not run here any more */
};

/* ---- budgets: a flood costs its sender, not slurmctld or the log ------------------------------------------------- */

struct budget {
    int period_ms, burst;
    int64_t next;
};

static bool spend(struct budget *budget, int64_t now)
{
    if (budget->next < now)
        budget->next = now;
    if (budget->next - now > (int64_t)budget->period_ms * budget->burst)
        return false;
    budget->next += budget->period_ms;
    return true;
}

static struct budget state_budget = {.period_ms = 2000}; /* its burst follows the cap */
static struct budget comment_budget = {.period_ms = 500, .burst = 20};
static struct budget log_budget = {.period_ms = 200, .burst = 50};
static unsigned unlogged;

/* ---- connections ------------------------------------------------------------------------------------------------ */

enum state { FREE, READING, READY, RUNNING };

static struct slot {
    enum state state;
    int fd;       /* of the client; a worker has it in RUNNING */
    pid_t worker; /* in RUNNING */
    uid_t caller;
    int64_t end; /* of the time for this state */
    size_t used;
    char line[TP_LINE_MAX + 2]; /* a longest line, its newline, and one byte that must not come */
    struct tp_request request;
} slots[SLOTS];

static struct tp_helper me;
static char nodes_asked[1 << 16];

static void answer(int fd, const char *why)
{
    char line[TP_WHY_MAX + 16];
    int n = why ? snprintf(line, sizeof line, "refused: %s\n", why) : snprintf(line, sizeof line, "ok\n");
    /* A client that is gone or does not listen is its own problem. */
    (void)!send(fd, line, (size_t)n, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void log_refusal(uid_t caller, const struct tp_request *request, const char *why)
{
    if (!spend(&log_budget, tp_now())) {
        unlogged++;
        return;
    }
    if (unlogged)
        tp_audit("%u more refusals were not logged", unlogged);
    unlogged = 0;
    if (request)
        tp_audit("refused to uid %u: %s %s %s: %s", caller, tp_verb_name(request->verb), request->node, request->text,
                 why);
    else
        tp_audit("refused to uid %u: %s", caller, why);
}

static void release(struct slot *slot)
{
    if (slot->fd >= 0)
        close(slot->fd);
    memset(slot, 0, sizeof *slot);
    slot->fd = -1;
}

/* `request` is told to the log only once it is known to be clean. */
static void refuse(struct slot *slot, const struct tp_request *request, const char *why)
{
    log_refusal(slot->caller, request, why);
    answer(slot->fd, why);
    release(slot);
}

static bool changes_state(const struct tp_request *request)
{
    return request->verb == TP_DRAIN || request->verb == TP_DOWN;
}

static void judge(struct slot *slot, size_t length)
{
    const char *why = tp_request_parse(slot->line, length, &slot->request);
    if (why) {
        refuse(slot, NULL, why);
        return;
    }
    why = tp_request_allowed(&me.job, slot->caller, &slot->request);
    if (!why && !spend(changes_state(&slot->request) ? &state_budget : &comment_budget, tp_now()))
        why = "too many requests: try again in a few seconds";
    if (why) {
        refuse(slot, &slot->request, why);
        return;
    }
    slot->state = READY;
    slot->end = tp_now() + QUEUE_MS;
}

static void take_input(struct slot *slot)
{
    ssize_t n = recv(slot->fd, slot->line + slot->used, sizeof slot->line - slot->used, MSG_DONTWAIT);
    if (n < 0) {
        if (errno != EAGAIN && errno != EINTR)
            release(slot);
        return;
    }
    slot->used += (size_t)n;
    const char *newline = memchr(slot->line, '\n', slot->used);
    size_t length = newline ? (size_t)(newline - slot->line) : slot->used;
    if (newline && length + 1 < slot->used)
        refuse(slot, NULL, "something follows the newline: one request a connection");
    else if (newline)
        judge(slot, length);
    else if (length > TP_LINE_MAX)
        refuse(slot, NULL, "the line is too long: at most 600 bytes");
    else if (n == 0)
        refuse(slot, NULL, "the line has no newline at its end");
}

/* A free slot, or the one whose client has kept us waiting longest; NULL where nobody can be sent away now. */
static struct slot *place(int64_t now)
{
    struct slot *oldest = NULL;
    for (struct slot *slot = slots; slot < slots + SLOTS; slot++) {
        if (slot->state == FREE)
            return slot;
        if (slot->state == READING && (!oldest || slot->end < oldest->end))
            oldest = slot;
    }
    return oldest && oldest->end - READ_MS + GRACE_MS <= now ? oldest : NULL;
}

static void take_clients(int listener)
{
    for (int i = 0; i < 16; i++) { /* not for ever: those already here want to be read */
        struct slot *slot = place(tp_now());
        if (!slot)
            return;
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
                poll(NULL, 0, 20); /* out of descriptors or memory: do not spin */
            return;
        }
        struct ucred peer;
        socklen_t size = sizeof peer;
        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
            close(fd);
            continue;
        }
        if (peer.uid != me.job.owner && peer.uid != 0) { /* before he can hold a slot */
            const char *why = "the caller is not the job's owner";
            log_refusal(peer.uid, NULL, why);
            answer(fd, why);
            close(fd);
            continue;
        }
        if (slot->state == READING)
            refuse(slot, NULL, "too many connections");
        *slot = (struct slot){.state = READING, .fd = fd, .caller = peer.uid, .end = tp_now() + READ_MS};
        take_input(slot);
    }
}

/* ---- workers ---------------------------------------------------------------------------------------------------- */

static _Noreturn void work(int client, uid_t caller, const struct tp_request *request, pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    char why[TP_WHY_MAX];
    enum tp_outcome outcome = tp_act(&me.job, &me.tools, request, why);
    if (outcome == TP_DONE)
        tp_audit("did for uid %u: %s %s %s", caller, tp_verb_name(request->verb), request->node, request->text);
    else
        log_refusal(caller, request, why);
    answer(client, outcome == TP_DONE ? NULL : why);
    _exit(outcome == TP_OVER ? OVER : 0);
}

/* Nobody runs an epilog on a node that was taken out of a job, so the helper there must find out by itself. */
static void watch(int64_t now)
{
    static int64_t next;
    if (next == 0) { /* not all nodes of a job at once */
        unsigned phase = 0;
        for (const char *c = me.tools.self; *c; c++)
            phase = phase * 31 + (unsigned char)*c;
        next = now + me.watch_ms / 2 + (int)(phase % (unsigned)me.watch_ms) / 2;
    }
    if (now < next)
        return;
    next = now + me.watch_ms;
    pid_t self = getpid();
    if (fork() != 0)
        return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    _exit(getppid() == self && tp_still_here(&me.job, &me.tools) == TP_OVER ? OVER : 0);
}

static bool may_start(const struct slot *slot)
{
    int state = 0, comment = 0;
    for (const struct slot *other = slots; other < slots + SLOTS; other++) {
        if (other->state != RUNNING)
            continue;
        if (!changes_state(&other->request))
            comment++;
        else if (strcmp(other->request.node, slot->request.node) == 0)
            return false; /* one after the other: a drain and a down of one node must not mix */
        else
            state++;
    }
    return changes_state(&slot->request) ? state < STATE_WORKERS : comment < COMMENT_WORKERS;
}

static void start_work(void)
{
    for (;;) { /* the one that waits longest first */
        struct slot *next = NULL;
        for (struct slot *slot = slots; slot < slots + SLOTS; slot++)
            if (slot->state == READY && (!next || slot->end < next->end) && may_start(slot))
                next = slot;
        if (!next)
            return;
        pid_t self = getpid(), pid = fork();
        if (pid == 0)
            work(next->fd, next->caller, &next->request, self);
        if (pid < 0) {
            refuse(next, &next->request, "out of processes: try again later");
            continue;
        }
        close(next->fd);
        next->fd = -1;
        next->state = RUNNING;
        next->worker = pid;
        next->end = tp_now() + WORK_MS;
    }
}

/* Returns whether one of them has found that the job does not run here any more. */
static bool reap(void)
{
    int status;
    pid_t pid;
    bool over = false;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        over |= WIFEXITED(status) && WEXITSTATUS(status) == OVER;
        for (struct slot *slot = slots; slot < slots + SLOTS; slot++)
            if (slot->state == RUNNING && slot->worker == pid) {
                if (!WIFEXITED(status))
                    tp_audit("the worker for node '%s' died: status %d", slot->request.node, status);
                release(slot);
            }
    }
    return over;
}

static void expire(int64_t now)
{
    for (struct slot *slot = slots; slot < slots + SLOTS; slot++) {
        if (slot->state == FREE || now < slot->end)
            continue;
        if (slot->state == READING)
            refuse(slot, NULL, "no whole line came in time");
        else if (slot->state == READY)
            refuse(slot, &slot->request, "busy: try again later");
        else
            kill(slot->worker, SIGKILL); /* not reaped yet, so the number is still his */
    }
}

/* ---- the server ------------------------------------------------------------------------------------------------- */

static struct sockaddr_un address;

/* The epilog ends us by removing our socket; a new life of the same job, by putting another there. */
static bool is_ours(ino_t socket)
{
    struct stat now;
    return stat(address.sun_path, &now) == 0 && now.st_ino == socket;
}

static _Noreturn void loop(int listener, int children, int changes)
{
    struct stat file;
    ino_t own = stat(address.sun_path, &file) == 0 ? file.st_ino : 0;
    while (is_ours(own)) {
        struct pollfd ready[SLOTS + 3];
        int64_t now = tp_now(), end = now + (me.watch_ms < IDLE_MS ? me.watch_ms : IDLE_MS);
        for (int i = 0; i < SLOTS; i++) {
            ready[i] = (struct pollfd){.fd = slots[i].state == READING ? slots[i].fd : -1, .events = POLLIN};
            if (slots[i].state != FREE && slots[i].end < end)
                end = slots[i].end;
        }
        bool room = place(now) != NULL;
        if (!room && end > now + 20)
            end = now + 20; /* soon */
        ready[SLOTS] = (struct pollfd){.fd = room ? listener : -1, .events = POLLIN};
        ready[SLOTS + 1] = (struct pollfd){.fd = children, .events = POLLIN};
        ready[SLOTS + 2] = (struct pollfd){.fd = changes, .events = POLLIN};
        if (poll(ready, SLOTS + 3, end > now ? (int)(end - now) : 0) < 0 && errno != EINTR)
            poll(NULL, 0, 20);
        for (int i = 0; i < SLOTS; i++)
            if (slots[i].state == READING && ready[i].fd >= 0 && ready[i].revents)
                take_input(&slots[i]);
        char ignored[4096];
        if (ready[SLOTS + 1].revents)
            while (read(children, ignored, sizeof ignored) > 0)
                ;
        if (ready[SLOTS + 2].revents)
            while (read(changes, ignored, sizeof ignored) > 0)
                ;
        if (reap()) {
            tp_audit("the job does not run on this node any more: the helper ends");
            unlink(address.sun_path);
            break;
        }
        if (ready[SLOTS].revents)
            take_clients(listener);
        expire(tp_now());
        start_work();
        watch(tp_now());
    }
    _exit(0); /* workers die with us */
}

static void close_all_from(unsigned first)
{
#ifdef SYS_close_range
    if (syscall(SYS_close_range, first, ~0U, 0) == 0)
        return;
#endif
    for (int fd = (int)first; fd < 65536; fd++)
        close(fd);
}

/* Leaves behind everything of the process that forked us: session, descriptors, signals, working folder. */
void tp_serve(const struct tp_helper *helper, int listener, const char *path)
{
    static char who[TP_NODE_MAX + 32];
    me = *helper;
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    snprintf(who, sizeof who, "job %u on %s", me.job.id, me.tools.self);
    tp_audit_open(me.tools.run, who);

    prctl(PR_SET_NAME, "torchpass-help");
    setsid();
    umask(077);
    if (chdir("/") != 0)
        _exit(1);
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});

    if (listener != 3)
        dup3(listener, 3, O_CLOEXEC);
    close_all_from(4);
    for (int fd = 0; fd < 3; fd++)
        close(fd);
    if (open("/dev/null", O_RDWR) != 0 || dup(0) != 1 || dup(0) != 2)
        _exit(1);

    /* A signal that is meant for slurmd's children is not for us. */
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGCHLD};
    for (int s = 1; s < NSIG; s++) {
        bool fault = false;
        for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
            fault |= faults[i] == s;
        if (!fault)
            signal(s, SIG_IGN);
    }
    signal(SIGCHLD, SIG_DFL);
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_SETMASK, &child, NULL);
    int children = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (children < 0)
        _exit(1);
    /* Removing a file that is in use changes its link count, hence an attribute. Without this, the loop still looks
     * now and then. */
    int changes = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (changes >= 0)
        inotify_add_watch(changes, address.sun_path, IN_ATTRIB);

    for (struct slot *slot = slots; slot < slots + SLOTS; slot++)
        slot->fd = -1;
    state_budget.burst = 2 * (int)me.job.cap + 8; /* a drain and a down for each, and some that come twice */

    uid_t owner = me.job.owner;
    for (int wait = 1; !*me.job.nodes; wait *= 2) { /* here, not in the prolog: it must not hold up the job's start */
        if (tp_ask_job(&me.tools, me.job.id, &owner, nodes_asked, sizeof nodes_asked) == TP_DONE &&
            owner == me.job.owner) {
            me.job.nodes = nodes_asked;
        } else if (wait > 8) {
            tp_audit("cannot learn the job's nodes: no requests are taken");
            unlink(address.sun_path);
            _exit(1);
        } else {
            poll(NULL, 0, wait * 1000);
        }
    }
    loop(3, children, changes);
}
