/* Mounts the copy over the image's path, in the namespace that the task enters (task_namespace.c). */
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

#define MAX_STALE_BINDS 8 /* unmounted from one path at most */
/* In mountinfo. An entry is renamed before it is deleted: move_to_evicted() in cache/layout.py. */
#define ENTRY_ROOT_PATTERN                                                                         \
	"/(" ENTRIES_NAME "/[0-9a-f]{32}|" EVICTED_NAME "/[0-9a-f]{32}\\.[0-9]+)"                   \
	"/image(//deleted)?$"

enum path_state { PATH_SOURCE, PATH_COPY, PATH_STALE, PATH_OTHER, PATH_UNREADABLE };
enum mount_kind { MOUNT_OTHER, MOUNT_ENTRY, MOUNT_READ_THROUGH };

static void close_copy(struct open_copy *copy)
{
	if (copy->image_fd >= 0)
		close(copy->image_fd);
	if (copy->directory_fd >= 0)
		close(copy->directory_fd);
	copy->image_fd = copy->directory_fd = -1;
}

/*
 * With job_container/tmpfs, the cache may be below a directory that is the job's own, and what
 * lies there the user's work. So the folder has to be as the product makes it, for root alone
 * (part.py). Nobody but root can then change what `image` in it is, whatever becomes of the path.
 */
const char *open_entry(const struct step *step, struct open_copy *copy)
{
	const char *name = strrchr(step->entry_path, '/');
	char directory[PATH_MAX];
	struct stat st;

	snprintf(directory, sizeof(directory), "%.*s", (int)(name - step->entry_path),
		 step->entry_path);
	copy->directory_fd = open(directory, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (copy->directory_fd < 0 || fstat(copy->directory_fd, &st) < 0)
		return "its copy is gone";
	if (st.st_uid != 0 || st.st_mode & 077) {
		errno = EPERM;
		return "its copy is not for root alone to change";
	}
	copy->image_fd = openat(copy->directory_fd, "image", O_PATH | O_NOFOLLOW | O_CLOEXEC);
	return copy->image_fd < 0 ? "its copy is gone" : NULL;
}

_Static_assert(sizeof(long) == 8, "elsewhere these system calls know 16 bits of an id");

/* By system calls, for this thread alone: glibc's would want all threads of a process to follow. */
bool set_effective_user(uid_t uid, gid_t gid, int count, const gid_t *groups)
{
	return syscall(SYS_setresuid, -1, 0, -1) == 0 &&
	       syscall(SYS_setgroups, (size_t)count, groups) == 0 &&
	       syscall(SYS_setresgid, -1, gid, -1) == 0 && syscall(SYS_setresuid, -1, uid, -1) == 0;
}

int open_image_path(const struct step *step)
{
	int directory_fd = -1;

	if (step->image[0] != '/')
		directory_fd = open(step->working_directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
	/* An absolute path needs no `directory_fd`. */
	int fd = openat(directory_fd, step->image, O_PATH | O_CLOEXEC);
	int error = errno;
	if (directory_fd >= 0)
		close(directory_fd);
	errno = error;
	return fd;
}

struct path_request {
	const struct step *step;
	int copy_fd; /* the copy, or -1 */
};

/* The image's path, or -1, also if this user cannot open the copy (if there is one yet: not -1). */
static int open_readable_image(const void *argument)
{
	const struct path_request *request = argument;
	char copy_path[32];
	int fd = open_image_path(request->step), copy_fd = request->copy_fd;

	if (fd < 0 || copy_fd < 0)
		return fd;
	snprintf(copy_path, sizeof(copy_path), "/proc/self/fd/%d", copy_fd);
	/* A server may grant what mode and ACL do not show: they have to open the copy as well. */
	int opened = open(copy_path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	int error = errno;
	/* A lease of its owner's (F_SETLEASE): the kernel checks the rights before that. */
	bool is_readable = opened >= 0 || error == EWOULDBLOCK;
	if (opened >= 0)
		close(opened);
	if (!is_readable)
		close(fd);
	errno = error;
	return is_readable ? fd : -1;
}

int call_as_job_user(spank_t sp, int (*function)(const void *argument), const void *argument)
{
	gid_t *groups = NULL, gid = 0, own_gid = getegid(), own_groups[NGROUPS_MAX];
	int count = 0, own_count = getgroups(NGROUPS_MAX, own_groups), result = -1;
	uid_t uid = 0;

	if (own_count < 0 || spank_get_item(sp, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_GID, &gid) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_SUPPLEMENTARY_GIDS, &groups, &count) != ESPANK_SUCCESS)
		return -1;
	if (set_effective_user(uid, gid, count, groups))
		result = function(argument);
	int error = errno;
	set_effective_user(0, own_gid, own_count, own_groups); /* the mounter checks that it is root */
	errno = error;
	return result;
}

/* Whose mount the open file is on: a bind of an entry is known by its root (bind/origins.py). */
static enum mount_kind find_mount_kind(int fd)
{
	char path[32], root[2 * PATH_MAX], *line = NULL;
	enum mount_kind kind = MOUNT_OTHER;
	int mount_id = -1, id;
	size_t size = 0;
	regex_t entry_root;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
	FILE *info = fopen(path, "re"), *mount_table = fopen("/proc/self/mountinfo", "re");
	if (regcomp(&entry_root, ENTRY_ROOT_PATTERN, REG_EXTENDED | REG_NOSUB) == 0) {
		while (info && getline(&line, &size, info) > 0)
			sscanf(line, "mnt_id: %d", &mount_id);
		while (mount_table && getline(&line, &size, mount_table) > 0) {
			if (sscanf(line, "%d %*d %*s %8191s", &id, root) != 2 || id != mount_id)
				continue;
			if (regexec(&entry_root, root, 0, NULL, 0) == 0)
				kind = MOUNT_ENTRY;
			else if (strstr(line, " - " FUSE_TYPE " "))
				kind = MOUNT_READ_THROUGH;
			break;
		}
		regfree(&entry_root);
	}
	free(line);
	if (info)
		fclose(info);
	if (mount_table)
		fclose(mount_table);
	return kind;
}

static unsigned long long timespec_to_ns(struct timespec time)
{
	return (unsigned long long)(time.tv_sec * 1000000000LL + time.tv_nsec);
}

void identity_from_stat(const struct stat *st, unsigned long long identity[4])
{
	identity[0] = st->st_ino;
	identity[1] = (unsigned long long)st->st_size;
	identity[2] = timespec_to_ns(st->st_mtim);
	identity[3] = timespec_to_ns(st->st_ctim);
}

/* What lies at the user's path. `target_fd`, closed first if it was open, is then open, or -1. */
static enum path_state inspect_path(spank_t sp, const struct step *step, int copy_fd,
				    int *target_fd)
{
	char link[32], path[PATH_MAX];
	struct stat st, copy_status = {0};

	if (*target_fd >= 0)
		close(*target_fd);
	*target_fd = call_as_job_user(sp, open_readable_image, &(struct path_request){step, copy_fd});
	if (*target_fd < 0)
		return PATH_UNREADABLE;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", *target_fd);
	ssize_t length = readlink(link, path, sizeof(path) - 1);
	if (length < 0 || fstat(*target_fd, &st) < 0 ||
	    (copy_fd >= 0 && fstat(copy_fd, &copy_status) < 0))
		return PATH_OTHER;
	path[length] = '\0';
	if (copy_fd >= 0 && st.st_dev == copy_status.st_dev && st.st_ino == copy_status.st_ino)
		return PATH_COPY;
	char *suffix = st.st_nlink == 0 ? strrchr(path, ' ') : NULL;
	if (suffix && strcmp(suffix, " (deleted)") == 0)
		*suffix = '\0'; /* how the kernel shows a bind whose entry was evicted */
	if (strcmp(path, step->resolved_path) != 0)
		return PATH_OTHER;
	unsigned long long identity[4];
	identity_from_stat(&st, identity);
	enum mount_kind kind = find_mount_kind(*target_fd);
	/* It has the inode, size and mtime of what it is read from. */
	if (kind == MOUNT_READ_THROUGH)
		return memcmp(identity, step->identity, 3 * sizeof(identity[0])) == 0 ? PATH_COPY
										      : PATH_STALE;
	if (kind == MOUNT_ENTRY && (step->reads_through || st.st_dev == copy_status.st_dev))
		return PATH_STALE;
	return memcmp(identity, step->identity, sizeof(identity)) == 0 ? PATH_SOURCE : PATH_OTHER;
}

static bool unmount_top(int target_fd)
{
	char link[32];

	snprintf(link, sizeof(link), "/proc/self/fd/%d", target_fd);
	return umount2(link, MNT_DETACH) == 0;
}

/*
 * A bind inherits the flags of the mount that it is made from. So the entry is bound over itself,
 * where only root gets, and that is made read-only: in no moment could the task write to it.
 */
static bool bind_entry(int directory_fd, int target_fd)
{
	const unsigned long flags = MS_RDONLY | MS_NOSUID | MS_NODEV;
	char link[32], entry[40];

	/* Not by the entry's path, which may lead elsewhere by now; nor by a descriptor of the entry,
	 * which would go on to show what lies below the first bind. */
	snprintf(entry, sizeof(entry), "/proc/self/fd/%d/image", directory_fd);
	snprintf(link, sizeof(link), "/proc/self/fd/%d", target_fd);
	if (mount(entry, entry, NULL, MS_BIND, NULL) < 0)
		return false;
	bool is_bound = mount(NULL, entry, NULL, MS_REMOUNT | MS_BIND | flags, NULL) == 0 &&
			mount(entry, link, NULL, MS_BIND, NULL) == 0;
	int error = errno;
	umount2(entry, MNT_DETACH);
	errno = error;
	return is_bound;
}

static const char *mount_copy(spank_t sp, const struct step *step, struct open_copy *copy,
			      int *target_fd)
{
	const char *failure = step->reads_through ? NULL : open_entry(step, copy);
	enum path_state state =
		failure ? PATH_OTHER : inspect_path(sp, step, copy->image_fd, target_fd);

	if (!failure && step->reads_through && (state == PATH_SOURCE || state == PATH_STALE)) {
		failure = open_read_through(step, copy);
		state = failure ? PATH_OTHER : inspect_path(sp, step, copy->image_fd, target_fd);
	}
	if (failure)
		return failure;
	if (state == PATH_SOURCE || state == PATH_STALE)
		mark_namespace_changed();
	for (int i = 0; state == PATH_STALE && i < MAX_STALE_BINDS; i++) {
		if (!unmount_top(*target_fd))
			return "an older copy lies over it";
		state = inspect_path(sp, step, copy->image_fd, target_fd);
	}
	if (state == PATH_SOURCE && step->reads_through)
		return attach_mount(copy->image_fd, *target_fd) ? NULL
								: "it cannot be mounted over";
	if (state == PATH_SOURCE)
		return bind_entry(copy->directory_fd, *target_fd) ? NULL : "it cannot be bound";
	if (state == PATH_UNREADABLE)
		return errno == EACCES || errno == EPERM
			       ? "the step's user and groups may not read it"
			       : "it cannot be opened";
	return state == PATH_COPY ? NULL : "it is another file by now";
}

const char *redirect_image(spank_t sp, const struct step *step)
{
	struct open_copy copy = {.directory_fd = -1, .image_fd = -1};
	int target_fd = -1;

	errno = 0;
	const char *failure = mount_copy(sp, step, &copy, &target_fd);
	int error = errno;
	if (target_fd >= 0)
		close(target_fd);
	close_copy(&copy);
	errno = error;
	return failure;
}
