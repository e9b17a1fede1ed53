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
 *   forks it, waits up to QUEUE_MS
 *                                          unshare(2): a copy of the task's mount namespace
 *                                          queues for the places of a mount
 *   waits up to LIMIT_MS
 *                                          mounts there, tells what fails
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

#define LIMIT_MS 2000  /* for each mount, from when it has its places */
#define QUEUE_MS 30000 /* for all that comes before the mounts of a task, in all tries */
#define TRIES 2
#define NAME "forestage-task" /* of the process that mounts */
#define CGROUPS "/sys/fs/cgroup"
#define HANGS " (" MOUNT_HANGS ")"
#define OVER_IT_HANGS "a mount over it hangs" HANGS
#define IN_QUEUE "the mounts of other tasks took too long (" MOUNT_QUEUE ")"

/*
 * What a mounter tells: that it queues for an item, that it begins with it, what was wrong with that, or
 * the end.
 */
struct news {
	enum { QUEUES, BEGINS, FAILED, ENTER, STAY } what;
	int item;
	enum cause cause;
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

static bool is_slurms(char *group)
{
	static const char *const patterns[] = {SLURMS};
	char *name;

	while ((name = strsep(&group, "/\n")))
		for (size_t i = 0; i < sizeof(patterns) / sizeof(*patterns); i++)
			if (fnmatch(patterns[i], name, 0) == 0)
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
	FILE *groups = move_to(HOLD, "serve") ? NULL : fopen("/proc/self/cgroup", "re");
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

/*
 * A mounter locks two of the user's bytes of the file MOUNTING: one for the path that it mounts over, and one
 * of the TASK_TURNS. The one that hangs keeps them, and others wait for a lock instead, where a signal ends
 * them: so one process of a user hangs for each path, and so many in all. By one descriptor: if another one
 * of this file were closed, all locks of this process would go.
 */
static bool ask_lock(int command, struct flock *place)
{
	static int file = -1;

	if (file < 0)
		file = open(MOUNTING, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
	return file >= 0 && fcntl(file, command, place) == 0;
}

static bool lock_place(off_t number, short how, int command)
{
	return ask_lock(command, &(struct flock){.l_type = how, .l_start = number, .l_len = 1});
}

/* The process that has locked that byte, or 0. */
static pid_t find_holder(off_t number)
{
	struct flock place = {.l_type = F_WRLCK, .l_start = number, .l_len = 1};

	return ask_lock(F_GETLK, &place) && place.l_type != F_UNLCK ? place.l_pid : 0;
}

static bool send_news(int line, struct news *news, const struct place *place)
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
	return sendmsg(line, &packet, MSG_NOSIGNAL) >= 0;
}

static void tell(int line, struct news *news)
{
	if (!send_news(line, news, NULL))
		_exit(1); /* the task has ended, or waits no more */
}

static off_t hash(const char *path)
{
	unsigned long long sum = 0;

	while (*path)
		sum = (sum * 31 + (unsigned char)*path++) % (TASK_MOUNTS_WIDTH - TASK_TURNS);
	return (off_t)sum;
}

static void wake(int number)
{
	(void)number; /* it is enough that fcntl(2) ends */
}

/* Calls wake() each LIMIT_MS, or else ends this process after that time and a second. */
static void set_alarm(bool wakes, int ms)
{
	const int rest = wakes ? ms : ms + 1000; /* nobody listens by then */
	const struct timeval after = {.tv_sec = rest / 1000, .tv_usec = rest % 1000 * 1000};
	const struct sigaction action = {.sa_handler = wakes ? wake : SIG_DFL};

	/* One that is due just now must find wake(). */
	if (wakes)
		sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &(struct itimerval){.it_interval = after, .it_value = after}, NULL);
	if (!wakes)
		sigaction(SIGALRM, &action, NULL);
}

/*
 * Waits as long as the place changes hands. False, and ETIMEDOUT, where one process has kept it for
 * LIMIT_MS: its own task has given it up. The task that waits hears from us, or we end with it.
 */
static bool await_place(off_t number, int line, struct news *news)
{
	pid_t before = 0;

	while (!lock_place(number, F_WRLCK, F_SETLKW)) {
		if (errno != EINTR)
			return false;
		const pid_t holder = find_holder(number);
		if (holder && holder == before) {
			errno = ETIMEDOUT;
			return false;
		}
		before = holder;
		tell(line, news);
	}
	return true;
}

static bool take_free(off_t first, off_t *any)
{
	for (*any = first; *any < first + TASK_TURNS; ++*any)
		if (lock_place(*any, F_WRLCK, F_SETLK))
			return true;
	return false;
}

/*
 * Until this process ends, or lets go of both. The path is not kept while this waits for one of the few:
 * who wants it next would take that wait for a mount that hangs. It waits for the last of them, which may
 * be that of a mount that hangs: then it looks once more whether another one is free by now.
 */
static bool take_places(off_t first, off_t path, off_t *any, int line, struct news *news)
{
	const off_t last = first + TASK_TURNS - 1;
	bool has_changed = true;

	while (await_place(path, line, news)) {
		if (take_free(first, any))
			return true;
		lock_place(path, F_UNLCK, F_SETLK);
		errno = ETIMEDOUT;
		if (!has_changed)
			return false;
		*any = last;
		has_changed = await_place(last, line, news);
		if (!has_changed && errno != ETIMEDOUT)
			return false;
		if (has_changed && lock_place(path, F_WRLCK, F_SETLK))
			return true;
		if (has_changed)
			lock_place(last, F_UNLCK, F_SETLK); /* nor is it kept during a wait for the path */
		tell(line, news);
	}
	return false;
}

static const char *show_in_turn(spank_t sp, const struct item *item, int line, struct news *news)
{
	uid_t uid = 0;

	errno = 0;
	if (!own)
		return "no mount namespace";
	if (spank_get_item(sp, S_JOB_UID, &uid) != ESPANK_SUCCESS)
		return "nobody says whose job this is";
	const off_t first = TASK_MOUNTS_START + (off_t)uid * TASK_MOUNTS_WIDTH;
	const off_t path = first + TASK_TURNS + hash(item->path);
	off_t any;
	set_alarm(true, LIMIT_MS);
	bool has_places = take_places(first, path, &any, line, news);
	int error = errno;
	set_alarm(false, LIMIT_MS);
	errno = error;
	if (!has_places && error == ETIMEDOUT)
		news->cause = IS_HANGING;
	if (!has_places)
		return news->cause == IS_HANGING ? OVER_IT_HANGS : MOUNTING " cannot be locked";
	news->what = BEGINS;
	tell(line, news);
	errno = 0;
	const char *wrong = show_item(sp, item);
	error = errno;
	lock_place(any, F_UNLCK, F_SETLK);
	lock_place(path, F_UNLCK, F_SETLK);
	errno = error;
	return wrong;
}

static void fail(struct item *item, enum cause cause, const char *why, int error)
{
	item->over = true;
	item->cause = cause;
	item->error = error;
	snprintf(item->why, sizeof(item->why), "%s", why);
}

static bool is_all_over(const struct item *items, int count)
{
	while (count > 0 && items[count - 1].over)
		count--;
	return count == 0;
}

/* The mounter's life. Nothing of Slurm's may log here: its descriptors are closed. */
static void live(spank_t sp, int line, struct item *items, int count)
{
	const int folder = O_PATH | O_DIRECTORY | O_CLOEXEC;
	struct news news = {.what = QUEUES};
	sigset_t none;

	setsid();
	prctl(PR_SET_NAME, NAME);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	let_go(line, items, count);
	leave_cgroups();
	set_alarm(false, QUEUE_MS);
	/* First: what is opened in another namespace can neither be mounted nor mounted over. */
	own = !is_all_over(items, count) && unshare(CLONE_NEWNS) == 0 &&
	      mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) == 0;
	for (int i = 0; i < count; i++) {
		if (items[i].over)
			continue;
		news = (struct news){.what = QUEUES, .item = i};
		tell(line, &news);
		const char *wrong = show_in_turn(sp, &items[i], line, &news);
		news.error = errno;
		if (geteuid() != 0)
			_exit(1);
		if (!wrong)
			continue;
		fail(&items[i], news.cause, wrong, news.error);
		news.what = FAILED;
		snprintf(news.why, sizeof(news.why), "%s", wrong);
		tell(line, &news);
	}
	/* By these links, as root may not be let into a user's directory by its name. */
	struct place place = {open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC),
			      open("/proc/self/root", folder), open("/proc/self/cwd", folder)};
	if (changed && (place.namespace < 0 || place.root < 0 || place.folder < 0))
		_exit(1);
	news.what = changed ? ENTER : STAY;
	send_news(line, &news, changed ? &place : NULL);
	for (int i = 0; i < count; i++) /* last: the task must not wait for a disk */
		if (items[i].over)
			note_failure(sp, &items[i]);
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

static void give_up(spank_t sp, struct item *item, enum cause cause, const char *why, int error)
{
	fail(item, cause, why, error);
	say_failure(sp, item);
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
 * Until the task has what could be mounted. NULL, or why it stays where it is, its cause and errno; the
 * mounter was at the item `at` then. `until` is when the queue has taken too long.
 */
static const char *follow(spank_t sp, int line, struct item *items, long long until, int *at,
			  enum cause *cause)
{
	struct pollfd ready = {.fd = line, .events = POLLIN};
	long long end = until;
	struct place place;
	struct news news = {.what = QUEUES};

	for (;;) {
		const long long left = end - now_ms();
		int heard = poll(&ready, 1, left > 0 ? (int)left : 0);
		if (heard < 0 && errno == EINTR)
			continue;
		*cause = heard > 0 ? IS_REFUSED : news.what == BEGINS ? IS_HANGING : IS_QUEUED;
		errno = heard == 0 ? ETIMEDOUT : ECHILD;
		if (heard == 0)
			return *cause == IS_HANGING ? OVER_IT_HANGS : IN_QUEUE;
		if (!hear(line, &news, &place))
			return "the process that mounts has ended";
		*at = news.item;
		end = news.what == BEGINS ? now_ms() + LIMIT_MS : until;
		if (news.what == ENTER)
			return enter(sp, &place);
		if (news.what == STAY)
			return NULL;
		if (news.what == FAILED)
			give_up(sp, &items[news.item], news.cause, news.why, news.error);
	}
}

/* Here, where it may take long and a signal ends it. */
static void fetch(spank_t sp, struct item *items, int count)
{
	for (struct item *one = items; one < items + count; one++) {
		errno = 0;
		const char *wrong = one->over ? NULL : fetch_item(one);
		int error = errno;
		if (wrong)
			give_up(sp, one, IS_REFUSED, wrong, error);
	}
}

void show_items(spank_t sp, struct item *items, int count)
{
	const long long until = now_ms() + QUEUE_MS;
	enum cause cause = IS_REFUSED;
	const char *wrong = NULL;
	int error = 0;

	for (int tries = 0; tries < TRIES && cause != IS_QUEUED; tries++) {
		fetch(sp, items, count);
		int at = 0, line = start(sp, items, count);
		cause = IS_REFUSED;
		wrong = line < 0 ? "no process can be started"
				 : follow(sp, line, items, until, &at, &cause);
		error = errno;
		if (line >= 0)
			close(line);
		if (!wrong)
			return;
		/* What its keeper may answer later must not be taken for an answer to another. */
		shutdown(*items[at].kept, SHUT_RDWR);
		give_up(sp, &items[at], cause, wrong, error);
	}
	if (cause == IS_HANGING)
		wrong = "another mount hangs" HANGS;
	for (struct item *one = items; one < items + count; one++)
		if (!one->over)
			give_up(sp, one, cause, wrong, error);
	int last = start(sp, items, count); /* it mounts nothing, and notes what failed */
	if (last >= 0)
		close(last);
}
