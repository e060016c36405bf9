/* Puts the helper's pure parts on stdin and stdout, one question and one answer a line; bytes are written in hex. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hostlist.h"
#include "request.h"
#include "view.h"

/* In memory of just this size, so that a sanitizer sees the first byte too many. */
static char *unhex(const char *hex, size_t *length)
{
    *length = strlen(hex) / 2;
    char *bytes = malloc(*length + 1);
    for (size_t i = 0; i < *length; i++) {
        unsigned byte;
        sscanf(hex + 2 * i, "%2x", &byte);
        bytes[i] = (char)byte;
    }
    return realloc(bytes, *length ? *length : 1);
}

static void parse(char *hex)
{
    size_t length;
    char *line = unhex(hex ? hex : "", &length);
    struct tp_request request;
    const char *no = tp_request_parse(line, length, &request);
    if (no)
        printf("no: %s\n", no);
    else
        printf("%s|%s|%s\n", tp_verb_name(request.verb), request.node, request.text);
    free(line);
}

/* allowed OWNER NODES CALLER HEX */
static void allowed(char **words)
{
    size_t length;
    char *line = unhex(words[3] ? words[3] : "", &length);
    struct tp_request request;
    const struct tp_job job = {.id = 7, .owner = (uid_t)atoi(words[0]), .nodes = words[1]};
    const char *no = tp_request_parse(line, length, &request);
    if (!no)
        no = tp_request_allowed(&job, (uid_t)atoi(words[2]), &request);
    printf("%s\n", no ? no : "yes");
    free(line);
}

/* cap CAP NODE TAKEN... */
static void cap(char **words)
{
    const struct tp_job job = {.cap = (unsigned)atoi(words[0])};
    static struct tp_nodes taken;
    memset(&taken, 0, sizeof taken);
    for (char **node = words + 2; *node; node++)
        tp_nodes_add(&taken, *node);
    const char *no = tp_cap_allows(&job, &taken, words[1]);
    printf("%s\n", no ? no : "yes");
}

/* view JOB NODE HEX: what scontrol printed -> seen|taken,taken|marked|reason|comment|reason to write|claim */
static void view(char **words)
{
    const struct tp_job job = {.id = (uint32_t)atoi(words[0])};
    static struct tp_view seen;
    size_t length;
    char *text = unhex(words[2] ? words[2] : "", &length), line[4096];
    tp_view_begin(&seen, &job, words[1], "n9");
    for (size_t at = 0; at < length;) {
        size_t n = 0;
        for (; at < length && text[at] != '\n'; at++)
            if (n < sizeof line - 1)
                line[n++] = text[at];
        line[n] = '\0';
        at++;
        tp_view_line(&seen, line);
    }
    printf("%d|", seen.seen);
    for (unsigned i = 0; i < seen.taken.count; i++)
        printf("%s%s", i ? "," : "", seen.taken.name[i]);
    printf("|%d|%s|%s", seen.marked, seen.reason, seen.comment);
    tp_view_reason(&seen, "news", line, sizeof line);
    printf("|%s", line);
    bool room = tp_view_claim(&seen, line, sizeof line);
    printf("|%s\n", seen.seen_self && room ? line : "no claim");
    free(text);
}

int main(void)
{
    static char line[1 << 20];
    while (fgets(line, sizeof line, stdin)) {
        char *words[300] = {NULL};
        int count = 0;
        for (char *word = strtok(line, " \n"); word && count < 299; word = strtok(NULL, " \n"))
            words[count++] = word;
        if (count == 0)
            continue;
        if (strcmp(words[0], "parse") == 0)
            parse(words[1]);
        else if (strcmp(words[0], "has") == 0)
            printf("%d\n", tp_hostlist_has(words[1], words[2]));
        else if (strcmp(words[0], "ok") == 0)
            printf("%d\n", tp_hostlist_ok(words[1]));
        else if (strcmp(words[0], "allowed") == 0)
            allowed(words + 1);
        else if (strcmp(words[0], "cap") == 0)
            cap(words + 1);
        else if (strcmp(words[0], "view") == 0)
            view(words + 1);
        fflush(stdout);
    }
    return 0;
}
