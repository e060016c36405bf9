/* What Slurm calls the node that we run on. */
#ifndef TP_NAME_H
#define TP_NAME_H

#include <stdbool.h>

#include "request.h"

/* `nodes`: the list that the name must be in, or "". */
bool tp_own_name(const char *nodes, char name[TP_NODE_MAX + 1]);

#endif
