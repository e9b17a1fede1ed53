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

#define VARIABLES 26         /* more than the environment has */
#define VALUE_BYTES 65536    /* the longest value taken from the step's own environment */
#define ENVIRONMENT_BYTES (8 << 20) /* of a job; no helper gets a longer one */
#define ENVIRONMENT 3        /* the descriptor by which the helper gets it */
#define LINES_SAID 100       /* more than so many lines are not for a user */
#define LOOK_MS 1000         /* between two looks whether the step is being signalled */
#define LOOKS_SIGNALLED 3    /* so many looks in a row must find a request that waits */
#define DESCRIPTORS 1024     /* looked at for such requests; a step manager has a few dozen */
#define CONTAINED_SECONDS 50 /* where such requests are not seen: below UnkillableStepTimeout */
#define RECALL_SECONDS 2     /* for a look at the record and the image; then a helper is asked */
#define EXIT_MS 5000         /* for the helper's exit once it has answered */
#define KILLED_MS 2000       /* for the end of a killed helper; one stuck in the kernel is left */

static pid_t manager;      /* the step manager */
static int namespace = -1; /* its mount namespace: the node's */

void remember_manager(void)
{
	manager = getpid();
	namespace = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
}

__attribute__((format(printf, 2, 3)))
static void add(char **env, const char *format, ...)
{
	va_list values;

	while (*env)
		env++;
	va_start(values, format);
	if (vasprintf(env, format, values) < 0)
		*env = NULL;
	va_end(values);
}

static void add_from_step(char **env, spank_t sp, const char *name)
{
	char value[VALUE_BYTES + 1];

	if (spank_getenv(sp, name, value, sizeof(value)) == ESPANK_SUCCESS)
		add(env, "%s=%s", name, value);
}

/*
 * The groups that Slurm has given the step, which this node's name service may not know. Left out
 * where they are too many for a variable: the helper then asks the name service.
 */
static void add_groups(char **env, const struct asker *who)
{
	static char listed[VALUE_BYTES];
	size_t have = 0;

	for (int i = 0; i < who->count && have < sizeof(listed); i++)
		have += (size_t)snprintf(listed + have, sizeof(listed) - have, "%s%u", i ? "," : "",
					 (unsigned int)who->groups[i]);
	if (who->count > 0 && have < sizeof(listed))
		add(env, STEP_GROUPS "=%s", listed);
}

/*
 * All that the helper gets, beside argv { HELPER, "step" }. The names are the Prolog's, so that one
 * parser reads both; what has no value is left out, and numbers are decimal. Slurm vouches for
 * ids, directory and node name. Partition and the step's nodes (add_from_step) are the user's word,
 * as they can change their step's environment, and so are image, save and home, as written. No SLURM_JOB_USER:
 * the helper looks the name up by uid.
 */
static void describe_step(char **env, spank_t sp, const struct step *step,
			  const struct asker *who, long timeout, bool has_environment)
{
	const char *option = "SPANK__SLURM_SPANK_OPTION_pyxis_container";
	/* The step manager's own: the step's may be that of the node where srun was called. */
	const char *node = getenv("SLURMD_NODENAME"), *conf = getenv("SLURM_CONF");
	const char *path = getenv("PATH"); /* on which pyxis finds enroot */
	char home[PATH_MAX];

	add(env, "PATH=/usr/sbin:/usr/bin:/sbin:/bin");
	add(env, "LANG=C.UTF-8");
	add(env, "SLURM_SCRIPT_CONTEXT=spank_step");
	add(env, "SLURM_JOB_ID=%u", who->job);
	add(env, "SLURM_JOB_UID=%u", who->uid);
	add(env, "SLURM_JOB_GID=%u", who->gid);
	add_groups(env, who);
	add(env, "SLURM_STEP_ID=%u", who->number);
	if (step->folder[0])
		add(env, "SLURM_JOB_WORK_DIR=%s", step->folder);
	add_from_step(env, sp, "SLURM_JOB_PARTITION");
	add_from_step(env, sp, "SLURM_STEP_NODELIST");
	if (node)
		add(env, "SLURMD_NODENAME=%s", node);
	if (step->image[0])
		add(env, "%s_image=%s", option, step->image);
	if (step->save[0])
		add(env, "%s_save=%s", option, step->save);
	if (step->container[0])
		add(env, "%s_name=%s", option, step->container);
	if (path)
		add(env, STEP_PATH "=%s", path);
	if (has_environment)
		add(env, STEP_ENVIRONMENT "=%d", ENVIRONMENT);
	if (conf) /* it says how nodes prove to each other who they are, see features/peers/auth.py */
		add(env, "SLURM_CONF=%s", conf);
	if (step->reference) /* says whether the step is a batch job's, see features/registry/step_image.py
	*/
		add_from_step(env, sp, "ENVIRONMENT");
	if (step->mounts_home)
		add(env, "%s=1", step->mounts_home == 'y'
				   ? "SPANK__SLURM_SPANK_OPTION_pyxis_container_mount_home"
				   : "SPANK__SLURM_SPANK_OPTION_pyxis_no_container_mount_home");
	if (spank_getenv(sp, "HOME", home, sizeof(home)) == ESPANK_SUCCESS)
		add(env, STEP_HOME "=%s", home);
	add(env, STEP_MANAGER "=%d", (int)manager); /* with ContainSpank not who forks it */
	add(env, STEP_TIMEOUT "=%ld", timeout); /* seconds until its group is killed */
}

/*
 * The job's environment, NUL between its variables, in memory: what enroot goes by, and a registry's
 * image is imported with. -1 where there is none.
 */
static int keep_environment(spank_t sp)
{
	char **env = NULL;
	int made = (int)syscall(SYS_memfd_create, "environment", 1U /* MFD_CLOEXEC */);
	/* Where 0, 1 or 2 were closed, it has one of those, which the helper gets anew. */
	int fd = made < 0 ? -1 : fcntl(made, F_DUPFD_CLOEXEC, ENVIRONMENT);
	if (made >= 0)
		close(made);
	FILE *file = fd < 0 ? NULL : fdopen(dup(fd), "w");
	bool written = file && spank_get_item(sp, S_JOB_ENV, &env) == ESPANK_SUCCESS;

	for (size_t total = 0; written && env && *env; env++) {
		total += strlen(*env) + 1;
		written = total < ENVIRONMENT_BYTES && fputs(*env, file) >= 0 &&
			  fputc('\0', file) == '\0';
	}
	/* Who reads it begins where we ended. */
	if (file && fclose(file) == 0 && written && lseek(fd, 0, SEEK_SET) == 0)
		return fd;
	if (fd >= 0)
		close(fd);
	return -1;
}

static void close_from(unsigned int first)
{
#ifdef SYS_close_range
	if (syscall(SYS_close_range, first, ~0U, 0) == 0)
		return;
#endif
	for (long fd = first, last = sysconf(_SC_OPEN_MAX); fd < last; fd++)
		close((int)fd);
}

/* What the child is for: a helper's arguments and environment, or a look at the job's record. */
struct errand {
	char **argv; /* NULL for a look at the record */
	char **env;
	void (*look)(const struct asker *who, struct step *step);
	int environment; /* the job's, for a helper; or -1 */
	const struct asker *who;
	struct step *step;
};

/* In the fork: the step manager has threads, so no call that one of their locks could hold up. */
static void become_child(int out, pid_t parent, const struct errand *errand)
{
	struct sigaction plain = {.sa_handler = SIG_DFL};
	sigset_t none;

	/* Not by glibc, which would want all threads to follow. Root first: it may do the rest. */
	if (syscall(SYS_setresuid, 0, 0, 0) < 0 || syscall(SYS_setgroups, 0, NULL) < 0 ||
	    syscall(SYS_setresgid, 0, 0, 0) < 0 || setpgid(0, 0) < 0 ||
	    /* Not where it is the same one: to join it would leave a slurmd's chroot. */
	    (parent != manager && setns(namespace, CLONE_NEWNS) < 0) || chdir("/") < 0 ||
	    prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != parent)
		_exit(126);
	umask(022);
	for (int number = 1; number < NSIG; number++)
		sigaction(number, &plain, NULL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);

	/* Where 0, 1 or 2 were closed, the pipe has them; null is never lower than its ends. */
	out = fcntl(out, F_DUPFD, 3);
	int null = open("/dev/null", O_RDWR);
	if (dup2(null, 0) < 0 || dup2(out, 1) < 0 || dup2(null, 2) < 0)
		_exit(126);
	bool given = errand->environment >= 0 &&
		     (errand->environment == ENVIRONMENT ? fcntl(ENVIRONMENT, F_SETFD, 0)
							 : dup2(errand->environment, ENVIRONMENT)) >= 0;
	close_from(given ? ENVIRONMENT + 1 : ENVIRONMENT);
	if (errand->argv)
		execve(errand->argv[0], errand->argv, errand->env);
	else
		errand->look(errand->who, errand->step);
}

static pid_t start_child(const struct errand *errand, int *out)
{
	int ends[2];

	if (pipe2(ends, O_CLOEXEC) < 0)
		return -1;
	pid_t parent = getpid(), pid = fork();
	if (pid == 0) {
		become_child(ends[1], parent, errand);
		_exit(127);
	}
	close(ends[1]);
	if (pid < 0)
		close(ends[0]);
	else
		setpgid(pid, pid); /* whoever of the two comes first */
	*out = ends[0];
	return pid;
}

void wait_a_moment(void)
{
	nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
}

long long now_ms(void)
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
static bool request_waits(uid_t uid)
{
	for (int fd = 0; fd < DESCRIPTORS; fd++) {
		struct sockaddr_un name = {0};
		struct ucred peer;
		int listens = 1;
		socklen_t size = sizeof(name) - 1, one = sizeof(listens), cred = sizeof(peer);

		/* A connection bears the name of the socket it was made to: the step manager's. */
		if (getsockname(fd, (struct sockaddr *)&name, &size) == 0 &&
		    name.sun_family == AF_UNIX && name.sun_path[0] == '/' &&
		    getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &one) == 0 && !listens &&
		    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &cred) == 0 &&
		    (peer.uid == 0 || peer.uid == uid))
			return true;
	}
	return false;
}

void take_answer(const struct line *line, struct step *step)
{
	if (line->word == LEAVE) {
		slurm_verbose("forestage: %s stays as it is: %s", step->image, line->field[0]);
		return;
	}
	snprintf(step->entry, PATH_MAX, "%s", line->field[0]);
	step->later = line->word == LATER;
	if (step->later)
		return;
	step->use = true;
	step->through = line->word == THROUGH;
	snprintf(step->path, PATH_MAX, "%s", line->field[1]);
	take_numbers(line, 2, step->identity);
	step->tell = number(line, 6);
}

/* One more image: shown at its resolved path, whatever links lead there. */
static void take_also(char *answer, struct step *step)
{
	struct step *one = &step->also[step->count];
	struct line line;
	const enum word word = understand(answer, &line);

	if (step->count == MAX_HINTED || (word != USE && word != THROUGH))
		return;
	*one = (struct step){.keeper = -1};
	take_answer(&line, one);
	memcpy(one->image, one->path, PATH_MAX);
	step->count++;
}

/* Follows a line; true once that is the answer. What is not understood is left out. */
static bool follow(const char *text, struct step *step, int *said)
{
	char *copy = strdup(text);
	struct line line;
	bool over = false;

	switch (copy ? understand(copy, &line) : ODD) {
	case SAY:
		if ((*said)++ < LINES_SAID)
			slurm_spank_log("%s", line.field[0]);
		break;
	case ALSO:
		take_also(line.field[0], step);
		break;
	case ENV:
	case DEVICE:
	case SERVED:
	case FOLDER:
		take_datum(&line, copy);
		return false;
	case USE:
	case THROUGH:
	case LATER:
	case LEAVE:
		take_answer(&line, step);
		over = true;
		break;
	default:
		if ((*said)++ < LINES_SAID)
			slurm_info("forestage: a line cannot be understood: %s", text);
	}
	free(copy);
	return over;
}

/* Reads the helper's lines until it answers. NULL, or why there is no answer. */
static const char *listen_to(int out, uid_t uid, long timeout, struct step *step)
{
	long long end = now_ms() + timeout * 1000LL, look = now_ms() + LOOK_MS;
	char line[MAX_LINE];
	size_t have = 0;
	int said = 0, waits = 0;
	bool known = false;

	while (have < MAX_LINE) {
		struct pollfd ready = {.fd = out, .events = POLLIN};
		long long now = now_ms();
		if (now >= end)
			return "it took too long";
		if (now >= look) {
			look = now + LOOK_MS;
			waits = request_waits(uid) ? waits + 1 : 0;
			if (waits >= LOOKS_SIGNALLED)
				return "the step is being signalled, and would not hear it";
		}
		if (poll(&ready, 1, (int)((look < end ? look : end) - now)) <= 0)
			continue;
		ssize_t n = read(out, line + have, MAX_LINE - have);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return "it gave no answer";
		have += (size_t)n;
		for (char *newline; (newline = memchr(line, '\n', have));) {
			*newline = '\0';
			if (!known && strcmp(line, LANGUAGE) != 0)
				return "it is of another release";
			if (known && follow(line, step, &said))
				return NULL;
			known = true;
			have -= (size_t)(newline + 1 - line);
			memmove(line, newline + 1, have);
		}
	}
	return "it wrote too long a line";
}

/* Whether the child ends in that time. It stays a zombie, so that nobody else gets its pid. */
static bool ends_within(pid_t pid, int ms)
{
	const int how = WEXITED | WNOHANG | WNOWAIT;

	for (long long end = now_ms() + ms;;) {
		siginfo_t info = {0};
		if (waitid(P_PID, (id_t)pid, &info, how) < 0 || info.si_pid == pid)
			return true;
		if (now_ms() >= end)
			return false;
		wait_a_moment();
	}
}

/* NULL, or why there is no answer. */
static const char *ask(const struct errand *errand, long timeout)
{
	int out;
	pid_t pid = start_child(errand, &out);

	if (pid < 0)
		return strerror(errno);
	const char *wrong = listen_to(out, errand->who->uid, timeout, errand->step);
	close(out);
	ends_within(pid, wrong ? 0 : EXIT_MS);
	kill(-pid, SIGKILL); /* and all that it may have left in its group */
	if (!ends_within(pid, KILLED_MS) || waitpid(pid, NULL, WNOHANG) < 0)
		slurm_info("forestage: the child %d does not end", (int)pid);
	return wrong;
}

static bool identify_asker(spank_t sp, struct asker *who)
{
	spank_get_item(sp, S_JOB_ID, &who->job);
	spank_get_item(sp, S_JOB_STEPID, &who->number);
	who->gid = (gid_t)-1;
	spank_get_item(sp, S_JOB_GID, &who->gid);
	who->count = getgroups(NGROUPS_MAX, who->groups);
	return spank_get_item(sp, S_JOB_UID, &who->uid) == ESPANK_SUCCESS;
}

/*
 * Whether the tasks will have what the answer says: a keeper stays for as long as we are connected.
 * Here, since a task may be where the socket cannot be seen.
 */
static bool hold_keeper(struct step *step)
{
	if (step->through)
		step->keeper = connect_keeper(step->entry);
	return !step->through || step->keeper >= 0;
}

const char *ask_helper(spank_t sp, const char *helper, long timeout, struct step *step)
{
	static struct asker who;
	char *env[VARIABLES] = {NULL}, *argv[] = {(char *)helper, "step", NULL};
	struct errand errand = {.look = recall, .environment = -1, .who = &who, .step = step};

	if (!identify_asker(sp, &who))
		return "Slurm does not say whose job it is";
	spank_get_item(sp, S_JOB_ENV, &who.variables);
	/*
	 * SlurmdParameters=contain_spank has us in a process beside the step manager, within the
	 * job's namespaces. They share memory, but not the connections made from now on.
	 */
	bool contained = getpid() != manager;
	/* What a step saves to, or binds, is a helper's matter: a redirect may not lie there. */
	if (!contained && !step->save[0] && !step->mounts_home && !step->hinted &&
	    !step->reference && who.count >= 0 && !ask(&errand, RECALL_SECONDS) && hold_keeper(step)) {
		slurm_verbose("forestage: %s needs no helper, as its job had it before", step->image);
		spank_setenv(sp, RESULT, step->through ? "through" : "hit", 1);
		spank_setenv(sp, IMAGE_PATH, step->path, 1);
		return NULL;
	}
	if (contained && timeout > CONTAINED_SECONDS)
		timeout = CONTAINED_SECONDS;
	step->use = step->through = step->later = false;
	step->count = 0;
	forget_data();
	errand.environment = keep_environment(sp);
	describe_step(env, sp, step, &who, timeout, errand.environment >= 0);
	errand.argv = argv;
	errand.env = env;
	const char *wrong = ask(&errand, timeout);
	if (errand.environment >= 0)
		close(errand.environment);
	errand.environment = -1;
	for (char **each = env; *each; each++)
		free(*each);
	if (wrong)
		slurm_info("forestage: %s stays as it is: %s: %s", step->image, helper, wrong);
	/* During an upgrade, or where the program is gone, the job's directory is still there. */
	if (wrong && step->hinted && !is_directory_named()) {
		errand.argv = NULL;
		errand.look = recall_directory;
		ask(&errand, RECALL_SECONDS);
	}
	/* A process beside the step manager would keep the connections for itself. */
	for (int i = contained ? step->count : 0; i < step->count; i++)
		hold_keeper(&step->also[i]);
	if (!contained)
		hold_keeper(step);
	return wrong;
}
