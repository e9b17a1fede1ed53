/*
 * The SPANK companion: stages the image of a step that the Prolog could not see.
 *
 * Once per step and node, before pyxis looks at the image, the helper `forestage step` is asked
 * which file of the cache may stand in for it (helper.c). Each task then gets that file bound over
 * the path in a mount namespace of its own (redirect.c, task_namespace.c), or the file that the copy's
 * keeper serves while the copy is under way (read_through.c), and the data of the job's comment at its
 * mount points (data_mounts.c). An image of a registry may have to be imported first: then the tasks
 * wait (import_wait.c). Whatever fails: the path stays as it is, the step goes on.
 *
 * In srun, sbatch and salloc it has the options that say what a job wants staged (stage_options.c).
 *
 * Plugstack arguments, listed before pyxis:
 *   helper=PATH       the program to ask; default /usr/lib/forestage/bin/forestage
 *   timeout=SECONDS   how long it may take, and with it the step's start; default 540, at most 570
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "plugin.h"

#pragma GCC visibility push(default)
SPANK_PLUGIN(forestage, 1)
#pragma GCC visibility pop

/*
 * srun kills a step whose tasks have not all started after 600 s. That is fixed, in
 * slurm_step_launch_wait_start() (libslurmfull.so of Debian bookworm, trixie and sid). A few
 * seconds go to the helper's end (helper.c), the rest to Slurm's own part of the start.
 */
#define MAX_TIMEOUT_S 570

#define EXTERN_STEP 0xfffffffcu /* SLURM_EXTERN_CONT of slurm.h */

static const char *helper_path = HELPER_PATH;
static long timeout_s = 540; /* seconds; below MAX_TIMEOUT_S, so that other plugins may be slow */
static bool has_bad_argument;

/* Completed in user_init; the tasks are forked later and inherit it. */
static struct step further_images[MAX_HINTED_PATHS];
static struct step step = {.keeper_fd = -1, .further_images = further_images};

#define MAX_TASK_MOUNTS (1 + MAX_HINTED_PATHS + MAX_DATA_LINES)

/* One for each mount, in memory that the tasks share. */
static struct report_marks *report_marks = MAP_FAILED;

static bool parse_argument(const char *argument)
{
	char *end;

	if (strncmp(argument, "helper=/", 8) == 0) {
		helper_path = argument + 7;
		return true;
	}
	if (strncmp(argument, "timeout=", 8) != 0)
		return false;
	timeout_s = strtol(argument + 8, &end, 10);
	return *end == '\0' && timeout_s >= 1 && timeout_s <= MAX_TIMEOUT_S;
}

/*
 * By this the Prolog knows that `redirect: auto` is spank (slurm/companion.py). In slurmd, so that the
 * first job after a boot finds it; in steps, for one that is added later.
 */
static void touch_loaded_mark(void)
{
	struct stat status;

	/* Looked at first: mkdir(2) of what exists waits for the lock of /run (system/folders.py). */
	if (stat(RUN_DIRECTORY, &status) != 0 &&
	    (mkdir(RUN_DIRECTORY, RUN_DIRECTORY_MODE) != 0 || stat(RUN_DIRECTORY, &status) != 0))
		return;
	if ((status.st_mode & 07777) != RUN_DIRECTORY_MODE)
		chmod(RUN_DIRECTORY, RUN_DIRECTORY_MODE);
	int fd = open(LOADED_MARK, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);

	if (fd < 0)
		return;
	futimens(fd, NULL); /* `forestage status` says when it was loaded last */
	close(fd);
}

/* Whether this is srun, sbatch or salloc. */
static bool is_submit_command(void)
{
	return spank_context() == S_CTX_LOCAL || spank_context() == S_CTX_ALLOCATOR;
}

/* In slurmd as well, so that a mistake in plugstack.conf is seen when it starts. */
int slurm_spank_init(spank_t sp, int ac, char **av)
{
	if (!is_submit_command() && spank_context() != S_CTX_REMOTE &&
	    spank_context() != S_CTX_SLURMD)
		return 0;
	if (spank_context() != S_CTX_SLURMD)
		register_stage_options(sp);
	for (int i = 0; i < ac; i++) {
		if (parse_argument(av[i]))
			continue;
		if (!is_submit_command()) /* it is the admin's, whom slurmd tells */
			slurm_error("forestage: off, as plugstack.conf has an argument that is neither "
				    "helper=/PATH nor timeout=SECONDS (1 to %d): %s",
				    MAX_TIMEOUT_S, av[i]);
		has_bad_argument = true;
	}
	if (!has_bad_argument && !is_submit_command())
		touch_loaded_mark();
	if (spank_context() == S_CTX_REMOTE)
		save_step_manager();
	return 0;
}

/* In a step manager as well, where there is nothing to do. */
int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	(void)ac, (void)av;
	if (is_submit_command())
		pass_options_to_prolog(sp, has_bad_argument ? NULL : helper_path);
	return 0;
}

/* A pyxis option by its name, else the variable that pyxis reads for it. Empty: there is none. */
static void read_pyxis_option(spank_t sp, char *option, const char *variable, char *value,
			      size_t size)
{
	struct spank_option spec = {.name = option, .has_arg = 1};
	char *argument = NULL;
	bool fits;

	if (spank_option_getopt(sp, &spec, &argument) == ESPANK_SUCCESS && argument)
		fits = (size_t)snprintf(value, size, "%s", argument) < size;
	else
		fits = spank_getenv(sp, variable, value, (int)size) == ESPANK_SUCCESS;
	if (!fits)
		value[0] = '\0';
}

static bool has_pyxis_flag(spank_t sp, char *option)
{
	struct spank_option spec = {.name = option};
	char *argument = NULL;

	return spank_option_getopt(sp, &spec, &argument) == ESPANK_SUCCESS;
}

static bool starts_with_any(const char *value, const char *characters)
{
	return value[0] && strchr(characters, value[0]);
}

/* A registry's image, as pyxis has it; it asks a daemon of the node for these two. */
static bool is_registry_image(const char *image)
{
	return image[0] && !starts_with_any(image, "./") && strncmp(image, "dockerd://", 10) != 0 &&
	       strncmp(image, "podman://", 9) != 0;
}

/*
 * As pyxis' args.c and enroot have it: the flag, pyxis' variable (parse_bool()), then enroot's own,
 * of which all counts as yes that does not begin like no or false.
 */
static char read_home_option(spank_t sp)
{
	char value[64];

	if (has_pyxis_flag(sp, "container-mount-home"))
		return 'y';
	if (has_pyxis_flag(sp, "no-container-mount-home"))
		return 'n';
	if (spank_getenv(sp, "PYXIS_CONTAINER_MOUNT_HOME", value, sizeof(value)) == ESPANK_SUCCESS &&
	    starts_with_any(value, "yYtT1nNfF0"))
		return starts_with_any(value, "yYtT1") ? 'y' : 'n';
	if (spank_getenv(sp, "ENROOT_MOUNT_HOME", value, sizeof(value)) == ESPANK_SUCCESS && value[0])
		return starts_with_any(value, "nNfF") ? 'n' : 'y';
	return '\0';
}

/* Whether there is such a file beside the job's lease. */
static bool has_lease_file(spank_t sp, const char *suffix)
{
	char path[64];
	uint32_t job_id = 0;

	if (spank_get_item(sp, S_JOB_ID, &job_id) != ESPANK_SUCCESS)
		return false;
	snprintf(path, sizeof(path), LEASE_DIRECTORY "/%u%s", job_id, suffix);
	return access(path, F_OK) == 0;
}

/*
 * Whether the Prolog noted images or data of the job's comment (cache/lease.py). By access(2), which
 * looks with our real user, root. A job's extern step has no process that could read them.
 */
static bool has_job_hints(spank_t sp)
{
	uint32_t step_id = 0;

	return spank_get_item(sp, S_JOB_STEPID, &step_id) == ESPANK_SUCCESS &&
	       step_id != EXTERN_STEP && has_lease_file(sp, HINTS_SUFFIX);
}

/* Where its job has a directory of its own: a script must not take the empty one of root's for it. */
static void report_lost_directory(spank_t sp, bool had_directory, const char *failure)
{
	if (has_directory_line() ||
	    !(has_lease_file(sp, DIRECTORY_RECORD_SUFFIX) || (had_directory && failure)))
		return;
	slurm_spank_log("forestage: this step does not have its job's " JOB_DIRECTORY ": %s",
			failure ? failure : "forestage has failed on this node");
}

/*
 * Where pyxis' importer finds the image, by our own number of the step: a batch script has none in
 * its environment, and a component of a het job has another one.
 */
static void set_image_path_variable(spank_t sp)
{
	char path[64];
	uint32_t job_id = 0, step_id = 0;

	spank_get_item(sp, S_JOB_ID, &job_id);
	spank_get_item(sp, S_JOB_STEPID, &step_id);
	snprintf(path, sizeof(path), STEP_IMAGE_DIRECTORY "/%u.%u.sqsh", job_id, step_id);
	spank_setenv(sp, IMAGE_PATH_VARIABLE, path, 1);
}

/* Once per step and node; our effective user is the job's, our real one root. */
int slurm_spank_user_init(spank_t sp, int ac, char **av)
{
	(void)ac, (void)av;
	/* Those of the batch script or of the submitting step say nothing of this one. */
	const bool had_directory = remove_forestage_variables(sp);
	const char *failure = NULL;
	if (has_bad_argument)
		return 0;
	step.has_hints = has_job_hints(sp);
	read_pyxis_option(sp, "container-image", "PYXIS_CONTAINER_IMAGE", step.image, PATH_MAX);
	step.is_registry_image = is_registry_image(step.image);
	if (!step.is_registry_image && !starts_with_any(step.image, "./"))
		step.image[0] = '\0';
	if (step.is_registry_image)
		read_pyxis_option(sp, "container-name", "PYXIS_CONTAINER_NAME", step.container_name,
				  sizeof(step.container_name));
	/* What is saved to is always a path, and needs no image. */
	read_pyxis_option(sp, "container-save", "PYXIS_CONTAINER_SAVE", step.save_path, PATH_MAX);
	if (!step.image[0] && !step.save_path[0] && !step.has_hints)
		return 0;
	step.mounts_home = read_home_option(sp);
	/* Slurm went to the step's directory, or to /tmp; the tasks and pyxis start from there. */
	if (!getcwd(step.working_directory, PATH_MAX) || step.working_directory[0] != '/')
		step.working_directory[0] = '\0';
	if (step.image[0] == '/' || step.save_path[0] == '/' || step.working_directory[0] ||
	    step.has_hints || step.is_registry_image)
		failure = ask_helper(sp, helper_path, timeout_s, &step);
	set_data_variables(sp);
	if (step.has_hints)
		report_lost_directory(sp, had_directory, failure);
	report_marks = mmap(NULL, MAX_TASK_MOUNTS * sizeof(*report_marks), PROT_READ | PROT_WRITE,
			    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (step.is_pending)
		set_image_path_variable(sp);
	return 0;
}

const char *fetch_task_mount(const struct task_mount *mount)
{
	return mount->image ? NULL : fetch_data_mount(mount->data_line);
}

const char *make_task_mount(spank_t sp, const struct task_mount *mount)
{
	return mount->image ? redirect_image(sp, mount->image)
			    : make_data_mount(sp, mount->data_line);
}

static void escape_json(char *out, size_t size, const char *text)
{
	size_t length = 0;

	for (; *text && length + 7 < size; text++) {
		const unsigned char byte = (unsigned char)*text;
		if (byte < ' ' || byte == '"' || byte == '\\')
			length += (size_t)snprintf(out + length, size - length, "\\u%04x", byte);
		else
			out[length++] = *text;
	}
	out[length] = '\0';
}

/* Whether no other task of the step was here before. */
static bool is_first_task(spank_t sp, bool *mark)
{
	int task = 0;

	if (mark)
		return !__atomic_test_and_set(mark, __ATOMIC_RELAXED);
	spank_get_item(sp, S_TASK_ID, &task);
	return task == 0;
}

static const char *failure_reason(const struct task_mount *mount)
{
	return mount->cause == CAUSE_HANGING_MOUNT ? MOUNT_HANGS
	       : mount->cause == CAUSE_QUEUE	   ? MOUNT_QUEUE
						   : NO_MOUNT;
}

void record_mount_failure(spank_t sp, const struct task_mount *mount)
{
	const char *node = getenv("SLURMD_NODENAME");
	char path[6 * PATH_MAX], failure[6 * FAILURE_BYTES], json_rest[8 * PATH_MAX];
	uint32_t job_id = 0, step_id = 0;
	uid_t uid = 0;

	if (spank_get_item(sp, S_JOB_ID, &job_id) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_STEPID, &step_id) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    !is_first_task(sp, mount->marks ? &mount->marks->event : NULL))
		return;
	escape_json(path, sizeof(path), mount->image ? mount->image->resolved_path : mount->path);
	escape_json(failure, sizeof(failure), mount->failure);
	snprintf(json_rest, sizeof(json_rest),
		"\"hook\":\"step\",\"job\":%u,\"uid\":%u,\"node\":\"%s\",\"outcome\":{\"kind\":"
		"\"handled\",\"result\":\"declined\",\"reason\":\"%s\",\"detail\":\"%s\",\"image\":"
		"\"%s\",\"data\":%s}}",
		job_id, uid, node ? node : "", failure_reason(mount), failure, path,
		mount->image ? "false" : "true");
	append_event(EVENT_LOG,
		     &(struct event){.uid = uid, .step_id = step_id, .json_rest = json_rest});
}

void report_mount_failure(spank_t sp, const struct task_mount *mount)
{
	bool first = is_first_task(sp, mount->marks ? &mount->marks->message : NULL);

	spank_unsetenv(sp, LOCAL_PATHS_VARIABLE); /* it would name this one, too */
	if (mount->image && (mount->image == &step || !step.image[0]))
		spank_setenv(sp, RESULT_VARIABLE, failure_reason(mount), 1);
	if (!mount->image) {
		if (strcmp(mount->path, JOB_DIRECTORY) == 0)
			remove_directory_variables(sp);
		spank_setenv(sp, DATA_RESULT_VARIABLE, failure_reason(mount), 1);
		slurm_info("forestage: nothing is mounted at %s: %s: %s", mount->path,
			   mount->failure, strerror(mount->error_number));
		if (first)
			slurm_spank_log("forestage: nothing is mounted at %s: %s", mount->path,
					mount->failure);
		return;
	}
	slurm_info("forestage: %s stays as it is: %s: %s", mount->path, mount->failure,
		   strerror(mount->error_number));
	if (mount->image->wants_message && first)
		slurm_spank_log("forestage: %s is read from where it is: %s", mount->path,
				mount->failure);
}

/* `index` is its own in all tasks of the step. */
static struct report_marks *find_report_marks(int index)
{
	return report_marks == MAP_FAILED ? NULL : report_marks + index;
}

static int add_image_mount(struct task_mount *mount, struct step *image, int index)
{
	*mount = (struct task_mount){.path = image->image,
				     .server_fd = &image->keeper_fd,
				     .image = image,
				     .marks = find_report_marks(index)};
	return image->uses_copy;
}

/* In each task, as root, when it has joined the job's own namespaces. */
int slurm_spank_task_init_privileged(spank_t sp, int ac, char **av)
{
	static struct task_mount mounts[MAX_TASK_MOUNTS];
	int count = 0, data_count;

	(void)ac, (void)av;
	if (step.is_pending)
		await_answer(sp, &step);
	count += add_image_mount(mounts + count, &step, 0);
	for (int i = 0; i < step.further_count; i++)
		count += add_image_mount(mounts + count, &step.further_images[i], 1 + i);
	/* After the images, which are known by what lies beneath. */
	data_count = list_data_mounts(mounts + count);
	for (int i = 0; i < data_count; i++)
		mounts[count + i].marks = find_report_marks(1 + MAX_HINTED_PATHS + i);
	count += data_count;
	if (count)
		make_task_mounts(sp, mounts, count);
	for (int i = 0; i < count; i++)
		if (*mounts[i].server_fd >= 0)
			close(*mounts[i].server_fd);
	return 0;
}
