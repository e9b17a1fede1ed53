/* The interfaces between the parts of the companion, and what they know of a step. */
#ifndef FORESTAGE_PLUGIN_H
#define FORESTAGE_PLUGIN_H

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

#define MAX_FIELDS 7

/* The first word of a line of the step protocol; a malformed line is LINE_UNKNOWN. */
enum line_kind {
	LINE_UNKNOWN, LINE_SAY, LINE_ENV, LINE_USE, LINE_THROUGH, LINE_ALSO, LINE_DEVICE,
	LINE_SERVED, LINE_FOLDER, LINE_LATER, LINE_LEAVE, LINE_BOOT, LINE_EVENTS, LINE_FILE,
	LINE_THEIRS, LINE_ROOM, LINE_ENROOT, LINE_VARIABLE, LINE_IMAGE, LINE_OWNER
};

/* A parsed line; the fields, which come after the first word, point into its text. */
struct protocol_line {
	enum line_kind kind;
	int field_count;
	char *fields[MAX_FIELDS];
};

struct step {
	char image[PATH_MAX];     /* as pyxis gets it; a path begins with . or / */
	bool is_registry_image;   /* `image` is a reference to a registry's image, not a path */
	char container_name[NAME_MAX];    /* the name that its container gets, or empty */
	char save_path[PATH_MAX];         /* what pyxis saves to, or empty */
	char working_directory[PATH_MAX]; /* where the tasks start, or empty if it is deleted */
	char mounts_home; /* whether the container gets $HOME: y, n, or 0 for the site's default */

	/* The helper's answer. */
	bool uses_copy;       /* else the path stays as it is */
	bool is_pending;      /* the tasks wait at the socket `entry_path` for the answer */
	bool reads_through;   /* the copy is under way: its keeper serves the file */
	char entry_path[PATH_MAX]; /* the file of the cache, or its keeper's socket; root's alone */
	char resolved_path[PATH_MAX];   /* the image without links: where the entry is mounted */
	unsigned long long identity[4]; /* of the image: inode, size, mtime and ctime in ns */
	bool wants_message;   /* whether the user wants to hear that the copy cannot be used */

	int keeper_fd;        /* the connection to it; -1 where that was not possible */

	bool has_hints;       /* the job's comment names images or data for its steps */
	int further_count;    /* of `further_images`, as the helper answered */
	struct step *further_images; /* MAX_HINTED_PATHS of them */
};

#define MAX_DATA_LINES 40   /* lines of a step; more are left out */

#define FAILURE_BYTES 200

/* Why a mount fails: an error, a mount that hangs, or the wait for the mounts of other tasks. */
enum failure_cause { CAUSE_ERROR, CAUSE_HANGING_MOUNT, CAUSE_QUEUE };

/* What the first task of a step has reported of a failed mount; the tasks share this memory. */
struct report_marks {
	bool message; /* to the user */
	bool event;   /* in the event log */
};

/* What is to be mounted for a task: an image, or a line on data. */
struct task_mount {
	const char *path;         /* where */
	int *server_fd;           /* what serves it: a connection, or a mount; or -1 */
	const struct step *image; /* or NULL */
	struct data_line *data_line;
	struct report_marks *marks; /* NULL where there is no memory: then task 0 reports */
	bool has_failed;            /* then it is not tried again, and the rest says why */
	enum failure_cause cause;
	int error_number;
	char failure[FAILURE_BYTES];
};

/* The copy of an image, opened; each is -1 where it is not open. */
struct open_copy {
	int directory_fd; /* the entry's; -1 for a file that is served */
	int image_fd;
};

/* The job's user, with the groups that the step manager has taken on. */
struct requester {
	uint32_t job_id;
	uint32_t step_id;
	uid_t uid;
	gid_t gid;
	int group_count;
	gid_t groups[NGROUPS_MAX];
	char **environment; /* of the step; NULL where Slurm does not tell */
};

/* helper.c. In the step manager itself, before SPANK may call us beside it. */
void save_step_manager(void);

/*
 * helper.c. Completes the step, or leaves it as it is; takes `timeout_s` seconds at most. NULL, or why
 * no helper has answered.
 */
const char *ask_helper(spank_t sp, const char *helper_path, long timeout_s, struct step *step);

/* step_protocol.c. Parses a line in place, and returns its kind. */
enum line_kind parse_line(char *text, struct protocol_line *line);

/* step_protocol.c. A field that is a number, and four of them. */
unsigned long long read_number(const struct protocol_line *line, int index);
void read_numbers(const struct protocol_line *line, int first_index, unsigned long long numbers[4]);

/* helper.c. Takes over the answer on an image of a line `use`, `through`, `later` or `leave`. */
void apply_answer(const struct protocol_line *line, struct step *step);

/* import_wait.c. In a task: completes the step by the answer that comes at the socket `entry_path`. */
void await_answer(spank_t sp, struct step *step);

/*
 * step_record.c. In a child with nothing but 0, 1 and 2 open: answers on 1 as a helper, by the record
 * of an earlier step, or not at all.
 */
void answer_from_record(const struct requester *requester, struct step *step);

/* step_record.c. As `answer_from_record`, of the job's own directory, which needs no helper. */
void answer_from_directory_record(const struct requester *requester, struct step *step);

/* What the event log gets of a step. */
struct event {
	uid_t uid;
	uint32_t step_id;
	long long duration_us;
	const char *json_rest; /* all that comes after the step's number */
};

/* step_record.c. Writes a line of the event log, and of the file that the user may read. */
void append_event(const char *log_path, const struct event *event);

/* helper.c. Sleeps for 2 ms, between two checks of something that is about to end. */
void sleep_poll_interval(void);

/* helper.c. Milliseconds of a clock that nobody sets. */
long long read_monotonic_ms(void);

/*
 * task_namespace.c. Mounts these for a task, in their order. Each that fails is reported to the user
 * and recorded in the event log.
 */
void make_task_mounts(spank_t sp, struct task_mount *mounts, int count);

/* plugin.c. In the task: what may take long. NULL, or why it cannot be mounted, and errno. */
const char *fetch_task_mount(const struct task_mount *mount);

/* plugin.c. In the process that mounts. NULL, or why it cannot be mounted, and errno. */
const char *make_task_mount(spank_t sp, const struct task_mount *mount);

/* plugin.c. Records for `forestage explain` why a mount failed, once a step. Waits for a disk. */
void record_mount_failure(spank_t sp, const struct task_mount *mount);

/* plugin.c. In the task: logs why a mount failed, and tells the user once a step. */
void report_mount_failure(spank_t sp, const struct task_mount *mount);

/* task_namespace.c. Before the first mount: the task is to enter the namespace in which it is made. */
void mark_namespace_changed(void);

/* read_through.c. By the path of its socket, as root; -1, and errno. For the step manager too. */
int connect_keeper(const char *path);

/* read_through.c. Opens a mount of the file that the keeper serves. NULL, or why not, and errno. */
const char *open_read_through(const struct step *step, struct open_copy *copy);

#define KEEPER_ANSWER_BYTES 1024 /* the longest answer of a keeper that counts */

/* read_through.c. A detached clone of the mount that a keeper holds; -1, errno, and its answer. */
int fetch_mount_clone(int keeper_fd, char answer[KEEPER_ANSWER_BYTES]);

/* read_through.c. Mounts it on an open directory or file; false, and errno. */
bool attach_mount(int mount_fd, int target_fd);

/* redirect.c. Opens the directory and the image of the entry. NULL, or why not, and errno. */
const char *open_entry(const struct step *step, struct open_copy *copy);

/* redirect.c. O_PATH, of the path as the user wrote it; -1, and errno. */
int open_image_path(const struct step *step);

/* redirect.c. Inode, size, mtime and ctime in ns. */
void identity_from_stat(const struct stat *st, unsigned long long identity[4]);

/* redirect.c. Real and saved ids stay root's: the user can neither signal nor trace the process. */
bool set_effective_user(uid_t uid, gid_t gid, int count, const gid_t *groups);

/* redirect.c. Calls `function` with the job's ids and groups, which a task does not have yet. */
int call_as_job_user(spank_t sp, int (*function)(const void *argument), const void *argument);

/* redirect.c. Mounts the entry on its image's path, for this process. NULL, or why not, and errno. */
const char *redirect_image(spank_t sp, const struct step *step);

/* stage_options.c. At init: has Slurm offer `--stage`; in srun and sbatch, forgets an earlier job's. */
void register_stage_options(spank_t sp);

/*
 * stage_options.c. Once all options of a job, or of a part of it, are read: passes them to its Prologs.
 * Ends the program where the command `hints` of the helper refuses them. Without a `helper_path` they
 * are not checked.
 */
void pass_options_to_prolog(spank_t sp, const char *helper_path);

/* data_mounts.c. One of the lines on the job's data; keeps its text, or frees that. */
void add_data_line(const struct protocol_line *line, char *text);

/* data_mounts.c. Before a helper is asked (again). */
void clear_data_lines(void);

/* data_mounts.c. In user_init: sets the variables that the helper named for the step. */
void set_data_variables(spank_t sp);

/* data_mounts.c. Whether a line says that the step has the job's own directory, or that it has none. */
bool has_directory_line(void);

/*
 * step_environment.c. Removes all that forestage puts into an environment: it may be of another job, or
 * of another node. Whether that had a job's own directory.
 */
bool remove_forestage_variables(spank_t sp);

/* step_environment.c. Removes only the variables that lead into a job's own directory. */
bool remove_directory_variables(spank_t sp);

/* step_environment.c. Saves the user's value of a variable that leads into the job's own directory. */
void set_step_variable(spank_t sp, const char *name, const char *value);

/* data_mounts.c. Adds all data that is to be mounted, in the order of the lines; returns how many. */
int list_data_mounts(struct task_mount *mounts);

/* data_mounts.c. NULL, or why it cannot be had, and errno. Waits for the program that serves it. */
const char *fetch_data_mount(struct data_line *line);

/* data_mounts.c. NULL, or why nothing is mounted there, and errno. */
const char *make_data_mount(spank_t sp, struct data_line *line);

#endif
