#define _GNU_SOURCE
#include "name.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hostlist.h"

bool tp_own_name(const char *nodes, char name[TP_NODE_MAX + 1])
{
    char host[256] = "", brief[256];
    if (gethostname(host, sizeof host - 1) != 0)
        *host = '\0';
    strcpy(brief, host);
    brief[strcspn(brief, ".")] = '\0';
    /* The environment of a prolog says it; for others there is the name of the host, which is usually the same. */
    const char *candidates[] = {getenv("SLURMD_NODENAME"), *nodes ? host : NULL, brief};
    for (int i = 0; i < 3; i++) {
        const char *candidate = candidates[i];
        if (candidate && tp_node_ok(candidate) && (!*nodes || tp_hostlist_has(nodes, candidate))) {
            strcpy(name, candidate);
            return true;
        }
    }
    return false;
}
