/* How does the path show the copy? By a mount, in the namespace that the task enters (task_namespace.c). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "plugin.h"

#define STALE_BINDS 8 /* unmounted from one path at most */
/* In mountinfo. An entry is renamed before it is deleted: move_aside() in cache/layout.py. */
#define ENTRY_ROOT "/(" ENTRIES "/[0-9a-f]{32}|" EVICTED "/[0-9a-f]{32}\\.[0-9]+)/image(//deleted)?$"

enum sight { IS_SOURCE, IS_SHOWN, IS_STALE, IS_OTHER, IS_CLOSED };
enum mounted { BY_OTHERS, AN_ENTRY, A_THROUGH };

static void close_copy(struct copy *copy)
{
	if (copy->image >= 0)
		close(copy->image);
	if (copy->folder >= 0)
		close(copy->folder);
	copy->image = copy->folder = -1;
}

/*
 * With job_container/tmpfs, the cache may be below a directory that is the job's own, and what
 * lies there the user's work. So the folder has to be as the product makes it, for root alone
 * (part.py). Nobody but root can then change what `image` in it is, whatever becomes of the path.
 */
const char *open_entry(const struct step *step, struct copy *copy)
{
	const char *name = strrchr(step->entry, '/');
	char folder[PATH_MAX];
	struct stat st;

	snprintf(folder, sizeof(folder), "%.*s", (int)(name - step->entry), step->entry);
	copy->folder = open(folder, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (copy->folder < 0 || fstat(copy->folder, &st) < 0)
		return "its copy is gone";
	if (st.st_uid != 0 || st.st_mode & 077) {
		errno = EPERM;
		return "its copy is not for root alone to change";
	}
	copy->image = openat(copy->folder, "image", O_PATH | O_NOFOLLOW | O_CLOEXEC);
	return copy->image < 0 ? "its copy is gone" : NULL;
}

_Static_assert(sizeof(long) == 8, "elsewhere these system calls know 16 bits of an id");

/* By system calls, for this thread alone: glibc's would want all threads of a process to follow. */
bool act_as(uid_t uid, gid_t gid, int count, const gid_t *groups)
{
	return syscall(SYS_setresuid, -1, 0, -1) == 0 &&
	       syscall(SYS_setgroups, (size_t)count, groups) == 0 &&
	       syscall(SYS_setresgid, -1, gid, -1) == 0 && syscall(SYS_setresuid, -1, uid, -1) == 0;
}

int open_path(const struct step *step)
{
	int at = -1;

	if (step->image[0] != '/')
		at = open(step->folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
	int fd = openat(at, step->image, O_PATH | O_CLOEXEC); /* an absolute one needs no `at` */
	int error = errno;
	if (at >= 0)
		close(at);
	errno = error;
	return fd;
}

struct looked_at {
	const struct step *step;
	int copied; /* the copy, or -1 */
};

/* The image's path, or -1, also if this user cannot open the copy (if there is one yet: not -1). */
static int open_image(const void *what)
{
	const struct looked_at *one = what;
	char copy_path[32];
	int fd = open_path(one->step), copied = one->copied;

	if (fd < 0 || copied < 0)
		return fd;
	snprintf(copy_path, sizeof(copy_path), "/proc/self/fd/%d", copied);
	/* A server may grant what mode and ACL do not show: they have to open the copy as well. */
	int copy = open(copy_path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	int error = errno;
	/* A lease of its owner's (F_SETLEASE): the kernel checks the rights before that. */
	bool readable = copy >= 0 || error == EWOULDBLOCK;
	if (copy >= 0)
		close(copy);
	if (!readable)
		close(fd);
	errno = error;
	return readable ? fd : -1;
}

int as_job_user(spank_t sp, int (*open_it)(const void *what), const void *what)
{
	gid_t *groups = NULL, gid = 0, own_gid = getegid(), own[NGROUPS_MAX];
	int count = 0, own_count = getgroups(NGROUPS_MAX, own), fd = -1;
	uid_t uid = 0;

	if (own_count < 0 || spank_get_item(sp, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_GID, &gid) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_SUPPLEMENTARY_GIDS, &groups, &count) != ESPANK_SUCCESS)
		return -1;
	if (act_as(uid, gid, count, groups))
		fd = open_it(what);
	int error = errno;
	act_as(0, own_gid, own_count, own); /* whoever mounts looks whether it is root */
	errno = error;
	return fd;
}

/* Whose mount the open file is on: a bind of an entry is known by its root (redirect.py). */
static enum mounted mounted(int fd)
{
	char name[32], root[2 * PATH_MAX], *text = NULL;
	enum mounted found = BY_OTHERS;
	int wanted = -1, id;
	size_t size = 0;
	regex_t entry;

	snprintf(name, sizeof(name), "/proc/self/fdinfo/%d", fd);
	FILE *info = fopen(name, "re"), *mounts = fopen("/proc/self/mountinfo", "re");
	if (regcomp(&entry, ENTRY_ROOT, REG_EXTENDED | REG_NOSUB) == 0) {
		while (info && getline(&text, &size, info) > 0)
			sscanf(text, "mnt_id: %d", &wanted);
		while (mounts && getline(&text, &size, mounts) > 0) {
			if (sscanf(text, "%d %*d %*s %8191s", &id, root) != 2 || id != wanted)
				continue;
			if (regexec(&entry, root, 0, NULL, 0) == 0)
				found = AN_ENTRY;
			else if (strstr(text, " - " FUSE_TYPE " "))
				found = A_THROUGH;
			break;
		}
		regfree(&entry);
	}
	free(text);
	if (info)
		fclose(info);
	if (mounts)
		fclose(mounts);
	return found;
}

static unsigned long long in_ns(struct timespec time)
{
	return (unsigned long long)(time.tv_sec * 1000000000LL + time.tv_nsec);
}

void identify(const struct stat *st, unsigned long long identity[4])
{
	identity[0] = st->st_ino;
	identity[1] = (unsigned long long)st->st_size;
	identity[2] = in_ns(st->st_mtim);
	identity[3] = in_ns(st->st_ctim);
}

/* What lies at the user's path. `target`, closed first if it was open, is then open, or -1. */
static enum sight look(spank_t sp, const struct step *step, int copied, int *target)
{
	char link[32], path[PATH_MAX];
	struct stat st, copy = {0};

	if (*target >= 0)
		close(*target);
	*target = as_job_user(sp, open_image, &(struct looked_at){step, copied});
	if (*target < 0)
		return IS_CLOSED;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", *target);
	ssize_t length = readlink(link, path, sizeof(path) - 1);
	if (length < 0 || fstat(*target, &st) < 0 || (copied >= 0 && fstat(copied, &copy) < 0))
		return IS_OTHER;
	path[length] = '\0';
	if (copied >= 0 && st.st_dev == copy.st_dev && st.st_ino == copy.st_ino)
		return IS_SHOWN;
	char *gone = st.st_nlink == 0 ? strrchr(path, ' ') : NULL;
	if (gone && strcmp(gone, " (deleted)") == 0)
		*gone = '\0'; /* how the kernel shows a bind whose entry was evicted */
	if (strcmp(path, step->path) != 0)
		return IS_OTHER;
	unsigned long long found[4];
	identify(&st, found);
	enum mounted kind = mounted(*target);
	/* It has the inode, size and mtime of what it is read from. */
	if (kind == A_THROUGH)
		return memcmp(found, step->identity, 3 * sizeof(found[0])) == 0 ? IS_SHOWN
										: IS_STALE;
	if (kind == AN_ENTRY && (step->through || st.st_dev == copy.st_dev))
		return IS_STALE;
	return memcmp(found, step->identity, sizeof(found)) == 0 ? IS_SOURCE : IS_OTHER;
}

static bool take_off(int target)
{
	char link[32];

	snprintf(link, sizeof(link), "/proc/self/fd/%d", target);
	return umount2(link, MNT_DETACH) == 0;
}

/*
 * A bind inherits the flags of the mount that it is made from. So the entry is bound over itself,
 * where only root gets, and that is made read-only: in no moment could the task write to it.
 */
static bool bind_entry(int folder, int target)
{
	const unsigned long flags = MS_RDONLY | MS_NOSUID | MS_NODEV;
	char link[32], entry[40];

	/* Not by the entry's path, which may lead elsewhere by now; nor by a descriptor of the entry,
	 * which would go on to show what lies below the first bind. */
	snprintf(entry, sizeof(entry), "/proc/self/fd/%d/image", folder);
	snprintf(link, sizeof(link), "/proc/self/fd/%d", target);
	if (mount(entry, entry, NULL, MS_BIND, NULL) < 0)
		return false;
	bool bound = mount(NULL, entry, NULL, MS_REMOUNT | MS_BIND | flags, NULL) == 0 &&
		     mount(entry, link, NULL, MS_BIND, NULL) == 0;
	int error = errno;
	umount2(entry, MNT_DETACH);
	errno = error;
	return bound;
}

static const char *lay(spank_t sp, const struct step *step, struct copy *copy, int *target)
{
	const char *wrong = step->through ? NULL : open_entry(step, copy);
	enum sight seen = wrong ? IS_OTHER : look(sp, step, copy->image, target);

	if (!wrong && step->through && (seen == IS_SOURCE || seen == IS_STALE)) {
		wrong = open_through(step, copy);
		seen = wrong ? IS_OTHER : look(sp, step, copy->image, target);
	}
	if (wrong)
		return wrong;
	if (seen == IS_SOURCE || seen == IS_STALE)
		will_change();
	for (int i = 0; seen == IS_STALE && i < STALE_BINDS; i++) {
		if (!take_off(*target))
			return "an older copy lies over it";
		seen = look(sp, step, copy->image, target);
	}
	if (seen == IS_SOURCE && step->through)
		return attach_mount(copy->image, *target) ? NULL : "it cannot be mounted over";
	if (seen == IS_SOURCE)
		return bind_entry(copy->folder, *target) ? NULL : "it cannot be bound";
	if (seen == IS_CLOSED)
		return errno == EACCES || errno == EPERM
			       ? "the step's user and groups may not read it"
			       : "it cannot be opened";
	return seen == IS_SHOWN ? NULL : "it is another file by now";
}

const char *redirect(spank_t sp, const struct step *step)
{
	struct copy copy = {.folder = -1, .image = -1};
	int target = -1;

	errno = 0;
	const char *wrong = lay(sp, step, &copy, &target);
	int error = errno;
	if (target >= 0)
		close(target);
	close_copy(&copy);
	errno = error;
	return wrong;
}
