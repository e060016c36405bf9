/* The node helper: root's ear for one job on one node, and the only privileged part of TorchPass.
 *
 * It lives as long as the job does on that node: the job's prolog starts it, the job's epilog ends it. Not the extern
 * step: Slurm kills that on all nodes when one of them goes down, which is when the helper is needed most. It listens
 * on /run/torchpass/job<ID>.<NODE>.sock, takes one line a connection (see request.h) and answers "ok" or
 * "refused: <why>". */
#ifndef TP_HELPER_H
#define TP_HELPER_H

#include <stdint.h>
#include <sys/types.h>

#define TP_RUN "/run/torchpass"

/* Starts the helper for this node, detached from the caller; the socket exists when it returns. `nodes` is Slurm's list
 * of the job's nodes; NULL or empty: the helper asks Slurm. `cap` is the number of nodes that the job may take out,
 * `confirm` the site's check or NULL. Returns 0, or -1 with errno. */
int tp_helper_start(uint32_t jobid, uid_t uid, const char *nodes, unsigned cap, const char *confirm);

/* Removes the helper's socket, by which it ends. Harmless where there is none. */
void tp_helper_stop(uint32_t jobid);

/* The same start with everything said; see server.h. */
struct tp_helper;
int tp_helper_start_as(const struct tp_helper *);

#endif
