#define _GNU_SOURCE
#include "verdict.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "arguments.h"

bool tp_random_hex(char *text, size_t bytes)
{
    static const char digits[] = "0123456789abcdef";
    unsigned char noise[64];

    if (bytes > sizeof noise || getrandom(noise, bytes, 0) != (ssize_t)bytes)
        return false;
    for (size_t i = 0; i < bytes; i++) {
        text[2 * i] = digits[noise[i] >> 4];
        text[2 * i + 1] = digits[noise[i] & 15];
    }
    text[2 * bytes] = '\0';
    return true;
}

bool tp_verdict_name(char path[PATH_MAX], const char *job)
{
    char folder[PATH_MAX], mark[17];
    int length;

    /* Not $PWD, which is only what a shell believed. */
    if (!getcwd(folder, sizeof folder) || !tp_random_hex(mark, 8))
        return false;
    length = snprintf(path, PATH_MAX, "%s/.torchpass-%s-%s.verdict", strcmp(folder, "/") ? folder : "", job, mark);
    return length > 0 && length < PATH_MAX;
}

int tp_verdict_take(const char *path, uid_t owner, const char **why)
{
    /* Non-blocking: a FIFO must not hold srun up. */
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat status;
    char text[8];
    ssize_t length;
    unsigned code;

    *why = NULL;
    if (file < 0) {
        if (errno != ENOENT)
            *why = "cannot be opened";
        return -1;
    }
    if (fstat(file, &status) || !S_ISREG(status.st_mode) || status.st_uid != owner) {
        *why = "is not a plain file of the job's user";
        close(file);
        return -1;
    }
    length = read(file, text, sizeof text - 1);
    close(file);
    unlink(path);
    text[length > 0 ? length : 0] = '\0';
    if (length > 0 && text[length - 1] == '\n')
        text[length - 1] = '\0';
    if (!tp_read_count(text, 255, &code)) {
        *why = "does not hold a number from 0 to 255";
        return -1;
    }
    return (int)code;
}
