/*
 * srun, sbatch and salloc in little: calls the companion for the options of a job as they do.
 *
 *   fake REPORT submit local|allocator [--]NAME[=VALUE]... [: ...]      ":" begins a further part
 *   fake REPORT submit ... arg=A                                        an argument of plugstack
 *
 * For each part, in Slurm's order: the environment's options, those of the command line, what Slurm
 * keeps of them in the environment and for the Prolog, init_post_opt, and that once more in the
 * environment (plugstack.c, sbatch.c: _set_spank_env). The report has what the Prolog gets of it.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <slurm/spank.h>

#include "submit.h"

#define MAX_ITEMS 64

extern const char plugin_name[]; /* SPANK_PLUGIN()'s */

static struct {
	struct spank_option option;
	char *value; /* the last one */
	int is_given;
} options[MAX_ITEMS];
static char *control_variables[MAX_ITEMS]; /* NAME=VALUE */
static int option_count, control_count;

spank_err_t spank_option_register(spank_t sp, struct spank_option *option)
{
	(void)sp;
	options[option_count++].option = *option;
	return ESPANK_SUCCESS;
}

spank_err_t spank_job_control_unsetenv(spank_t sp, const char *name)
{
	size_t length = strlen(name);

	(void)sp;
	for (int i = 0; i < control_count; i++)
		if (strncmp(control_variables[i], name, length) == 0 &&
		    control_variables[i][length] == '=') {
			free(control_variables[i]);
			control_variables[i] = control_variables[--control_count];
			return ESPANK_SUCCESS;
		}
	return ESPANK_ENV_NOEXIST;
}

spank_err_t spank_job_control_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	(void)overwrite;
	spank_job_control_unsetenv(sp, name);
	if (asprintf(&control_variables[control_count++], "%s=%s", name, value) < 0)
		abort();
	return ESPANK_SUCCESS;
}

static void format_variable(const struct spank_option *option, char name[128])
{
	snprintf(name, 128, "_SLURM_SPANK_OPTION_%s_%s", plugin_name, option->name);
	for (char *c = name; *c; c++)
		if (*c == '-')
			*c = '_';
}

static void process_option(int index, char *value)
{
	if (options[index].option.cb(options[index].option.val, value ? value : "", 0) != 0) {
		report_fact("refused by the callback");
		exit(255);
	}
	options[index].value = value;
	options[index].is_given = 1;
}

static void process_environment(void)
{
	for (int i = 0; i < option_count; i++) {
		char name[128], prefixed[160];
		format_variable(&options[i].option, name);
		snprintf(prefixed, sizeof(prefixed), "SLURM_SPANK_%s", name);
		if (getenv(prefixed))
			process_option(i, strdup(getenv(prefixed)));
	}
}

static void process_word(char *word)
{
	char *equals = strchr(word, '=');

	if (equals)
		*equals = '\0';
	for (int i = 0; i < option_count; i++)
		if (strcmp(options[i].option.name, word) == 0) {
			process_option(i, equals ? equals + 1 : NULL);
			return;
		}
	report_fact("unknown option %s", word);
	exit(255);
}

static void finish_part(int ac, char **av)
{
	for (int i = 0; i < option_count; i++) {
		char name[128];
		if (!options[i].is_given)
			continue;
		format_variable(&options[i].option, name);
		setenv(name, options[i].value ? options[i].value : "", 1);
		spank_job_control_setenv(NULL, name, options[i].value ? options[i].value : "(null)",
					 1);
	}
	report_fact("post_opt %d", slurm_spank_init_post_opt(NULL, ac, av));
	report_fact("part %d", control_count);
	for (int i = 0; i < control_count; i++) {
		char name[128];
		snprintf(name, sizeof(name), "SLURM_SPANK_%.*s",
			 (int)(strchr(control_variables[i], '=') - control_variables[i]),
			 control_variables[i]);
		setenv(name, strchr(control_variables[i], '=') + 1, 1);
		for (char *c = control_variables[i]; *c; c++) /* a line of the report each */
			if (*c == '\n')
				*c = '\1';
		report_fact("prolog SPANK_%s", control_variables[i]);
	}
}

int submit(int argc, char **argv)
{
	char *plugin_arguments[MAX_ITEMS];
	int argument_count = 0;

	for (int i = 0; i < argc; i++)
		if (strncmp(argv[i], "arg=", 4) == 0)
			plugin_arguments[argument_count++] = argv[i] + 4;
	report_fact("init %d", slurm_spank_init(NULL, argument_count, plugin_arguments));
	process_environment();
	for (int i = 0; i < argc; i++) {
		if (strcmp(argv[i], ":") == 0) {
			finish_part(argument_count, plugin_arguments);
			process_environment();
		} else if (strncmp(argv[i], "arg=", 4) != 0)
			process_word(argv[i] + (strncmp(argv[i], "--", 2) == 0 ? 2 : 0));
	}
	finish_part(argument_count, plugin_arguments);
	for (char **each = environ; *each; each++)
		if (strncmp(*each, "SLURM_SPANK_", 12) == 0 || strncmp(*each, "_SLURM_SPANK", 12) == 0)
			report_fact("environment %.60s", *each);
	return 0;
}
