/* Slurm's short form of many node names: n[1-3,5],gpu[007-009]-ib,login. Pure.
 *
 * The question is only ever "is this node in that list", so the list is matched, never expanded: no memory, and a job
 * of ten thousand nodes costs what a small one does. */
#ifndef TP_HOSTLIST_H
#define TP_HOSTLIST_H

#include <stdbool.h>
#include <stddef.h>

/* A list that is not understood holds nobody. */
bool tp_hostlist_has(const char *list, const char *node);

/* Only characters that Slurm writes, not empty, and no option: fit to be handed to Slurm's commands. */
bool tp_hostlist_ok(const char *list);

#endif
