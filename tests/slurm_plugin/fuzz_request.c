/* For libFuzzer: any bytes as a request, as a list of nodes, and as what scontrol prints. What gets through must keep
 * the promises that act.c relies on. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "hostlist.h"
#include "request.h"
#include "view.h"

static void require(bool promise)
{
    if (!promise)
        abort();
}

static void as_request(const char *bytes, size_t size)
{
    struct tp_request request;
    if (tp_request_parse(bytes, size, &request))
        return;
    require(tp_text_ok(request.text) && strlen(request.text) <= TP_LINE_MAX);
    require(strpbrk(request.text, "\"'`\\\n\r\t") == NULL && *request.text != '-');
    if (request.verb != TP_JOBCOMMENT)
        require(tp_node_ok(request.node) && strpbrk(request.node, " =,[]/;$") == NULL);
    const struct tp_job job = {.id = 7, .owner = 2001, .nodes = "n[1-3],gpu[007-009]-ib", .cap = 1};
    require(tp_request_allowed(&job, 2002, &request) != NULL);
    if (request.verb != TP_JOBCOMMENT && !tp_request_allowed(&job, 2001, &request)) {
        static const char *const members[] = {"n1", "n2", "n3", "gpu007-ib", "gpu008-ib", "gpu009-ib"};
        bool member = false;
        for (size_t i = 0; i < sizeof members / sizeof members[0]; i++)
            member |= strcmp(members[i], request.node) == 0;
        require(member);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    as_request((const char *)data, size);

    char *text = malloc(size + 1); /* the other two take strings */
    memcpy(text, data, size);
    text[size] = '\0';
    char *second = strchr(text, '\n');
    if (second) {
        *second++ = '\0';
        tp_hostlist_has(text, second);
        require(!tp_hostlist_ok(text) || *text != '-');
    }

    static struct tp_view view;
    const struct tp_job job = {.id = 7};
    char reason[TP_LINE_MAX + TP_REASON_MAX + 64];
    memcpy(text, data, size);
    tp_view_begin(&view, &job, "n2", "n9");
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
        tp_view_line(&view, line);
    for (unsigned i = 0; i < view.taken.count; i++)
        for (unsigned j = 0; j < i; j++)
            require(strcmp(view.taken.name[i], view.taken.name[j]) != 0);
    tp_view_reason(&view, "xid 79", reason, sizeof reason);
    require(strpbrk(reason, "\"'`\\\n") == NULL);
    require(tp_view_claim(&view, reason, sizeof reason) || strlen(view.extra) > 100);
    free(text);
    return 0;
}
