/* The loop of the node helper, in a process of its own. */
#ifndef TP_SERVER_H
#define TP_SERVER_H

#include <sys/types.h>

#include "act.h"
#include "request.h"

struct tp_helper {
    struct tp_job job;
    struct tp_tools tools;
    int watch_ms; /* how often to ask Slurm whether the job still runs here */
};

/* Takes requests from `listener` for as long as `path` is its socket and the job runs here. */
_Noreturn void tp_serve(const struct tp_helper *, int listener, const char *path);

#endif
