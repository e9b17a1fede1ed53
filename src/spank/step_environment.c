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

#define WAS "FORESTAGE_WAS_"
#define SEEDS JOB_DIR "/seed/"
#define NAME_BYTES 128 /* longer than the names that a seed may set (features/data/fill.py), with
WAS */
#define MOST_OWN 256   /* more than forestage sets for a step; others are the user's own doing */

/* The value of the first variable of that name, which is the one that Slurm finds, or NULL. */
static const char *find_value(char **env, const char *name)
{
	size_t length = strlen(name);

	for (; env && *env; env++)
		if (strncmp(*env, name, length) == 0 && (*env)[length] == '=')
			return *env + length + 1;
	return NULL;
}

/* Any other value is the user's own, whatever the variable's name is. */
static bool is_own(const char *name, const char *value)
{
	if (strcmp(name, DIRECTORY) == 0)
		return strcmp(value, JOB_DIR) == 0;
	return strncmp(value, SEEDS, strlen(SEEDS)) == 0 && strcmp(value + strlen(SEEDS), name) == 0;
}

/* Gives the variable back what the user had, or takes it out. */
static void restore(spank_t sp, char **env, const char *name)
{
	char was[sizeof(WAS) + NAME_BYTES];
	const char *found;
	char *value;

	snprintf(was, sizeof(was), WAS "%s", name);
	found = find_value(env, was);
	value = found ? strdup(found) : NULL; /* Slurm may move its environment */
	if (!value || spank_setenv(sp, name, value, 1) != ESPANK_SUCCESS)
		spank_unsetenv(sp, name);
	if (found)
		spank_unsetenv(sp, was);
	free(value);
}

/* Takes one variable out; false once there is none. Each change may move Slurm's environment. */
static bool take_out_one(spank_t sp, bool *had)
{
	char **env = NULL, name[NAME_BYTES];

	if (spank_get_item(sp, S_JOB_ENV, &env) != ESPANK_SUCCESS)
		return false;
	for (char **each = env; each && *each; each++) {
		const size_t length = strcspn(*each, "="), prefix = strlen(WAS);

		if (length >= sizeof(name) || !(*each)[length])
			continue;
		snprintf(name, sizeof(name), "%.*s", (int)length, *each);
		if (is_own(name, *each + length + 1)) {
			*had = *had || strcmp(name, DIRECTORY) == 0;
			restore(sp, env, name);
			return true;
		}
		if (strncmp(name, WAS, prefix) != 0)
			continue;
		const char *now = find_value(env, name + prefix);
		if (now && is_own(name + prefix, now))
			continue; /* its own turn comes */
		spank_unsetenv(sp, name); /* the script has set or unset the variable since */
		return true;
	}
	return false;
}

bool forget_directory(spank_t sp)
{
	bool had = false;

	for (int i = 0; i < MOST_OWN && take_out_one(sp, &had); i++)
		continue;
	return had;
}

bool forget_variables(spank_t sp)
{
	spank_unsetenv(sp, RESULT);
	spank_unsetenv(sp, IMAGE_PATH);
	spank_unsetenv(sp, DATA_RESULT);
	spank_unsetenv(sp, LOCAL);
	return forget_directory(sp);
}

void set_variable(spank_t sp, const char *name, const char *value)
{
	char **env = NULL, was[sizeof(WAS) + NAME_BYTES];
	const char *found = NULL;

	if (is_own(name, value) && spank_get_item(sp, S_JOB_ENV, &env) == ESPANK_SUCCESS)
		found = find_value(env, name);
	char *before = found ? strdup(found) : NULL;
	snprintf(was, sizeof(was), WAS "%s", name);
	if (before)
		spank_setenv(sp, was, before, 1);
	free(before);
	if (spank_setenv(sp, name, value, 1) != ESPANK_SUCCESS)
		slurm_info("forestage: %s cannot be set", name);
}
