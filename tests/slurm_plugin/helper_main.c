/* The node helper alone, with a sanitizer, for a job that it is told: JOB OWNER NODES CAP CONFIRM NAME RUN WATCH_MS. It
 * runs until stdin ends, and is then ended as an epilog would do it. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "helper.h"
#include "server.h"

int main(int count, char **arguments)
{
    if (count != 9)
        return 2;
    const struct tp_helper as = {
        .job = {.id = (uint32_t)atoi(arguments[1]),
                .owner = (uid_t)atoi(arguments[2]),
                .nodes = arguments[3],
                .cap = (unsigned)atoi(arguments[4])},
        .tools = {.bin = TP_SLURM_BIN,
                  .confirm = *arguments[5] ? arguments[5] : NULL,
                  .self = arguments[6],
                  .run = arguments[7]},
        .watch_ms = atoi(arguments[8]),
    };
    if (tp_helper_start_as(&as) != 0) {
        perror("start");
        return 1;
    }
    printf("ready\n");
    fflush(stdout);
    while (getchar() != EOF)
        ;
    char path[200];
    snprintf(path, sizeof path, "%s/job%s.%s.sock", arguments[7], arguments[1], arguments[6]);
    unlink(path);
    int status = 0;
    wait(&status); /* of the helper; its workers are its own children */
    printf("%d\n", status);
    return status != 0;
}
