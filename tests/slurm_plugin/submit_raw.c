/* Submits a batch job as slurmrestd does: by Slurm's own library, from no command of Slurm's and past the plugin.
 *
 *     submit_raw SCRIPT NODES TASKS TASKS_PER_NODE TRES_PER_JOB SPARES     (0 or "": not given); prints the job id */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>

int main(int count, char **words)
{
    char *environment[] = {"PATH=/usr/bin:/bin", NULL}, spares[100], *told[] = {spares, NULL}, script[10000] = "";
    submit_response_msg_t *answer;
    job_desc_msg_t job;
    FILE *file;

    if (count != 7 || !(file = fopen(words[1], "r")) || !fread(script, 1, sizeof script - 1, file))
        return 2;
    snprintf(spares, sizeof spares, "TORCHPASS_SPARES=%s", words[6]);
    slurm_init(NULL);
    slurm_init_job_desc_msg(&job);
    job.name = "raw";
    job.script = script;
    job.environment = environment;
    job.env_size = 1;
    job.work_dir = getcwd(NULL, 0);
    job.user_id = getuid();
    job.group_id = getgid();
    job.kill_on_node_fail = 0;
    job.spank_job_env = told;
    job.spank_job_env_size = 1;
    if (atoi(words[2]))
        job.min_nodes = job.max_nodes = (uint32_t)atoi(words[2]);
    if (atoi(words[3]))
        job.num_tasks = job.min_cpus = (uint32_t)atoi(words[3]);
    if (atoi(words[4]))
        job.ntasks_per_node = (uint16_t)atoi(words[4]);
    if (*words[5])
        job.tres_per_job = words[5];
    if (slurm_submit_batch_job(&job, &answer)) {
        slurm_perror("submit_raw");
        return 1;
    }
    if (answer->job_submit_user_msg)
        fprintf(stderr, "%s\n", answer->job_submit_user_msg);
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(25, 11, 0)
    printf("%u\n", answer->step_id.job_id);
#else
    printf("%u\n", answer->job_id);
#endif
    return 0;
}
