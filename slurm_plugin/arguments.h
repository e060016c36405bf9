/* What the site says about the plugin: the arguments of its line in plugstack.conf. */
#ifndef TORCHPASS_ARGUMENTS_H
#define TORCHPASS_ARGUMENTS_H

#include <stdbool.h>

enum tp_enlarger { TP_BY_PLUGIN, TP_BY_CLI_FILTER, TP_BY_JOB_SUBMIT };

struct tp_arguments {
    unsigned max_spares;       /* max_spares=N: the most a user may ask for */
    unsigned max_drain;        /* max_drain=N: nodes that a job may drain or set down; 0: as many as it has spares */
    bool helper;               /* helper=yes|no: run the node helper */
    enum tp_enlarger enlarger; /* enlarge=plugin|cli_filter|job_submit: who adds the spares to the request */
    const char *confirm;       /* confirm=PATH: program that must agree before the helper touches a node, or NULL */
    char fault[256];           /* the first argument that was not understood, as a sentence; "" if none */
};

/* Always gives a usable site: what is not understood keeps its default, except that a faulty line has no helper
   (the argument might have been the site's limit on it). */
void tp_arguments_read(int count, char **arguments, struct tp_arguments *site);

/* "plugin", "cli_filter" or "job_submit". */
const char *tp_enlarger_name(enum tp_enlarger enlarger);

/* Strict decimal number from 0 to `most`. */
bool tp_read_count(const char *text, unsigned most, unsigned *count);

#endif
