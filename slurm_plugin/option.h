/*
 * Slurm's own option table, read and set from inside sbatch, salloc and srun.
 *
 * SPANK lets a plugin add options, but not see or change the others. So this asks the process it runs in: every
 * submitting command exports its options as `opt`, and libslurmfull has the functions that cli_filter plugins use
 * on it. They take and give strings and are the same from 22.05 to 26.05, yet they are no public interface: where
 * one is missing or does not do what it is told, the submission stops, and cli_filter.lua does the same job
 * through documented ones (enlarge=cli_filter in plugstack.conf).
 */
#ifndef TORCHPASS_OPTION_H
#define TORCHPASS_OPTION_H

#include <stdbool.h>

#include "sizes.h"

/* Find the table; false with one sentence. The other functions need a table that was found. */
bool tp_options_find(char sentence[TP_SENTENCE]);

/* Whether the user, the environment or a script gave the option. */
bool tp_option_given(const char *name);

/* What the user asks for, read after Slurm checked and completed it. Strings live as long as the process. */
void tp_options_read(struct tp_asked *asked);

/* Ask for `sizes` instead; each value is read back. */
bool tp_options_write(const struct tp_sizes *sizes, char sentence[TP_SENTENCE]);

/* The allocation outlives a lost node. */
bool tp_options_keep_job(char sentence[TP_SENTENCE]);

/* Whether somebody asked for that already. */
bool tp_options_job_is_kept(void);

/* For srun outside of an allocation: the step outlives failed tasks, too. */
bool tp_options_keep_step(char sentence[TP_SENTENCE]);

#endif
