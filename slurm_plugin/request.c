#include "request.h"

#include <string.h>

#include "hostlist.h"

static const struct {
    const char *name;
    enum tp_verb verb;
} verbs[] = {
    {"drain", TP_DRAIN},
    {"down", TP_DOWN},
    {"nodecomment", TP_NODECOMMENT},
    {"jobcomment", TP_JOBCOMMENT},
};

const char *tp_verb_name(enum tp_verb verb)
{
    for (size_t i = 0; i < sizeof verbs / sizeof verbs[0]; i++)
        if (verbs[i].verb == verb)
            return verbs[i].name;
    return "?";
}

bool tp_nodes_has(const struct tp_nodes *nodes, const char *node)
{
    for (unsigned i = 0; i < nodes->count; i++)
        if (strcmp(nodes->name[i], node) == 0)
            return true;
    return false;
}

void tp_nodes_add(struct tp_nodes *nodes, const char *node)
{
    if (nodes->count > TP_CAP_MAX || strlen(node) > TP_NODE_MAX || tp_nodes_has(nodes, node))
        return;
    strcpy(nodes->name[nodes->count++], node);
}

/* isalnum() asks the locale, which is not ours to trust. */
static bool in_name(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
}

static bool in_text(char c)
{
    return c >= ' ' && c <= '~' && c != '"' && c != '\'' && c != '`' && c != '\\';
}

bool tp_node_ok(const char *node)
{
    size_t length = strlen(node);
    if (length == 0 || length > TP_NODE_MAX)
        return false;
    for (size_t i = 0; i < length; i++)
        if (!in_name(node[i]))
            return false;
    return true;
}

bool tp_text_ok(const char *text)
{
    if (*text == '\0' || *text == ' ' || *text == '-')
        return false;
    for (; *text; text++)
        if (!in_text(*text))
            return false;
    return true;
}

/* Copies the word up to the next space and skips that space; false where the word does not fit. */
static bool take_word(const char **line, size_t *length, char *word, size_t size)
{
    const char *space = memchr(*line, ' ', *length);
    size_t n = space ? (size_t)(space - *line) : *length;
    if (n >= size)
        return false;
    memcpy(word, *line, n);
    word[n] = '\0';
    n += space != NULL;
    *line += n;
    *length -= n;
    return true;
}

const char *tp_request_parse(const char *line, size_t length, struct tp_request *request)
{
    memset(request, 0, sizeof *request);
    if (length > TP_LINE_MAX)
        return "the line is too long: at most 600 bytes";
    if (memchr(line, '\0', length))
        return "the line has a zero byte: send plain text";

    char word[16];
    size_t verb = sizeof verbs / sizeof verbs[0];
    if (take_word(&line, &length, word, sizeof word))
        for (verb = 0; verb < sizeof verbs / sizeof verbs[0]; verb++)
            if (strcmp(word, verbs[verb].name) == 0)
                break;
    if (verb == sizeof verbs / sizeof verbs[0])
        return "unknown verb: use drain, down, nodecomment or jobcomment";
    request->verb = verbs[verb].verb;

    if (request->verb != TP_JOBCOMMENT) {
        if (!take_word(&line, &length, request->node, sizeof request->node) || !tp_node_ok(request->node))
            return "bad node: 1 to 63 letters, digits, '.', '_' or '-'";
    }
    memcpy(request->text, line, length);
    request->text[length] = '\0';
    if (!tp_text_ok(request->text))
        return "bad text: printable ASCII without quotes and backslash, not empty, first neither '-' nor a "
               "space";
    return NULL;
}

const char *tp_request_allowed(const struct tp_job *job, uid_t caller, const struct tp_request *request)
{
    if (caller != job->owner && caller != 0)
        return "the caller is not the job's owner";
    if (request->verb != TP_JOBCOMMENT && !tp_hostlist_has(job->nodes, request->node))
        return "the node is not one of the job's nodes";
    return NULL;
}

const char *tp_cap_allows(const struct tp_job *job, const struct tp_nodes *taken, const char *node)
{
    if (tp_nodes_has(taken, node) && taken->count <= job->cap)
        return NULL;
    if (taken->count >= job->cap || taken->count >= TP_CAP_MAX)
        return "the job has used up the number of nodes that it may take out";
    return NULL;
}
