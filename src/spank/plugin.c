/*
 * The SPANK companion: stages the image of a step that the Prolog could not see.
 *
 * Once per step and node, before pyxis looks at the image, the helper `forestage step` is asked
 * which file of the cache may stand in for it (helper.c). Each task then gets that file bound over
 * the path in a mount namespace of its own (redirect.c), or the file that the copy's keeper serves
 * while the copy is under way (read_through.c), and the data of the job's comment at its mount points
 * (data_mounts.c). An image of a registry may have to be imported first: then the tasks wait (import_wait.c).
 * Whatever fails: the path stays as it is, the step goes on.
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
#define MOST_SECONDS 570

#define EXTERN_STEP 0xfffffffcu /* SLURM_EXTERN_CONT of slurm.h */

static const char *helper = HELPER;
static long timeout = 540; /* seconds; below MOST_SECONDS, so that other plugins may be slow */
static bool refused;

/* Completed in user_init; the tasks are forked later and inherit it. */
static struct step also[MAX_HINTED];
static struct step step = {.keeper = -1, .also = also};

#define MOST_ITEMS (1 + MAX_HINTED + MOST_DATA)

/* One for each item, in memory that the tasks share. */
static struct once *onces = MAP_FAILED;

static bool understand_argument(const char *argument)
{
	char *end;

	if (strncmp(argument, "helper=/", 8) == 0) {
		helper = argument + 7;
		return true;
	}
	if (strncmp(argument, "timeout=", 8) != 0)
		return false;
	timeout = strtol(argument + 8, &end, 10);
	return *end == '\0' && timeout >= 1 && timeout <= MOST_SECONDS;
}

/*
 * By this the Prolog knows that `redirect: auto` is spank (slurm/companion.py). In slurmd, so that the first
 * job after a boot finds it; in steps, for one that is added later.
 */
static void leave_mark(void)
{
	struct stat found;

	/* Looked at first: mkdir(2) of what exists waits for the lock of /run (system/folders.py). */
	if (stat(RUN, &found) != 0 && (mkdir(RUN, RUN_MODE) != 0 || stat(RUN, &found) != 0))
		return;
	if ((found.st_mode & 07777) != RUN_MODE)
		chmod(RUN, RUN_MODE);
	int fd = open(LOADED, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);

	if (fd < 0)
		return;
	futimens(fd, NULL); /* `forestage status` says when it was loaded last */
	close(fd);
}

/* Whether this is srun, sbatch or salloc. */
static bool is_submitting(void)
{
	return spank_context() == S_CTX_LOCAL || spank_context() == S_CTX_ALLOCATOR;
}

/* In slurmd as well, so that a mistake in plugstack.conf is seen when it starts. */
int slurm_spank_init(spank_t sp, int ac, char **av)
{
	if (!is_submitting() && spank_context() != S_CTX_REMOTE && spank_context() != S_CTX_SLURMD)
		return 0;
	if (spank_context() != S_CTX_SLURMD)
		offer_options(sp);
	for (int i = 0; i < ac; i++) {
		if (understand_argument(av[i]))
			continue;
		if (!is_submitting()) /* it is the admin's, whom slurmd tells */
			slurm_error("forestage: off, as plugstack.conf has an argument that is neither "
				    "helper=/PATH nor timeout=SECONDS (1 to %d): %s", MOST_SECONDS,
				    av[i]);
		refused = true;
	}
	if (!refused && !is_submitting())
		leave_mark();
	if (spank_context() == S_CTX_REMOTE)
		remember_manager();
	return 0;
}

/* In a step manager as well, where there is nothing to do. */
int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	(void)ac, (void)av;
	if (is_submitting())
		hand_over(sp, refused ? NULL : helper);
	return 0;
}

/* A pyxis option by its name, else the variable that pyxis reads for it. Empty: there is none. */
static void pyxis_option(spank_t sp, char *option, const char *variable, char *value, size_t size)
{
	struct spank_option wanted = {.name = option, .has_arg = 1};
	char *given = NULL;
	bool fits;

	if (spank_option_getopt(sp, &wanted, &given) == ESPANK_SUCCESS && given)
		fits = (size_t)snprintf(value, size, "%s", given) < size;
	else
		fits = spank_getenv(sp, variable, value, (int)size) == ESPANK_SUCCESS;
	if (!fits)
		value[0] = '\0';
}

static bool has_flag(spank_t sp, char *option)
{
	struct spank_option wanted = {.name = option};
	char *none = NULL;

	return spank_option_getopt(sp, &wanted, &none) == ESPANK_SUCCESS;
}

static bool begins_with(const char *value, const char *characters)
{
	return value[0] && strchr(characters, value[0]);
}

/* A registry's image, as pyxis has it; it asks a daemon of the node for these two. */
static bool is_reference(const char *image)
{
	return image[0] && !begins_with(image, "./") && strncmp(image, "dockerd://", 10) != 0 &&
	       strncmp(image, "podman://", 9) != 0;
}

/*
 * As pyxis' args.c and enroot have it: the flag, pyxis' variable (parse_bool()), then enroot's own,
 * of which all counts as yes that does not begin like no or false.
 */
static char mounts_home(spank_t sp)
{
	char value[64];

	if (has_flag(sp, "container-mount-home"))
		return 'y';
	if (has_flag(sp, "no-container-mount-home"))
		return 'n';
	if (spank_getenv(sp, "PYXIS_CONTAINER_MOUNT_HOME", value, sizeof(value)) == ESPANK_SUCCESS &&
	    begins_with(value, "yYtT1nNfF0"))
		return begins_with(value, "yYtT1") ? 'y' : 'n';
	if (spank_getenv(sp, "ENROOT_MOUNT_HOME", value, sizeof(value)) == ESPANK_SUCCESS && value[0])
		return begins_with(value, "nNfF") ? 'n' : 'y';
	return '\0';
}

/* Whether there is such a file beside the job's lease. */
static bool has_record(spank_t sp, const char *suffix)
{
	char name[64];
	uint32_t job = 0;

	if (spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS)
		return false;
	snprintf(name, sizeof(name), LEASES "/%u%s", job, suffix);
	return access(name, F_OK) == 0;
}

/*
 * Whether the Prolog noted images or data of the job's comment (cache/lease.py). By access(2), which
 * looks with our real user, root. A job's extern step has no process that could read them.
 */
static bool is_hinted(spank_t sp)
{
	uint32_t number = 0;

	return spank_get_item(sp, S_JOB_STEPID, &number) == ESPANK_SUCCESS &&
	       number != EXTERN_STEP && has_record(sp, HINTED_SUFFIX);
}

/* Where its job has a directory of its own: a script must not take the empty one of root's for it. */
static void report_lost_directory(spank_t sp, bool had, const char *wrong)
{
	if (is_directory_named() || !(has_record(sp, DIRECTORY_SUFFIX) || (had && wrong)))
		return;
	slurm_spank_log("forestage: this step does not have its job's " JOB_DIR ": %s",
			wrong ? wrong : "forestage has failed on this node");
}

/*
 * Where pyxis' importer finds the image, by our own number of the step: a batch script has none in
 * its environment, and a component of a het job has another one.
 */
static void name_place(spank_t sp)
{
	char place[64];
	uint32_t job = 0, number = 0;

	spank_get_item(sp, S_JOB_ID, &job);
	spank_get_item(sp, S_JOB_STEPID, &number);
	snprintf(place, sizeof(place), IMAGES "/%u.%u.sqsh", job, number);
	spank_setenv(sp, IMAGE_PATH, place, 1);
}

/* Once per step and node; our effective user is the job's, our real one root. */
int slurm_spank_user_init(spank_t sp, int ac, char **av)
{
	(void)ac, (void)av;
	/* Those of the batch script or of the submitting step say nothing of this one. */
	const bool had = forget_variables(sp);
	const char *wrong = NULL;
	if (refused)
		return 0;
	step.hinted = is_hinted(sp);
	pyxis_option(sp, "container-image", "PYXIS_CONTAINER_IMAGE", step.image, PATH_MAX);
	step.reference = is_reference(step.image);
	if (!step.reference && !begins_with(step.image, "./"))
		step.image[0] = '\0';
	if (step.reference)
		pyxis_option(sp, "container-name", "PYXIS_CONTAINER_NAME", step.container,
			     sizeof(step.container));
	/* What is saved to is always a path, and needs no image. */
	pyxis_option(sp, "container-save", "PYXIS_CONTAINER_SAVE", step.save, PATH_MAX);
	if (!step.image[0] && !step.save[0] && !step.hinted)
		return 0;
	step.mounts_home = mounts_home(sp);
	/* Slurm went to the step's directory, or to /tmp; the tasks and pyxis start from there. */
	if (!getcwd(step.folder, PATH_MAX) || step.folder[0] != '/')
		step.folder[0] = '\0';
	if (step.image[0] == '/' || step.save[0] == '/' || step.folder[0] || step.hinted ||
	    step.reference)
		wrong = ask_helper(sp, helper, timeout, &step);
	set_variables(sp);
	if (step.hinted)
		report_lost_directory(sp, had, wrong);
	onces = mmap(NULL, MOST_ITEMS * sizeof(*onces), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (step.later)
		name_place(sp);
	return 0;
}

const char *fetch_item(const struct item *item)
{
	return item->image ? NULL : fetch_datum(item->datum);
}

const char *show_item(spank_t sp, const struct item *item)
{
	return item->image ? redirect(sp, item->image) : show_datum(sp, item->datum);
}

static void add_escaped(char *out, size_t size, const char *path)
{
	size_t at = 0;

	for (; *path && at + 7 < size; path++) {
		const unsigned char byte = (unsigned char)*path;
		if (byte < ' ' || byte == '"' || byte == '\\')
			at += (size_t)snprintf(out + at, size - at, "\\u%04x", byte);
		else
			out[at++] = *path;
	}
	out[at] = '\0';
}

/* Whether no other task of the step was here before. */
static bool is_first(spank_t sp, bool *mark)
{
	int task = 0;

	if (mark)
		return !__atomic_test_and_set(mark, __ATOMIC_RELAXED);
	spank_get_item(sp, S_TASK_ID, &task);
	return task == 0;
}

static const char *reason(const struct item *item)
{
	return item->cause == IS_HANGING  ? MOUNT_HANGS
	       : item->cause == IS_QUEUED ? MOUNT_QUEUE
					  : NO_MOUNT;
}

void note_failure(spank_t sp, const struct item *item)
{
	const char *node = getenv("SLURMD_NODENAME");
	char path[6 * PATH_MAX], why[6 * WHY_BYTES], rest[8 * PATH_MAX];
	uint32_t job = 0, number = 0;
	uid_t uid = 0;

	if (spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_STEPID, &number) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    !is_first(sp, item->once ? &item->once->noted : NULL))
		return;
	add_escaped(path, sizeof(path), item->image ? item->image->path : item->path);
	add_escaped(why, sizeof(why), item->why);
	snprintf(rest, sizeof(rest),
		 "\"hook\":\"step\",\"job\":%u,\"uid\":%u,\"node\":\"%s\",\"outcome\":{\"kind\":"
		 "\"handled\",\"result\":\"declined\",\"reason\":\"%s\",\"detail\":\"%s\",\"image\":"
		 "\"%s\",\"data\":%s}}",
		 job, uid, node ? node : "", reason(item), why, path, item->image ? "false" : "true");
	append_event(EVENTS, &(struct event){.uid = uid, .number = number, .rest = rest});
}

void say_failure(spank_t sp, const struct item *item)
{
	bool first = is_first(sp, item->once ? &item->once->said : NULL);

	spank_unsetenv(sp, LOCAL); /* it would name this one, too */
	if (item->image && (item->image == &step || !step.image[0]))
		spank_setenv(sp, RESULT, reason(item), 1);
	if (!item->image) {
		if (strcmp(item->path, JOB_DIR) == 0)
			forget_directory(sp);
		spank_setenv(sp, DATA_RESULT, reason(item), 1);
		slurm_info("forestage: nothing is mounted at %s: %s: %s", item->path, item->why,
			   strerror(item->error));
		if (first)
			slurm_spank_log("forestage: nothing is mounted at %s: %s", item->path,
					item->why);
		return;
	}
	slurm_info("forestage: %s stays as it is: %s: %s", item->path, item->why,
		   strerror(item->error));
	if (item->image->tell && first)
		slurm_spank_log("forestage: %s is read from where it is: %s", item->path, item->why);
}

/* `number` is its own in all tasks of the step. */
static struct once *find_once(int number)
{
	return onces == MAP_FAILED ? NULL : onces + number;
}

static int list_image(struct item *items, struct step *one, int number)
{
	*items = (struct item){.path = one->image,
			       .kept = &one->keeper,
			       .image = one,
			       .once = find_once(number)};
	return one->use;
}

/* In each task, as root, when it has joined the job's own namespaces. */
int slurm_spank_task_init_privileged(spank_t sp, int ac, char **av)
{
	static struct item items[MOST_ITEMS];
	int count = 0, data;

	(void)ac, (void)av;
	if (step.later)
		await_answer(sp, &step);
	count += list_image(items + count, &step, 0);
	for (int i = 0; i < step.count; i++)
		count += list_image(items + count, &step.also[i], 1 + i);
	data = list_data(items + count); /* after the images, which are known by what lies beneath */
	for (int i = 0; i < data; i++)
		items[count + i].once = find_once(1 + MAX_HINTED + i);
	count += data;
	if (count)
		show_items(sp, items, count);
	for (int i = 0; i < count; i++)
		if (*items[i].kept >= 0)
			close(*items[i].kept);
	return 0;
}
