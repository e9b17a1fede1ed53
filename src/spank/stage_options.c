/*
 * `--stage` and its kin, of srun, sbatch and salloc: what a job wants staged, asked at submission.
 *
 * Of an option that is repeated Slurm hands on the last value only; and it leaves that in the job's
 * environment, where the job's own sbatch finds it, before the lines of its script, and the second
 * part of a het job. So the words are collected here, the job's Prologs get all of them in one
 * variable, and Slurm's own copies are taken away. That is a courtesy, and no border: users can set
 * all of it by hand, and the Prolog checks everything.
 *
 *   init           what an earlier submission has left is forgotten
 *   callback       for each option, and for each part of a het job: a word is added
 *   init_post_opt  for each part: the words are checked (by `forestage hints`, as the user), handed
 *                  over, and the next part begins with none
 *
 * Where a job is made, what `forestage hints` refuses is not submitted. Whatever else goes wrong with
 * it, the job is submitted as it is.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "plugin.h"

#define CHECK_TIMEOUT_MS 2000	   /* for `forestage hints` */
#define MAX_ANSWER_BYTES 8192   /* of what it says */

static int add_option(int index, const char *value, int remote);

static struct spank_option stage_options[] = {
	{"stage", "PATH",
	 "have the job's nodes copy PATH: an image, DIR/, FILE@/mount/point, TREE@job,"
	 " TREE@seed:NAME (may be repeated); or no",
	 1, 0, add_option},
	{"stage-wait", "TIME", "how long the job may wait for that", 1, 1, add_option},
	{"stage-dir", "SIZE[,ram]", "a directory of the job's own on each node", 1, 2, add_option},
	{"stage-tell", NULL, "say at the first step what came of it", 0, 3, add_option},
};
#define STAGE_OPTIONS (sizeof(stage_options) / sizeof(stage_options[0]))

/* As `forestage hints` takes them, each with a newline. */
static char option_words[MAX_OPTION_CHARS + 1];
static size_t option_words_length;
static bool are_words_too_long;
static const char *option_with_newline; /* the name of an option whose value holds a newline */

static bool has_option_words(void)
{
	return option_words_length || are_words_too_long || option_with_newline;
}

static void add_option_word(const char *name, const char *value)
{
	if (strchr(value, '\n')) { /* it would be two words */
		option_with_newline = name;
		return;
	}
	size_t left = sizeof(option_words) - option_words_length;
	int length = snprintf(option_words + option_words_length, left, "%s=%s\n", name, value);

	if (length < 0 || (size_t)length >= left) {
		option_words[option_words_length] = '\0';
		are_words_too_long = true;
	} else
		option_words_length += (size_t)length;
}

/* In a step manager it is called too, and has nothing to do: steps go by what the Prolog noted. */
static int add_option(int index, const char *value, int remote)
{
	spank_context_t context = spank_context();

	if (remote || (context != S_CTX_LOCAL && context != S_CTX_ALLOCATOR))
		return 0;
	add_option_word(stage_options[index].name,
			stage_options[index].has_arg && value ? value : "yes");
	return 0;
}

/* The variable in which Slurm keeps an option of ours. */
static const char *format_slurm_variable(const struct spank_option *option, char name[96])
{
	snprintf(name, 96, "_SLURM_SPANK_OPTION_forestage_%s", option->name);
	for (char *c = name; *c; c++)
		if (*c == '-')
			*c = '_';
	return name;
}

static void unset_slurm_variable(const char *name)
{
	char prefixed[128];

	unsetenv(name);
	/* The variable that sbatch and srun read. */
	snprintf(prefixed, sizeof(prefixed), "SLURM_SPANK_%s", name);
	unsetenv(prefixed);
}

void register_stage_options(spank_t sp)
{
	char name[96];

	for (size_t i = 0; i < STAGE_OPTIONS; i++) {
		spank_option_register(sp, &stage_options[i]);
		if (spank_context() != S_CTX_REMOTE)
			unset_slurm_variable(format_slurm_variable(&stage_options[i], name));
	}
	if (spank_context() != S_CTX_REMOTE)
		unset_slurm_variable(STAGE_VARIABLE);
}

static char **build_check_arguments(const char *helper_path, char *text)
{
	size_t size = 4, argument_count = 0;

	for (const char *c = text; *c; c++)
		size += *c == '\n';
	char **argv = calloc(size, sizeof(*argv));

	if (!argv)
		return NULL;
	argv[argument_count++] = (char *)helper_path;
	argv[argument_count++] = "hints";
	argv[argument_count++] = "--";
	for (char *save = NULL, *word = strtok_r(text, "\n", &save); word;
	     word = strtok_r(NULL, "\n", &save))
		argv[argument_count++] = word;
	return argv;
}

/* Its process, whose output is to be read from `output_fd`; -1 where there is none. */
static pid_t start_check(char **argv, int *output_fd)
{
	char *env[] = {"PATH=/usr/bin:/bin", "LANG=C.UTF-8", NULL};
	int pipe_ends[2], ends[2] = {-1, -1};
	posix_spawn_file_actions_t file_actions;
	posix_spawnattr_t attributes;
	sigset_t no_signals, all_signals;
	pid_t pid = -1;

	if (pipe2(pipe_ends, O_CLOEXEC) < 0)
		return -1;
	for (int i = 0; i < 2; i++) { /* never one of 0, 1, 2, which may be closed */
		ends[i] = fcntl(pipe_ends[i], F_DUPFD_CLOEXEC, 3);
		close(pipe_ends[i]);
	}
	sigemptyset(&no_signals);
	sigfillset(&all_signals);
	posix_spawnattr_init(&attributes);
	posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF |
						      POSIX_SPAWN_SETPGROUP);
	posix_spawnattr_setsigmask(&attributes, &no_signals);
	posix_spawnattr_setsigdefault(&attributes, &all_signals);
	posix_spawn_file_actions_init(&file_actions);
	posix_spawn_file_actions_addopen(&file_actions, 0, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_adddup2(&file_actions, ends[1], 1);
	posix_spawn_file_actions_addopen(&file_actions, 2, "/dev/null", O_WRONLY, 0);
	if (ends[0] < 0 || ends[1] < 0 ||
	    posix_spawn(&pid, argv[0], &file_actions, &attributes, argv, env) != 0)
		pid = -1;
	posix_spawn_file_actions_destroy(&file_actions);
	posix_spawnattr_destroy(&attributes);
	close(ends[1]);
	if (pid < 0)
		close(ends[0]);
	*output_fd = ends[0];
	return pid;
}

/* Whether it has said all that it says, by then. */
static bool read_check_output(int output_fd, long long end_ms, char *answer, size_t size)
{
	for (size_t length = 0; length + 1 < size;) {
		struct pollfd ready = {.fd = output_fd, .events = POLLIN};
		long long left_ms = end_ms - read_monotonic_ms();

		if (left_ms <= 0)
			return false;
		if (poll(&ready, 1, (int)left_ms) <= 0)
			continue;
		ssize_t n = read(output_fd, answer + length, size - 1 - length);
		if (n == 0)
			return true;
		if (n < 0 && errno != EINTR)
			return false;
		length += n > 0 ? (size_t)n : 0;
		answer[length] = '\0';
	}
	return true; /* it says more, which nobody reads */
}

/* Its exit status, or -1 where it does not end by then, or not by itself. */
static int await_exit_status(pid_t pid, long long end_ms)
{
	int status;

	for (;;) {
		pid_t ended = waitpid(pid, &status, WNOHANG);
		if (ended == pid)
			return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
		if (ended < 0 || read_monotonic_ms() >= end_ms)
			return -1;
		sleep_poll_interval();
	}
}

/* Whether the words may not be submitted. Has said why, then. */
static bool are_words_refused(const char *helper_path)
{
	static char text[sizeof(option_words)], answer[MAX_ANSWER_BYTES];
	int output_fd;

	if (are_words_too_long) {
		slurm_error("forestage: --stage: more than %d bytes in all (name the directory that the"
			    " paths lie in, or a list: --comment=stage-list=FILE)",
			    MAX_OPTION_CHARS);
		return true;
	}
	if (option_with_newline) {
		slurm_error("forestage: --%s: its value holds a newline", option_with_newline);
		return true;
	}
	memcpy(text, option_words, sizeof(text));
	char **argv = helper_path ? build_check_arguments(helper_path, text) : NULL;
	pid_t pid = argv ? start_check(argv, &output_fd) : -1;

	free(argv);
	if (pid < 0)
		return false;
	long long end_ms = read_monotonic_ms() + CHECK_TIMEOUT_MS;
	answer[0] = '\0';
	bool is_complete = read_check_output(output_fd, end_ms, answer, sizeof(answer));
	close(output_fd);
	int status = is_complete ? await_exit_status(pid, end_ms) : -1;
	if (status < 0) {
		kill(-pid, SIGKILL);
		/* Killed, it ends at once. */
		await_exit_status(pid, read_monotonic_ms() + CHECK_TIMEOUT_MS);
		return false;
	}
	if (status != REFUSED_EXIT_STATUS || !answer[0])
		return false;
	for (char *save = NULL, *line = strtok_r(answer, "\n", &save); line;
	     line = strtok_r(NULL, "\n", &save))
		slurm_error("forestage: %s", line);
	return true;
}

/* The status with which Slurm's own commands refuse something (_set_exit_code() in each). */
static int find_refusal_status(void)
{
	const char *configured = getenv("SLURM_EXIT_ERROR");
	int status = configured ? atoi(configured) : 0;

	return status ? status : 1;
}

/* Whether this is a step, or a component of one, in an allocation that is there. */
static bool is_step_launch(void)
{
	return spank_context() == S_CTX_LOCAL && (getenv("SLURM_JOB_ID") || getenv("SLURM_JOBID"));
}

void pass_options_to_prolog(spank_t sp, const char *helper_path)
{
	static bool is_warned;
	char name[96];

	/* Ended as Slurm ends itself here where a required plugin fails (`optional` ones may not). */
	if (has_option_words() && !is_step_launch() && are_words_refused(helper_path))
		exit(find_refusal_status());
	if (has_option_words() && is_step_launch() && !is_warned) {
		slurm_spank_log("forestage: --stage is for jobs, and too late for a step: it counts at"
				" sbatch, salloc, or an srun that makes its job");
		is_warned = true;
	}
	for (size_t i = 0; i < STAGE_OPTIONS; i++) {
		spank_job_control_unsetenv(sp, format_slurm_variable(&stage_options[i], name));
		unset_slurm_variable(name);
	}
	if (option_words_length && !is_step_launch())
		spank_job_control_setenv(sp, STAGE_VARIABLE, option_words, 1);
	else
		spank_job_control_unsetenv(sp, STAGE_VARIABLE);
	option_words[0] = '\0';
	option_words_length = 0;
	are_words_too_long = false;
	option_with_newline = NULL;
}
