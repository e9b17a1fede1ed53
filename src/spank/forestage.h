/* What the three parts of the companion know of a step, and ask of each other. */
#ifndef FORESTAGE_H
#define FORESTAGE_H

#include <limits.h>
#include <stdbool.h>

/* Slurm finds by name what spank.h declares. All else is hidden (Makefile). */
#pragma GCC visibility push(default)
#include <slurm/spank.h>
#pragma GCC visibility pop

struct step {
	char image[PATH_MAX]; /* as pyxis gets it; begins with . or / */
	char save[PATH_MAX];  /* likewise, or empty */
	char folder[PATH_MAX]; /* where the tasks start, or empty if that is deleted */

	/* The helper's answer. */
	bool use;              /* else the path stays as it is */
	char entry[PATH_MAX];  /* the file of the cache; only root gets there */
	char path[PATH_MAX];   /* the image, resolved: where the entry is to show */
	unsigned long long identity[4]; /* of the image: inode, size, mtime and ctime in ns */
	bool tell;             /* whether the user wants to hear that it did not work */
};

/* helper.c. In the step manager itself, before SPANK may call us beside it. */
void remember_manager(void);

/* helper.c. Completes the step, or leaves it as it is; takes `timeout` seconds at most. */
void ask_helper(spank_t sp, const char *helper, long timeout, struct step *step);

/* redirect.c. The path shows the entry to this task alone. NULL, or why not, and errno. */
const char *redirect(spank_t sp, const struct step *step);

#endif
