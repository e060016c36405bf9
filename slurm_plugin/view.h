/* What Slurm knows about the job's nodes, read from `scontrol show node`. Pure.
 *
 * slurmctld is the one place that all helpers of a job share, so the nodes that a job takes out are counted there:
 *     Reason=torchpass job <id>: ...            this node is out, if it is drained or down
 *     Extra=... torchpass job <id> takes <node> the helper on this node is about to take <node> out
 * The long form with one field group a line is read, never the one-line form: no user can write a newline into a node's
 * fields, so none can forge a line. */
#ifndef TP_VIEW_H
#define TP_VIEW_H

#include <stdbool.h>

#include "request.h"

enum { TP_REASON_MAX = 255, TP_EXTRA_MAX = 1000 };

struct tp_view {
    const struct tp_job *job;
    const char *node;                /* the one that is asked about */
    const char *self;                /* the one that we run on */
    char at[TP_NODE_MAX + 1];        /* the node whose lines are being read */
    bool out;                        /* it is drained or down */
    bool seen, seen_self;            /* Slurm knows them */
    bool marked;                     /* `node` is out, and its Reason says that it is the job's doing */
    struct tp_nodes taken;           /* out, or claimed by the helper of another node */
    char reason[TP_REASON_MAX + 1];  /* why `node` is out, without who and when; empty: it is not, or nobody says */
    char comment[TP_REASON_MAX + 1]; /* of `node` */
    char extra[TP_EXTRA_MAX + 1];    /* of `self`, without a claim of ours */
};

void tp_view_begin(struct tp_view *, const struct tp_job *, const char *node, const char *self);
void tp_view_line(struct tp_view *, const char *line);

/* The Reason for taking `node` out: who asks and why, and behind it the reason that somebody else had left there. */
void tp_view_reason(const struct tp_view *, const char *text, char *reason, size_t size);

/* The Extra of `self` while it takes `node` out; false where there is no room for it. */
bool tp_view_claim(const struct tp_view *, char *extra, size_t size);

#endif
