/*
 * The verdict: how tpwrap, which alone knows whether the training is whole, tells srun the exit code.
 *
 * srun names a file that does not exist yet; tpwrap's last word is to write one number into it. Slurm's own code
 * cannot serve: it is not 0 after a rank or a node was lost and replaced, and may be 0 after all was lost.
 */
#ifndef TORCHPASS_VERDICT_H
#define TORCHPASS_VERDICT_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* `bytes` random bytes as hex digits and a final NUL. */
bool tp_random_hex(char *text, size_t bytes);

/* A fresh path in the working directory; `job` is a job id, or any other word. */
bool tp_verdict_name(char path[PATH_MAX], const char *job);

/* The number 0..255 in the file, which is then removed; -1 with *why NULL: there is no file, with *why a phrase: it
   does not count. Only a plain file of `owner` does. */
int tp_verdict_take(const char *path, uid_t owner, const char **why);

#endif
