/*
 * TorchPass's SPANK plugin: --torchpass-spares=N. This file is the glue between Slurm's hooks and the files that
 * each know one thing; README.md says what happens where.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <slurm/slurm.h>

/* Slurm looks the hooks up by name; everything else of the plugin stays hidden from it. */
#pragma GCC visibility push(default)
#include <slurm/spank.h>
SPANK_PLUGIN(torchpass, 1)
#pragma GCC visibility pop

#include "arguments.h"
#include "helper.h"
#include "option.h"
#include "record.h"
#include "sizes.h"
#include "verdict.h"

/* How Slurm hands the option on: from a job to the commands inside of it, in a variable named like this. */
#define INHERITED "SLURM_SPANK__SLURM_SPANK_OPTION_torchpass_torchpass_spares"

/* What a torchpass job leaves in the environment. A job submitted from inside of it is another job. */
static const char *const of_this_job[] = {
    INHERITED,
    "_SLURM_SPANK_OPTION_torchpass_torchpass_spares",
    "SLURM_SPANK_TORCHPASS_SPARES",
    "SLURM_SPANK_TORCHPASS_ENLARGED",
    "SLURM_SPANK_TORCHPASS_NTASKS",
    "SLURM_SPANK_TORCHPASS_NTASKS_PER_NODE",
    "TORCHPASS_SPARES",
    "TORCHPASS_ENLARGED",
};

/* For the tasks of a step. Slurm passes variables named SLURM_* on whatever --export says, so a copy travels under
   such a name and is renamed in the task. */
static const char *const of_this_step[] = {"TORCHPASS_SPARES", "TORCHPASS_KEY", "TORCHPASS_VERDICT"};

/* What srun would do to a step that loses a task or a node, whatever slurm.conf says. */
static const char *const step_survives[][2] = {
    {"SLURM_NO_KILL", "set"}, {"SLURM_KILL_BAD_EXIT", "0"}, {"SLURM_WAIT", "0"}};

#define LENGTH(array) (sizeof(array) / sizeof *(array))
#define TRAVELLING "SLURM_%s"

static struct tp_arguments site;
static unsigned asked_spares;     /* --torchpass-spares, 0: not given */
static unsigned inherited_spares; /* the same, as this job was submitted with */
static unsigned job_spares;       /* of the job that this command runs in */
static bool enlarged;             /* a component of a heterogeneous job, or the job */
static char verdict[PATH_MAX];    /* where srun expects it; "" if it does not */
static pid_t verdict_reader;

static _Noreturn void refuse(const char *sentence)
{
    slurm_error("torchpass: %s", sentence);
    /* Not a return code: Slurm would print it and submit the job without its spares, if the plugin is `optional`. */
    exit(1);
}

static bool outside_of_a_job(void)
{
    return spank_context() == S_CTX_ALLOCATOR || (spank_context() == S_CTX_LOCAL && !getenv("SLURM_JOB_ID"));
}

static void set(const char *name, const char *text)
{
    if (setenv(name, text, 1))
        refuse("out of memory");
}

static unsigned count_in(const char *name)
{
    unsigned count = 0;

    return tp_read_count(getenv(name), INT_MAX, &count) ? count : 0;
}

/* Where the controller does it, srun still has tasks to lay out over all nodes, and so must know their numbers itself. */
static enum tp_enlarger enlarger(void)
{
    return site.enlarger == TP_BY_JOB_SUBMIT && spank_context() == S_CTX_LOCAL ? TP_BY_PLUGIN : site.enlarger;
}

static int on_option(int value, const char *text, int remote)
{
    (void)value;
    if (!tp_read_count(text, remote ? INT_MAX : site.max_spares, &asked_spares)) {
        slurm_error("torchpass: --torchpass-spares=%s: write a number of nodes from 0 to %u", text ? text : "",
                    site.max_spares);
        return -1;
    }
    /* cli_filter.lua runs after this and before everything else, and asks here whether it is its turn. */
    if (!remote && outside_of_a_job()) {
        if (asked_spares)
            set("TORCHPASS_ENLARGED", tp_enlarger_name(enlarger()));
        else
            unsetenv("TORCHPASS_ENLARGED");
    }
    return 0;
}

static struct spank_option option = {
    .name = "torchpass-spares",
    .arginfo = "N",
    .usage = "allocate N nodes on top of -N, as warm spares for tpwrap",
    .has_arg = 1,
    .cb = on_option,
};

static void forget_the_job_around(void)
{
    bool in_torchpass_job = getenv(INHERITED) || getenv("SLURM_SPANK_TORCHPASS_SPARES") || getenv("TORCHPASS_ENLARGED");

    if (getenv("TORCHPASS_KEY")) {
        for (size_t i = 0; i < LENGTH(step_survives); i++)
            unsetenv(step_survives[i][0]);
        unsetenv("TORCHPASS_KEY");
        unsetenv("TORCHPASS_VERDICT");
    }
    for (size_t i = 0; in_torchpass_job && i < LENGTH(of_this_job); i++)
        unsetenv(of_this_job[i]);
}

static void protect_step(void)
{
    for (size_t i = 0; i < LENGTH(step_survives); i++)
        set(step_survives[i][0], step_survives[i][1]);
}

/* For the prolog, the epilog and (under a longer name) the commands and hooks inside of the job. */
static void tell_job(spank_t spank, const char *name, long number)
{
    char text[32];

    snprintf(text, sizeof text, "%ld", number);
    if (spank_job_control_setenv(spank, name, text, 1) != ESPANK_SUCCESS)
        refuse("Slurm does not take the plugin's variables for the job");
}

/* Ask Slurm for the spares too. */
static void enlarge(spank_t spank)
{
    char sentence[TP_SENTENCE], number[32];
    struct tp_asked asked;
    struct tp_sizes sizes;

    if (*site.fault)
        slurm_error("torchpass: %s", site.fault);
    if (enlarged)
        refuse("in a heterogeneous job --torchpass-spares belongs to the last component only; write it there");
    if (!tp_options_find(sentence))
        refuse(sentence);
    tp_options_read(&asked);
    asked.step = spank_context() == S_CTX_LOCAL;
    if (enlarger() == TP_BY_CLI_FILTER) {
        if (!tp_options_job_is_kept())
            refuse("plugstack.conf says enlarge=cli_filter, but no cli_filter.lua added the spares; the administrator "
                   "can set CliFilterPlugins=cli_filter/lua in slurm.conf, or leave the argument away");
    } else {
        if (!tp_enlarge(&asked, asked_spares, &sizes, sentence))
            refuse(sentence);
        /* The totals that sbatch and salloc write down for the job's commands would be those without spares. */
        if (enlarger() == TP_BY_JOB_SUBMIT && (asked.tasks_given || *asked.gpus))
            refuse(
                "on this cluster the controller adds the spares, for which -n and --gpus are of no use; write -N NODES "
                "--ntasks-per-node=TASKS --gpus-per-node=GPUS instead");
        if (enlarger() == TP_BY_PLUGIN && !tp_options_write(&sizes, sentence))
            refuse(sentence);
        if (!tp_options_keep_job(sentence))
            refuse(sentence);
        if (sizes.tasks)
            tell_job(spank, "TORCHPASS_NTASKS", sizes.tasks);
        if (sizes.tasks_per_node)
            tell_job(spank, "TORCHPASS_NTASKS_PER_NODE", sizes.tasks_per_node);
        slurm_info("torchpass: %ld nodes, %u of them spares", sizes.max_nodes, asked_spares);
    }
    enlarged = true;
    snprintf(number, sizeof number, "%u", asked_spares);
    set("TORCHPASS_SPARES", number);
    tell_job(spank, "TORCHPASS_SPARES", asked_spares);
    if (enlarger() != TP_BY_JOB_SUBMIT) /* where it is missing, job_submit.lua does it */
        spank_job_control_setenv(spank, "TORCHPASS_ENLARGED", tp_enlarger_name(enlarger()), 1);
}

static void hand_to_tasks(const char *name)
{
    char travelling[64];

    snprintf(travelling, sizeof travelling, TRAVELLING, name);
    set(travelling, getenv(name));
}

static void begin_step(void)
{
    const char *job = getenv("SLURM_JOB_ID");
    char key[65];

    if (*verdict) /* a further component of the same step */
        return;
    if (!tp_random_hex(key, 32))
        refuse("the kernel gives no random bytes for the step's key");
    set("TORCHPASS_KEY", key);
    if (tp_verdict_name(verdict, job ? job : "srun")) {
        set("TORCHPASS_VERDICT", verdict);
        verdict_reader = getpid();
    } else {
        unsetenv("TORCHPASS_VERDICT");
        slurm_error(
            "torchpass: the working directory has no usable name (%s), so this step ends with srun's own exit code",
            strerror(errno));
    }
    for (size_t i = 0; i < LENGTH(of_this_step); i++)
        if (getenv(of_this_step[i]))
            hand_to_tasks(of_this_step[i]);
}

static void in_srun(spank_t spank)
{
    char sentence[TP_SENTENCE];
    bool readable = tp_options_find(sentence);

    if (getenv("SLURM_JOB_ID") || (readable && tp_option_given("jobid"))) {
        if (asked_spares && asked_spares != inherited_spares && asked_spares != job_spares)
            refuse("inside of an allocation it is too late for --torchpass-spares; write it for sbatch or salloc, or, "
                   "where the allocation has nodes to spare, TORCHPASS_SPARES=N srun");
        /* The shell that salloc starts on a node is a step too, but not of tpwrap. */
        if (job_spares && !(readable && tp_option_given("interactive")))
            begin_step();
        return;
    }
    if (asked_spares) {
        enlarge(spank);
        protect_step(); /* for what the tasks start; the options of this srun are read already */
        if (!tp_options_keep_step(sentence))
            refuse(sentence);
    }
    if (asked_spares || job_spares)
        begin_step();
}

static void end_with_verdict(void)
{
    const char *why;
    int code = tp_verdict_take(verdict, getuid(), &why);

    if (code < 0) {
        if (why)
            slurm_error("torchpass: %s %s, so this step ends with srun's own exit code", verdict, why);
        return;
    }
    slurm_verbose("torchpass: the verdict is %d", code);
    /* srun is on its way out with a code of its own; this hook is the last thing that it calls. */
    fflush(NULL);
    _exit(code);
}

/* Inside a task or batch script. */
static void set_in_job(spank_t spank, const char *name, const char *text)
{
    spank_err_t error = spank_setenv(spank, name, text, 1);

    if (error != ESPANK_SUCCESS)
        slurm_error("torchpass: cannot set %s: %s", name, spank_strerror(error));
}

static void in_batch_script(spank_t spank)
{
    static const char *const told[][2] = {
        /* sbatch --export=NONE does not pass it on by its own name. */
        {"SLURM_SPANK_TORCHPASS_SPARES", "TORCHPASS_SPARES"},
        /* sbatch wrote these down before the spares came on top, and srun would believe it (22.05 in all cases). */
        {"SLURM_SPANK_TORCHPASS_NTASKS", "SLURM_NTASKS"},
        {"SLURM_SPANK_TORCHPASS_NTASKS", "SLURM_NPROCS"},
        {"SLURM_SPANK_TORCHPASS_NTASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"},
    };
    char text[32];

    for (size_t i = 0; i < LENGTH(told); i++)
        if (spank_getenv(spank, told[i][0], text, sizeof text) == ESPANK_SUCCESS)
            set_in_job(spank, told[i][1], text);
}

static void in_task(spank_t spank)
{
    char travelling[64], text[PATH_MAX];

    for (size_t i = 0; i < LENGTH(of_this_step); i++) {
        snprintf(travelling, sizeof travelling, TRAVELLING, of_this_step[i]);
        if (spank_getenv(spank, travelling, text, sizeof text) != ESPANK_SUCCESS)
            continue;
        set_in_job(spank, of_this_step[i], text);
        spank_unsetenv(spank, travelling);
    }
}

/* On every node of a job with spares, idle ones included. The helper starts here and not in the extern step, which
   Slurm 22.05 kills on all nodes as soon as one of them goes down. */
static void begin_job_on_node(spank_t spank)
{
    static struct tp_record record;
    const char *nodes = getenv("SLURM_JOB_NODELIST"); /* 24.11 and later */
    unsigned cap;
    uint32_t job;

    record.spares = count_in("SPANK_TORCHPASS_SPARES");
    if (!record.spares)
        return;
    if (!nodes)
        nodes = getenv("SLURM_NODELIST");
    if (nodes && strlen(nodes) < sizeof record.nodes)
        strcpy(record.nodes, nodes);
    cap = site.max_drain ? site.max_drain : record.spares;
    if (spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_UID, &record.uid) != ESPANK_SUCCESS || tp_record_write(job, &record))
        slurm_error("torchpass: cannot write the job's record in " TP_RUN ": %s", strerror(errno));
    else if (site.helper && tp_helper_start(job, record.uid, record.nodes, cap, site.confirm))
        slurm_error("torchpass: no helper for job %u: %s", job, strerror(errno));
}

#pragma GCC visibility push(default)

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
    tp_arguments_read(count, arguments, &site);
    if (spank_context() == S_CTX_SLURMD) {
        if (*site.fault)
            slurm_error("torchpass: %s; until then no helper runs", site.fault);
        return 0;
    }
    if (spank_context() == S_CTX_ALLOCATOR)
        forget_the_job_around();
    if (spank_context() == S_CTX_LOCAL) {
        inherited_spares = count_in(INHERITED);
        job_spares = count_in("TORCHPASS_SPARES");
        if (!job_spares && inherited_spares) {
            job_spares = inherited_spares;
            set("TORCHPASS_SPARES", getenv(INHERITED));
        }
        if (job_spares)
            protect_step(); /* srun reads these after this hook */
    }
    return spank_option_register(spank, &option);
}

int slurm_spank_init_post_opt(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    if (spank_context() == S_CTX_LOCAL)
        in_srun(spank);
    else if (spank_context() == S_CTX_ALLOCATOR && asked_spares)
        enlarge(spank);
    return 0;
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments)
{
    uint32_t step = 0;

    (void)count, (void)arguments;
    if (spank_get_item(spank, S_JOB_STEPID, &step) == ESPANK_SUCCESS && step == SLURM_BATCH_SCRIPT)
        in_batch_script(spank);
    else
        in_task(spank);
    return 0;
}

int slurm_spank_job_prolog(spank_t spank, int count, char **arguments)
{
    tp_arguments_read(count, arguments, &site);
    begin_job_on_node(spank);
    return 0;
}

int slurm_spank_job_epilog(spank_t spank, int count, char **arguments)
{
    uint32_t job;

    (void)count, (void)arguments;
    if (spank_get_item(spank, S_JOB_ID, &job) == ESPANK_SUCCESS)
        tp_helper_stop(job);
    return 0;
}

int slurm_spank_exit(spank_t spank, int count, char **arguments)
{
    (void)spank, (void)count, (void)arguments;
    if (spank_context() == S_CTX_LOCAL && *verdict && getpid() == verdict_reader)
        end_with_verdict();
    return 0;
}

#pragma GCC visibility pop
