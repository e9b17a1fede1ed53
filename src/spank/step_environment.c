/*
 * What forestage puts into a step's environment, it takes out of each environment that was made of it.
 *
 * A batch script passes its environment on to its steps, to jobs that it submits and to other components
 * of its job, of which forestage may say nothing. What the user had is kept beside what replaces it, as
 * FORESTAGE_WAS_NAME, since nothing else is passed on in the same way.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plugin.h"

#define SAVED_PREFIX "FORESTAGE_WAS_"
#define SEED_PREFIX JOB_DIRECTORY "/seed/"
#define MAX_NAME_BYTES 128 /* more than a seed's variable and SAVED_PREFIX (job_dir_fill.py) */
#define MAX_OWN_VARIABLES 256 /* more than forestage sets for a step */

/* The value of the first variable of that name, which is the one that Slurm finds, or NULL. */
static const char *find_variable(char **env, const char *name)
{
	size_t length = strlen(name);

	for (; env && *env; env++)
		if (strncmp(*env, name, length) == 0 && (*env)[length] == '=')
			return *env + length + 1;
	return NULL;
}

/* Any other value is the user's own, whatever the variable's name is. */
static bool is_forestage_variable(const char *name, const char *value)
{
	if (strcmp(name, DIRECTORY_VARIABLE) == 0)
		return strcmp(value, JOB_DIRECTORY) == 0;
	return strncmp(value, SEED_PREFIX, strlen(SEED_PREFIX)) == 0 &&
	       strcmp(value + strlen(SEED_PREFIX), name) == 0;
}

/* Gives the variable back what the user had, or takes it out. */
static void restore_variable(spank_t sp, char **env, const char *name)
{
	char saved_name[sizeof(SAVED_PREFIX) + MAX_NAME_BYTES];
	const char *saved;
	char *value;

	snprintf(saved_name, sizeof(saved_name), SAVED_PREFIX "%s", name);
	saved = find_variable(env, saved_name);
	value = saved ? strdup(saved) : NULL; /* Slurm may move its environment */
	if (!value || spank_setenv(sp, name, value, 1) != ESPANK_SUCCESS)
		spank_unsetenv(sp, name);
	if (saved)
		spank_unsetenv(sp, saved_name);
	free(value);
}

/* Takes one variable out; false once there is none. Each change may move Slurm's environment. */
static bool remove_next_variable(spank_t sp, bool *had_directory)
{
	char **env = NULL, name[MAX_NAME_BYTES];

	if (spank_get_item(sp, S_JOB_ENV, &env) != ESPANK_SUCCESS)
		return false;
	for (char **variable = env; variable && *variable; variable++) {
		const size_t length = strcspn(*variable, "="), prefix_length = strlen(SAVED_PREFIX);

		if (length >= sizeof(name) || !(*variable)[length])
			continue;
		snprintf(name, sizeof(name), "%.*s", (int)length, *variable);
		if (is_forestage_variable(name, *variable + length + 1)) {
			*had_directory = *had_directory || strcmp(name, DIRECTORY_VARIABLE) == 0;
			restore_variable(sp, env, name);
			return true;
		}
		if (strncmp(name, SAVED_PREFIX, prefix_length) != 0)
			continue;
		const char *current = find_variable(env, name + prefix_length);
		if (current && is_forestage_variable(name + prefix_length, current))
			continue; /* its own turn comes */
		spank_unsetenv(sp, name); /* the script has set or unset the variable since */
		return true;
	}
	return false;
}

bool remove_directory_variables(spank_t sp)
{
	bool had_directory = false;

	for (int i = 0; i < MAX_OWN_VARIABLES && remove_next_variable(sp, &had_directory); i++)
		continue;
	return had_directory;
}

bool remove_forestage_variables(spank_t sp)
{
	spank_unsetenv(sp, RESULT_VARIABLE);
	spank_unsetenv(sp, IMAGE_PATH_VARIABLE);
	spank_unsetenv(sp, DATA_RESULT_VARIABLE);
	spank_unsetenv(sp, LOCAL_PATHS_VARIABLE);
	return remove_directory_variables(sp);
}

void set_step_variable(spank_t sp, const char *name, const char *value)
{
	char **env = NULL, saved_name[sizeof(SAVED_PREFIX) + MAX_NAME_BYTES];
	const char *previous = NULL;

	if (is_forestage_variable(name, value) &&
	    spank_get_item(sp, S_JOB_ENV, &env) == ESPANK_SUCCESS)
		previous = find_variable(env, name);
	char *copy = previous ? strdup(previous) : NULL;
	snprintf(saved_name, sizeof(saved_name), SAVED_PREFIX "%s", name);
	if (copy)
		spank_setenv(sp, saved_name, copy, 1);
	free(copy);
	if (spank_setenv(sp, name, value, 1) != ESPANK_SUCCESS)
		slurm_info("forestage: %s cannot be set", name);
}
