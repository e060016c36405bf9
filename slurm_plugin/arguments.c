#include "arguments.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const enlargers[] = {
    [TP_BY_PLUGIN] = "plugin", [TP_BY_CLI_FILTER] = "cli_filter", [TP_BY_JOB_SUBMIT] = "job_submit"};

const char *tp_enlarger_name(enum tp_enlarger enlarger)
{
    return enlargers[enlarger];
}

bool tp_read_count(const char *text, unsigned most, unsigned *count)
{
    size_t digits = text ? strspn(text, "0123456789") : 0;
    unsigned long number;

    if (digits == 0 || digits > 9 || text[digits] != '\0')
        return false;
    number = strtoul(text, NULL, 10);
    if (number > most)
        return false;
    *count = (unsigned)number;
    return true;
}

/* The text behind "name=", or NULL. */
static const char *behind(const char *argument, const char *name)
{
    size_t length = strlen(name);

    return strncmp(argument, name, length) == 0 && argument[length] == '=' ? argument + length + 1 : NULL;
}

static bool read_enlarger(const char *text, enum tp_enlarger *enlarger)
{
    for (size_t i = 0; i < sizeof enlargers / sizeof *enlargers; i++)
        if (strcmp(text, enlargers[i]) == 0) {
            *enlarger = (enum tp_enlarger)i;
            return true;
        }
    return false;
}

static bool read_switch(const char *text, bool *on)
{
    *on = strcmp(text, "yes") == 0;
    return *on || strcmp(text, "no") == 0;
}

static bool read_argument(const char *argument, struct tp_arguments *site)
{
    const char *text;

    if ((text = behind(argument, "max_spares")))
        return tp_read_count(text, INT_MAX, &site->max_spares);
    if ((text = behind(argument, "max_drain")))
        return tp_read_count(text, INT_MAX, &site->max_drain);
    if ((text = behind(argument, "helper")))
        return read_switch(text, &site->helper);
    if ((text = behind(argument, "enlarge")))
        return read_enlarger(text, &site->enlarger);
    if ((text = behind(argument, "confirm"))) {
        site->confirm = text;
        return text[0] == '/';
    }
    return false;
}

void tp_arguments_read(int count, char **arguments, struct tp_arguments *site)
{
    *site = (struct tp_arguments){.max_spares = 64, .helper = true, .enlarger = TP_BY_PLUGIN};
    for (int i = 0; i < count; i++) {
        struct tp_arguments before = *site;

        if (read_argument(arguments[i], site))
            continue;
        *site = before;
        if (!*site->fault)
            snprintf(site->fault, sizeof site->fault,
                     "'%.60s' in plugstack.conf is not understood; write max_spares=N, max_drain=N, "
                     "helper=yes|no, confirm=/PATH or enlarge=plugin|cli_filter|job_submit",
                     arguments[i]);
    }
    if (*site->fault)
        site->helper = false;
}
