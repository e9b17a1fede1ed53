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

#define CHECK_MS 2000	   /* for `forestage hints` */
#define ANSWER_MOST 8192   /* of what it says */

static int take(int which, const char *value, int remote);

static struct spank_option offered[] = {
	{"stage", "PATH", "have the job's nodes copy PATH: an image, DIR/, FILE@/mount/point, TREE@job,"
	 " TREE@seed:NAME (may be repeated); or no", 1, 0, take},
	{"stage-wait", "TIME", "how long the job may wait for that", 1, 1, take},
	{"stage-dir", "SIZE[,ram]", "a directory of the job's own on each node", 1, 2, take},
	{"stage-tell", NULL, "say at the first step what came of it", 0, 3, take},
};
#define OFFERED (sizeof(offered) / sizeof(offered[0]))

static char words[MAX_OPTION + 1]; /* as `forestage hints` takes them, each with a newline */
static size_t length;
static bool too_long;
static const char *broken; /* the name of an option whose value holds a newline */

static bool is_asked(void)
{
	return length || too_long || broken;
}

static void add_word(const char *name, const char *value)
{
	if (strchr(value, '\n')) { /* it would be two words */
		broken = name;
		return;
	}
	size_t left = sizeof(words) - length;
	int n = snprintf(words + length, left, "%s=%s\n", name, value);

	if (n < 0 || (size_t)n >= left) {
		words[length] = '\0';
		too_long = true;
	} else
		length += (size_t)n;
}

/* In a step manager it is called too, and has nothing to do: steps go by what the Prolog noted. */
static int take(int which, const char *value, int remote)
{
	spank_context_t where = spank_context();

	if (remote || (where != S_CTX_LOCAL && where != S_CTX_ALLOCATOR))
		return 0;
	add_word(offered[which].name, offered[which].has_arg && value ? value : "yes");
	return 0;
}

/* The variable in which Slurm keeps an option of ours. */
static const char *slurms_name(const struct spank_option *option, char name[96])
{
	snprintf(name, 96, "_SLURM_SPANK_OPTION_forestage_%s", option->name);
	for (char *c = name; *c; c++)
		if (*c == '-')
			*c = '_';
	return name;
}

static void forget_variable(const char *name)
{
	char longer[128];

	unsetenv(name);
	snprintf(longer, sizeof(longer), "SLURM_SPANK_%s", name); /* which sbatch and srun read */
	unsetenv(longer);
}

void offer_options(spank_t sp)
{
	char name[96];

	for (size_t i = 0; i < OFFERED; i++) {
		spank_option_register(sp, &offered[i]);
		if (spank_context() != S_CTX_REMOTE)
			forget_variable(slurms_name(&offered[i], name));
	}
	if (spank_context() != S_CTX_REMOTE)
		forget_variable(HANDED_OVER);
}

static char **as_arguments(const char *helper, char *text)
{
	size_t count = 4, at = 0;

	for (const char *c = text; *c; c++)
		count += *c == '\n';
	char **argv = calloc(count, sizeof(*argv));

	if (!argv)
		return NULL;
	argv[at++] = (char *)helper;
	argv[at++] = "hints";
	argv[at++] = "--";
	for (char *save = NULL, *word = strtok_r(text, "\n", &save); word;
	     word = strtok_r(NULL, "\n", &save))
		argv[at++] = word;
	return argv;
}

/* Its process, whose output is to be read from `out`; -1 where there is none. */
static pid_t start_check(char **argv, int *out)
{
	char *env[] = {"PATH=/usr/bin:/bin", "LANG=C.UTF-8", NULL};
	int made[2], ends[2] = {-1, -1};
	posix_spawn_file_actions_t files;
	posix_spawnattr_t how;
	sigset_t none, all;
	pid_t pid = -1;

	if (pipe2(made, O_CLOEXEC) < 0)
		return -1;
	for (int i = 0; i < 2; i++) { /* never one of 0, 1, 2, which may be closed */
		ends[i] = fcntl(made[i], F_DUPFD_CLOEXEC, 3);
		close(made[i]);
	}
	sigemptyset(&none);
	sigfillset(&all);
	posix_spawnattr_init(&how);
	posix_spawnattr_setflags(&how, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF |
					       POSIX_SPAWN_SETPGROUP);
	posix_spawnattr_setsigmask(&how, &none);
	posix_spawnattr_setsigdefault(&how, &all);
	posix_spawn_file_actions_init(&files);
	posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_adddup2(&files, ends[1], 1);
	posix_spawn_file_actions_addopen(&files, 2, "/dev/null", O_WRONLY, 0);
	if (ends[0] < 0 || ends[1] < 0 || posix_spawn(&pid, argv[0], &files, &how, argv, env) != 0)
		pid = -1;
	posix_spawn_file_actions_destroy(&files);
	posix_spawnattr_destroy(&how);
	close(ends[1]);
	if (pid < 0)
		close(ends[0]);
	*out = ends[0];
	return pid;
}

/* Whether it has said all that it says, by then. */
static bool read_until(int out, long long end, char *answer, size_t size)
{
	for (size_t have = 0; have + 1 < size;) {
		struct pollfd ready = {.fd = out, .events = POLLIN};
		long long left = end - now_ms();

		if (left <= 0)
			return false;
		if (poll(&ready, 1, (int)left) <= 0)
			continue;
		ssize_t n = read(out, answer + have, size - 1 - have);
		if (n == 0)
			return true;
		if (n < 0 && errno != EINTR)
			return false;
		have += n > 0 ? (size_t)n : 0;
		answer[have] = '\0';
	}
	return true; /* it says more, which nobody reads */
}

/* Its exit status, or -1 where it does not end by then, or not by itself. */
static int status_of(pid_t pid, long long end)
{
	int status;

	for (;;) {
		pid_t ended = waitpid(pid, &status, WNOHANG);
		if (ended == pid)
			return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
		if (ended < 0 || now_ms() >= end)
			return -1;
		wait_a_moment();
	}
}

/* Whether the words may not be submitted. Has said why, then. */
static bool is_refused(const char *helper)
{
	static char text[sizeof(words)], answer[ANSWER_MOST];
	int out;

	if (too_long) {
		slurm_error("forestage: --stage: more than %d bytes in all (name the directory that the"
			    " paths lie in, or a list: --comment=stage-list=FILE)", MAX_OPTION);
		return true;
	}
	if (broken) {
		slurm_error("forestage: --%s: its value holds a newline", broken);
		return true;
	}
	memcpy(text, words, sizeof(text));
	char **argv = helper ? as_arguments(helper, text) : NULL;
	pid_t pid = argv ? start_check(argv, &out) : -1;

	free(argv);
	if (pid < 0)
		return false;
	long long end = now_ms() + CHECK_MS;
	answer[0] = '\0';
	bool whole = read_until(out, end, answer, sizeof(answer));
	close(out);
	int status = whole ? status_of(pid, end) : -1;
	if (status < 0) {
		kill(-pid, SIGKILL);
		status_of(pid, now_ms() + CHECK_MS); /* killed, it ends at once */
		return false;
	}
	if (status != REFUSED || !answer[0])
		return false;
	for (char *save = NULL, *line = strtok_r(answer, "\n", &save); line;
	     line = strtok_r(NULL, "\n", &save))
		slurm_error("forestage: %s", line);
	return true;
}

/* The status with which Slurm's own commands refuse something (_set_exit_code() in each). */
static int refusal(void)
{
	const char *wanted = getenv("SLURM_EXIT_ERROR");
	int status = wanted ? atoi(wanted) : 0;

	return status ? status : 1;
}

/* Whether this is a step, or a component of one, in an allocation that is there. */
static bool is_step(void)
{
	return spank_context() == S_CTX_LOCAL && (getenv("SLURM_JOB_ID") || getenv("SLURM_JOBID"));
}

void hand_over(spank_t sp, const char *helper)
{
	static bool told;
	char name[96];

	/* Ended as Slurm ends itself here where a required plugin fails (`optional` ones may not). */
	if (is_asked() && !is_step() && is_refused(helper))
		exit(refusal());
	if (is_asked() && is_step() && !told) {
		slurm_spank_log("forestage: --stage is for jobs, and too late for a step: it counts at"
				" sbatch, salloc, or an srun that makes its job");
		told = true;
	}
	for (size_t i = 0; i < OFFERED; i++) {
		spank_job_control_unsetenv(sp, slurms_name(&offered[i], name));
		forget_variable(name);
	}
	if (length && !is_step())
		spank_job_control_setenv(sp, HANDED_OVER, words, 1);
	else
		spank_job_control_unsetenv(sp, HANDED_OVER);
	words[0] = '\0';
	length = 0;
	too_long = false;
	broken = NULL;
}
