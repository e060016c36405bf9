#include "hostlist.h"

#include <stdint.h>
#include <string.h>

enum { DIGITS_MAX = 18, BRACKETS_MAX = 4 };

struct span { /* [at, end) */
    const char *at, *end;
};

/* Reads a run of digits; returns how many there were, 0 where there are none or too many. */
static size_t number(struct span *text, uint64_t *value)
{
    size_t n = 0;
    *value = 0;
    while (text->at < text->end && *text->at >= '0' && *text->at <= '9') {
        if (++n > DIGITS_MAX)
            return 0;
        *value = *value * 10 + (uint64_t)(*text->at++ - '0');
    }
    return n;
}

/* Is `digits`, written out, one of the numbers of "1-3,5,007-012"? A range writes its numbers as wide as its start. */
static bool in_ranges(struct span ranges, struct span digits)
{
    struct span copy = digits;
    uint64_t value, low, high;
    size_t width = number(&copy, &value);
    if (width == 0)
        return false;
    while (ranges.at < ranges.end) {
        size_t low_width = number(&ranges, &low);
        high = low;
        if (low_width == 0)
            return false;
        if (ranges.at < ranges.end && *ranges.at == '-') {
            ranges.at++;
            if (number(&ranges, &high) == 0)
                return false;
        }
        bool padded = width > 1 && *digits.at == '0';
        if (value >= low && value <= high && (width == low_width || (width > low_width && !padded)))
            return true;
        if (ranges.at < ranges.end && *ranges.at++ != ',')
            return false;
    }
    return false;
}

static bool matches(struct span item, struct span node, int brackets)
{
    while (item.at < item.end) {
        if (*item.at != '[') {
            if (node.at == node.end || *item.at++ != *node.at++)
                return false;
            continue;
        }
        const char *close = memchr(item.at, ']', (size_t)(item.end - item.at));
        if (!close || brackets == BRACKETS_MAX)
            return false;
        struct span ranges = {item.at + 1, close}, rest = {close + 1, item.end};
        struct span digits = {node.at, node.at};
        /* More digits may follow the bracket, as in n[1-2]0: every cut is tried. */
        while (digits.end < node.end && *digits.end >= '0' && *digits.end <= '9' &&
               digits.end - digits.at < DIGITS_MAX) {
            digits.end++;
            if (in_ranges(ranges, digits) && matches(rest, (struct span){digits.end, node.end}, brackets + 1))
                return true;
        }
        return false;
    }
    return node.at == node.end;
}

bool tp_hostlist_has(const char *list, const char *node)
{
    struct span name = {node, node + strlen(node)};
    if (name.at == name.end)
        return false;
    while (*list) {
        struct span item = {list, list};
        bool inside = false;
        for (; *item.end && (inside || *item.end != ','); item.end++) {
            if (*item.end == '[')
                inside = true;
            else if (*item.end == ']')
                inside = false;
        }
        if (item.at < item.end && matches(item, name, 0))
            return true;
        list = *item.end ? item.end + 1 : item.end;
    }
    return false;
}

bool tp_hostlist_ok(const char *list)
{
    return *list && *list != '-' &&
           list[strspn(list, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-,[]")] == '\0';
}
