/* What Slurm knows about the job's nodes, read from `scontrol show node`. Pure.
 *
 * slurmctld is the one place that all helpers of a job share, so the nodes that a job has taken out are counted there:
 * they are the nodes whose Reason starts with "torchpass job <id>: ". The long form with one field group a line is
 * read, never the one-line form: no user can write a newline into a node's fields, so none can forge a line. */
#ifndef TP_VIEW_H
#define TP_VIEW_H

#include <stdbool.h>

#include "request.h"

enum { TP_REASON_MAX = 255 };

struct tp_view {
    const struct tp_job *job;
    const char *node;                /* the one that is asked about */
    char at[TP_NODE_MAX + 1];        /* the node whose lines are being read */
    bool seen;                       /* Slurm knows `node` */
    struct tp_nodes taken;           /* by this job */
    char reason[TP_REASON_MAX + 1];  /* of `node`, without who and when; empty: none */
    char comment[TP_REASON_MAX + 1]; /* of `node` */
};

void tp_view_begin(struct tp_view *, const struct tp_job *, const char *node);
void tp_view_line(struct tp_view *, const char *line);

/* The Reason for taking `node` out: who asks and why, and behind it the reason that somebody else had left there. */
void tp_view_reason(const struct tp_view *, const char *text, char *reason, unsigned size);

#endif
