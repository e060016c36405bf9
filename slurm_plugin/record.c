#define _GNU_SOURCE
#include "record.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "helper.h"

static int name(char path[PATH_MAX], uint32_t job)
{
    const char *slurm = getenv("SLURMD_NODENAME"); /* in the prolog; not where HealthCheckProgram runs */
    char host[HOST_NAME_MAX + 1] = "";

    if (!slurm && gethostname(host, sizeof host - 1))
        return -1;
    host[strcspn(host, ".")] = '\0';
    return snprintf(path, PATH_MAX, TP_RUN "/job%u.%s.job", job, slurm ? slurm : host) < PATH_MAX ? 0 : -1;
}

int tp_record_write(uint32_t job, const struct tp_record *record)
{
    char path[PATH_MAX], text[TP_NODELIST + 100];
    int file, length = snprintf(text, sizeof text, "uid %u\nspares %u\nnodes %s\n", (unsigned)record->uid,
                                record->spares, record->nodes);

    if ((mkdir(TP_RUN, 0755) && errno != EEXIST) || name(path, job))
        return -1;
    unlink(path); /* of an earlier run of a requeued job */
    file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (file < 0)
        return -1;
    if (write(file, text, (size_t)length) != length || fchmod(file, 0644)) {
        close(file);
        unlink(path);
        return -1;
    }
    return close(file);
}

int tp_record_read(uint32_t job, struct tp_record *record)
{
    char path[PATH_MAX], line[TP_NODELIST + 8];
    bool complete = false;
    struct stat status;
    FILE *stream;
    int file;

    if (name(path, job) || (file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW)) < 0)
        return -1;
    if (fstat(file, &status) || status.st_uid != 0 || !S_ISREG(status.st_mode) || !(stream = fdopen(file, "r"))) {
        close(file);
        errno = EPERM;
        return -1;
    }
    memset(record, 0, sizeof *record);
    while (fgets(line, sizeof line, stream)) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "uid ", 4) == 0)
            record->uid = (uid_t)strtoul(line + 4, NULL, 10);
        else if (strncmp(line, "spares ", 7) == 0)
            record->spares = (unsigned)strtoul(line + 7, NULL, 10);
        else if (strncmp(line, "nodes ", 6) == 0) {
            complete = strlen(line + 6) < sizeof record->nodes;
            if (complete)
                strcpy(record->nodes, line + 6);
        }
    }
    fclose(stream);
    errno = EBADMSG;
    return complete ? 0 : -1;
}
