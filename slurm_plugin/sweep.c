/* torchpass-sweep MAX_DRAIN CONFIRM: does the requests that lie in /run/torchpass/requests, as root, for
 * HealthCheckProgram.
 *
 * The same rules as the node helper's; what a connection tells there, the owner of the file tells here. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "act.h"
#include "audit.h"
#include "helper.h"
#include "name.h"
#include "record.h"
#include "request.h"

enum {
    FILES_MAX = 1024, /* looked at in one sweep */
    USERS_MAX = 64,   /* served in one sweep */
    PER_USER_MAX = 8, /* requests of one user in one sweep */
    SWEEP_MS = 40000, /* slurmd kills the program after 60 s */
};

static struct tp_tools tools = {.bin = TP_SLURM_BIN, .run = TP_RUN};
static long max_drain = -1;

/* job<ID>.<name>; the name is letters and digits, so it says nothing to any program. */
static bool name_ok(const char *file, uint32_t *job)
{
    if (strncmp(file, "job", 3) != 0 || file[3] < '1' || file[3] > '9')
        return false;
    char *end;
    errno = 0;
    unsigned long id = strtoul(file + 3, &end, 10);
    size_t rest = strspn(end + (*end == '.'), "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789");
    if (errno || id > UINT32_MAX || *end != '.' || rest == 0 || rest > 32 || end[1 + rest])
        return false;
    *job = (uint32_t)id;
    return true;
}

static bool enough_of(uid_t uid)
{
    static struct {
        uid_t uid;
        int count;
    } users[USERS_MAX];
    for (int i = 0; i < USERS_MAX; i++) {
        if (users[i].count && users[i].uid != uid)
            continue;
        users[i].uid = uid;
        return ++users[i].count > PER_USER_MAX;
    }
    return true;
}

static const char *judge(uint32_t id, uid_t caller, const char *line, ssize_t length)
{
    static struct tp_request request;
    static struct tp_record record;
    static char nodes[1 << 16], why[TP_WHY_MAX];
    struct tp_job job = {.id = id, .nodes = nodes};

    if (length <= 0 || line[length - 1] != '\n')
        return length > TP_LINE_MAX ? "the line is too long: at most 600 bytes" : "the line has no newline at its end";
    if (memchr(line, '\n', (size_t)length - 1))
        return "something follows the newline: one request a file";
    const char *no = tp_request_parse(line, (size_t)length - 1, &request);
    if (no)
        return no;
    switch (tp_ask_job(&tools, id, &job.owner, nodes, sizeof nodes)) {
    case TP_DONE:
        break;
    case TP_REFUSED:
        return "slurmctld does not answer: try again later";
    case TP_OVER:
        return "Slurm does not know the job as running";
    }
    bool noted = tp_record_read(id, &record) == 0 && record.uid == job.owner;
    if (noted && *record.nodes) /* as at the job's start: Slurm forgets a node that it has removed from the job */
        job.nodes = record.nodes;
    static char self[TP_NODE_MAX + 1];
    if (!tp_own_name(job.nodes, self))
        return "this node is not one of the job's nodes";
    tools.self = self;
    job.cap = max_drain >= 0 ? (unsigned)max_drain : noted ? record.spares : 0;
    no = tp_request_allowed(&job, caller, &request);
    if (!no)
        no = tp_act(&job, &tools, &request, why) == TP_DONE ? NULL : why;
    tp_audit("job %u: %s uid %u: %s %s %s%s%s", id, no ? "refused to" : "did for", caller, tp_verb_name(request.verb),
             request.node, request.text, no ? ": " : "", no ? no : "");
    return no;
}

static void answer(int folder, const char *name, const char *no)
{
    char text[TP_WHY_MAX + 16];
    int n = no ? snprintf(text, sizeof text, "refused: %s\n", no) : snprintf(text, sizeof text, "ok\n");
    int fd = openat(folder, ".new", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0)
        return;
    bool written = write(fd, text, (size_t)n) == n;
    close(fd);
    if (written)
        renameat(folder, ".new", folder, name);
}

static void handle(int requests, int answers, const char *name)
{
    uint32_t job;
    if (!name_ok(name, &job))
        return;
    int fd = openat(requests, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return;
    struct stat file;
    char line[TP_LINE_MAX + 2];
    ssize_t length = -1;
    /* A second name might be somebody else's doing. */
    bool good = fstat(fd, &file) == 0 && S_ISREG(file.st_mode) && file.st_nlink == 1;
    if (good)
        length = read(fd, line, sizeof line);
    close(fd);
    if (!good)
        return;
    unlinkat(requests, name, 0); /* before it is done: never twice */
    if (!enough_of(file.st_uid)) /* the rest of a flood is not worth an answer */
        answer(answers, name, judge(job, file.st_uid, line, length));
}

int main(int count, char **arguments)
{
    if (count != 3 || geteuid() != 0) {
        fprintf(stderr, "usage, as root: torchpass-sweep MAX_DRAIN CONFIRM   (both may be empty)\n");
        return 2;
    }
    if (*arguments[1]) {
        char *end;
        max_drain = strtol(arguments[1], &end, 10);
        if (*end || max_drain < 0 || max_drain > TP_CAP_MAX) {
            fprintf(stderr, "torchpass-sweep: MAX_DRAIN=%s: write a number of nodes from 0 to %d\n", arguments[1],
                    TP_CAP_MAX);
            return 2;
        }
    }
    tools.confirm = *arguments[2] ? arguments[2] : NULL;
    tp_audit_open(TP_RUN, "sweep");

    int lock = open(TP_RUN "/sweep.lock", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (lock < 0 || flock(lock, LOCK_EX | LOCK_NB) != 0)
        return 0; /* an earlier sweep is still at work */
    int requests = open(TP_RUN "/requests", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int answers = open(TP_RUN "/answers", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *folder = requests < 0 || answers < 0 ? NULL : fdopendir(dup(requests));
    if (!folder) {
        perror("torchpass-sweep: " TP_RUN);
        return 1;
    }
    int64_t end = tp_now() + SWEEP_MS;
    struct dirent *entry;
    for (int i = 0; i < FILES_MAX && tp_now() < end && (entry = readdir(folder)); i++)
        handle(requests, answers, entry->d_name);
    closedir(folder);
    return 0;
}
