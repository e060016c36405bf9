#include "view.h"

#include <stdio.h>
#include <string.h>

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
    char mark[40];
    snprintf(mark, sizeof mark, "torchpass job %u: ", job->id);
    return after(reason, mark) != NULL;
}

void tp_view_begin(struct tp_view *view, const struct tp_job *job, const char *node)
{
    memset(view, 0, sizeof *view);
    view->job = job;
    view->node = node;
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
        view->seen |= strcmp(view->at, view->node) == 0;
        return;
    }
    if (*view->at == '\0' || !(line = after(line, "   ")))
        return;
    bool asked = strcmp(view->at, view->node) == 0;
    if ((value = after(line, "Reason="))) {
        if (ours(view->job, value))
            tp_nodes_add(&view->taken, view->at);
        if (asked) {
            keep(view->reason, value);
            char *who = strrchr(view->reason, '['); /* "bad DIMM [root@2025-01-31T10:00:00]" */
            if (who && who > view->reason && who[-1] == ' ')
                who[-1] = '\0';
        }
    } else if (asked && (value = after(line, "Comment="))) {
        keep(view->comment, value);
    }
}

void tp_view_reason(const struct tp_view *view, const char *text, char *reason, unsigned size)
{
    const char *before = view->reason;
    if (ours(view->job, before)) { /* what was there before our first word about this node */
        before = strstr(before, was);
        before = before ? before + strlen(was) : "";
    } else if (after(before, "torchpass")) {
        before = "";
    }
    int n = snprintf(reason, size, "torchpass job %u: %s", view->job->id, text);
    if (*before && n >= 0 && (unsigned)n < size)
        snprintf(reason + n, size - (unsigned)n, "%s%s", was, before);
}
