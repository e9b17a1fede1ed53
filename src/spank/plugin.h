/* What the parts of the companion know of a step, and ask of each other. */
#ifndef FORESTAGE_H
#define FORESTAGE_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

/* Slurm finds by name what spank.h declares. All else is hidden (Makefile). */
#pragma GCC visibility push(default)
#include <slurm/spank.h>
#pragma GCC visibility pop

#include "constants.h"

#define MOST_FIELDS 7

enum word {
	ODD, SAY, ENV, USE, THROUGH, ALSO, DEVICE, SERVED, FOLDER, LATER, LEAVE,
	BOOT, EVENT_LOG, OUR_FILE, THEIR_FILE, ROOM, ENROOT, VARIABLE, IMAGE, OWNER
};

/* A line, taken apart: the fields after its word, which point into its text. */
struct line {
	enum word word;
	int count;
	char *field[MOST_FIELDS];
};

struct step {
	char image[PATH_MAX]; /* as pyxis gets it; begins with . or / unless it is a reference */
	bool reference;       /* the image is a registry's */
	char container[NAME_MAX]; /* the name that its container gets, or empty */
	char save[PATH_MAX];  /* what pyxis saves to, or empty */
	char folder[PATH_MAX]; /* where the tasks start, or empty if that is deleted */
	char mounts_home; /* whether its container is to have it: y, n, or 0 where nobody says */

	/* The helper's answer. */
	bool use;              /* else the path stays as it is */
	bool later;            /* who knows listens at `entry`: the tasks wait for the answer */
	bool through;          /* the copy is under way: its keeper serves the file */
	char entry[PATH_MAX];  /* the file of the cache, or its keeper's socket; root's alone */
	char path[PATH_MAX];   /* the image, resolved: where the entry is to show */
	unsigned long long identity[4]; /* of the image: inode, size, mtime and ctime in ns */
	bool tell;             /* whether the user wants to hear that it did not work */

	int keeper;            /* connected to it; -1 where that was not possible */

	bool hinted;           /* the job's comment names images or data for its steps */
	int count;             /* of `also`, as the helper answered */
	struct step *also;     /* MAX_HINTED of them */
};

#define MOST_DATA 40   /* lines of a step; more are left out */

#define WHY_BYTES 200

/* Why an item is not shown: what is wrong with it, a mount that hangs, or the mounts of other tasks. */
enum cause { IS_REFUSED, IS_HANGING, IS_QUEUED };

/* What the first task of a step does for all that are not shown an item; the tasks share this memory. */
struct once {
	bool said;
	bool noted;
};

/* What a task is to be shown: an image, or a line on data that is a mount. */
struct item {
	const char *path; /* where */
	int *kept;        /* what serves it: a connection, or a mount; or -1 */
	const struct step *image; /* or NULL */
	struct datum *datum;
	struct once *once; /* NULL where there is no memory: then task 0 does it */
	bool over;         /* it failed: it is not tried again. Why: */
	enum cause cause;
	int error;
	char why[WHY_BYTES];
};

/* What is to show at the path, opened; -1 where it is not. */
struct copy {
	int folder; /* the entry's; -1 for a file that is served */
	int image;
};

/* Who asks: the job's user, with the groups that the step manager has taken on. */
struct asker {
	uint32_t job;
	uint32_t number; /* the step's */
	uid_t uid;
	gid_t gid;
	int count;
	gid_t groups[NGROUPS_MAX];
	char **variables; /* of the step; NULL where Slurm does not tell */
};

/* helper.c. In the step manager itself, before SPANK may call us beside it. */
void remember_manager(void);

/*
 * helper.c. Completes the step, or leaves it as it is; takes `timeout` seconds at most. NULL, or why no
 * helper has answered.
 */
const char *ask_helper(spank_t sp, const char *helper, long timeout, struct step *step);

/* step_protocol.c. Takes a line apart, in place; its word. What counts for nothing is ODD. */
enum word understand(char *text, struct line *line);

/* step_protocol.c. A field that is a number, and four of them. */
unsigned long long number(const struct line *line, int field);
void take_numbers(const struct line *line, int first, unsigned long long numbers[4]);

/* helper.c. Takes over what a line answers on an image: USE, THROUGH, LATER or LEAVE. */
void take_answer(const struct line *line, struct step *step);

/* import_wait.c. In a task: waits for the answer at the socket `entry`; the step is then complete. */
void await_answer(spank_t sp, struct step *step);

/* step_record.c. In a child with nothing but 0, 1 and 2 open: answers on 1 as a helper, or not at all. */
void recall(const struct asker *who, struct step *step);

/* step_record.c. As `recall`, of the job's own directory, which needs no helper. */
void recall_directory(const struct asker *who, struct step *step);

/* What the companion notes of a step: whose it is, microseconds in all, and the rest of its JSON. */
struct event {
	uid_t uid;
	uint32_t number; /* the step's */
	long long total;
	const char *rest;
};

/* step_record.c. A line of the event log, and of what its user may read. */
void append_event(const char *log, const struct event *event);

/* Between two looks at what is about to end. */
void wait_a_moment(void);

/* helper.c. Of a clock that nobody sets. */
long long now_ms(void);

/* task_namespace.c. Shows a task these, in their order; for each that it is not shown, why is said and noted. */
void show_items(spank_t sp, struct item *items, int count);

/* plugin.c. In the task: what may take long. NULL, or why it is not shown, and errno. */
const char *fetch_item(const struct item *item);

/* plugin.c. Where the mounts are made. NULL, or why it is not shown, and errno. */
const char *show_item(spank_t sp, const struct item *item);

/* plugin.c. Notes for `forestage explain` why it is not shown, once a step. Waits for a disk. */
void note_failure(spank_t sp, const struct item *item);

/* plugin.c. In the task: why it is not shown. */
void say_failure(spank_t sp, const struct item *item);

/* task_namespace.c. Before the first mount: the task is to enter the namespace in which it is made. */
void will_change(void);

/* read_through.c. By the path of its socket, as root; -1, and errno. For the step manager too. */
int connect_keeper(const char *path);

/* read_through.c. Gets a mount of the file that is served. NULL, or why not, and errno. */
const char *open_through(const struct step *step, struct copy *copy);

#define ANSWER_BYTES 1024 /* the longest answer of a keeper that counts */

/* read_through.c. A detached clone of the mount that a keeper holds; -1, errno, and what it answers. */
int fetch_mount(int keeper, char answer[ANSWER_BYTES]);

/* read_through.c. Mounts it on the open directory or file `target`; false, and errno. */
bool attach_mount(int mount, int target);

/* redirect.c. Opens the folder and the image of the entry. NULL, or why not, and errno. */
const char *open_entry(const struct step *step, struct copy *copy);

/* redirect.c. O_PATH, of the path as the user wrote it; -1, and errno. */
int open_path(const struct step *step);

/* redirect.c. Inode, size, mtime and ctime in ns. */
void identify(const struct stat *st, unsigned long long identity[4]);

/* redirect.c. Real and saved ids stay root's: the user can neither signal nor trace the process. */
bool act_as(uid_t uid, gid_t gid, int count, const gid_t *groups);

/* redirect.c. Calls `open_it` with the job's ids and groups, which a task does not have yet. */
int as_job_user(spank_t sp, int (*open_it)(const void *what), const void *what);

/* redirect.c. The path shows the entry in a namespace of this process. NULL, or why not, and errno. */
const char *redirect(spank_t sp, const struct step *step);

/* stage_options.c. At init: has Slurm offer `--stage`; in srun and sbatch, forgets an earlier job's. */
void offer_options(spank_t sp);

/*
 * stage_options.c. Once all options of a job, or of a part of it, are read: hands them to its Prologs. Ends
 * the program where `helper hints` refuses them; NULL: they are not checked.
 */
void hand_over(spank_t sp, const char *helper);

/* data_mounts.c. One of the lines on the job's data; keeps its text, or frees that. */
void take_datum(const struct line *line, char *text);

/* data_mounts.c. Before a helper is asked (again). */
void forget_data(void);

/* data_mounts.c. In user_init: what the helper said of the step's environment. */
void set_variables(spank_t sp);

/* data_mounts.c. Whether a line says that the step has the job's own directory, or that it has none. */
bool is_directory_named(void);

/*
 * step_environment.c. Takes out all that forestage puts into an environment: it may be of another job, or of
 * another node. Whether that had a job's own directory.
 */
bool forget_variables(spank_t sp);

/* step_environment.c. As before, of the variables alone that lead into a job's own directory. */
bool forget_directory(spank_t sp);

/* step_environment.c. Keeps what the user had of a variable that leads into the job's own directory. */
void set_variable(spank_t sp, const char *name, const char *value);

/* data_mounts.c. All that is to be mounted, in the order of the lines; how many that are. */
int list_data(struct item *items);

/* data_mounts.c. NULL, or why it cannot be had, and errno. Waits for who serves it. */
const char *fetch_datum(struct datum *one);

/* data_mounts.c. NULL, or why nothing is mounted there, and errno. */
const char *show_datum(spank_t sp, struct datum *one);

#endif
