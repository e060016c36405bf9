/* Start and stop: what runs in the processes of the job's prolog and epilog. */
#define _GNU_SOURCE
#include "helper.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hostlist.h"
#include "name.h"
#include "server.h"

enum {
    BACKLOG = 1024,
    WATCH_MS = 600000, /* a thousand nodes ask less than twice a second */
};

static bool address_of(const char *run, uint32_t jobid, const char *name, struct sockaddr_un *address)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    int n = snprintf(address->sun_path, sizeof address->sun_path, "%s/job%u.%s.sock", run, jobid, name);
    return n < (int)sizeof address->sun_path;
}

static int bind_socket(const struct tp_helper *as, struct sockaddr_un *address)
{
    struct stat folder;
    mkdir(as->tools.run, 0755);
    if (lstat(as->tools.run, &folder) != 0)
        return -1;
    if (!S_ISDIR(folder.st_mode) || folder.st_uid != geteuid() || (folder.st_mode & (S_IWGRP | S_IWOTH))) {
        errno = EPERM; /* somebody else could put a socket of his own there */
        return -1;
    }
    if (!address_of(as->tools.run, as->job.id, as->tools.self, address)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    unlink(address->sun_path); /* of an earlier life of the same job */
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    /* bind() gives the file the mode of the socket, so there is no moment in which anybody else could connect. */
    if (fd >= 0 && fchmod(fd, 0600) == 0 && bind(fd, (struct sockaddr *)address, sizeof *address) == 0 &&
        chown(address->sun_path, as->job.owner, (gid_t)-1) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    int error = errno;
    if (fd >= 0)
        close(fd);
    unlink(address->sun_path);
    errno = error;
    return -1;
}

int tp_helper_start_as(const struct tp_helper *as)
{
    struct sockaddr_un address;
    if (!tp_node_ok(as->tools.self) || (*as->job.nodes && !tp_hostlist_ok(as->job.nodes)) || as->job.cap > TP_CAP_MAX) {
        errno = EINVAL;
        return -1;
    }
    int listener = bind_socket(as, &address);
    if (listener < 0)
        return -1;
    /* The prolog's process group is killed when the prolog ends: not before the child has left it, which it shows by
     * closing the pipe. */
    int left[2];
    if (pipe2(left, O_CLOEXEC) != 0) {
        int error = errno;
        close(listener);
        unlink(address.sun_path);
        errno = error;
        return -1;
    }
    pid_t pid = fork();
    if (pid == 0)
        tp_serve(as, listener, address.sun_path);
    close(left[1]);
    if (pid > 0) {
        char nothing;
        while (read(left[0], &nothing, 1) < 0 && errno == EINTR)
            ;
    }
    close(left[0]);
    int error = errno;
    close(listener);
    if (pid < 0)
        unlink(address.sun_path);
    errno = error;
    return pid < 0 ? -1 : 0;
}

int tp_helper_start(uint32_t jobid, uid_t uid, const char *nodes, unsigned cap, const char *confirm)
{
    char name[TP_NODE_MAX + 1];
    struct tp_helper as = {
        .job = {.id = jobid, .owner = uid, .nodes = nodes ? nodes : "", .cap = cap > TP_CAP_MAX ? TP_CAP_MAX : cap},
        .tools = {.bin = TP_SLURM_BIN, .confirm = confirm && *confirm ? confirm : NULL, .self = name, .run = TP_RUN},
        .watch_ms = WATCH_MS,
    };
    if (!tp_own_name(as.job.nodes, name)) {
        errno = ENODEV;
        return -1;
    }
    return tp_helper_start_as(&as);
}

void tp_helper_stop(uint32_t jobid)
{
    char name[TP_NODE_MAX + 1];
    struct sockaddr_un address;
    if (tp_own_name("", name) && address_of(TP_RUN, jobid, name, &address))
        unlink(address.sun_path);
}
