#include "view.h"

#include <stdio.h>
#include <string.h>

static const char mark[] = "torchpass job ";
static const char was[] = "; was: ";

static const char *after(const char *text, const char *prefix)
{
    size_t n = strlen(prefix);
    return strncmp(text, prefix, n) == 0 ? text + n : NULL;
}

/* Text of others is kept only as what we would take from anybody. */
static void keep(char *to, const char *from)
{
    size_t n = 0;
    for (; from[n] && n < TP_REASON_MAX; n++) {
        char one[2] = {from[n], '\0'};
        to[n] = from[n] == ' ' || from[n] == '-' || tp_text_ok(one) ? from[n] : '?';
    }
    to[n] = '\0';
}

static bool ours(const struct tp_job *job, const char *reason)
{
    char start[40];
    snprintf(start, sizeof start, "%s%u: ", mark, job->id);
    return after(reason, start) != NULL;
}

/* Splits "what was there torchpass job 7 takes n2" before the claim; returns the claim, or NULL. */
static const char *claim_in(const char *extra, size_t *before)
{
    const char *claim = NULL;
    for (const char *next = extra; (next = strstr(next, mark)); next++)
        claim = next;
    *before = claim ? (size_t)(claim - extra) : strlen(extra);
    if (*before > 0 && claim && claim[-1] == ' ')
        --*before;
    return claim;
}

void tp_view_begin(struct tp_view *view, const struct tp_job *job, const char *node, const char *self)
{
    memset(view, 0, sizeof *view);
    view->job = job;
    view->node = node;
    view->self = self;
}

static void read_extra(struct tp_view *view, const char *extra)
{
    size_t before;
    const char *claim = claim_in(extra, &before);
    if (strcmp(view->at, view->self) == 0) {
        view->seen_self = before <= TP_EXTRA_MAX;
        snprintf(view->extra, sizeof view->extra, "%.*s", (int)(before <= TP_EXTRA_MAX ? before : 0), extra);
        return; /* a claim of our own is what is left of a worker that was killed */
    }
    unsigned job;
    char node[TP_NODE_MAX + 2];
    if (claim && sscanf(claim, "torchpass job %u takes %64s", &job, node) == 2 && job == view->job->id)
        tp_nodes_add(&view->taken, node);
}

void tp_view_line(struct tp_view *view, const char *line)
{
    const char *value = after(line, "NodeName=");
    if (value) {
        size_t n = strcspn(value, " ");
        if (n > TP_NODE_MAX)
            n = 0;
        memcpy(view->at, value, n);
        view->at[n] = '\0';
        view->out = false;
        view->seen |= strcmp(view->at, view->node) == 0;
        view->seen_self |= strcmp(view->at, view->self) == 0;
        return;
    }
    if (*view->at == '\0' || !(line = after(line, "   ")))
        return;
    bool asked = strcmp(view->at, view->node) == 0;
    if ((value = after(line, "State="))) {
        char state[128] = "";
        sscanf(value, "%127s", state);
        view->out = strstr(state, "DRAIN") || strstr(state, "DOWN") || strstr(state, "FAIL");
    } else if (view->out &&
               (value = after(line, "Reason="))) { /* some versions keep it when a node is back in service */
        if (ours(view->job, value))
            tp_nodes_add(&view->taken, view->at);
        if (asked) {
            view->marked = ours(view->job, value);
            keep(view->reason, value);
            char *who = strrchr(view->reason, '['); /* "bad DIMM [root@2025-01-31T10:00:00]" */
            if (who && who > view->reason && who[-1] == ' ')
                who[-1] = '\0';
        }
    } else if (asked && (value = after(line, "Comment="))) {
        keep(view->comment, value);
    } else if ((value = after(line, "Extra="))) {
        read_extra(view, value);
    }
}

void tp_view_reason(const struct tp_view *view, const char *text, char *reason, size_t size)
{
    const char *before = view->reason;
    if (ours(view->job, before)) { /* what was there before our first word about this node */
        before = strstr(before, was);
        before = before ? before + strlen(was) : "";
    } else if (after(before, "torchpass")) {
        before = "";
    }
    int n = snprintf(reason, size, "%s%u: %s", mark, view->job->id, text);
    if (*before && n >= 0 && (size_t)n < size)
        snprintf(reason + n, size - (size_t)n, "%s%s", was, before);
}

bool tp_view_claim(const struct tp_view *view, char *extra, size_t size)
{
    int n = snprintf(extra, size, "%s%s%s%u takes %s", view->extra, *view->extra ? " " : "", mark, view->job->id,
                     view->node);
    return n >= 0 && (size_t)n < size;
}
