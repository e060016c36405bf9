/*
 * The job's record on a node: what the job's prolog knows and torchpass-sweep, which knows no job, is not told.
 *
 *     /run/torchpass/job<ID>.<NODE>.job      root's; lines: uid 2001, spares 2, nodes n[1-5]
 *
 * The epilog removes it with all else of the job.
 */
#ifndef TORCHPASS_RECORD_H
#define TORCHPASS_RECORD_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { TP_NODELIST = 32 * 1024 };

struct tp_record {
    uid_t uid;
    unsigned spares;
    char nodes[TP_NODELIST]; /* as Slurm writes it; "" if it did not say */
};

/* Both: 0, or -1 with errno. */
int tp_record_write(uint32_t job, const struct tp_record *record);
int tp_record_read(uint32_t job, struct tp_record *record);

#endif
