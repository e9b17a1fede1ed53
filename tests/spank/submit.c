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

#define MOST 64

extern const char plugin_name[]; /* SPANK_PLUGIN()'s */

static struct {
	struct spank_option option;
	char *value; /* the last one */
	int found;
} known[MOST];
static char *control[MOST]; /* NAME=VALUE */
static int options, variables;

spank_err_t spank_option_register(spank_t sp, struct spank_option *option)
{
	(void)sp;
	known[options++].option = *option;
	return ESPANK_SUCCESS;
}

spank_err_t spank_job_control_unsetenv(spank_t sp, const char *name)
{
	size_t length = strlen(name);

	(void)sp;
	for (int i = 0; i < variables; i++)
		if (strncmp(control[i], name, length) == 0 && control[i][length] == '=') {
			free(control[i]);
			control[i] = control[--variables];
			return ESPANK_SUCCESS;
		}
	return ESPANK_ENV_NOEXIST;
}

spank_err_t spank_job_control_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	(void)overwrite;
	spank_job_control_unsetenv(sp, name);
	if (asprintf(&control[variables++], "%s=%s", name, value) < 0)
		abort();
	return ESPANK_SUCCESS;
}

static void variable_of(const struct spank_option *option, char name[128])
{
	snprintf(name, 128, "_SLURM_SPANK_OPTION_%s_%s", plugin_name, option->name);
	for (char *c = name; *c; c++)
		if (*c == '-')
			*c = '_';
}

static void process(int i, char *value)
{
	if (known[i].option.cb(known[i].option.val, value ? value : "", 0) != 0) {
		fact("refused by the callback");
		exit(255);
	}
	known[i].value = value;
	known[i].found = 1;
}

static void process_environment(void)
{
	for (int i = 0; i < options; i++) {
		char name[128], longer[160];
		variable_of(&known[i].option, name);
		snprintf(longer, sizeof(longer), "SLURM_SPANK_%s", name);
		if (getenv(longer))
			process(i, strdup(getenv(longer)));
	}
}

static void process_word(char *word)
{
	char *equals = strchr(word, '=');

	if (equals)
		*equals = '\0';
	for (int i = 0; i < options; i++)
		if (strcmp(known[i].option.name, word) == 0) {
			process(i, equals ? equals + 1 : NULL);
			return;
		}
	fact("unknown option %s", word);
	exit(255);
}

static void end_part(int ac, char **av)
{
	for (int i = 0; i < options; i++) {
		char name[128];
		if (!known[i].found)
			continue;
		variable_of(&known[i].option, name);
		setenv(name, known[i].value ? known[i].value : "", 1);
		spank_job_control_setenv(NULL, name, known[i].value ? known[i].value : "(null)", 1);
	}
	fact("post_opt %d", slurm_spank_init_post_opt(NULL, ac, av));
	fact("part %d", variables);
	for (int i = 0; i < variables; i++) {
		char name[128];
		snprintf(name, sizeof(name), "SLURM_SPANK_%.*s",
			 (int)(strchr(control[i], '=') - control[i]), control[i]);
		setenv(name, strchr(control[i], '=') + 1, 1);
		for (char *c = control[i]; *c; c++) /* a line of the report each */
			if (*c == '\n')
				*c = '\1';
		fact("prolog SPANK_%s", control[i]);
	}
}

int submit(int argc, char **argv)
{
	char *args[MOST];
	int arg_count = 0;

	for (int i = 0; i < argc; i++)
		if (strncmp(argv[i], "arg=", 4) == 0)
			args[arg_count++] = argv[i] + 4;
	fact("init %d", slurm_spank_init(NULL, arg_count, args));
	process_environment();
	for (int i = 0; i < argc; i++) {
		if (strcmp(argv[i], ":") == 0) {
			end_part(arg_count, args);
			process_environment();
		} else if (strncmp(argv[i], "arg=", 4) != 0)
			process_word(argv[i] + (strncmp(argv[i], "--", 2) == 0 ? 2 : 0));
	}
	end_part(arg_count, args);
	for (char **each = environ; *each; each++)
		if (strncmp(*each, "SLURM_SPANK_", 12) == 0 || strncmp(*each, "_SLURM_SPANK", 12) == 0)
			fact("environment %.60s", *each);
	return 0;
}
