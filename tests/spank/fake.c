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

#define MAX_ITEMS 32

static int report_fd = -1;
static char *report_path, *image, *save, *container, *flag, *context, *before_command,
	*between_command, *task_command, *step_directory, *request_uid, *task_directory, *task_root,
	*rest_command;
static char *plugin_arguments[MAX_ITEMS], *step_env[MAX_ITEMS];
static int argument_count, env_count, task_count = 1;
static int has_closed_streams, leaks_descriptors, is_contained;
static uid_t uid = 4242;
static gid_t gid = 4243, groups[] = {4243, 4244};
static int task_index = -1;
/* The mount table before; the tasks inherit it, and it is no leak there. */
static char *first_mounts;

static void write_report(const char *kind, const char *format, va_list values)
{
	char *text = NULL, *line = NULL;

	if (vasprintf(&text, format, values) < 0 || asprintf(&line, "%s %s\n", kind, text) < 0 ||
	    write(report_fd, line, strlen(line)) < 0)
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
REPORTER(report_fact, "fact")

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

static void remove_variable(const char *name)
{
	size_t length = strlen(name);
	int kept_count = 0;

	for (int i = 0; i < env_count; i++)
		if (strncmp(step_env[i], name, length) != 0 || step_env[i][length] != '=')
			step_env[kept_count++] = step_env[i];
	env_count = kept_count;
	step_env[kept_count] = NULL;
}

spank_err_t spank_unsetenv(spank_t sp, const char *name)
{
	int count_before = env_count;

	(void)sp;
	report_fact("unsetenv %s", name);
	remove_variable(name);
	return env_count < count_before ? ESPANK_SUCCESS : ESPANK_ENV_NOEXIST;
}

spank_err_t spank_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	static char *variables[256]; /* a sanitizer would call them leaks */
	static int count;
	char *variable = NULL;

	(void)sp;
	report_fact("setenv %d %s=%s", overwrite, name, value);
	if (env_count == MAX_ITEMS - 1 || count == 256 ||
	    asprintf(&variable, "%s=%s", name, value) < 0)
		return ESPANK_ERROR;
	remove_variable(name);
	step_env[env_count++] = variables[count++] = variable;
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
	else if (item == S_TASK_ID && task_index >= 0)
		*va_arg(out, int *) = task_index;
	else if (item == S_JOB_ENV)
		*va_arg(out, char ***) = step_env; /* ends with NULL: MAX_ITEMS is never reached */
	else if (item == S_JOB_SUPPLEMENTARY_GIDS) {
		*va_arg(out, gid_t **) = groups;
		*va_arg(out, int *) = 2;
	} else
		result = ESPANK_BAD_ARG;
	va_end(out);
	return result;
}

static void exit_on_error(int result, const char *what)
{
	if (result < 0) {
		report_fact("broken %s: %m", what);
		exit(2);
	}
}

static char *read_mount_table(void)
{
	size_t size = 1 << 20;
	char *table = calloc(1, size);
	int fd = open("/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);

	for (ssize_t n, have = 0; (n = read(fd, table + have, size - 1 - (size_t)have)) > 0;)
		have += n;
	close(fd);
	return table;
}

static void parse_arguments(int argc, char **argv)
{
	const struct {
		const char *name;
		char **value;
	} options[] = {{"image", &image},
		       {"save", &save},
		       {"container", &container},
		       {"flag", &flag},
		       {"context", &context},
		       {"before", &before_command},
		       {"between", &between_command},
		       {"task", &task_command},
		       {"cwd", &step_directory},
		       {"request", &request_uid},
		       {"stands", &task_directory},
		       {"chroot", &task_root},
		       {"rest", &rest_command}};

	for (int i = 2; i < argc; i++) {
		char *value = strchr(argv[i], '=');
		exit_on_error(value && argument_count < MAX_ITEMS && env_count < MAX_ITEMS ? 0 : -1,
			      argv[i]);
		*value++ = '\0';
		for (size_t k = 0; k < sizeof(options) / sizeof(options[0]); k++)
			if (strcmp(argv[i], options[k].name) == 0)
				*options[k].value = value;
		if (strcmp(argv[i], "arg") == 0)
			plugin_arguments[argument_count++] = value;
		else if (strcmp(argv[i], "env") == 0)
			step_env[env_count++] = value;
		else if (strcmp(argv[i], "tasks") == 0)
			task_count = atoi(value);
		else if (strcmp(argv[i], "closed") == 0)
			has_closed_streams = 1;
		else if (strcmp(argv[i], "leak") == 0)
			leaks_descriptors = 1;
		else if (strcmp(argv[i], "contained") == 0)
			is_contained = 1;
	}
}

/* A request that waits for its answer, on a connection to a socket with a name, as slurmd's. */
static void hold_request(void)
{
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	int listener = socket(AF_UNIX, SOCK_STREAM, 0), client = socket(AF_UNIX, SOCK_STREAM, 0);

	snprintf(name.sun_path, sizeof(name.sun_path), "%s.sock", report_path);
	exit_on_error(bind(listener, (struct sockaddr *)&name, sizeof(name)), "bind");
	exit_on_error(chmod(name.sun_path, 0777), "chmod");
	exit_on_error(listen(listener, 1), "listen");
	exit_on_error(seteuid((uid_t)atoi(request_uid)), "seteuid");
	exit_on_error(connect(client, (struct sockaddr *)&name, sizeof(name)), "connect");
	exit_on_error(seteuid(0), "seteuid");
	exit_on_error(accept(listener, NULL, NULL), "accept");
}

/* As SlurmdParameters=contain_spank has it, since 24.05. */
static int run_contained_user_init(void *arg)
{
	(void)arg;
	exit_on_error(seteuid(0), "seteuid");
	exit_on_error(unshare(CLONE_NEWNS), "unshare");
	exit_on_error(seteuid(uid), "seteuid");
	report_fact("user_init %d", slurm_spank_user_init(NULL, argument_count, plugin_arguments));
	_exit(0);
}

static void call_user_init(void)
{
	static char stack[1 << 20] __attribute__((aligned(16)));

	if (!is_contained)
		report_fact("user_init %d",
			    slurm_spank_user_init(NULL, argument_count, plugin_arguments));
	else {
		pid_t pid = clone(run_contained_user_init, stack + sizeof(stack),
				  CLONE_VM | SIGCHLD, NULL);
		exit_on_error(waitpid(pid, NULL, 0), "clone");
	}
}

static void run_user_init(void)
{
	sigset_t all;

	if (leaks_descriptors)
		for (int fd = 10; fd < 1000; fd += 300)
			exit_on_error(dup2(report_fd, fd), "dup2");
	for (int fd = 0; has_closed_streams && fd < 3; fd++)
		close(fd);
	signal(SIGPIPE, SIG_IGN);
	signal(SIGHUP, SIG_IGN);
	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL);
	umask(0777);
	exit_on_error(setegid(gid), "setegid");
	exit_on_error(setgroups(2, groups), "setgroups");
	exit_on_error(seteuid(uid), "seteuid");
	call_user_init();
	report_fact("identity %d %d", geteuid(), getegid());
	exit_on_error(seteuid(0), "seteuid");
	exit_on_error(setegid(0), "setegid");
	exit_on_error(setgroups(0, NULL), "setgroups");
	umask(022);
	sigprocmask(SIG_UNBLOCK, &all, NULL);
	report_fact("children %s", waitpid(-1, NULL, WNOHANG) < 0 ? "none" : "left");
}

static int count_descriptors(void)
{
	int count = 0;

	for (int fd = 0; fd < 1024; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

static void ignore_signal(int sig)
{
	(void)sig;
}

static int run_task(void)
{
	int open_before = count_descriptors();
	char *table_path = NULL;
	gid_t task_groups[MAX_ITEMS];
	int count;

	exit_on_error(setgroups(1, (gid_t[]){4711}), "setgroups");
	/* A task of 24.11 has the handlers of its step manager until it runs its program. */
	signal(SIGTERM, ignore_signal);
	if (rest_command && task_index > 0) {
		exit_on_error(unshare(CLONE_NEWNS), "unshare");
		exit_on_error(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "private");
		exit_on_error(system(rest_command) ? -1 : 0, "rest");
	}
	if (task_root)
		exit_on_error(chroot(task_root), "chroot");
	/* "/" is where setns(2) leaves it, where a job has its own namespace */
	exit_on_error(chdir(task_directory ? task_directory : "/"), "chdir");
	report_fact("task %d",
		    slurm_spank_task_init_privileged(NULL, argument_count, plugin_arguments));
	for (int i = 0; i < env_count; i++)
		report_fact("environ %s", step_env[i]);
	char *working_directory = getcwd(NULL, 0);
	report_fact("folder %s", working_directory);
	free(working_directory);
	report_fact("descriptors %d more", count_descriptors() - open_before);
	count = getgroups(MAX_ITEMS, task_groups);
	report_fact("root %d %d %d %d %d %d", getuid(), geteuid(), getgid(), getegid(), count,
		    count == 1 ? (int)task_groups[0] : -1);
	exit_on_error(asprintf(&table_path, "%s.%d", report_path, task_index), "asprintf");
	FILE *file = fopen(table_path, "we");
	char *table = read_mount_table();
	fputs(table, file);
	fclose(file);
	free(table);
	free(table_path);
	return task_command ? system(task_command) : 0;
}

int main(int argc, char **argv)
{
	report_path = argv[1];
	report_fd = fcntl(open(report_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644),
			  F_DUPFD_CLOEXEC, 100);
	if (argc > 3 && strcmp(argv[2], "submit") == 0) {
		context = argv[3];
		return submit(argc - 4, argv + 4);
	}
	parse_arguments(argc, argv);
	/* As on a node: what a task mounts would come back here if it left propagation as it is. */
	exit_on_error(unshare(CLONE_NEWNS), "unshare");
	exit_on_error(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "private");
	exit_on_error(mount(NULL, "/", NULL, MS_REC | MS_SHARED, NULL), "shared");
	report_fact("init %d", slurm_spank_init(NULL, argument_count, plugin_arguments));
	if (step_directory)
		exit_on_error(chdir(step_directory), "cwd");
	if (before_command)
		exit_on_error(system(before_command) ? -1 : 0, "before");
	if (request_uid)
		hold_request();
	first_mounts = read_mount_table();
	run_user_init();
	if (between_command)
		exit_on_error(system(between_command) ? -1 : 0, "between");
	for (task_index = 0; task_index < task_count; task_index++)
		if (fork() == 0)
			exit(run_task() ? 1 : 0);
	for (int i = 0, status; i < task_count; i++)
		report_fact("ended %d", wait(&status) > 0 ? status : -1);
	char *last_mounts = read_mount_table();
	report_fact("mounts %s", strcmp(first_mounts, last_mounts) == 0 ? "same" : "changed");
	free(first_mounts);
	free(last_mounts);
	return 0;
}
