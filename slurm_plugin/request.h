/* What a user may ask of root on a node, and the rules for it. Pure: no I/O, no clock, no heap.
 *
 * A request is one line:
 *     drain <node> <text>        down <node> <text>        nodecomment <node> <text>        jobcomment <text>
 * Every function that judges returns NULL for "yes" or one sentence that says why not: the same for the client and the
 * log. */
#ifndef TP_REQUEST_H
#define TP_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    TP_LINE_MAX = 600, /* bytes of a request, its newline not counted */
    TP_NODE_MAX = 63,  /* bytes of a node's name */
    TP_CAP_MAX = 128,  /* nodes that one job may ever take out */
};

enum tp_verb { TP_DRAIN, TP_DOWN, TP_NODECOMMENT, TP_JOBCOMMENT };

struct tp_request {
    enum tp_verb verb;
    char node[TP_NODE_MAX + 1]; /* empty for TP_JOBCOMMENT */
    char text[TP_LINE_MAX + 1];
};

struct tp_job {
    uint32_t id;
    uid_t owner;
    const char *nodes; /* Slurm's list of the job's nodes at its start, such as n[1-3,5] */
    unsigned cap;      /* distinct nodes that the job may drain or set down */
};

/* A set of nodes. It remembers one more than any cap, which is enough to know that a cap is used up. */
struct tp_nodes {
    unsigned count;
    char name[TP_CAP_MAX + 1][TP_NODE_MAX + 1];
};

const char *tp_verb_name(enum tp_verb);

bool tp_nodes_has(const struct tp_nodes *, const char *node);
void tp_nodes_add(struct tp_nodes *, const char *node);

bool tp_node_ok(const char *node);
bool tp_text_ok(const char *text);

/* `line` has `length` bytes, any bytes, without the newline. */
const char *tp_request_parse(const char *line, size_t length, struct tp_request *);

/* May this user ask this at all? */
const char *tp_request_allowed(const struct tp_job *, uid_t caller, const struct tp_request *);

/* May this node be taken out, when `taken` are the nodes that the job has taken out so far? */
const char *tp_cap_allows(const struct tp_job *, const struct tp_nodes *taken, const char *node);

#endif
