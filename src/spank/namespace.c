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
 *   forks it, waits up to LIMIT_MS
 *                                          unshare(2): a copy of the task's mount namespace
 *                                          mounts there, tells what fails
 *                                          gives away that namespace, and its root and directory
 *   setns(2), chroot(2), fchdir(2)
 *
 * If it is late the task stays where it is: what is mounted later is mounted where nobody is. What
 * hung is left out of a second try, so that it keeps nothing else from being shown.
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
#include <sys/wait.h>
#include <unistd.h>

#include "forestage.h"

#define LIMIT_MS 2000 /* for all mounts of a task, in each try */
#define TRIES 2
#define NAME "forestage-task" /* of the process that mounts */
#define WHY_BYTES 200
#define CGROUPS "/sys/fs/cgroup"
#define HANGS " (" MOUNT_HANGS ")"

/*
 * A mounter locks two of the user's bytes of this file: one for the path that it mounts over, one that is
 * any of a few. The one that hangs keeps them, and others wait for a lock instead, where a signal ends
 * them: so one process of a user hangs for each path, and so many in all.
 */
#define PLACES RUN "/mounting"
#define MOST_OF_USER 8

/* What a mounter tells: that it begins with an item, what was wrong with that, or the end. */
struct news {
	enum { BEGINS, FAILED, ENTER, STAY } what;
	int item;
	int error;
	char why[WHY_BYTES];
};

/* What an end comes with, if there is something to enter. */
struct place {
	int namespace;
	int root;
	int folder;
};

static bool own;     /* whether this process has a mount namespace of its own */
static bool changed; /* whether that is one to enter */

void will_change(void)
{
	changed = true;
}

/* As SLURMS in system/child.py. */
static bool is_slurms(char *group)
{
	char *name;

	while ((name = strsep(&group, "/\n")))
		if (fnmatch("slurm*", name, 0) == 0 || fnmatch("job_*", name, 0) == 0 ||
		    fnmatch("*slurmstepd.scope", name, 0) == 0)
			return true;
	return false;
}

/* False also in a job's own user namespace: then it stays. */
static bool move_to(const char *folder, const char *name)
{
	char path[PATH_MAX];

	snprintf(path, sizeof(path), "%s/%s/cgroup.procs", folder, name);
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	bool moved = fd >= 0 && write(fd, "0", 1) == 1;
	if (fd >= 0)
		close(fd);
	return moved;
}

/* As leave_job() in system/child.py: Slurm waits for what hangs in a step's cgroups, and drains. */
static void leave_cgroups(void)
{
	FILE *groups = move_to(RUN, "hold/serve") ? NULL : fopen("/proc/self/cgroup", "re");
	char *line = NULL;
	size_t size = 0;

	while (groups && getline(&line, &size, groups) > 0) { /* number:controllers:path */
		char *group = line, *name;
		strsep(&group, ":");
		name = strsep(&group, ":");
		if (!group || !is_slurms(group))
			continue;
		move_to(CGROUPS, strncmp(name, "name=", 5) == 0 ? name + 5 : name);
		if (!*name)
			move_to(CGROUPS, "unified");
	}
	free(line);
	if (groups)
		fclose(groups);
}

static bool is_kept(int fd, const struct item *items, int count)
{
	for (int i = 0; i < count; i++)
		if (*items[i].kept == fd)
			return true;
	return false;
}

/* All but `line` and what serves the items: who waits for their end would wait for us. */
static void let_go(int line, const struct item *items, int count)
{
	DIR *folder = opendir("/proc/self/fd");
	struct dirent *entry;
	int null;

	if (!folder)
		_exit(1);
	while ((entry = readdir(folder))) {
		int fd = atoi(entry->d_name);
		if (entry->d_name[0] != '.' && fd != line && fd != dirfd(folder) &&
		    !is_kept(fd, items, count))
			close(fd);
	}
	closedir(folder);
	do { /* what is opened from now on is nobody's stdout */
		null = open("/dev/null", O_RDWR | O_CLOEXEC);
	} while (null >= 0 && null <= 2);
	close(null);
}

static bool lock_place(off_t number, short how, int command)
{
	struct flock place = {.l_type = how, .l_start = number, .l_len = 1};
	static int file = -1;

	if (file < 0)
		file = open(PLACES, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
	return file >= 0 && fcntl(file, command, &place) == 0;
}

static void tell(int line, struct news *news, const struct place *place)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(*place))];
	} control = {0};
	struct iovec part = {.iov_base = news, .iov_len = sizeof(*news)};
	struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};

	if (place) {
		control.head = (struct cmsghdr){CMSG_LEN(sizeof(*place)), SOL_SOCKET, SCM_RIGHTS};
		memcpy(CMSG_DATA(&control.head), place, sizeof(*place));
		packet.msg_control = &control;
		packet.msg_controllen = sizeof(control);
	}
	if (sendmsg(line, &packet, MSG_NOSIGNAL) < 0)
		_exit(1); /* the task has ended, or waits no more */
}

static off_t hash(const char *path)
{
	unsigned long long sum = 0;

	while (*path)
		sum = (sum * 31 + (unsigned char)*path++) % (TASK_MOUNTS_WIDTH - MOST_OF_USER);
	return (off_t)sum;
}

/* Until this process ends, or lets go of both. */
static bool take_places(off_t first, off_t path, off_t *any)
{
	if (!lock_place(path, F_WRLCK, F_SETLKW))
		return false;
	for (*any = first; *any < first + MOST_OF_USER; ++*any)
		if (lock_place(*any, F_WRLCK, F_SETLK))
			return true;
	--*any;
	return lock_place(*any, F_WRLCK, F_SETLKW);
}

static const char *show_in_turn(spank_t sp, const struct item *item)
{
	uid_t uid = 0;

	if (!own)
		return "no mount namespace";
	if (spank_get_item(sp, S_JOB_UID, &uid) != ESPANK_SUCCESS)
		return "nobody says whose job this is";
	off_t first = TASK_MOUNTS_START + (off_t)uid * TASK_MOUNTS_WIDTH, path = first + MOST_OF_USER + hash(item->path), any;
	if (!take_places(first, path, &any))
		return PLACES " cannot be locked";
	errno = 0;
	const char *wrong = show_item(sp, item);
	int error = errno;
	lock_place(any, F_UNLCK, F_SETLK);
	lock_place(path, F_UNLCK, F_SETLK);
	errno = error;
	return wrong;
}

/* The mounter's life. Nothing of Slurm's may log here: its descriptors are closed. */
static void live(spank_t sp, int line, const struct item *items, int count)
{
	const int folder = O_PATH | O_DIRECTORY | O_CLOEXEC;
	struct news news = {.what = BEGINS};
	sigset_t none;

	setsid();
	prctl(PR_SET_NAME, NAME);
	signal(SIGALRM, SIG_DFL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	let_go(line, items, count);
	leave_cgroups();
	alarm(LIMIT_MS / 1000 + 1); /* nobody listens by then */
	/* First: what is opened in another namespace can neither be mounted nor mounted over. */
	own = unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) == 0;
	for (int i = 0; i < count; i++) {
		if (items[i].hung)
			note_hang(sp, &items[i]); /* the task must not wait for a disk */
		if (items[i].over)
			continue;
		news = (struct news){.what = BEGINS, .item = i};
		tell(line, &news, NULL);
		const char *wrong = show_in_turn(sp, &items[i]);
		news.error = errno;
		if (geteuid() != 0)
			_exit(1);
		if (!wrong)
			continue;
		news.what = FAILED;
		snprintf(news.why, sizeof(news.why), "%s", wrong);
		tell(line, &news, NULL);
	}
	/* By these links, as root may not be let into a user's directory by its name. */
	struct place place = {open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC),
			      open("/proc/self/root", folder), open("/proc/self/cwd", folder)};
	if (changed && (place.namespace < 0 || place.root < 0 || place.folder < 0))
		_exit(1);
	news.what = changed ? ENTER : STAY;
	tell(line, &news, changed ? &place : NULL);
	_exit(0);
}

/*
 * Not as a child of the task's: what hangs would be found by proctrack/linuxproc, and by wait(2). The
 * one in between shares the task's memory, of which a copy takes longer than all that is done here.
 */
static int start(spank_t sp, struct item *items, int count)
{
	int ends[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
		return -1;
	const pid_t pid = vfork();
	if (pid == 0) {
		if (fork() == 0)
			live(sp, ends[1], items, count);
		_exit(0);
	}
	int error = errno;
	for (int i = 0; i < count; i++)
		items[i].hung = false;
	close(ends[1]);
	while (pid > 0 && waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
	if (pid < 0)
		close(ends[0]);
	errno = error;
	return pid < 0 ? -1 : ends[0];
}

static bool hear(int line, struct news *news, struct place *place)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(*place))];
	} control = {0};
	struct iovec part = {.iov_base = news, .iov_len = sizeof(*news)};
	struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
				.msg_controllen = sizeof(control)};

	if (recvmsg(line, &packet, MSG_CMSG_CLOEXEC) != sizeof(*news))
		return false;
	struct cmsghdr *came = CMSG_FIRSTHDR(&packet);
	bool given = came && came->cmsg_type == SCM_RIGHTS &&
		     came->cmsg_len == CMSG_LEN(sizeof(*place));
	if (given)
		memcpy(place, CMSG_DATA(came), sizeof(*place));
	return given || news->what != ENTER;
}

static int go_to(const void *folder)
{
	return fchdir(*(const int *)folder);
}

static const char *enter(spank_t sp, const struct place *place)
{
	bool entered = setns(place->namespace, CLONE_NEWNS) == 0 && fchdir(place->root) == 0 &&
		       chroot(".") == 0 &&
		       (fchdir(place->folder) == 0 || as_job_user(sp, go_to, &place->folder) == 0);
	int error = errno;

	close(place->namespace);
	close(place->root);
	close(place->folder);
	errno = error;
	return entered ? NULL : "the namespace of its mount cannot be entered";
}

/*
 * Until the task has what could be mounted. NULL, or why it stays where it is, and errno; the mounter
 * was at the item `at` then.
 */
static const char *follow(spank_t sp, int line, struct item *items, int *at)
{
	const long long end = now_ms() + LIMIT_MS;
	struct pollfd ready = {.fd = line, .events = POLLIN};
	struct place place;
	struct news news;

	for (;;) {
		long long left = end - now_ms();
		int heard = poll(&ready, 1, left > 0 ? (int)left : 0);
		if (heard < 0 && errno == EINTR)
			continue;
		errno = heard == 0 ? ETIMEDOUT : ECHILD;
		if (heard == 0)
			return "a mount over it hangs" HANGS;
		if (!hear(line, &news, &place))
			return "the process that mounts has ended";
		*at = news.item;
		if (news.what == ENTER)
			return enter(sp, &place);
		if (news.what == STAY)
			return NULL;
		if (news.what == FAILED) {
			items[news.item].over = true;
			say_item(sp, &items[news.item], news.why, news.error);
		}
	}
}

static void give_up(spank_t sp, struct item *item, const char *wrong, int error)
{
	item->over = true;
	item->hung = error == ETIMEDOUT;
	say_item(sp, item, wrong, error);
}

/* Here, where it may take long and a signal ends it. */
static void fetch(spank_t sp, struct item *items, int count)
{
	for (struct item *one = items; one < items + count; one++) {
		errno = 0;
		const char *wrong = one->over ? NULL : fetch_item(one);
		int error = errno;
		if (wrong) {
			one->over = true;
			say_item(sp, one, wrong, error);
		}
	}
}

void show_items(spank_t sp, struct item *items, int count)
{
	const char *wrong = NULL;
	int error = 0;

	for (int tries = 0; tries < TRIES; tries++) {
		fetch(sp, items, count);
		int at = 0, line = start(sp, items, count);
		wrong = line < 0 ? "no process can be started" : follow(sp, line, items, &at);
		error = errno;
		if (line >= 0)
			close(line);
		if (!wrong)
			return;
		/* What its keeper may answer later must not be taken for an answer to another. */
		shutdown(*items[at].kept, SHUT_RDWR);
		give_up(sp, &items[at], wrong, error);
	}
	if (error == ETIMEDOUT)
		wrong = "another mount hangs" HANGS;
	for (struct item *one = items; one < items + count; one++)
		if (!one->over)
			give_up(sp, one, wrong, error);
	int last = error == ETIMEDOUT ? start(sp, items, count) : -1; /* it notes what hangs */
	if (last >= 0)
		close(last);
}
