/*
 * In which mount namespace does a task see what is mounted for it? In a copy of its own.
 *
 * mount(2) over a file or directory waits for its inode, and no signal ends that wait. Whoever can
 * read the file holds the inode for as long as they like: by a read or a write whose memory is a
 * FUSE of theirs. A task that waits so drains the node, and a child that is killed there still
 * mounts once it goes on. So:
 *
 *   task                                   mounter, in no cgroup of the step, nobody's descendant
 *   fetches mounts that a program serves
 *   forks it, waits up to QUEUE_TIMEOUT_MS
 *                                          unshare(2): a copy of the task's mount namespace
 *                                          queues for the locks of a mount
 *   waits up to MOUNT_TIMEOUT_MS
 *                                          mounts there, reports what fails
 *                                          gives away that namespace, and its root and directory
 *   setns(2), chroot(2), fchdir(2)         notes what failed
 *
 * If it is late the task stays where it is: what is mounted later is mounted where nobody is. What
 * hung is left out of a second try, so that it keeps nothing else from being shown. On a busy node with
 * many tasks most of the time goes by in the queue, which says nothing of a mount: so its clock is
 * another one.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "plugin.h"

#define MOUNT_TIMEOUT_MS 2000  /* for each mount, from when it has its locks */
#define QUEUE_TIMEOUT_MS 30000 /* for all that comes before the mounts of a task, in all tries */
#define MAX_TRIES 2
#define MOUNTER_NAME "forestage-task" /* of the process that mounts */
#define CGROUP_ROOT "/sys/fs/cgroup"
#define HANG_SUFFIX " (" MOUNT_HANGS ")"
#define MOUNT_HANGS_TEXT "a mount over it hangs" HANG_SUFFIX
#define QUEUE_TEXT "the mounts of other tasks took too long (" MOUNT_QUEUE ")"

/* What a mounter tells its task: that it queues for a mount, begins it, has failed, or ends. */
struct mounter_message {
	enum { MESSAGE_QUEUES, MESSAGE_MOUNTS, MESSAGE_FAILED, MESSAGE_ENTER, MESSAGE_STAY } kind;
	int mount_index;
	enum failure_cause cause;
	int error_number;
	char failure[FAILURE_BYTES];
};

/* What comes with MESSAGE_ENTER: the namespace, and where the task stands in it. */
struct task_location {
	int namespace_fd;
	int root_fd;
	int directory_fd;
};

static bool has_own_namespace;     /* whether this process has a mount namespace of its own */
static bool namespace_has_changed; /* whether that is one to enter */

void mark_namespace_changed(void)
{
	namespace_has_changed = true;
}

static bool is_slurm_cgroup(char *path)
{
	static const char *const patterns[] = {SLURM_CGROUP_NAMES};
	char *name;

	while ((name = strsep(&path, "/\n")))
		for (size_t i = 0; i < sizeof(patterns) / sizeof(*patterns); i++)
			if (fnmatch(patterns[i], name, 0) == 0)
				return true;
	return false;
}

/* False also in a job's own user namespace: then it stays. */
static bool move_to_cgroup(const char *directory, const char *name)
{
	char path[PATH_MAX];

	snprintf(path, sizeof(path), "%s/%s/cgroup.procs", directory, name);
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	bool moved = fd >= 0 && write(fd, "0", 1) == 1;
	if (fd >= 0)
		close(fd);
	return moved;
}

/* As leave_job_cgroups() in system/forked_child.py: Slurm waits for what hangs in a step's cgroups, and drains. */
static void leave_slurm_cgroups(void)
{
	FILE *groups =
		move_to_cgroup(HOLD_CGROUP, "serve") ? NULL : fopen("/proc/self/cgroup", "re");
	char *line = NULL;
	size_t size = 0;

	while (groups && getline(&line, &size, groups) > 0) { /* number:controllers:path */
		char *group = line, *controllers;
		strsep(&group, ":");
		controllers = strsep(&group, ":");
		if (!group || !is_slurm_cgroup(group))
			continue;
		move_to_cgroup(CGROUP_ROOT, strncmp(controllers, "name=", 5) == 0 ? controllers + 5
										  : controllers);
		if (!*controllers)
			move_to_cgroup(CGROUP_ROOT, "unified");
	}
	free(line);
	if (groups)
		fclose(groups);
}

static bool is_server_fd(int fd, const struct task_mount *mounts, int count)
{
	for (int i = 0; i < count; i++)
		if (*mounts[i].server_fd == fd)
			return true;
	return false;
}

/* All but `socket_fd` and what serves the mounts: a reader at their other ends would wait for us. */
static void close_other_descriptors(int socket_fd, const struct task_mount *mounts, int count)
{
	DIR *directory = opendir("/proc/self/fd");
	struct dirent *entry;
	int null_fd;

	if (!directory)
		_exit(1);
	while ((entry = readdir(directory))) {
		int fd = atoi(entry->d_name);
		if (entry->d_name[0] != '.' && fd != socket_fd && fd != dirfd(directory) &&
		    !is_server_fd(fd, mounts, count))
			close(fd);
	}
	closedir(directory);
	do { /* what is opened from now on is nobody's stdout */
		null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	} while (null_fd >= 0 && null_fd <= 2);
	close(null_fd);
}

/*
 * A mounter locks two of the user's bytes of MOUNT_LOCK_FILE: one for the path that it mounts over,
 * and one of the TASK_TURNS. The one that hangs keeps them, and others wait for a lock instead, where a
 * signal ends them: so one process of a user hangs for each path, and so many in all. By one descriptor: if
 * another one of this file were closed, all locks of this process would go.
 */
static bool control_byte_lock(int command, struct flock *lock)
{
	static int file = -1;

	if (file < 0)
		file = open(MOUNT_LOCK_FILE, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC,
			    0600);
	return file >= 0 && fcntl(file, command, lock) == 0;
}

static bool lock_byte(off_t offset, short type, int command)
{
	return control_byte_lock(command,
				 &(struct flock){.l_type = type, .l_start = offset, .l_len = 1});
}

/* The process that has locked that byte, or 0. */
static pid_t find_lock_holder(off_t offset)
{
	struct flock lock = {.l_type = F_WRLCK, .l_start = offset, .l_len = 1};

	return control_byte_lock(F_GETLK, &lock) && lock.l_type != F_UNLCK ? lock.l_pid : 0;
}

static bool send_message(int socket_fd, struct mounter_message *message,
			 const struct task_location *location)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(*location))];
	} control = {0};
	struct iovec part = {.iov_base = message, .iov_len = sizeof(*message)};
	struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};

	if (location) {
		control.head =
			(struct cmsghdr){CMSG_LEN(sizeof(*location)), SOL_SOCKET, SCM_RIGHTS};
		memcpy(CMSG_DATA(&control.head), location, sizeof(*location));
		packet.msg_control = &control;
		packet.msg_controllen = sizeof(control);
	}
	return sendmsg(socket_fd, &packet, MSG_NOSIGNAL) >= 0;
}

static void send_or_exit(int socket_fd, struct mounter_message *message)
{
	if (!send_message(socket_fd, message, NULL))
		_exit(1); /* the task has ended, or waits no more */
}

static off_t hash_path(const char *path)
{
	unsigned long long sum = 0;

	while (*path)
		sum = (sum * 31 + (unsigned char)*path++) % (TASK_LOCKS_WIDTH - TASK_TURNS);
	return (off_t)sum;
}

static void handle_alarm(int signal_number)
{
	(void)signal_number; /* it is enough that fcntl(2) ends */
}

/* Calls handle_alarm() each `timeout_ms`, or ends this process a second after that time. */
static void set_alarm(bool wakes, int timeout_ms)
{
	const int interval_ms = wakes ? timeout_ms : timeout_ms + 1000; /* nobody listens by then */
	const struct timeval interval = {.tv_sec = interval_ms / 1000,
					 .tv_usec = interval_ms % 1000 * 1000};
	const struct sigaction action = {.sa_handler = wakes ? handle_alarm : SIG_DFL};

	/* One that is due just now must find handle_alarm(). */
	if (wakes)
		sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &(struct itimerval){.it_interval = interval, .it_value = interval},
		  NULL);
	if (!wakes)
		sigaction(SIGALRM, &action, NULL);
}

/*
 * Waits as long as the byte changes hands. False, and ETIMEDOUT, where one process has kept it for
 * MOUNT_TIMEOUT_MS: its own task has given it up. The task that waits hears from us, or we end with it.
 */
static bool await_byte_lock(off_t offset, int socket_fd, struct mounter_message *message)
{
	pid_t previous_holder = 0;

	while (!lock_byte(offset, F_WRLCK, F_SETLKW)) {
		if (errno != EINTR)
			return false;
		const pid_t holder = find_lock_holder(offset);
		if (holder && holder == previous_holder) {
			errno = ETIMEDOUT;
			return false;
		}
		previous_holder = holder;
		send_or_exit(socket_fd, message);
	}
	return true;
}

static bool lock_free_turn(off_t first_turn, off_t *turn)
{
	for (*turn = first_turn; *turn < first_turn + TASK_TURNS; ++*turn)
		if (lock_byte(*turn, F_WRLCK, F_SETLK))
			return true;
	return false;
}

/*
 * Until this process ends, or unlocks both. The path is not kept while this waits for one of the turns:
 * who wants it next would take that wait for a mount that hangs. It waits for the last turn, which may be
 * that of a mount that hangs: then it checks once more whether another one is free by now.
 */
static bool lock_path_and_turn(off_t first_turn, off_t path, off_t *turn, int socket_fd,
			       struct mounter_message *message)
{
	const off_t last_turn = first_turn + TASK_TURNS - 1;
	bool has_changed = true;

	while (await_byte_lock(path, socket_fd, message)) {
		if (lock_free_turn(first_turn, turn))
			return true;
		lock_byte(path, F_UNLCK, F_SETLK);
		errno = ETIMEDOUT;
		if (!has_changed)
			return false;
		*turn = last_turn;
		has_changed = await_byte_lock(last_turn, socket_fd, message);
		if (!has_changed && errno != ETIMEDOUT)
			return false;
		if (has_changed && lock_byte(path, F_WRLCK, F_SETLK))
			return true;
		if (has_changed)
			lock_byte(last_turn, F_UNLCK, F_SETLK); /* nor kept in a wait for the path */
		send_or_exit(socket_fd, message);
	}
	return false;
}

static const char *mount_in_turn(spank_t sp, const struct task_mount *mount, int socket_fd,
				 struct mounter_message *message)
{
	uid_t uid = 0;

	errno = 0;
	if (!has_own_namespace)
		return "no mount namespace";
	if (spank_get_item(sp, S_JOB_UID, &uid) != ESPANK_SUCCESS)
		return "nobody says whose job this is";
	const off_t first_turn = TASK_LOCKS_START + (off_t)uid * TASK_LOCKS_WIDTH;
	const off_t path = first_turn + TASK_TURNS + hash_path(mount->path);
	off_t turn;
	set_alarm(true, MOUNT_TIMEOUT_MS);
	bool has_locks = lock_path_and_turn(first_turn, path, &turn, socket_fd, message);
	int error = errno;
	set_alarm(false, MOUNT_TIMEOUT_MS);
	errno = error;
	if (!has_locks && error == ETIMEDOUT)
		message->cause = CAUSE_HANGING_MOUNT;
	if (!has_locks)
		return message->cause == CAUSE_HANGING_MOUNT ? MOUNT_HANGS_TEXT
							     : MOUNT_LOCK_FILE " cannot be locked";
	message->kind = MESSAGE_MOUNTS;
	send_or_exit(socket_fd, message);
	errno = 0;
	const char *failure = make_task_mount(sp, mount);
	error = errno;
	lock_byte(turn, F_UNLCK, F_SETLK);
	lock_byte(path, F_UNLCK, F_SETLK);
	errno = error;
	return failure;
}

static void set_failure(struct task_mount *mount, enum failure_cause cause, const char *failure,
			int error_number)
{
	mount->has_failed = true;
	mount->cause = cause;
	mount->error_number = error_number;
	snprintf(mount->failure, sizeof(mount->failure), "%s", failure);
}

static bool have_all_failed(const struct task_mount *mounts, int count)
{
	while (count > 0 && mounts[count - 1].has_failed)
		count--;
	return count == 0;
}

/* The mounter's life. Nothing of Slurm's may log here: its descriptors are closed. */
static void run_mounter(spank_t sp, int socket_fd, struct task_mount *mounts, int count)
{
	const int flags = O_PATH | O_DIRECTORY | O_CLOEXEC;
	struct mounter_message message = {.kind = MESSAGE_QUEUES};
	sigset_t no_signals;

	setsid();
	prctl(PR_SET_NAME, MOUNTER_NAME);
	sigemptyset(&no_signals);
	sigprocmask(SIG_SETMASK, &no_signals, NULL);
	close_other_descriptors(socket_fd, mounts, count);
	leave_slurm_cgroups();
	set_alarm(false, QUEUE_TIMEOUT_MS);
	/* First: what is opened in another namespace can neither be mounted nor mounted over. */
	has_own_namespace = !have_all_failed(mounts, count) && unshare(CLONE_NEWNS) == 0 &&
			    mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) == 0;
	for (int i = 0; i < count; i++) {
		if (mounts[i].has_failed)
			continue;
		message = (struct mounter_message){.kind = MESSAGE_QUEUES, .mount_index = i};
		send_or_exit(socket_fd, &message);
		const char *failure = mount_in_turn(sp, &mounts[i], socket_fd, &message);
		message.error_number = errno;
		if (geteuid() != 0)
			_exit(1);
		if (!failure)
			continue;
		set_failure(&mounts[i], message.cause, failure, message.error_number);
		message.kind = MESSAGE_FAILED;
		snprintf(message.failure, sizeof(message.failure), "%s", failure);
		send_or_exit(socket_fd, &message);
	}
	/* By these links, as root may not be let into a user's directory by its name. */
	struct task_location location = {open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC),
					 open("/proc/self/root", flags),
					 open("/proc/self/cwd", flags)};
	if (namespace_has_changed &&
	    (location.namespace_fd < 0 || location.root_fd < 0 || location.directory_fd < 0))
		_exit(1);
	message.kind = namespace_has_changed ? MESSAGE_ENTER : MESSAGE_STAY;
	send_message(socket_fd, &message, namespace_has_changed ? &location : NULL);
	for (int i = 0; i < count; i++) /* last: the task must not wait for a disk */
		if (mounts[i].has_failed)
			record_mount_failure(sp, &mounts[i]);
	_exit(0);
}

/*
 * Not as a child of the task's: what hangs would be found by proctrack/linuxproc, and by wait(2). The
 * one in between shares the task's memory, of which a copy takes longer than all that is done here.
 */
static int start_mounter(spank_t sp, struct task_mount *mounts, int count)
{
	int ends[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
		return -1;
	const pid_t pid = vfork();
	if (pid == 0) {
		if (fork() == 0)
			run_mounter(sp, ends[1], mounts, count);
		_exit(0);
	}
	int error = errno;
	close(ends[1]);
	while (pid > 0 && waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
	if (pid < 0)
		close(ends[0]);
	errno = error;
	return pid < 0 ? -1 : ends[0];
}

static bool receive_message(int socket_fd, struct mounter_message *message,
			    struct task_location *location)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(*location))];
	} control = {0};
	struct iovec part = {.iov_base = message, .iov_len = sizeof(*message)};
	struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
				.msg_controllen = sizeof(control)};

	if (recvmsg(socket_fd, &packet, MSG_CMSG_CLOEXEC) != sizeof(*message))
		return false;
	struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
	bool has_location = header && header->cmsg_type == SCM_RIGHTS &&
			    header->cmsg_len == CMSG_LEN(sizeof(*location));
	if (has_location)
		memcpy(location, CMSG_DATA(header), sizeof(*location));
	return has_location || message->kind != MESSAGE_ENTER;
}

static void abandon_mount(spank_t sp, struct task_mount *mount, enum failure_cause cause,
			  const char *failure, int error_number)
{
	set_failure(mount, cause, failure, error_number);
	report_mount_failure(sp, mount);
}

static int change_directory(const void *directory_fd) { return fchdir(*(const int *)directory_fd); }

static const char *enter_namespace(spank_t sp, const struct task_location *location)
{
	bool has_entered = setns(location->namespace_fd, CLONE_NEWNS) == 0 &&
			   fchdir(location->root_fd) == 0 && chroot(".") == 0 &&
			   (fchdir(location->directory_fd) == 0 ||
			    call_as_job_user(sp, change_directory, &location->directory_fd) == 0);
	int error = errno;

	close(location->namespace_fd);
	close(location->root_fd);
	close(location->directory_fd);
	errno = error;
	return has_entered ? NULL : "the namespace of its mount cannot be entered";
}

/*
 * Until the task has what could be mounted. NULL, or why it stays where it is, its cause and errno; the
 * mounter was at the mount `mount_index` then. `queue_end` is when the queue has taken too long.
 */
static const char *follow_mounter(spank_t sp, int socket_fd, struct task_mount *mounts,
				  long long queue_end, int *mount_index, enum failure_cause *cause)
{
	struct pollfd ready = {.fd = socket_fd, .events = POLLIN};
	long long end = queue_end;
	struct task_location location;
	struct mounter_message message = {.kind = MESSAGE_QUEUES};

	for (;;) {
		const long long left_ms = end - read_monotonic_ms();
		int ready_count = poll(&ready, 1, left_ms > 0 ? (int)left_ms : 0);
		if (ready_count < 0 && errno == EINTR)
			continue;
		*cause = ready_count > 0		    ? CAUSE_ERROR
			 : message.kind == MESSAGE_MOUNTS ? CAUSE_HANGING_MOUNT
							  : CAUSE_QUEUE;
		errno = ready_count == 0 ? ETIMEDOUT : ECHILD;
		if (ready_count == 0)
			return *cause == CAUSE_HANGING_MOUNT ? MOUNT_HANGS_TEXT : QUEUE_TEXT;
		if (!receive_message(socket_fd, &message, &location))
			return "the process that mounts has ended";
		*mount_index = message.mount_index;
		end = message.kind == MESSAGE_MOUNTS ? read_monotonic_ms() + MOUNT_TIMEOUT_MS
						     : queue_end;
		if (message.kind == MESSAGE_ENTER)
			return enter_namespace(sp, &location);
		if (message.kind == MESSAGE_STAY)
			return NULL;
		if (message.kind == MESSAGE_FAILED)
			abandon_mount(sp, &mounts[message.mount_index], message.cause,
				      message.failure, message.error_number);
	}
}

/* Here, where it may take long and a signal ends it. */
static void fetch_task_mounts(spank_t sp, struct task_mount *mounts, int count)
{
	for (struct task_mount *mount = mounts; mount < mounts + count; mount++) {
		errno = 0;
		const char *failure = mount->has_failed ? NULL : fetch_task_mount(mount);
		int error = errno;
		if (failure)
			abandon_mount(sp, mount, CAUSE_ERROR, failure, error);
	}
}

void make_task_mounts(spank_t sp, struct task_mount *mounts, int count)
{
	const long long queue_end = read_monotonic_ms() + QUEUE_TIMEOUT_MS;
	enum failure_cause cause = CAUSE_ERROR;
	const char *failure = NULL;
	int error = 0;

	for (int tries = 0; tries < MAX_TRIES && cause != CAUSE_QUEUE; tries++) {
		fetch_task_mounts(sp, mounts, count);
		int mount_index = 0, socket_fd = start_mounter(sp, mounts, count);
		cause = CAUSE_ERROR;
		failure = socket_fd < 0 ? "no process can be started"
					: follow_mounter(sp, socket_fd, mounts, queue_end,
							 &mount_index, &cause);
		error = errno;
		if (socket_fd >= 0)
			close(socket_fd);
		if (!failure)
			return;
		/* What its keeper may answer later must not be taken for an answer to another. */
		shutdown(*mounts[mount_index].server_fd, SHUT_RDWR);
		abandon_mount(sp, &mounts[mount_index], cause, failure, error);
	}
	if (cause == CAUSE_HANGING_MOUNT)
		failure = "another mount hangs" HANG_SUFFIX;
	for (struct task_mount *mount = mounts; mount < mounts + count; mount++)
		if (!mount->has_failed)
			abandon_mount(sp, mount, cause, failure, error);
	int socket_fd =
		start_mounter(sp, mounts, count); /* it mounts nothing, and notes what failed */
	if (socket_fd >= 0)
		close(socket_fd);
}
