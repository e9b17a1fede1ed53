/*
 * A stand-in for pyxis: does what a job can see of the real one before its container runs.
 *
 * Plugstack arguments:
 *   report=FILE    append one JSON line for each task that has a squashfs image; without it (and
 *                  without print) the image is opened and not read
 *   print          print that line on the task's stdout as well (or PYXIS_STANDIN_PRINT=1)
 *   container=no   run the task outside of the image even where FUSE is usable
 *   unpack=DIR     unpack the image below DIR, as `enroot create` does, and run the task in that
 *                  tree, which stays; without it, the image is mounted with squashfuse
 *   binds=DIR      bind what the fstabs in DIR/mounts.d say, and those in the user's own directory
 *   own=DIR        that one, below their HOME, if ENROOT_CONFIG_PATH names no other
 *   importer=PROGRAM  asked for the path of an image that a registry has, as pyxis 0.21 does
 *
 * As in pyxis, everything happens in task_init, as the job's user, and a value that begins
 * with '.' or '/' is the path of a squashfs file; the importer is asked by the first task of a step
 * on each node, for all. Other than pyxis, every task looks for itself and gets a container of its
 * own, so that a test sees what each task would have seen.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <grp.h>
#include <linux/capability.h>
#include <mntent.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

/* The name decides how the Prolog's variables are called: SPANK__SLURM_SPANK_OPTION_pyxis_... */
SPANK_PLUGIN(pyxis, 1)

#define MOUNT_SECONDS 10
#define RUNTIME "/run/pyxis"

static char image[4096];
static char report_file[4096];
static char unpack_directory[2048];
static char importer[2048];
/* No name here is the real program's: `forestage check` would take this for the real pyxis. */
static char bind_directory[2048], user_bind_directory[256], user_bind_path[4096];
static char container_mounts[4096];
static bool prints_report, uses_container = true;

/* What a step's tasks on a node have in common, as in pyxis. */
static struct {
	pthread_mutex_t mutex; /* robust: a task may be killed while it waits for the importer */
	bool is_imported;
	uint32_t ended_tasks;
	char image_path[4096]; /* that the importer has named */
} *shared;

static int set_image(int val, const char *arg, int remote)
{
	(void)val, (void)remote;
	snprintf(image, sizeof(image), "%s", arg ? arg : "");
	return 0;
}

static int set_mounts(int val, const char *arg, int remote)
{
	(void)val, (void)remote;
	snprintf(container_mounts, sizeof(container_mounts), "%s", arg ? arg : "");
	return 0;
}

static int ignore_value(int val, const char *arg, int remote)
{
	(void)val, (void)arg, (void)remote;
	return 0;
}

static struct spank_option options[] = {
	{"container-image", "IMAGE", "[pyxis stand-in] the container's image", 1, 0, set_image},
	{"container-mounts", "SRC:DST,…", "[pyxis stand-in] binds", 1, 3, set_mounts},
	{"container-save", "PATH", "[pyxis stand-in] seen, not done", 1, 1, ignore_value},
	{"container-name", "NAME", "[pyxis stand-in] seen, not done", 1, 2, ignore_value},
};

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	spank_context_t context = spank_context();

	/* An exported table `spank_options` would do for srun, but sbatch and salloc ignore it. */
	if (context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR || context == S_CTX_REMOTE)
		for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++)
			if (spank_option_register(sp, &options[i]) != ESPANK_SUCCESS)
				return -1;

	for (int i = 0; i < ac; i++) {
		if (strncmp(av[i], "report=", 7) == 0)
			snprintf(report_file, sizeof(report_file), "%s", av[i] + 7);
		else if (strcmp(av[i], "print") == 0)
			prints_report = true;
		else if (strcmp(av[i], "container=no") == 0)
			uses_container = false;
		else if (strncmp(av[i], "importer=", 9) == 0)
			snprintf(importer, sizeof(importer), "%s", av[i] + 9);
		else if (strncmp(av[i], "binds=", 6) == 0)
			snprintf(bind_directory, sizeof(bind_directory), "%s", av[i] + 6);
		else if (strncmp(av[i], "own=", 4) == 0)
			snprintf(user_bind_directory, sizeof(user_bind_directory), "/%s",
				 av[i] + 4);
		else if (strncmp(av[i], "unpack=", 7) == 0)
			snprintf(unpack_directory, sizeof(unpack_directory), "%s", av[i] + 7);
		else {
			slurm_error("pyxis stand-in: unknown argument %s", av[i]);
			return -1;
		}
	}
	return 0;
}

static int make_shared_state(void)
{
	pthread_mutexattr_t attributes;

	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	if (shared == MAP_FAILED || pthread_mutexattr_init(&attributes) ||
	    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) ||
	    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST))
		return -1;
	return pthread_mutex_init(&shared->mutex, &attributes);
}

/* Where an importer may write, as pyxis has it: below a directory of the user's. */
int slurm_spank_user_init(spank_t sp, int ac, char **av)
{
	char directory[64];
	uid_t uid = geteuid();

	(void)ac, (void)av;
	if (!image[0])
		spank_getenv(sp, "PYXIS_CONTAINER_IMAGE", image, sizeof(image));
	if (!importer[0] || seteuid(0) < 0)
		return 0;
	mkdir(RUNTIME, 0755);
	snprintf(directory, sizeof(directory), RUNTIME "/%u", uid);
	if (mkdir(directory, 0700) == 0 && chown(directory, uid, (gid_t)-1) < 0)
		slurm_error("pyxis stand-in: %s: %s", directory, strerror(errno));
	return seteuid(uid) < 0 || make_shared_state() ? -1 : 0;
}

/* pyxis has this one, and for that alone Slurm keeps the option variables from the Epilog. */
int slurm_spank_job_epilog(spank_t sp, int ac, char **av)
{
	(void)sp, (void)ac, (void)av;
	return 0;
}

/* The digest is made by a program that reads our very descriptor, not the path again. */
static void hash_file(int fd, char digest[65])
{
	int out[2];
	size_t length = 0;
	ssize_t n;

	digest[0] = '\0';
	if (pipe2(out, O_CLOEXEC) < 0)
		return;
	pid_t child = fork();
	if (child == 0) {
		dup2(fd, STDIN_FILENO);
		dup2(out[1], STDOUT_FILENO);
		execl("/usr/bin/sha256sum", "sha256sum", (char *)NULL);
		_exit(127);
	}
	close(out[1]);
	while (length < 64 && (n = read(out[0], digest + length, 64 - length)) > 0)
		length += (size_t)n;
	digest[length == 64 ? 64 : 0] = '\0';
	close(out[0]);
	if (child > 0)
		waitpid(child, NULL, 0);
	lseek(fd, 0, SEEK_SET);
}

/* Type and mount point of the file system the descriptor is on: shows whether a bind is used. */
static void find_mount_point(int fd, char fs[64], char point[4096])
{
	char line[8192], path[64];
	int mount_id = -1, id;
	FILE *file;

	snprintf(fs, 64, "?");
	snprintf(point, 4096, "?");
	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
	if ((file = fopen(path, "re"))) {
		while (fgets(line, sizeof(line), file))
			if (sscanf(line, "mnt_id: %d", &id) == 1)
				mount_id = id;
		fclose(file);
	}
	if (!(file = fopen("/proc/self/mountinfo", "re")))
		return;
	while (fgets(line, sizeof(line), file)) {
		char *type = strstr(line, " - ");
		if (type && sscanf(line, "%d", &id) == 1 && id == mount_id) {
			sscanf(line, "%*d %*d %*s %*s %4095s", point);
			sscanf(type, " - %63s", fs);
		}
	}
	fclose(file);
}

static void print_json_string(FILE *out, const char *name, const char *value)
{
	fprintf(out, ", \"%s\": ", name);
	if (!value) {
		fputs("null", out);
		return;
	}
	fputc('"', out);
	for (const unsigned char *c = (const unsigned char *)value; *c; c++)
		fprintf(out, *c < ' ' || *c == '"' || *c == '\\' ? "\\u%04x" : "%c", *c);
	fputc('"', out);
}

static void report_task(spank_t sp, int fd, const struct stat *st, const char *error)
{
	char digest[65] = "", node[256] = "", fs[64] = "?", point[4096] = "?", dev[32];
	uint32_t job = 0, step = 0, task = 0;
	char *line = NULL;
	size_t size = 0;
	FILE *out = open_memstream(&line, &size);

	if (!out)
		return;
	spank_get_item(sp, S_JOB_ID, &job);
	spank_get_item(sp, S_JOB_STEPID, &step);
	spank_get_item(sp, S_TASK_GLOBAL_ID, &task);
	spank_getenv(sp, "SLURMD_NODENAME", node, sizeof(node));
	snprintf(dev, sizeof(dev), "%u:%u", major(st->st_dev), minor(st->st_dev));
	if (fd >= 0) {
		hash_file(fd, digest);
		find_mount_point(fd, fs, point);
	}
	fprintf(out, "{\"job\": %u, \"step\": %d, \"task\": %u", job, (int)step, task);
	fprintf(out, ", \"ino\": %ju, \"size\": %jd", (uintmax_t)st->st_ino, (intmax_t)st->st_size);
	fprintf(out, ", \"uid\": %u, \"gid\": %u, \"mode\": %u", st->st_uid, st->st_gid,
		st->st_mode & 07777);
	print_json_string(out, "node", node);
	print_json_string(out, "path", image);
	print_json_string(out, "dev", dev);
	print_json_string(out, "sha256", digest);
	print_json_string(out, "mount_fs", fs);
	print_json_string(out, "mount_point", point);
	print_json_string(out, "error", error);
	fputs("}\n", out);
	fclose(out);
	/* One write with O_APPEND: lines of several tasks never mix. */
	int log = report_file[0] ? open(report_file, O_WRONLY | O_APPEND | O_CLOEXEC) : -1;
	if (log >= 0 && write(log, line, size) < 0)
		slurm_error("pyxis stand-in: %s: %s", report_file, strerror(errno));
	if (log >= 0)
		close(log);
	if (prints_report && write(STDOUT_FILENO, line, size) < 0)
		slurm_error("pyxis stand-in: stdout: %s", strerror(errno));
	free(line);
}

static int write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : write(fd, text, strlen(text));

	if (fd >= 0)
		close(fd);
	return n < 0 ? -1 : 0;
}

/* A user namespace in which the user has kept the uid and may mount. */
static int enter_user_namespace(void)
{
	char map[64];
	uid_t uid = geteuid();
	gid_t gid = getegid();

	/* After the step manager's setuid our /proc/self is root's; its maps could not be written. */
	if (prctl(PR_SET_DUMPABLE, 1) < 0 || unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0)
		return -1;
	snprintf(map, sizeof(map), "%u %u 1", uid, uid);
	if (write_file("/proc/self/uid_map", map) < 0 ||
	    write_file("/proc/self/setgroups", "deny") < 0)
		return -1;
	snprintf(map, sizeof(map), "%u %u 1", gid, gid);
	if (write_file("/proc/self/gid_map", map) < 0)
		return -1;
	return mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL);
}

/* Lets a program that this process executes mount: over exec, only ambient capabilities last. */
static int raise_ambient_sys_admin(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct sets[2];

	if (syscall(SYS_capget, &header, sets) < 0)
		return -1;
	sets[0].inheritable |= 1u << CAP_SYS_ADMIN;
	if (syscall(SYS_capset, &header, sets) < 0)
		return -1;
	return prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_SYS_ADMIN, 0, 0);
}

/* Mounts the open image on root. The server is the task's child and ends with it. */
static int mount_image(int fd, const char *root)
{
	struct stat before, after;
	char path[64];
	pid_t parent = getpid();

	if (stat(root, &before) < 0)
		return -1;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	pid_t server = fork();
	if (server == 0) {
		int null = open("/dev/null", O_RDWR);
		/* No daemon: it would escape proctrack/linuxproc and keep the mount for ever. */
		if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != parent ||
		    raise_ambient_sys_admin() < 0)
			_exit(1);
		/* srun waits for the end of all who have the task's stdout open. */
		for (int i = 0; i < 3; i++)
			dup2(null, i);
		fcntl(fd, F_SETFD, 0);
		execl("/usr/bin/squashfuse", "squashfuse", "-f", path, root, (char *)NULL);
		_exit(127);
	}
	for (int i = 0; server > 0 && i < MOUNT_SECONDS * 200; i++) {
		if (stat(root, &after) == 0 && after.st_dev != before.st_dev)
			return 0;
		if (waitpid(server, NULL, WNOHANG) == server) {
			errno = EIO;
			return -1;
		}
		nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
	}
	errno = ETIMEDOUT;
	return -1;
}

/* Unpacks the image, by its path as the real one does, into a new directory. */
static int unpack_image(char tree[4096])
{
	char directory[2064];
	int status;

	snprintf(directory, sizeof(directory), "%s/XXXXXX", unpack_directory);
	if (!mkdtemp(directory))
		return -1;
	snprintf(tree, 4096, "%s/tree", directory);
	pid_t child = fork();
	if (child == 0) {
		int null = open("/dev/null", O_RDWR);
		for (int i = 0; i < 3; i++)
			dup2(null, i);
		execl("/usr/bin/unsquashfs", "unsquashfs", "-no-progress", "-dest", tree, image,
		      (char *)NULL);
		_exit(127);
	}
	if (child < 0 || waitpid(child, &status, 0) < 0)
		return -1;
	errno = EIO;
	return status == 0 ? 0 : -1;
}

/*
 * SRC[:DST] of --container-mounts, with all that is mounted below. The image has to have DST: the
 * real one makes it, in an overlay.
 */
static int bind_container_mounts(const char *root)
{
	char target[8192], *rest = container_mounts, *source;

	while ((source = strsep(&rest, ","))) {
		const char *destination = strchr(source, ':') ? strchr(source, ':') + 1 : source;
		snprintf(target, sizeof(target), "%s%.*s", root, (int)strcspn(destination, ":"),
			 destination);
		source[strcspn(source, ":")] = '\0';
		if (*source && mount(source, target, NULL, MS_BIND | MS_REC, NULL) < 0)
			return -1;
	}
	return 0;
}

/* As enroot's runtime.sh: a line without rbind binds nothing of what is mounted below. */
static int bind_fstabs(const char *root, const char *folder)
{
	char pattern[4200], target[8192];
	int failed = 0;
	glob_t found;

	snprintf(pattern, sizeof(pattern), "%s/mounts.d/*.fstab", folder);
	if (glob(pattern, 0, NULL, &found))
		return 0;
	for (size_t i = 0; i < found.gl_pathc && !failed; i++) {
		FILE *file = setmntent(found.gl_pathv[i], "re");
		struct mntent *entry;

		while (file && !failed && (entry = getmntent(file))) {
			bool is_recursive = hasmntopt(entry, "rbind");
			snprintf(target, sizeof(target), "%s%s", root, entry->mnt_dir);
			failed = mount(entry->mnt_fsname, target, NULL,
				       MS_BIND | (is_recursive ? MS_REC : 0), NULL);
		}
		if (file)
			endmntent(file);
	}
	globfree(&found);
	return failed;
}

/* Where the image has such directories, the node's own are seen, as enroot's hooks do it. */
static int enter_image(int fd)
{
	static const char *const node_directories[] = {"proc", "sys",  "dev",
						       "tmp",  "home", "shared"};
	/* A directory that every node has. What it held is out of sight in this namespace only. */
	const char *root = "/mnt";
	char target[64], source[16], tree[4096];
	char *cwd = getcwd(NULL, 0);

	if (unpack_directory[0] && unpack_image(tree) < 0)
		return -1;
	if (enter_user_namespace() < 0)
		return -1;
	if (unpack_directory[0] ? mount(tree, root, NULL, MS_BIND, NULL) : mount_image(fd, root))
		return -1;
	for (size_t i = 0; i < sizeof(node_directories) / sizeof(node_directories[0]); i++) {
		snprintf(target, sizeof(target), "%s/%s", root, node_directories[i]);
		snprintf(source, sizeof(source), "/%s", node_directories[i]);
		if (access(target, F_OK) == 0 && mount(source, target, NULL, MS_BIND | MS_REC, NULL) < 0)
			return -1;
	}
	if (bind_container_mounts(root) < 0)
		return -1;
	if (bind_directory[0] &&
	    (bind_fstabs(root, bind_directory) < 0 || bind_fstabs(root, user_bind_path) < 0))
		return -1;
	if (chroot(root) < 0 || (chdir(cwd ? cwd : "/") < 0 && chdir("/") < 0))
		return -1;
	free(cwd);
	return 0;
}

/* As enroot_deny_env has it: what the user says of these does not reach the importer. */
static bool is_denied_variable(const char *variable)
{
	static const char *const denied_variables[] = {
		"PATH=", "LD_LIBRARY_PATH=", "LD_PRELOAD=", "SLURM_PROCID=", "SLURM_LOCALID=",
		"SLURM_TASK_PID=", "PMIX_RANK=", "PMI_FD=", "ENROOT_LIBRARY_PATH=",
		"ENROOT_SYSCONF_PATH=", "ENROOT_RUNTIME_PATH=", "ENROOT_CACHE_PATH=",
		"ENROOT_DATA_PATH=", "ENROOT_TEMP_PATH=", "ENROOT_ZSTD_OPTIONS=",
		"ENROOT_TRANSFER_RETRIES=", "ENROOT_CONNECT_TIMEOUT=",
		"ENROOT_MAX_CONNECTIONS=", "ENROOT_ALLOW_HTTP="};

	for (size_t i = 0; i < sizeof(denied_variables) / sizeof(denied_variables[0]); i++)
		if (strncmp(variable, denied_variables[i], strlen(denied_variables[i])) == 0)
			return true;
	return false;
}

/* Runs the importer with the job's environment; its output goes to `out`. */
static int run_importer(spank_t sp, const char *verb, const char *uri, int out)
{
	char **variables = NULL;
	uid_t uid = 0;
	gid_t gid = 0;
	int status = -1;

	spank_get_item(sp, S_JOB_ENV, &variables);
	spank_get_item(sp, S_JOB_UID, &uid);
	spank_get_item(sp, S_JOB_GID, &gid);
	pid_t child = fork();
	if (child == 0) {
		if (getuid() == 0 && (setgroups(0, NULL) < 0 || setresgid(gid, gid, gid) < 0 ||
				      setresuid(uid, uid, uid) < 0))
			_exit(126);
		const char *path = getenv("PATH");
		char *path_copy = path ? strdup(path) : NULL;
		clearenv(); /* what the step manager has is not the importer's */
		if (path_copy)
			setenv("PATH", path_copy, 1);
		for (; variables && *variables; variables++)
			if (!is_denied_variable(*variables))
				putenv(*variables);
		setenv("PYXIS_RUNTIME_PATH", RUNTIME, 1);
		int null = open("/dev/null", O_RDWR);
		dup2(null, STDIN_FILENO);
		dup2(out < 0 ? null : out, STDOUT_FILENO);
		execl(importer, importer, verb, uri, (char *)NULL);
		_exit(127);
	}
	return child > 0 && waitpid(child, &status, 0) == child && status == 0 ? 0 : -1;
}

/* Notes the path that the importer names: its first line. */
static int ask_importer(spank_t sp)
{
	char uri[4096 + 16];
	int ends[2];
	FILE *output;

	snprintf(uri, sizeof(uri), "%s%s", strstr(image, "://") ? "" : "docker://", image);
	if (pipe2(ends, O_CLOEXEC) < 0 || run_importer(sp, "get", uri, ends[1]) < 0)
		return -1;
	close(ends[1]);
	if ((output = fdopen(ends[0], "r")) &&
	    fgets(shared->image_path, sizeof(shared->image_path), output))
		shared->image_path[strcspn(shared->image_path, "\n")] = '\0';
	if (output)
		fclose(output);
	return shared->image_path[0] == '/' ? 0 : -1;
}

/* Replaces `image` by that path. */
static int import_image(spank_t sp)
{
	int lock_error = pthread_mutex_lock(&shared->mutex);

	if (lock_error == EOWNERDEAD)
		pthread_mutex_consistent(&shared->mutex);
	else if (lock_error)
		return -1;
	if (!shared->is_imported && ask_importer(sp) < 0)
		shared->image_path[0] = '\0';
	shared->is_imported = true;
	snprintf(image, sizeof(image), "%s", shared->image_path);
	pthread_mutex_unlock(&shared->mutex);
	return image[0] ? 0 : -1;
}

static bool is_squashfs(int fd)
{
	char magic[4];

	return pread(fd, magic, 4, 0) == 4 && memcmp(magic, "hsqs", 4) == 0;
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	struct stat st = {0};
	uint32_t step = 0;
	char value[8];
	int error = 0;

	(void)ac, (void)av;
	if (spank_getenv(sp, "PYXIS_STANDIN_PRINT", value, sizeof(value)) == ESPANK_SUCCESS)
		prints_report = strcmp(value, "1") == 0;
	bool is_registry_image = importer[0] && image[0] && image[0] != '.' && image[0] != '/';
	if (is_registry_image && import_image(sp) < 0) {
		slurm_spank_log("pyxis stand-in: %s could not import the image", importer);
		return -1;
	}
	if (image[0] != '.' && image[0] != '/')
		return 0;
	if (spank_getenv(sp, "ENROOT_CONFIG_PATH", user_bind_path, sizeof(user_bind_path)) &&
	    spank_getenv(sp, "HOME", user_bind_path,
			 sizeof(user_bind_path) - sizeof(user_bind_directory)) == ESPANK_SUCCESS)
		strcat(user_bind_path, user_bind_directory);

	int fd = open(image, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0)
		error = errno;
	if (report_file[0] || prints_report)
		report_task(sp, error ? -1 : fd, &st, error ? strerror(error) : NULL);
	if (error) {
		slurm_spank_log("pyxis stand-in: could not open %s: %s", image, strerror(error));
		return -1;
	}
	spank_get_item(sp, S_JOB_STEPID, &step);
	/* A batch script stays outside: in the image there is no srun for it. */
	if (uses_container && step != SLURM_BATCH_SCRIPT && is_squashfs(fd) &&
	    access("/dev/fuse", R_OK | W_OK) == 0 && enter_image(fd) < 0) {
		slurm_spank_log("pyxis stand-in: could not start %s: %s", image,
				strerror(errno));
		return -1;
	}
	close(fd);
	return 0;
}

/* In the step manager, outside of all that the tasks mounted; for the last of them. */
int slurm_spank_task_exit(spank_t sp, int ac, char **av)
{
	uint32_t tasks = 0;

	(void)ac, (void)av;
	spank_get_item(sp, S_JOB_LOCAL_TASK_COUNT, &tasks);
	if (shared && ++shared->ended_tasks == tasks && image[0] && image[0] != '.' &&
	    image[0] != '/')
		run_importer(sp, "release", NULL, -1);
	return 0;
}
