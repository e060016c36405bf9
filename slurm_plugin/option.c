#define _GNU_SOURCE
#include "option.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

#include <slurm/slurm.h>

static struct {
    void *opt;
    char *(*get)(void *opt, const char *name);
    bool (*isset)(void *opt, const char *name);
    int (*set)(void *opt, const char *name, const char *value, bool early);
    int (*process)(void *opt, int letter, const char *value, bool from_environment, bool early);
    job_desc_msg_t *(*describe)(void *opt, bool defaults);
} table;

static bool find(void **symbol, const char *name)
{
    return (*symbol = dlsym(RTLD_DEFAULT, name)) != NULL;
}

/* `opt` is a common name: only the one that the command itself exports is Slurm's. */
static bool belongs_to_program(void *symbol)
{
    Dl_info program, found;

    return dladdr((void *)getauxval(AT_PHDR), &program) && dladdr(symbol, &found) &&
           program.dli_fbase == found.dli_fbase;
}

bool tp_options_find(char sentence[TP_SENTENCE])
{
    if (find(&table.opt, "opt") && belongs_to_program(table.opt) && find((void **)&table.get, "slurm_option_get") &&
        find((void **)&table.isset, "slurm_option_isset") && find((void **)&table.set, "slurm_option_set") &&
        find((void **)&table.process, "slurm_process_option") &&
        find((void **)&table.describe, "slurm_opt_create_job_desc"))
        return true;
    snprintf(
        sentence, TP_SENTENCE,
        "this build of Slurm hides its option table, so the plugin cannot add the spares; the administrator can write "
        "enlarge=cli_filter or enlarge=job_submit in plugstack.conf");
    return false;
}

bool tp_option_given(const char *name)
{
    return table.isset(table.opt, name);
}

/* Never NULL. What Slurm allocates is not freed: its allocator is private, and the process is short-lived. */
static const char *value(const char *name)
{
    char *text = table.get(table.opt, name);

    return text ? text : "";
}

static long number_given(const char *name)
{
    return tp_option_given(name) ? strtol(value(name), NULL, 10) : 0;
}

void tp_options_read(struct tp_asked *asked)
{
    /* The message that Slurm would send as things stand: it tells what the table of strings does not. */
    const job_desc_msg_t *message = table.describe(table.opt, false);
    char *rest;

    memset(asked, 0, sizeof *asked);
    asked->nodes_given = tp_option_given("nodes") || *value("nodelist");
    asked->min_nodes = strtol(value("nodes"), &rest, 10);
    asked->max_nodes = *rest == '-' ? strtol(rest + 1, NULL, 10) : asked->min_nodes;
    asked->tasks_given = tp_option_given("ntasks");
    asked->tasks = strtol(value("ntasks"), NULL, 10);
    asked->tasks_sent = message && message->num_tasks == (uint32_t)asked->tasks;
    asked->tasks_per_node = number_given("ntasks-per-node");
    asked->tasks_per_gpu = tp_option_given("ntasks-per-gpu") || tp_option_given("ntasks-per-tres");
    asked->gpus = tp_option_given("gpus") ? value("gpus") : "";
    asked->gpus_placed = tp_option_given("gpus-per-node") || tp_option_given("gpus-per-socket") ||
                         tp_option_given("gpus-per-task") || strstr(value("gres"), "gpu") != NULL;
    asked->segment = number_given("segment");
    asked->arbitrary = strncmp(value("distribution"), "arbitrary", 9) == 0;
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(23, 2, 0)
    asked->size_list = message && message->job_size_str != NULL;
#endif
}

static bool put(const char *name, const char *text, char sentence[TP_SENTENCE])
{
    if (table.set(table.opt, name, text, false) == 0 && strcmp(value(name), text) == 0)
        return true;
    snprintf(sentence, TP_SENTENCE, "Slurm does not take --%s=%s, which the spares need; its value is now '%.60s'",
             name, text, value(name));
    return false;
}

static bool put_number(const char *name, long number, char sentence[TP_SENTENCE])
{
    char text[32];

    snprintf(text, sizeof text, "%ld", number);
    return number == 0 || put(name, text, sentence);
}

bool tp_options_write(const struct tp_sizes *sizes, char sentence[TP_SENTENCE])
{
    char nodes[64];

    if (sizes->min_nodes == sizes->max_nodes)
        snprintf(nodes, sizeof nodes, "%ld", sizes->min_nodes);
    else
        snprintf(nodes, sizeof nodes, "%ld-%ld", sizes->min_nodes, sizes->max_nodes);
    return put("nodes", nodes, sentence) && put_number("ntasks", sizes->tasks, sentence) &&
           put_number("ntasks-per-node", sizes->tasks_per_node, sentence) &&
           (!*sizes->gpus || put("gpus", sizes->gpus, sentence)) &&
           (!*sizes->gpus_per_node || put("gpus-per-node", sizes->gpus_per_node, sentence));
}

bool tp_options_keep_job(char sentence[TP_SENTENCE])
{
    return put("no-kill", "set", sentence);
}

bool tp_options_job_is_kept(void)
{
    return strcmp(value("no-kill"), "set") == 0;
}

bool tp_options_keep_step(char sentence[TP_SENTENCE])
{
    /* By letter, since the name `wait` finds the option of sbatch. */
    if (table.process(table.opt, 'W', "0", false, false)) {
        snprintf(sentence, TP_SENTENCE, "Slurm does not take --wait=0, which the spares need");
        return false;
    }
    return tp_option_given("kill-on-bad-exit") || put("kill-on-bad-exit", "0", sentence);
}
