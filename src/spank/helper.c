/* How is the helper asked? Once per step and node, and the step manager stays as it was. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "plugin.h"

#define MAX_VARIABLES 26                 /* more than the environment has */
#define MAX_VALUE_BYTES 65536            /* the longest value taken from the step's environment */
#define MAX_ENVIRONMENT_BYTES (8 << 20)  /* of a job; no helper gets a longer one */
#define ENVIRONMENT_FD 3                 /* the descriptor by which the helper gets it */
#define MAX_USER_LINES 100               /* more lines are not for a user */
#define SIGNAL_CHECK_MS 1000             /* between two checks whether the step is being signalled */
#define SIGNAL_CHECKS 3                  /* so many in a row must find a request that waits */
#define MAX_DESCRIPTORS 1024             /* checked for such requests; a step manager has dozens */
#define CONTAINED_TIMEOUT_S 50           /* without such checks: below UnkillableStepTimeout */
#define RECORD_TIMEOUT_S 2               /* for reading record and image; then a helper is asked */
#define EXIT_TIMEOUT_MS 5000             /* for the helper's exit once it has answered */
#define KILL_TIMEOUT_MS 2000             /* for a killed helper's end; one stuck in the kernel is left */

static pid_t manager_pid;          /* the step manager */
static int node_namespace_fd = -1; /* its mount namespace: the node's */

void save_step_manager(void)
{
	manager_pid = getpid();
	node_namespace_fd = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
}

__attribute__((format(printf, 2, 3)))
static void add_variable(char **env, const char *format, ...)
{
	va_list values;

	while (*env)
		env++;
	va_start(values, format);
	if (vasprintf(env, format, values) < 0)
		*env = NULL;
	va_end(values);
}

static void copy_step_variable(char **env, spank_t sp, const char *name)
{
	char value[MAX_VALUE_BYTES + 1];

	if (spank_getenv(sp, name, value, sizeof(value)) == ESPANK_SUCCESS)
		add_variable(env, "%s=%s", name, value);
}

/*
 * The groups that Slurm has given the step, which this node's name service may not know. Left out
 * where they are too many for a variable: the helper then asks the name service.
 */
static void add_group_ids(char **env, const struct requester *requester)
{
	static char list[MAX_VALUE_BYTES];
	size_t length = 0;

	for (int i = 0; i < requester->group_count && length < sizeof(list); i++)
		length += (size_t)snprintf(list + length, sizeof(list) - length, "%s%u",
					   i ? "," : "", (unsigned int)requester->groups[i]);
	if (requester->group_count > 0 && length < sizeof(list))
		add_variable(env, STEP_GROUPS_VARIABLE "=%s", list);
}

/*
 * All that the helper gets, beside argv { HELPER_PATH, "step" }. The names are the Prolog's, so that
 * one parser reads both; what has no value is left out, and numbers are decimal. Slurm vouches for
 * ids, directory and node name. Partition and the step's nodes (copy_step_variable) are the user's
 * word, as they can change their step's environment, and so are image, save and home, as written. No
 * SLURM_JOB_USER: the helper looks the name up by uid.
 */
static void build_helper_environment(char **env, spank_t sp, const struct step *step,
				     const struct requester *requester, long timeout_s,
				     bool has_environment)
{
	const char *option = "SPANK__SLURM_SPANK_OPTION_pyxis_container";
	/* The step manager's own: the step's may be that of the node where srun was called. */
	const char *node = getenv("SLURMD_NODENAME"), *conf = getenv("SLURM_CONF");
	const char *path = getenv("PATH"); /* on which pyxis finds enroot */
	char home[PATH_MAX];

	add_variable(env, "PATH=/usr/sbin:/usr/bin:/sbin:/bin");
	add_variable(env, "LANG=C.UTF-8");
	add_variable(env, "SLURM_SCRIPT_CONTEXT=spank_step");
	add_variable(env, "SLURM_JOB_ID=%u", requester->job_id);
	add_variable(env, "SLURM_JOB_UID=%u", requester->uid);
	add_variable(env, "SLURM_JOB_GID=%u", requester->gid);
	add_group_ids(env, requester);
	add_variable(env, "SLURM_STEP_ID=%u", requester->step_id);
	if (step->working_directory[0])
		add_variable(env, "SLURM_JOB_WORK_DIR=%s", step->working_directory);
	copy_step_variable(env, sp, "SLURM_JOB_PARTITION");
	copy_step_variable(env, sp, "SLURM_STEP_NODELIST");
	if (node)
		add_variable(env, "SLURMD_NODENAME=%s", node);
	if (step->image[0])
		add_variable(env, "%s_image=%s", option, step->image);
	if (step->save_path[0])
		add_variable(env, "%s_save=%s", option, step->save_path);
	if (step->container_name[0])
		add_variable(env, "%s_name=%s", option, step->container_name);
	if (path)
		add_variable(env, STEP_PATH_VARIABLE "=%s", path);
	if (has_environment)
		add_variable(env, STEP_ENVIRONMENT_VARIABLE "=%d", ENVIRONMENT_FD);
	if (conf) /* it says how nodes prove to each other who they are, see features/peers/auth.py */
		add_variable(env, "SLURM_CONF=%s", conf);
	if (step->is_registry_image) /* for features/registry/step_image.py: is it a batch job's? */
		copy_step_variable(env, sp, "ENVIRONMENT");
	if (step->mounts_home)
		add_variable(env, "%s=1",
			     step->mounts_home == 'y'
				     ? "SPANK__SLURM_SPANK_OPTION_pyxis_container_mount_home"
				     : "SPANK__SLURM_SPANK_OPTION_pyxis_no_container_mount_home");
	if (spank_getenv(sp, "HOME", home, sizeof(home)) == ESPANK_SUCCESS)
		add_variable(env, STEP_HOME_VARIABLE "=%s", home);
	/* With ContainSpank it is not the process that forks the helper. */
	add_variable(env, STEP_MANAGER_VARIABLE "=%d", (int)manager_pid);
	/* Seconds until its group is killed. */
	add_variable(env, STEP_TIMEOUT_VARIABLE "=%ld", timeout_s);
}

/*
 * The job's environment, NUL between its variables, in memory: what enroot goes by, and a registry's
 * image is imported with. -1 where there is none.
 */
static int save_environment(spank_t sp)
{
	char **env = NULL;
	int memory_fd = (int)syscall(SYS_memfd_create, "environment", 1U /* MFD_CLOEXEC */);
	/* Where 0, 1 or 2 were closed, it has one of those, which the helper gets anew. */
	int fd = memory_fd < 0 ? -1 : fcntl(memory_fd, F_DUPFD_CLOEXEC, ENVIRONMENT_FD);
	if (memory_fd >= 0)
		close(memory_fd);
	FILE *file = fd < 0 ? NULL : fdopen(dup(fd), "w");
	bool is_written = file && spank_get_item(sp, S_JOB_ENV, &env) == ESPANK_SUCCESS;

	for (size_t total = 0; is_written && env && *env; env++) {
		total += strlen(*env) + 1;
		is_written = total < MAX_ENVIRONMENT_BYTES && fputs(*env, file) >= 0 &&
			     fputc('\0', file) == '\0';
	}
	/* Who reads it begins where we ended. */
	if (file && fclose(file) == 0 && is_written && lseek(fd, 0, SEEK_SET) == 0)
		return fd;
	if (fd >= 0)
		close(fd);
	return -1;
}

static void close_descriptors_from(unsigned int first)
{
#ifdef SYS_close_range
	if (syscall(SYS_close_range, first, ~0U, 0) == 0)
		return;
#endif
	for (long fd = first, last = sysconf(_SC_OPEN_MAX); fd < last; fd++)
		close((int)fd);
}

/* What the child is for: a helper's arguments and environment, or a look at the job's record. */
struct child_call {
	char **argv; /* NULL for a look at the record */
	char **env;
	void (*answer)(const struct requester *requester, struct step *step);
	int environment_fd; /* the job's, for a helper; or -1 */
	const struct requester *requester;
	struct step *step;
};

/* In the fork: the step manager has threads, so no call that one of their locks could hold up. */
static void run_child(int output_fd, pid_t parent, const struct child_call *call)
{
	struct sigaction default_action = {.sa_handler = SIG_DFL};
	sigset_t no_signals;

	/* Not by glibc, which would want all threads to follow. Root first: it may do the rest. */
	if (syscall(SYS_setresuid, 0, 0, 0) < 0 || syscall(SYS_setgroups, 0, NULL) < 0 ||
	    syscall(SYS_setresgid, 0, 0, 0) < 0 || setpgid(0, 0) < 0 ||
	    /* Not where it is the same one: to join it would leave a slurmd's chroot. */
	    (parent != manager_pid && setns(node_namespace_fd, CLONE_NEWNS) < 0) ||
	    chdir("/") < 0 || prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != parent)
		_exit(126);
	umask(022);
	for (int signal_number = 1; signal_number < NSIG; signal_number++)
		sigaction(signal_number, &default_action, NULL);
	sigemptyset(&no_signals);
	sigprocmask(SIG_SETMASK, &no_signals, NULL);

	/* Where 0, 1 or 2 were closed, the pipe has them; null is never lower than its ends. */
	output_fd = fcntl(output_fd, F_DUPFD, 3);
	int null_fd = open("/dev/null", O_RDWR);
	if (dup2(null_fd, 0) < 0 || dup2(output_fd, 1) < 0 || dup2(null_fd, 2) < 0)
		_exit(126);
	bool passes_environment = call->environment_fd >= 0 &&
				  (call->environment_fd == ENVIRONMENT_FD
					   ? fcntl(ENVIRONMENT_FD, F_SETFD, 0)
					   : dup2(call->environment_fd, ENVIRONMENT_FD)) >= 0;
	close_descriptors_from(passes_environment ? ENVIRONMENT_FD + 1 : ENVIRONMENT_FD);
	if (call->argv)
		execve(call->argv[0], call->argv, call->env);
	else
		call->answer(call->requester, call->step);
}

static pid_t start_child(const struct child_call *call, int *output_fd)
{
	int ends[2];

	if (pipe2(ends, O_CLOEXEC) < 0)
		return -1;
	pid_t parent = getpid(), pid = fork();
	if (pid == 0) {
		run_child(ends[1], parent, call);
		_exit(127);
	}
	close(ends[1]);
	if (pid < 0)
		close(ends[0]);
	else
		setpgid(pid, pid); /* whoever of the two comes first */
	*output_fd = ends[0];
	return pid;
}

void sleep_poll_interval(void)
{
	nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
}

long long read_monotonic_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

/*
 * Whether slurmd (or the user) waits for an answer of this step manager. Before its tasks run, a
 * step manager answers all requests at once, except for those that signal, suspend or end the
 * step: _wait_for_job_running() in slurmstepd/req.c holds them back for up to two minutes, from
 * Slurm 22.05 to 26.05. Nothing else tells a plugin that its step was cancelled.
 */
static bool has_waiting_request(uid_t uid)
{
	for (int fd = 0; fd < MAX_DESCRIPTORS; fd++) {
		struct sockaddr_un name = {0};
		struct ucred peer;
		int listens = 1;
		socklen_t name_size = sizeof(name) - 1, listens_size = sizeof(listens),
			  peer_size = sizeof(peer);

		/* A connection bears the name of the socket it was made to: the step manager's. */
		if (getsockname(fd, (struct sockaddr *)&name, &name_size) == 0 &&
		    name.sun_family == AF_UNIX && name.sun_path[0] == '/' &&
		    getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &listens_size) == 0 &&
		    !listens && getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &peer_size) == 0 &&
		    (peer.uid == 0 || peer.uid == uid))
			return true;
	}
	return false;
}

void apply_answer(const struct protocol_line *line, struct step *step)
{
	if (line->kind == LINE_LEAVE) {
		slurm_verbose("forestage: %s stays as it is: %s", step->image, line->fields[0]);
		return;
	}
	snprintf(step->entry_path, PATH_MAX, "%s", line->fields[0]);
	step->is_pending = line->kind == LINE_LATER;
	if (step->is_pending)
		return;
	step->uses_copy = true;
	step->reads_through = line->kind == LINE_THROUGH;
	snprintf(step->resolved_path, PATH_MAX, "%s", line->fields[1]);
	read_numbers(line, 2, step->identity);
	step->wants_message = read_number(line, 6);
}

/* One more image: shown at its resolved path, whatever links lead there. */
static void add_further_image(char *text, struct step *step)
{
	struct step *image = &step->further_images[step->further_count];
	struct protocol_line line;
	const enum line_kind kind = parse_line(text, &line);

	if (step->further_count == MAX_HINTED_PATHS || (kind != LINE_USE && kind != LINE_THROUGH))
		return;
	*image = (struct step){.keeper_fd = -1};
	apply_answer(&line, image);
	memcpy(image->image, image->resolved_path, PATH_MAX);
	step->further_count++;
}

/* Follows a line; true once that is the answer. What is not understood is left out. */
static bool apply_line(const char *text, struct step *step, int *user_lines)
{
	char *copy = strdup(text);
	struct protocol_line line;
	bool is_answer = false;

	switch (copy ? parse_line(copy, &line) : LINE_UNKNOWN) {
	case LINE_SAY:
		if ((*user_lines)++ < MAX_USER_LINES)
			slurm_spank_log("%s", line.fields[0]);
		break;
	case LINE_ALSO:
		add_further_image(line.fields[0], step);
		break;
	case LINE_ENV:
	case LINE_DEVICE:
	case LINE_SERVED:
	case LINE_FOLDER:
		add_data_line(&line, copy);
		return false;
	case LINE_USE:
	case LINE_THROUGH:
	case LINE_LATER:
	case LINE_LEAVE:
		apply_answer(&line, step);
		is_answer = true;
		break;
	default:
		if ((*user_lines)++ < MAX_USER_LINES)
			slurm_info("forestage: a line cannot be understood: %s", text);
	}
	free(copy);
	return is_answer;
}

/* Reads the helper's lines until it answers. NULL, or why there is no answer. */
static const char *read_answer(int output_fd, uid_t uid, long timeout_s, struct step *step)
{
	long long end = read_monotonic_ms() + timeout_s * 1000LL,
		  next_check = read_monotonic_ms() + SIGNAL_CHECK_MS;
	char line[MAX_LINE_BYTES];
	size_t length = 0;
	int user_lines = 0, waiting_checks = 0;
	bool is_protocol_known = false;

	while (length < MAX_LINE_BYTES) {
		struct pollfd ready = {.fd = output_fd, .events = POLLIN};
		long long now = read_monotonic_ms();
		if (now >= end)
			return "it took too long";
		if (now >= next_check) {
			next_check = now + SIGNAL_CHECK_MS;
			waiting_checks = has_waiting_request(uid) ? waiting_checks + 1 : 0;
			if (waiting_checks >= SIGNAL_CHECKS)
				return "the step is being signalled, and would not hear it";
		}
		if (poll(&ready, 1, (int)((next_check < end ? next_check : end) - now)) <= 0)
			continue;
		ssize_t n = read(output_fd, line + length, MAX_LINE_BYTES - length);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return "it gave no answer";
		length += (size_t)n;
		for (char *newline; (newline = memchr(line, '\n', length));) {
			*newline = '\0';
			if (!is_protocol_known && strcmp(line, PROTOCOL_GREETING) != 0)
				return "it is of another release";
			if (is_protocol_known && apply_line(line, step, &user_lines))
				return NULL;
			is_protocol_known = true;
			length -= (size_t)(newline + 1 - line);
			memmove(line, newline + 1, length);
		}
	}
	return "it wrote too long a line";
}

/* Whether the child ends in that time. It stays a zombie, so that nobody else gets its pid. */
static bool has_ended_within(pid_t pid, int ms)
{
	const int options = WEXITED | WNOHANG | WNOWAIT;

	for (long long end = read_monotonic_ms() + ms;;) {
		siginfo_t info = {0};
		if (waitid(P_PID, (id_t)pid, &info, options) < 0 || info.si_pid == pid)
			return true;
		if (read_monotonic_ms() >= end)
			return false;
		sleep_poll_interval();
	}
}

/* NULL, or why there is no answer. */
static const char *run_call(const struct child_call *call, long timeout_s)
{
	int output_fd;
	pid_t pid = start_child(call, &output_fd);

	if (pid < 0)
		return strerror(errno);
	const char *failure = read_answer(output_fd, call->requester->uid, timeout_s, call->step);
	close(output_fd);
	has_ended_within(pid, failure ? 0 : EXIT_TIMEOUT_MS);
	kill(-pid, SIGKILL); /* and all that it may have left in its group */
	if (!has_ended_within(pid, KILL_TIMEOUT_MS) || waitpid(pid, NULL, WNOHANG) < 0)
		slurm_info("forestage: the child %d does not end", (int)pid);
	return failure;
}

static bool read_requester(spank_t sp, struct requester *requester)
{
	spank_get_item(sp, S_JOB_ID, &requester->job_id);
	spank_get_item(sp, S_JOB_STEPID, &requester->step_id);
	requester->gid = (gid_t)-1;
	spank_get_item(sp, S_JOB_GID, &requester->gid);
	requester->group_count = getgroups(NGROUPS_MAX, requester->groups);
	return spank_get_item(sp, S_JOB_UID, &requester->uid) == ESPANK_SUCCESS;
}

/*
 * Whether the tasks will have what the answer says: a keeper stays for as long as we are connected.
 * Here, since a task may be where the socket cannot be seen.
 */
static bool connect_step_keeper(struct step *step)
{
	if (step->reads_through)
		step->keeper_fd = connect_keeper(step->entry_path);
	return !step->reads_through || step->keeper_fd >= 0;
}

const char *ask_helper(spank_t sp, const char *helper_path, long timeout_s, struct step *step)
{
	static struct requester requester;
	char *env[MAX_VARIABLES] = {NULL}, *argv[] = {(char *)helper_path, "step", NULL};
	struct child_call call = {.answer = answer_from_record,
				  .environment_fd = -1,
				  .requester = &requester,
				  .step = step};

	if (!read_requester(sp, &requester))
		return "Slurm does not say whose job it is";
	spank_get_item(sp, S_JOB_ENV, &requester.environment);
	/*
	 * SlurmdParameters=contain_spank has us in a process beside the step manager, within the
	 * job's namespaces. They share memory, but not the connections made from now on.
	 */
	bool is_contained = getpid() != manager_pid;
	/* What a step saves to, or binds, is a helper's matter: a redirect may not lie there. */
	if (!is_contained && !step->save_path[0] && !step->mounts_home && !step->has_hints &&
	    !step->is_registry_image && requester.group_count >= 0 &&
	    !run_call(&call, RECORD_TIMEOUT_S) && connect_step_keeper(step)) {
		slurm_verbose("forestage: %s needs no helper, as its job had it before", step->image);
		spank_setenv(sp, RESULT_VARIABLE, step->reads_through ? "through" : "hit", 1);
		spank_setenv(sp, IMAGE_PATH_VARIABLE, step->resolved_path, 1);
		return NULL;
	}
	if (is_contained && timeout_s > CONTAINED_TIMEOUT_S)
		timeout_s = CONTAINED_TIMEOUT_S;
	step->uses_copy = step->reads_through = step->is_pending = false;
	step->further_count = 0;
	clear_data_lines();
	call.environment_fd = save_environment(sp);
	build_helper_environment(env, sp, step, &requester, timeout_s, call.environment_fd >= 0);
	call.argv = argv;
	call.env = env;
	const char *failure = run_call(&call, timeout_s);
	if (call.environment_fd >= 0)
		close(call.environment_fd);
	call.environment_fd = -1;
	for (char **variable = env; *variable; variable++)
		free(*variable);
	if (failure)
		slurm_info("forestage: %s stays as it is: %s: %s", step->image, helper_path,
			   failure);
	/* During an upgrade, or where the program is gone, the job's directory is still there. */
	if (failure && step->has_hints && !has_directory_line()) {
		call.argv = NULL;
		call.answer = answer_from_directory_record;
		run_call(&call, RECORD_TIMEOUT_S);
	}
	/* A process beside the step manager would keep the connections for itself. */
	for (int i = is_contained ? step->further_count : 0; i < step->further_count; i++)
		connect_step_keeper(&step->further_images[i]);
	if (!is_contained)
		connect_step_keeper(step);
	return failure;
}
