/* What root does in Slurm for a request that is allowed: runs scontrol and squeue, and the site's own check. */
#ifndef TP_ACT_H
#define TP_ACT_H

#include <stdbool.h>

#include "request.h"

/* Where Slurm's commands are; the Makefile sets it. */
#ifndef TP_SLURM_BIN
#define TP_SLURM_BIN "/usr/bin"
#endif

enum { TP_WHY_MAX = 200 };

struct tp_tools {
    const char *bin;     /* folder of scontrol and squeue, absolute */
    const char *confirm; /* program that is asked before a node is taken out, or NULL */
    const char *self;    /* the node that we run on */
    const char *run;     /* our folder there */
};

/* Does what the request asks; otherwise says why not. Blocks, at most for two minutes. The caller has checked
 * tp_request_allowed. */
bool tp_act(const struct tp_job *, const struct tp_tools *, const struct tp_request *, char why[TP_WHY_MAX]);

/* Asks Slurm for the owner and the nodes of a job. */
bool tp_ask_job(const struct tp_tools *, uint32_t id, uid_t *owner, char *nodes, size_t size);

/* Milliseconds of a clock that never jumps. */
int64_t tp_now(void);

#endif
