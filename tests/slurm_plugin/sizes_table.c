/* Runs tp_enlarge on requests from standard input, one a line of "name=value" words; prints sizes or the sentence. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sizes.h"

int main(void)
{
    char line[4096], sentence[TP_SENTENCE];
    struct tp_sizes sizes;

    while (fgets(line, sizeof line, stdin)) {
        struct tp_asked asked = {.min_nodes = 1, .tasks = 1, .gpus = ""}; /* Slurm's own defaults */
        long spares = 1;

        for (char *word = strtok(line, " \n"); word; word = strtok(NULL, " \n")) {
            char *text = strchr(word, '=');

            *text++ = '\0';
            if (!strcmp(word, "spares"))
                spares = atol(text);
            else if (!strcmp(word, "nodes_given"))
                asked.nodes_given = atoi(text);
            else if (!strcmp(word, "min_nodes"))
                asked.min_nodes = atol(text);
            else if (!strcmp(word, "max_nodes"))
                asked.max_nodes = atol(text);
            else if (!strcmp(word, "size_list"))
                asked.size_list = atoi(text);
            else if (!strcmp(word, "tasks_given"))
                asked.tasks_given = atoi(text);
            else if (!strcmp(word, "tasks_sent"))
                asked.tasks_sent = atoi(text);
            else if (!strcmp(word, "tasks"))
                asked.tasks = atol(text);
            else if (!strcmp(word, "tasks_per_node"))
                asked.tasks_per_node = atol(text);
            else if (!strcmp(word, "tasks_per_gpu"))
                asked.tasks_per_gpu = atoi(text);
            else if (!strcmp(word, "gpus"))
                asked.gpus = text;
            else if (!strcmp(word, "gpus_placed"))
                asked.gpus_placed = atoi(text);
            else if (!strcmp(word, "segment"))
                asked.segment = atol(text);
            else if (!strcmp(word, "arbitrary"))
                asked.arbitrary = atoi(text);
            else if (!strcmp(word, "step"))
                asked.step = atoi(text);
            else
                return 2;
        }
        if (tp_enlarge(&asked, spares, &sizes, sentence))
            printf("{\"min_nodes\": %ld, \"max_nodes\": %ld, \"tasks\": %ld, \"tasks_per_node\": %ld, "
                   "\"gpus\": \"%s\", \"gpus_per_node\": \"%s\"}\n",
                   sizes.min_nodes, sizes.max_nodes, sizes.tasks, sizes.tasks_per_node, sizes.gpus,
                   sizes.gpus_per_node);
        else
            printf("%s\n", sentence);
        fflush(stdout);
    }
    return 0;
}
