/*
 * A step manager in little: calls the companion's callbacks as slurmstepd does, as root, with
 * the rights, the working directory and the signals that they have there.
 *
 *   fake REPORT [NAME=VALUE]...
 *
 *   arg=A          a plugstack argument                cwd=DIR       the step's directory
 *   image=, save=, flag=  pyxis' options               env=NAME=VAL  in the step's environment
 *   before=CMD     as root there, before user_init     between=CMD   as root, after user_init
 *   task=CMD       as root, in each task               tasks=N       1 if not given
 *   stands=DIR     a task's directory             chroot=DIR    its root
 *   rest=CMD       as root, in the namespace of each task but the first
 *   closed=1       0, 1 and 2 are closed               leak=1        descriptors without CLOEXEC
 *   context=slurmd, local                              request=UID   a request of UID's waits
 *   contained=1    user_init runs beside the step manager, in other namespaces
 *
 * Or calls them as srun, sbatch and salloc do:   fake REPORT submit ...   (submit.c)
 *
 * What happened goes to REPORT, a line each, and each task's mount table to REPORT.N.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/spank.h>

#include "submit.h"

#define MOST 32

static int report = -1;
static char *report_name, *image, *save, *container, *flag, *context, *before, *between, *task, *cwd, *request,
	*stands, *root, *rest;
static char *args[MOST], *step_env[MOST];
static int arg_count, env_count, tasks = 1, closed, leak, contained;
static uid_t uid = 4242;
static gid_t gid = 4243, groups[] = {4243, 4244};
static int this_task = -1;
static char *first; /* the mount table before; the tasks inherit it, and it is no leak there */

static void write_report(const char *kind, const char *format, va_list values)
{
	char *text = NULL, *line = NULL;

	if (vasprintf(&text, format, values) < 0 ||
	    asprintf(&line, "%s %s\n", kind, text) < 0 || write(report, line, strlen(line)) < 0)
		abort();
	free(text);
	free(line);
}

#define REPORTER(name, kind)                                                                       \
	void name(const char *format, ...)                                                         \
	{                                                                                          \
		va_list values;                                                                    \
		va_start(values, format);                                                          \
		write_report(kind, format, values);                                                \
		va_end(values);                                                                    \
	}

REPORTER(slurm_info, "info")
REPORTER(slurm_error, "error")
REPORTER(slurm_verbose, "verbose")
REPORTER(slurm_spank_log, "user")
REPORTER(fact, "fact")

spank_context_t spank_context(void)
{
	if (!context)
		return S_CTX_REMOTE;
	if (strcmp(context, "allocator") == 0)
		return S_CTX_ALLOCATOR;
	return strcmp(context, "slurmd") == 0 ? S_CTX_SLURMD : S_CTX_LOCAL;
}

spank_err_t spank_option_getopt(spank_t sp, struct spank_option *option, char **value)
{
	(void)sp;
	*value = strcmp(option->name, "container-image") == 0	? image
		 : strcmp(option->name, "container-save") == 0 ? save
		 : strcmp(option->name, "container-name") == 0 ? container
							      : NULL;
	if (flag && strcmp(option->name, flag) == 0)
		return option->has_arg ? ESPANK_ERROR : ESPANK_SUCCESS;
	return option->has_arg && *value ? ESPANK_SUCCESS : ESPANK_ERROR;
}

spank_err_t spank_getenv(spank_t sp, const char *name, char *value, int size)
{
	size_t length = strlen(name);

	(void)sp;
	for (int i = 0; i < env_count; i++)
		if (strncmp(step_env[i], name, length) == 0 && step_env[i][length] == '=')
			return snprintf(value, (size_t)size, "%s", step_env[i] + length + 1) < size
				       ? ESPANK_SUCCESS
				       : ESPANK_NOSPACE;
	return ESPANK_ENV_NOEXIST;
}

static void drop_variable(const char *name)
{
	size_t length = strlen(name);
	int kept = 0;

	for (int i = 0; i < env_count; i++)
		if (strncmp(step_env[i], name, length) != 0 || step_env[i][length] != '=')
			step_env[kept++] = step_env[i];
	env_count = kept;
	step_env[kept] = NULL;
}

spank_err_t spank_unsetenv(spank_t sp, const char *name)
{
	int before = env_count;

	(void)sp;
	fact("unsetenv %s", name);
	drop_variable(name);
	return env_count < before ? ESPANK_SUCCESS : ESPANK_ENV_NOEXIST;
}

spank_err_t spank_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	static char *made[256]; /* a sanitizer would call them leaks */
	static int count;
	char *variable = NULL;

	(void)sp;
	fact("setenv %d %s=%s", overwrite, name, value);
	if (env_count == MOST - 1 || count == 256 || asprintf(&variable, "%s=%s", name, value) < 0)
		return ESPANK_ERROR;
	drop_variable(name);
	step_env[env_count++] = made[count++] = variable;
	return ESPANK_SUCCESS;
}

spank_err_t spank_get_item(spank_t sp, spank_item_t item, ...)
{
	va_list out;
	spank_err_t result = ESPANK_SUCCESS;

	(void)sp;
	va_start(out, item);
	if (item == S_JOB_UID)
		*va_arg(out, uid_t *) = uid;
	else if (item == S_JOB_GID)
		*va_arg(out, gid_t *) = gid;
	else if (item == S_JOB_ID)
		*va_arg(out, uint32_t *) = 77;
	else if (item == S_JOB_STEPID)
		*va_arg(out, uint32_t *) = 4294967291u; /* the batch script's */
	else if (item == S_TASK_ID && this_task >= 0)
		*va_arg(out, int *) = this_task;
	else if (item == S_JOB_ENV)
		*va_arg(out, char ***) = step_env; /* ends with NULL: MOST is never reached */
	else if (item == S_JOB_SUPPLEMENTARY_GIDS) {
		*va_arg(out, gid_t **) = groups;
		*va_arg(out, int *) = 2;
	} else
		result = ESPANK_BAD_ARG;
	va_end(out);
	return result;
}

static void check(int result, const char *what)
{
	if (result < 0) {
		fact("broken %s: %m", what);
		exit(2);
	}
}

static char *mounts(void)
{
	size_t size = 1 << 20;
	char *table = calloc(1, size);
	int fd = open("/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);

	for (ssize_t n, have = 0; (n = read(fd, table + have, size - 1 - (size_t)have)) > 0;)
		have += n;
	close(fd);
	return table;
}

static void read_arguments(int argc, char **argv)
{
	const struct {
		const char *name;
		char **value;
	} known[] = {{"image", &image},	  {"save", &save},     {"container", &container}, {"flag", &flag},	      {"context", &context},
		     {"before", &before}, {"between", &between}, {"task", &task},
		     {"cwd", &cwd},	  {"request", &request},   {"stands", &stands},
		     {"chroot", &root},	  {"rest", &rest}};

	for (int i = 2; i < argc; i++) {
		char *value = strchr(argv[i], '=');
		check(value && arg_count < MOST && env_count < MOST ? 0 : -1, argv[i]);
		*value++ = '\0';
		for (size_t k = 0; k < sizeof(known) / sizeof(known[0]); k++)
			if (strcmp(argv[i], known[k].name) == 0)
				*known[k].value = value;
		if (strcmp(argv[i], "arg") == 0)
			args[arg_count++] = value;
		else if (strcmp(argv[i], "env") == 0)
			step_env[env_count++] = value;
		else if (strcmp(argv[i], "tasks") == 0)
			tasks = atoi(value);
		else if (strcmp(argv[i], "closed") == 0)
			closed = 1;
		else if (strcmp(argv[i], "leak") == 0)
			leak = 1;
		else if (strcmp(argv[i], "contained") == 0)
			contained = 1;
	}
}

/* A request that waits for its answer, on a connection to a socket with a name, as slurmd's. */
static void hold_request(void)
{
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	int listener = socket(AF_UNIX, SOCK_STREAM, 0), client = socket(AF_UNIX, SOCK_STREAM, 0);

	snprintf(name.sun_path, sizeof(name.sun_path), "%s.sock", report_name);
	check(bind(listener, (struct sockaddr *)&name, sizeof(name)), "bind");
	check(chmod(name.sun_path, 0777), "chmod");
	check(listen(listener, 1), "listen");
	check(seteuid((uid_t)atoi(request)), "seteuid");
	check(connect(client, (struct sockaddr *)&name, sizeof(name)), "connect");
	check(seteuid(0), "seteuid");
	check(accept(listener, NULL, NULL), "accept");
}

/* As SlurmdParameters=contain_spank has it, since 24.05. */
static int call_contained(void *arg)
{
	(void)arg;
	check(seteuid(0), "seteuid");
	check(unshare(CLONE_NEWNS), "unshare");
	check(seteuid(uid), "seteuid");
	fact("user_init %d", slurm_spank_user_init(NULL, arg_count, args));
	_exit(0);
}

static void call_user_init(void)
{
	static char stack[1 << 20] __attribute__((aligned(16)));

	if (!contained)
		fact("user_init %d", slurm_spank_user_init(NULL, arg_count, args));
	else {
		pid_t pid = clone(call_contained, stack + sizeof(stack), CLONE_VM | SIGCHLD, NULL);
		check(waitpid(pid, NULL, 0), "clone");
	}
}

static void run_user_init(void)
{
	sigset_t all;

	if (leak)
		for (int fd = 10; fd < 1000; fd += 300)
			check(dup2(report, fd), "dup2");
	for (int fd = 0; closed && fd < 3; fd++)
		close(fd);
	signal(SIGPIPE, SIG_IGN);
	signal(SIGHUP, SIG_IGN);
	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL);
	umask(0777);
	check(setegid(gid), "setegid");
	check(setgroups(2, groups), "setgroups");
	check(seteuid(uid), "seteuid");
	call_user_init();
	fact("identity %d %d", geteuid(), getegid());
	check(seteuid(0), "seteuid");
	check(setegid(0), "setegid");
	check(setgroups(0, NULL), "setgroups");
	umask(022);
	sigprocmask(SIG_UNBLOCK, &all, NULL);
	fact("children %s", waitpid(-1, NULL, WNOHANG) < 0 ? "none" : "left");
}

static int descriptors(void)
{
	int count = 0;

	for (int fd = 0; fd < 1024; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

static void step_managers(int sig)
{
	(void)sig;
}

static int run_task(void)
{
	int open_before = descriptors();
	char *name = NULL;
	gid_t own[MOST];
	int count;

	check(setgroups(1, (gid_t[]){4711}), "setgroups");
	/* A task of 24.11 has the handlers of its step manager until it runs its program. */
	signal(SIGTERM, step_managers);
	if (rest && this_task > 0) {
		check(unshare(CLONE_NEWNS), "unshare");
		check(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "private");
		check(system(rest) ? -1 : 0, "rest");
	}
	if (root)
		check(chroot(root), "chroot");
	/* "/" is where setns(2) leaves it, where a job has its own namespace */
	check(chdir(stands ? stands : "/"), "chdir");
	fact("task %d", slurm_spank_task_init_privileged(NULL, arg_count, args));
	for (int i = 0; i < env_count; i++)
		fact("environ %s", step_env[i]);
	char *stood = getcwd(NULL, 0);
	fact("folder %s", stood);
	free(stood);
	fact("descriptors %d more", descriptors() - open_before);
	count = getgroups(MOST, own);
	fact("root %d %d %d %d %d %d", getuid(), geteuid(), getgid(), getegid(), count,
	     count == 1 ? (int)own[0] : -1);
	check(asprintf(&name, "%s.%d", report_name, this_task), "asprintf");
	FILE *file = fopen(name, "we");
	char *table = mounts();
	fputs(table, file);
	fclose(file);
	free(table);
	free(name);
	return task ? system(task) : 0;
}

int main(int argc, char **argv)
{
	report_name = argv[1];
	report = fcntl(open(report_name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644),
		       F_DUPFD_CLOEXEC, 100);
	if (argc > 3 && strcmp(argv[2], "submit") == 0) {
		context = argv[3];
		return submit(argc - 4, argv + 4);
	}
	read_arguments(argc, argv);
	/* As on a node: what a task mounts would come back here if it left propagation as it is. */
	check(unshare(CLONE_NEWNS), "unshare");
	check(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "private");
	check(mount(NULL, "/", NULL, MS_REC | MS_SHARED, NULL), "shared");
	fact("init %d", slurm_spank_init(NULL, arg_count, args));
	if (cwd)
		check(chdir(cwd), "cwd");
	if (before)
		check(system(before) ? -1 : 0, "before");
	if (request)
		hold_request();
	first = mounts();
	run_user_init();
	if (between)
		check(system(between) ? -1 : 0, "between");
	for (this_task = 0; this_task < tasks; this_task++)
		if (fork() == 0)
			exit(run_task() ? 1 : 0);
	for (int i = 0, status; i < tasks; i++)
		fact("ended %d", wait(&status) > 0 ? status : -1);
	char *last = mounts();
	fact("mounts %s", strcmp(first, last) == 0 ? "same" : "changed");
	free(first);
	free(last);
	return 0;
}
