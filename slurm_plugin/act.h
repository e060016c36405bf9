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

/* Does what the request asks, or says why not. Blocks, at most for two minutes. The caller has checked
 * tp_request_allowed. */
enum tp_outcome {
    TP_DONE,
    TP_REFUSED,
    TP_OVER, /* refused, because the job does not run here any more */
};
enum tp_outcome tp_act(const struct tp_job *, const struct tp_tools *, const struct tp_request *, char why[TP_WHY_MAX]);

/* Asks Slurm for the owner and the nodes of a job. TP_OVER: it is not running; TP_REFUSED: Slurm does not answer. */
enum tp_outcome tp_ask_job(const struct tp_tools *, uint32_t id, uid_t *owner, char *nodes, size_t size);

/* Does the job still run, and on this node? TP_REFUSED: Slurm does not answer. */
enum tp_outcome tp_still_here(const struct tp_job *, const struct tp_tools *);

/* Milliseconds of a clock that never jumps. */
int64_t tp_now(void);

#endif
