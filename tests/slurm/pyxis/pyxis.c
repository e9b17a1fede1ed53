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
static char binds[2048], own[256], own_binds[4096];
static char mounts[4096];
static bool print_report, use_container = true;

/* What a step's tasks on a node have in common, as in pyxis. */
static struct {
	pthread_mutex_t mutex; /* robust: a task may be killed while it waits for the importer */
	bool asked;
	uint32_t ended;
	char path[4096]; /* that the importer has named */
} *common;

static int set_image(int val, const char *arg, int remote)
{
	(void)val, (void)remote;
	snprintf(image, sizeof(image), "%s", arg ? arg : "");
	return 0;
}

static int set_mounts(int val, const char *arg, int remote)
{
	(void)val, (void)remote;
	snprintf(mounts, sizeof(mounts), "%s", arg ? arg : "");
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
			print_report = true;
		else if (strcmp(av[i], "container=no") == 0)
			use_container = false;
		else if (strncmp(av[i], "importer=", 9) == 0)
			snprintf(importer, sizeof(importer), "%s", av[i] + 9);
		else if (strncmp(av[i], "binds=", 6) == 0)
			snprintf(binds, sizeof(binds), "%s", av[i] + 6);
		else if (strncmp(av[i], "own=", 4) == 0)
			snprintf(own, sizeof(own), "/%s", av[i] + 4);
		else if (strncmp(av[i], "unpack=", 7) == 0)
			snprintf(unpack_directory, sizeof(unpack_directory), "%s", av[i] + 7);
		else {
			slurm_error("pyxis stand-in: unknown argument %s", av[i]);
			return -1;
		}
	}
	return 0;
}

static int make_common(void)
{
	pthread_mutexattr_t attributes;

	common = mmap(NULL, sizeof(*common), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (common == MAP_FAILED || pthread_mutexattr_init(&attributes) ||
	    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) ||
	    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST))
		return -1;
	return pthread_mutex_init(&common->mutex, &attributes);
}

/* Where an importer may write, as pyxis has it: below a directory of the user's. */
int slurm_spank_user_init(spank_t sp, int ac, char **av)
{
	char own[64];
	uid_t uid = geteuid();

	(void)ac, (void)av;
	if (!image[0])
		spank_getenv(sp, "PYXIS_CONTAINER_IMAGE", image, sizeof(image));
	if (!importer[0] || seteuid(0) < 0)
		return 0;
	mkdir(RUNTIME, 0755);
	snprintf(own, sizeof(own), RUNTIME "/%u", uid);
	if (mkdir(own, 0700) == 0 && chown(own, uid, (gid_t)-1) < 0)
		slurm_error("pyxis stand-in: %s: %s", own, strerror(errno));
	return seteuid(uid) < 0 || make_common() ? -1 : 0;
}

/* pyxis has this one, and for that alone Slurm keeps the option variables from the Epilog. */
int slurm_spank_job_epilog(spank_t sp, int ac, char **av)
{
	(void)sp, (void)ac, (void)av;
	return 0;
}

/* The digest is made by a program that reads our very descriptor, not the path again. */
static void sha256(int fd, char digest[65])
{
	int out[2];
	size_t have = 0;
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
	while (have < 64 && (n = read(out[0], digest + have, 64 - have)) > 0)
		have += (size_t)n;
	digest[have == 64 ? 64 : 0] = '\0';
	close(out[0]);
	if (child > 0)
		waitpid(child, NULL, 0);
	lseek(fd, 0, SEEK_SET);
}

/* Type and mount point of the file system the descriptor is on: shows whether a bind is used. */
static void find_mount(int fd, char fs[64], char point[4096])
{
	char line[8192], path[64];
	int wanted = -1, id;
	FILE *file;

	snprintf(fs, 64, "?");
	snprintf(point, 4096, "?");
	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
	if ((file = fopen(path, "re"))) {
		while (fgets(line, sizeof(line), file))
			if (sscanf(line, "mnt_id: %d", &id) == 1)
				wanted = id;
		fclose(file);
	}
	if (!(file = fopen("/proc/self/mountinfo", "re")))
		return;
	while (fgets(line, sizeof(line), file)) {
		char *type = strstr(line, " - ");
		if (type && sscanf(line, "%d", &id) == 1 && id == wanted) {
			sscanf(line, "%*d %*d %*s %*s %4095s", point);
			sscanf(type, " - %63s", fs);
		}
	}
	fclose(file);
}

static void print_string(FILE *out, const char *name, const char *value)
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

static void report(spank_t sp, int fd, const struct stat *st, const char *error)
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
		sha256(fd, digest);
		find_mount(fd, fs, point);
	}
	fprintf(out, "{\"job\": %u, \"step\": %d, \"task\": %u", job, (int)step, task);
	fprintf(out, ", \"ino\": %ju, \"size\": %jd", (uintmax_t)st->st_ino, (intmax_t)st->st_size);
	fprintf(out, ", \"uid\": %u, \"gid\": %u, \"mode\": %u", st->st_uid, st->st_gid,
		st->st_mode & 07777);
	print_string(out, "node", node);
	print_string(out, "path", image);
	print_string(out, "dev", dev);
	print_string(out, "sha256", digest);
	print_string(out, "mount_fs", fs);
	print_string(out, "mount_point", point);
	print_string(out, "error", error);
	fputs("}\n", out);
	fclose(out);
	/* One write with O_APPEND: lines of several tasks never mix. */
	int log = report_file[0] ? open(report_file, O_WRONLY | O_APPEND | O_CLOEXEC) : -1;
	if (log >= 0 && write(log, line, size) < 0)
		slurm_error("pyxis stand-in: %s: %s", report_file, strerror(errno));
	if (log >= 0)
		close(log);
	if (print_report && write(STDOUT_FILENO, line, size) < 0)
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
static int unshare_mounts(void)
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
static int keep_sys_admin(void)
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
	struct stat before, now;
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
		    keep_sys_admin() < 0)
			_exit(1);
		/* srun waits for the end of all who have the task's stdout open. */
		for (int i = 0; i < 3; i++)
			dup2(null, i);
		fcntl(fd, F_SETFD, 0);
		execl("/usr/bin/squashfuse", "squashfuse", "-f", path, root, (char *)NULL);
		_exit(127);
	}
	for (int i = 0; server > 0 && i < MOUNT_SECONDS * 200; i++) {
		if (stat(root, &now) == 0 && now.st_dev != before.st_dev)
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
	char parent[2064];
	int status;

	snprintf(parent, sizeof(parent), "%s/XXXXXX", unpack_directory);
	if (!mkdtemp(parent))
		return -1;
	snprintf(tree, 4096, "%s/tree", parent);
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
static int bind_wanted(const char *root)
{
	char target[8192], *rest = mounts, *source;

	while ((source = strsep(&rest, ","))) {
		const char *place = strchr(source, ':') ? strchr(source, ':') + 1 : source;
		snprintf(target, sizeof(target), "%s%.*s", root, (int)strcspn(place, ":"), place);
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
		struct mntent *line;

		while (file && !failed && (line = getmntent(file))) {
			bool all = hasmntopt(line, "rbind");
			snprintf(target, sizeof(target), "%s%s", root, line->mnt_dir);
			failed = mount(line->mnt_fsname, target, NULL, MS_BIND | (all ? MS_REC : 0), NULL);
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
	static const char *const shown[] = {"proc", "sys", "dev", "tmp", "home", "shared"};
	/* A directory that every node has. What it held is out of sight in this namespace only. */
	const char *root = "/mnt";
	char target[64], source[16], tree[4096];
	char *cwd = getcwd(NULL, 0);

	if (unpack_directory[0] && unpack_image(tree) < 0)
		return -1;
	if (unshare_mounts() < 0)
		return -1;
	if (unpack_directory[0] ? mount(tree, root, NULL, MS_BIND, NULL) : mount_image(fd, root))
		return -1;
	for (size_t i = 0; i < sizeof(shown) / sizeof(shown[0]); i++) {
		snprintf(target, sizeof(target), "%s/%s", root, shown[i]);
		snprintf(source, sizeof(source), "/%s", shown[i]);
		if (access(target, F_OK) == 0 && mount(source, target, NULL, MS_BIND | MS_REC, NULL) < 0)
			return -1;
	}
	if (bind_wanted(root) < 0)
		return -1;
	if (binds[0] && (bind_fstabs(root, binds) < 0 || bind_fstabs(root, own_binds) < 0))
		return -1;
	if (chroot(root) < 0 || (chdir(cwd ? cwd : "/") < 0 && chdir("/") < 0))
		return -1;
	free(cwd);
	return 0;
}

/* As enroot_deny_env has it: what the user says of these does not reach the importer. */
static bool is_denied(const char *variable)
{
	static const char *const denied[] = {
		"PATH=", "LD_LIBRARY_PATH=", "LD_PRELOAD=", "SLURM_PROCID=", "SLURM_LOCALID=",
		"SLURM_TASK_PID=", "PMIX_RANK=", "PMI_FD=", "ENROOT_LIBRARY_PATH=",
		"ENROOT_SYSCONF_PATH=", "ENROOT_RUNTIME_PATH=", "ENROOT_CACHE_PATH=",
		"ENROOT_DATA_PATH=", "ENROOT_TEMP_PATH=", "ENROOT_ZSTD_OPTIONS=",
		"ENROOT_TRANSFER_RETRIES=", "ENROOT_CONNECT_TIMEOUT=",
		"ENROOT_MAX_CONNECTIONS=", "ENROOT_ALLOW_HTTP="};

	for (size_t i = 0; i < sizeof(denied) / sizeof(denied[0]); i++)
		if (strncmp(variable, denied[i], strlen(denied[i])) == 0)
			return true;
	return false;
}

/* Runs the importer with the job's environment; its output goes to `out`. */
static int run_importer(spank_t sp, const char *verb, const char *uri, int out)
{
	char **job = NULL;
	uid_t uid = 0;
	gid_t gid = 0;
	int status = -1;

	spank_get_item(sp, S_JOB_ENV, &job);
	spank_get_item(sp, S_JOB_UID, &uid);
	spank_get_item(sp, S_JOB_GID, &gid);
	pid_t child = fork();
	if (child == 0) {
		if (getuid() == 0 && (setgroups(0, NULL) < 0 || setresgid(gid, gid, gid) < 0 ||
				      setresuid(uid, uid, uid) < 0))
			_exit(126);
		const char *path = getenv("PATH");
		char *kept = path ? strdup(path) : NULL;
		clearenv(); /* what the step manager has is not the importer's */
		if (kept)
			setenv("PATH", kept, 1);
		for (; job && *job; job++)
			if (!is_denied(*job))
				putenv(*job);
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
	FILE *said;

	snprintf(uri, sizeof(uri), "%s%s", strstr(image, "://") ? "" : "docker://", image);
	if (pipe2(ends, O_CLOEXEC) < 0 || run_importer(sp, "get", uri, ends[1]) < 0)
		return -1;
	close(ends[1]);
	if ((said = fdopen(ends[0], "r")) && fgets(common->path, sizeof(common->path), said))
		common->path[strcspn(common->path, "\n")] = '\0';
	if (said)
		fclose(said);
	return common->path[0] == '/' ? 0 : -1;
}

/* Replaces `image` by that path. */
static int import_image(spank_t sp)
{
	int locked = pthread_mutex_lock(&common->mutex);

	if (locked == EOWNERDEAD)
		pthread_mutex_consistent(&common->mutex);
	else if (locked)
		return -1;
	if (!common->asked && ask_importer(sp) < 0)
		common->path[0] = '\0';
	common->asked = true;
	snprintf(image, sizeof(image), "%s", common->path);
	pthread_mutex_unlock(&common->mutex);
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
		print_report = strcmp(value, "1") == 0;
	bool imported = importer[0] && image[0] && image[0] != '.' && image[0] != '/';
	if (imported && import_image(sp) < 0) {
		slurm_spank_log("pyxis stand-in: %s could not import the image", importer);
		return -1;
	}
	if (image[0] != '.' && image[0] != '/')
		return 0;
	if (spank_getenv(sp, "ENROOT_CONFIG_PATH", own_binds, sizeof(own_binds)) &&
	    spank_getenv(sp, "HOME", own_binds, sizeof(own_binds) - sizeof(own)) == ESPANK_SUCCESS)
		strcat(own_binds, own);

	int fd = open(image, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0)
		error = errno;
	if (report_file[0] || print_report)
		report(sp, error ? -1 : fd, &st, error ? strerror(error) : NULL);
	if (error) {
		slurm_spank_log("pyxis stand-in: could not open %s: %s", image, strerror(error));
		return -1;
	}
	spank_get_item(sp, S_JOB_STEPID, &step);
	/* A batch script stays outside: in the image there is no srun for it. */
	if (use_container && step != SLURM_BATCH_SCRIPT && is_squashfs(fd) &&
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
	if (common && ++common->ended == tasks && image[0] && image[0] != '.' && image[0] != '/')
		run_importer(sp, "release", NULL, -1);
	return 0;
}
