#include "sizes.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((format(printf, 2, 3))) static bool refuse(char sentence[TP_SENTENCE], const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(sentence, TP_SENTENCE, format, arguments);
    va_end(arguments);
    return false;
}

/* `total` is spread evenly over `nodes`: the same share for each of `wanted` nodes. False: more than Slurm counts. */
static bool scale(long total, long nodes, long wanted, long *scaled)
{
    return !__builtin_mul_overflow(total / nodes, wanted, scaled) && *scaled <= INT_MAX;
}

/* "8" or "a100:8"; the type keeps its colon. False for lists, suffixes and anything else. */
static bool read_gpus(const char *text, char type[TP_GPUS], long *count)
{
    const char *colon = strrchr(text, ':');
    const char *number = colon ? colon + 1 : text;
    size_t length = (size_t)(number - text);
    char *end;

    /* Half the room is enough for a type, and leaves the rest for any number. */
    if (strchr(text, ',') || length >= TP_GPUS / 2 || *number < '0' || *number > '9')
        return false;
    memcpy(type, text, length);
    type[length] = '\0';
    *count = strtol(number, &end, 10);
    return *end == '\0' && *count > 0 && *count <= INT_MAX;
}

/* How many nodes train, where Slurm was not told a number itself. */
static bool count_nodes(const struct tp_asked *asked, long *nodes, char sentence[TP_SENTENCE])
{
    if (asked->tasks_given && asked->tasks_per_node > 0) {
        if (asked->tasks % asked->tasks_per_node)
            return refuse(sentence,
                          "-n %ld does not fill its last node with --ntasks-per-node=%ld; write -N NODES "
                          "--ntasks-per-node=%ld without -n",
                          asked->tasks, asked->tasks_per_node, asked->tasks_per_node);
        *nodes = asked->tasks / asked->tasks_per_node;
    } else if (asked->tasks_given && asked->tasks > 1) {
        return refuse(sentence,
                      "-n %ld alone does not say how many nodes train; write -N NODES --ntasks-per-node=TASKS "
                      "instead",
                      asked->tasks);
    } else if (*asked->gpus && strcmp(asked->gpus, "1") != 0) {
        return refuse(sentence,
                      "--gpus=%.60s alone does not say how many nodes train; write -N NODES "
                      "--gpus-per-node=GPUS instead",
                      asked->gpus);
    } else {
        *nodes = 1;
    }
    return true;
}

static bool enlarge_tasks(const struct tp_asked *asked, long nodes, bool range, struct tp_sizes *sizes,
                          char sentence[TP_SENTENCE])
{
    long each = asked->tasks / nodes;

    if (!asked->tasks_given && !asked->tasks_sent)
        return true;
    if (asked->tasks_given && range)
        return refuse(sentence,
                      "-n %ld with a range of nodes leaves the tasks of a node open; write --ntasks-per-node=TASKS "
                      "instead of -n",
                      asked->tasks);
    if (asked->tasks < 1 || asked->tasks % nodes)
        return refuse(sentence,
                      "-n %ld is not a multiple of the %ld nodes that train; write --ntasks-per-node=TASKS instead of "
                      "-n",
                      asked->tasks, nodes);
    if (asked->tasks_given && asked->tasks_per_node > 0 && asked->tasks_per_node != each)
        return refuse(sentence,
                      "-n %ld on %ld nodes is %ld tasks a node, but --ntasks-per-node says %ld; leave -n away",
                      asked->tasks, nodes, each, asked->tasks_per_node);
    if (asked->tasks_given && asked->tasks_per_gpu)
        return refuse(sentence,
                      "-n %ld with --ntasks-per-gpu counts tasks twice; write -N %ld --gpus-per-node=GPUS "
                      "--ntasks-per-gpu=TASKS without -n",
                      asked->tasks, nodes);
    /* Without it Slurm fills the first nodes and leaves one task to each of the others. */
    if (asked->tasks_given && asked->tasks_per_node == 0)
        sizes->tasks_per_node = each;
    if (!scale(asked->tasks, nodes, sizes->min_nodes, &sizes->tasks))
        return refuse(sentence, "with the spares these are more tasks than Slurm can count; write smaller numbers");
    return true;
}

static bool enlarge_gpus(const struct tp_asked *asked, long nodes, bool range, struct tp_sizes *sizes,
                         char sentence[TP_SENTENCE])
{
    char type[TP_GPUS];
    long count, scaled;

    if (!*asked->gpus)
        return true;
    if (!read_gpus(asked->gpus, type, &count))
        return refuse(sentence, "--gpus=%.60s is not one number of GPUs; write --gpus-per-node=GPUS instead",
                      asked->gpus);
    if (range)
        return refuse(sentence,
                      "--gpus=%s with a range of nodes leaves the GPUs of a node open; write "
                      "--gpus-per-node=GPUS instead",
                      asked->gpus);
    if (count % nodes)
        return refuse(sentence,
                      "--gpus=%s is not a multiple of the %ld nodes that train; write --gpus-per-node=GPUS "
                      "instead",
                      asked->gpus, nodes);
    if (!scale(count, nodes, sizes->min_nodes, &scaled))
        return refuse(sentence, "with the spares these are more GPUs than Slurm can count; write smaller numbers");
    snprintf(sizes->gpus, TP_GPUS, "%.*s%ld", TP_GPUS / 2, type, scaled);
    /* A total may be spread unevenly, and a spare needs what a training node has. */
    if (!asked->gpus_placed)
        snprintf(sizes->gpus_per_node, TP_GPUS, "%.*s%ld", TP_GPUS / 2, type, count / nodes);
    return true;
}

/* Slurm takes a number of nodes that is at most one segment, or whole segments. */
static bool fits(long nodes, long segment)
{
    return segment <= 0 || nodes <= segment || nodes % segment == 0;
}

bool tp_enlarge(const struct tp_asked *asked, long spares, struct tp_sizes *sizes, char sentence[TP_SENTENCE])
{
    long nodes = asked->min_nodes, last = asked->max_nodes;
    bool range;

    memset(sizes, 0, sizeof *sizes);
    sentence[0] = '\0';
    if (spares < 1 || spares > INT_MAX)
        return refuse(sentence, "%ld is no number of spare nodes; write 1 or more", spares);
    if (asked->arbitrary)
        return refuse(sentence, "--distribution=arbitrary places every task by hand, the spares' too; leave it away, "
                                "or ask for the nodes yourself and write TORCHPASS_SPARES=N srun");
    if (asked->size_list)
        return refuse(sentence, "-N with a list of node counts cannot be enlarged; write one number or MIN-MAX");
    if (!asked->nodes_given) {
        if (!count_nodes(asked, &nodes, sentence))
            return false;
        last = nodes;
    }
    if (last == 0)
        last = nodes;
    if (nodes < 1 || last < nodes)
        return refuse(sentence, "there is no training node in -N %ld-%ld; write -N 1 or more", nodes, last);
    if (last > INT_MAX - spares)
        return refuse(sentence, "with the spares these are more nodes than Slurm can count; write smaller numbers");
    range = last != nodes;
    if (range && asked->step)
        return refuse(
            sentence,
            "srun lays its tasks out for one number of nodes; write -N %ld, or use sbatch or salloc for a range",
            nodes);
    sizes->min_nodes = nodes + spares;
    sizes->max_nodes = last + spares;
    if (!fits(sizes->min_nodes, asked->segment) || !fits(sizes->max_nodes, asked->segment))
        return refuse(sentence,
                      "%ld nodes and %ld spares are not whole segments of %ld nodes; write --torchpass-spares=%ld, or "
                      "leave --segment away",
                      nodes, spares, asked->segment,
                      spares + (asked->segment - sizes->min_nodes % asked->segment) % asked->segment);
    return enlarge_tasks(asked, nodes, range, sizes, sentence) && enlarge_gpus(asked, nodes, range, sizes, sentence);
}
