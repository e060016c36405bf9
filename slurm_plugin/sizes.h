/*
 * How large a request must be so that spare nodes come on top of it.
 *
 * Pure: numbers and strings in, numbers and strings out, or one sentence that says why not and what to write
 * instead. Everything that talks to Slurm is in option.c and torchpass.c.
 */
#ifndef TORCHPASS_SIZES_H
#define TORCHPASS_SIZES_H

#include <stdbool.h>

enum { TP_GPUS = 96, TP_SENTENCE = 400 };

/* What the user asked for, as Slurm understood it. 0 or "" means: not given. */
struct tp_asked {
    bool nodes_given; /* there is a node count: -N, or the length of a node list */
    long min_nodes;
    long max_nodes;   /* 0: no upper end */
    bool size_list;   /* -N 4,8 or -N 4-16:4 (Slurm 23.02 and later) */
    bool tasks_given; /* -n */
    bool tasks_sent;  /* Slurm counted tasks, from -n or anything else, and will send the number */
    long tasks;
    long tasks_per_node;
    bool tasks_per_gpu;
    const char *gpus; /* the total of --gpus: "8" or "a100:8" */
    bool gpus_placed; /* another option already says how many GPUs a node, socket or task has */
    long segment;
    bool arbitrary; /* --distribution=arbitrary */
    bool step;      /* srun outside of an allocation: the same numbers lay out its tasks */
};

/* What to ask for instead. 0 or "" means: leave that option as it is. */
struct tp_sizes {
    long min_nodes;
    long max_nodes;
    long tasks;
    long tasks_per_node;
    char gpus[TP_GPUS];
    char gpus_per_node[TP_GPUS];
};

/* False: it cannot be enlarged soundly, and `sentence` says why and what to write. */
bool tp_enlarge(const struct tp_asked *asked, long spares, struct tp_sizes *sizes, char sentence[TP_SENTENCE]);

#endif
