#define _GNU_SOURCE
#include "act.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "hostlist.h"
#include "view.h"

enum {
    SLURM_MS = 12000,  /* scontrol itself gives up after 9 to 10 s without slurmctld */
    CONFIRM_MS = 5000, /* part of the site's contract */
    LOCK_MS = 20000,   /* for other requests on this node */
    ERROR_MAX = 120,   /* of what scontrol says */
};

int64_t tp_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000) + now.tv_nsec / 1000000;
}

/* ---- running a program ------------------------------------------------------------------------------------------ */

/* What a program writes is handed on line by line; of a line longer than the buffer only the start. */
struct lines {
    void (*take)(void *, const char *line);
    void *to;
    size_t used;
    char buffer[4096];
};

static void take_bytes(struct lines *lines, const char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] == '\n') {
            lines->buffer[lines->used] = '\0';
            lines->take(lines->to, lines->buffer);
            lines->used = 0;
        } else if (bytes[i] != '\0' && lines->used < sizeof lines->buffer - 1) {
            lines->buffer[lines->used++] = bytes[i];
        }
    }
}

static _Noreturn void become(const char *const argv[], int output, bool errors, pid_t parent)
{
    static char conf[PATH_MAX + 16];
    const char *environment[] = {"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", NULL, NULL};
    const char *slurm_conf = getenv("SLURM_CONF"); /* of slurmd, not of the job */
    if (slurm_conf && snprintf(conf, sizeof conf, "SLURM_CONF=%s", slurm_conf) < (int)sizeof conf)
        environment[2] = conf;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(126);
    setpgid(0, 0);
    for (int s = 1; s < NSIG; s++)
        signal(s, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int null = open("/dev/null", O_RDWR);
    dup2(null, STDIN_FILENO);
    dup2(output, STDOUT_FILENO);
    dup2(errors ? output : null, STDERR_FILENO);
    if (null > STDERR_FILENO)
        close(null);
    /* execve takes char *const[] for old times' sake and changes none of them. */
    execve(argv[0], (char *const *)(uintptr_t)argv, (char *const *)(uintptr_t)environment);
    _exit(127);
}

/* Runs a program in a fixed environment until it ends or its time is up; then it and its children are killed. Returns
 * its exit status, or -1. With `errors`, its error output counts as output. */
static int run(const char *const argv[], int limit_ms, bool errors, void (*take)(void *, const char *), void *to)
{
    int pipes[2];
    if (pipe2(pipes, O_CLOEXEC) != 0)
        return -1;
    pid_t self = getpid(), pid = fork();
    if (pid < 0) {
        close(pipes[0]);
        close(pipes[1]);
        return -1;
    }
    if (pid == 0)
        become(argv, pipes[1], errors, self);
    setpgid(pid, pid); /* the child does it too: whoever comes first */
    close(pipes[1]);
    fcntl(pipes[0], F_SETFL, O_NONBLOCK);

    struct lines lines = {.take = take, .to = to};
    int64_t end = tp_now() + limit_ms;
    int status = 0;
    bool open = true, ended = false;
    /* Neither end of output nor end of process is enough alone: either can stay away while the other came. */
    while (!ended && tp_now() < end) {
        struct pollfd output = {.fd = open ? pipes[0] : -1, .events = POLLIN};
        poll(&output, 1, open ? 10 : 1);
        ended = waitpid(pid, &status, WNOHANG) == pid;
        char bytes[4096];
        ssize_t n;
        while (open && (n = read(pipes[0], bytes, sizeof bytes)) >= 0) {
            open = n > 0;
            take_bytes(&lines, bytes, (size_t)n);
            if (!ended && tp_now() >= end)
                break;
        }
    }
    if (lines.used)
        take_bytes(&lines, "\n", 1);
    close(pipes[0]);
    kill(-pid, SIGKILL); /* also what it left in the background */
    if (!ended) {
        waitpid(pid, &status, 0);
        return -1;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void ignore_line(void *to, const char *line)
{
    (void)to, (void)line;
}

/* The first line of an error, made fit to be shown. */
static void first_line(void *to, const char *line)
{
    char *why = to;
    if (*why)
        return;
    size_t n = 0;
    for (; line[n] && n < ERROR_MAX - 1; n++)
        why[n] = line[n] >= ' ' && line[n] <= '~' ? line[n] : '?';
    why[n] = '\0';
}

static bool refuse(char why[TP_WHY_MAX], const char *reason)
{
    snprintf(why, TP_WHY_MAX, "%s", reason);
    return false;
}

/* ---- asking Slurm ----------------------------------------------------------------------------------------------- */

static void view_line(void *to, const char *line)
{
    tp_view_line(to, line);
}

static bool look(const struct tp_job *job, const struct tp_tools *tools, const char *nodes, const char *node,
                 struct tp_view *view, char why[TP_WHY_MAX])
{
    char scontrol[PATH_MAX];
    snprintf(scontrol, sizeof scontrol, "%s/scontrol", tools->bin);
    const char *argv[] = {scontrol, "show", "node", nodes, NULL};
    tp_view_begin(view, job, node, tools->self);
    if (run(argv, SLURM_MS, false, view_line, view) != 0)
        return refuse(why, "slurmctld does not answer: try again later");
    if (!view->seen)
        return refuse(why, "Slurm does not know the node");
    return true;
}

static bool update(const struct tp_tools *tools, const char *what, const char *state, const char *text,
                   char why[TP_WHY_MAX])
{
    char scontrol[PATH_MAX], error[ERROR_MAX] = "";
    snprintf(scontrol, sizeof scontrol, "%s/scontrol", tools->bin);
    const char *with_state[] = {scontrol, "update", what, state, text, NULL};
    const char *without[] = {scontrol, "update", what, text, NULL};
    if (run(state ? with_state : without, SLURM_MS, true, first_line, error) == 0)
        return true;
    snprintf(why, TP_WHY_MAX, "scontrol failed: %s", *error ? error : "no answer in time");
    return false;
}

struct others {
    uid_t owner;
    bool found;
};

static void other_user(void *to, const char *line)
{
    struct others *others = to;
    char *end;
    errno = 0;
    unsigned long uid = strtoul(line, &end, 10);
    if (*line && (errno || *end || uid != others->owner))
        others->found = true;
}

/* Setting a node down kills everything on it, so nobody else's job may be there. */
static bool alone(const struct tp_job *job, const struct tp_tools *tools, const char *node, char why[TP_WHY_MAX])
{
    char squeue[PATH_MAX];
    snprintf(squeue, sizeof squeue, "%s/squeue", tools->bin);
    const char *argv[] = {squeue, "-h", "-a", "-w", node, "-t", "R,S,CG,CF", "-o", "%U", NULL};
    struct others others = {.owner = job->owner};
    if (run(argv, SLURM_MS, false, other_user, &others) != 0)
        return refuse(why, "slurmctld does not answer: try again later");
    return others.found ? refuse(why, "another user's job runs on the node: it may be drained, but not set down")
                        : true;
}

struct answer {
    uint32_t id;
    uid_t *owner;
    char *nodes;
    size_t size;
    bool found, unknown;
};

static void job_line(void *to, const char *line)
{
    struct answer *answer = to;
    char *end;
    answer->unknown |= strstr(line, "Invalid job id") != NULL; /* it was long ago */
    if (strtoul(line, &end, 10) != answer->id || end == line || *end != ' ')
        return;
    unsigned long owner = strtoul(end + 1, &end, 10);
    if (*end != ' ' || !tp_hostlist_ok(end + 1) || strlen(end + 1) >= answer->size)
        return;
    *answer->owner = (uid_t)owner;
    strcpy(answer->nodes, end + 1);
    answer->found = true;
}

enum tp_outcome tp_ask_job(const struct tp_tools *tools, uint32_t id, uid_t *owner, char *nodes, size_t size)
{
    char squeue[PATH_MAX], job[16];
    snprintf(squeue, sizeof squeue, "%s/squeue", tools->bin);
    snprintf(job, sizeof job, "%u", id);
    /* %A, because -j also lists the other elements of an array and the other components of a job. */
    const char *argv[] = {squeue, "-h", "-a", "-j", job, "-t", "R,S,CG,CF", "-o", "%A %U %N", NULL};
    struct answer answer = {.id = id, .owner = owner, .nodes = nodes, .size = size};
    int status = run(argv, SLURM_MS, true, job_line, &answer);
    if (answer.unknown)
        return TP_OVER;
    return status != 0 ? TP_REFUSED : answer.found ? TP_DONE : TP_OVER;
}

enum tp_outcome tp_still_here(const struct tp_job *job, const struct tp_tools *tools)
{
    static char nodes[1 << 16];
    uid_t owner;
    enum tp_outcome outcome = tp_ask_job(tools, job->id, &owner, nodes, sizeof nodes);
    return outcome == TP_DONE && (owner != job->owner || !tp_hostlist_has(nodes, tools->self)) ? TP_OVER : outcome;
}

/* ---- acting ----------------------------------------------------------------------------------------------------- */

static bool confirmed(const struct tp_job *job, const struct tp_tools *tools, const struct tp_request *request,
                      char why[TP_WHY_MAX])
{
    if (!tools->confirm)
        return true;
    struct stat program;
    if (*tools->confirm != '/' || stat(tools->confirm, &program) != 0 || !S_ISREG(program.st_mode) ||
        program.st_uid != 0 || (program.st_mode & (S_IWGRP | S_IWOTH)))
        return refuse(why, "the site's check is not an absolute path of a program that only root can change");
    char id[16];
    snprintf(id, sizeof id, "%u", job->id);
    const char *argv[] = {tools->confirm, id, request->node, request->verb == TP_DOWN ? "down" : "drain", NULL};
    int status = run(argv, CONFIRM_MS, false, ignore_line, NULL);
    if (status == 0)
        return true;
    return refuse(why, status < 0 ? "the site's check did not end in time" : "the site's check says no");
}

/* Only one of this node's workers, whichever job it works for, may claim at a time. Returns a descriptor that holds the
 * lock, or -1. */
static int lock(const struct tp_tools *tools)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/claim.lock", tools->run);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    for (int64_t end = tp_now() + LOCK_MS; fd >= 0; poll(NULL, 0, 10)) {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0)
            return fd;
        if (errno != EWOULDBLOCK || tp_now() > end)
            break;
    }
    if (fd >= 0)
        close(fd);
    return -1;
}

/* The cap is the job's, and each of its nodes has a helper that knows nothing of the others. So each announces which
 * node it is about to take out, in a field of slurmctld that only it writes: Extra of its own node. Then it counts what
 * is out and what the others have announced. Whoever announces last sees all the rest, however many ask at once; and an
 * announcement stands until the node is marked by its Reason, so nothing is ever missing from the count. */
static bool drain(const struct tp_job *job, const struct tp_tools *tools, const char *what, const char *reason,
                  struct tp_view *view, char why[TP_WHY_MAX])
{
    if (view->marked) /* so it counts already */
        return update(tools, what, "state=drain", reason, why);

    char self[TP_NODE_MAX + 16], claim[TP_EXTRA_MAX + 256] = "extra=", before[TP_EXTRA_MAX + 16], ignored[TP_WHY_MAX];
    snprintf(self, sizeof self, "nodename=%s", tools->self);
    snprintf(before, sizeof before, "extra=%s", view->extra);
    if (!view->seen_self || !tp_view_claim(view, claim + strlen(claim), sizeof claim - strlen(claim)))
        return refuse(why, "this node is not the job's, or its Extra field has no room");
    int held = lock(tools);
    if (held < 0)
        return refuse(why, "busy: try again later");
    bool done = false;
    if (update(tools, self, NULL, claim, why)) {
        if (look(job, tools, job->nodes, view->node, view, why)) {
            const char *no = tp_cap_allows(job, &view->taken, view->node);
            done = no ? refuse(why, no) : update(tools, what, "state=drain", reason, why);
        }
        update(tools, self, NULL, before, ignored);
    }
    close(held);
    return done;
}

static bool take_out(const struct tp_job *job, const struct tp_tools *tools, const struct tp_request *request,
                     char why[TP_WHY_MAX])
{
    char what[TP_NODE_MAX + 16], reason[TP_LINE_MAX + TP_REASON_MAX + 64] = "reason=";
    static struct tp_view view;
    snprintf(what, sizeof what, "nodename=%s", request->node);
    if (!look(job, tools, job->nodes, request->node, &view, why))
        return false;
    const char *no = tp_cap_allows(job, &view.taken, request->node);
    if (no)
        return refuse(why, no);
    if (request->verb == TP_DOWN && !alone(job, tools, request->node, why))
        return false;
    if (!confirmed(job, tools, request, why))
        return false;
    tp_view_reason(&view, request->text, reason + strlen(reason), sizeof reason - strlen(reason));
    /* Down alone would not last: a node that registers again may come back into service. Drain stays. */
    return drain(job, tools, what, reason, &view, why) &&
           (request->verb == TP_DRAIN || update(tools, what, "state=down", reason, why));
}

/* An administrator's note on a node is not ours to overwrite, and ours says whose it is. */
static bool comment_node(const struct tp_job *job, const struct tp_tools *tools, const struct tp_request *request,
                         char why[TP_WHY_MAX])
{
    static const char mark[] = "torchpass";
    static struct tp_view view;
    if (!look(job, tools, request->node, request->node, &view, why))
        return false;
    if (*view.comment && strncmp(view.comment, mark, strlen(mark)) != 0)
        return refuse(why, "the node has somebody else's comment");
    char what[TP_NODE_MAX + 16], comment[TP_LINE_MAX + 64];
    snprintf(what, sizeof what, "nodename=%s", request->node);
    if (strncmp(request->text, mark, strlen(mark)) == 0)
        snprintf(comment, sizeof comment, "comment=%s", request->text);
    else
        snprintf(comment, sizeof comment, "comment=torchpass job %u: %s", job->id, request->text);
    return update(tools, what, NULL, comment, why);
}

static bool comment_job(const struct tp_job *job, const struct tp_tools *tools, const struct tp_request *request,
                        char why[TP_WHY_MAX])
{
    char what[32], comment[TP_LINE_MAX + 32];
    snprintf(what, sizeof what, "jobid=%u", job->id);
    snprintf(comment, sizeof comment, "admincomment=%s", request->text);
    return update(tools, what, NULL, comment, why);
}

enum tp_outcome tp_act(const struct tp_job *job, const struct tp_tools *tools, const struct tp_request *request,
                       char why[TP_WHY_MAX])
{
    *why = '\0';
    /* A helper whose end was missed, or whose node was fenced, must not act. */
    switch (tp_still_here(job, tools)) {
    case TP_DONE:
        break;
    case TP_REFUSED:
        refuse(why, "slurmctld does not answer: try again later");
        return TP_REFUSED;
    case TP_OVER:
        refuse(why, "the job does not run on this node any more");
        return TP_OVER;
    }
    bool done = false;
    switch (request->verb) {
    case TP_DRAIN:
    case TP_DOWN:
        done = take_out(job, tools, request, why);
        break;
    case TP_NODECOMMENT:
        done = comment_node(job, tools, request, why);
        break;
    case TP_JOBCOMMENT:
        done = comment_job(job, tools, request, why);
        break;
    }
    return done ? TP_DONE : TP_REFUSED;
}
