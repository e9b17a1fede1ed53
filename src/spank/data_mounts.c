/* Mounts a job's data in its steps, as the helper's lines say (features/data/data_view.py). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include "plugin.h"

#define FETCH_TIMEOUT_S (SERVE_TIMEOUT_S + 7) /* a busy node takes longer */
#define TMPFS_OPTIONS "mode=0755,size=64k" /* of the tmpfs in which missing mount points are made */

/* A line, parsed in user_init; the tasks inherit it. */
struct data_line {
	struct protocol_line parsed; /* a mount's last two fields: where, and its inode or `root` */
	char *text;                  /* what its fields point into */
	int mount_fd;                /* fetched from the program that serves it; -1 */
	bool is_mounted;
};

static struct data_line data_lines[MAX_DATA_LINES];
static int data_line_count;

static enum line_kind get_kind(const struct data_line *line) { return line->parsed.kind; }
static char *get_field(const struct data_line *line, int index)
{
	return line->parsed.fields[index];
}
static const char *get_target(const struct data_line *line)
{
	return get_field(line, line->parsed.field_count - 2);
}
static const char *get_owner(const struct data_line *line)
{
	return get_field(line, line->parsed.field_count - 1);
}

void clear_data_lines(void)
{
	for (int i = 0; i < data_line_count; i++)
		free(data_lines[i].text);
	data_line_count = 0;
}

void add_data_line(const struct protocol_line *line, char *text)
{
	if (data_line_count < MAX_DATA_LINES) {
		data_lines[data_line_count++] =
			(struct data_line){.parsed = *line, .text = text, .mount_fd = -1};
		return;
	}
	slurm_info("forestage: more than %d lines on data: one is left out: %s", MAX_DATA_LINES,
		   text);
	free(text);
}

void set_data_variables(spank_t sp)
{
	for (const struct data_line *line = data_lines; line < data_lines + data_line_count;
	     line++) {
		/* Without a value: what was forestage's is out already, what is there is the user's. */
		if (get_kind(line) == LINE_ENV && line->parsed.field_count == 2)
			set_step_variable(sp, get_field(line, 0), get_field(line, 1));
	}
}

bool has_directory_line(void)
{
	for (const struct data_line *line = data_lines; line < data_lines + data_line_count; line++)
		if (get_kind(line) == LINE_ENV &&
		    strcmp(get_field(line, 0), DIRECTORY_VARIABLE) == 0)
			return true;
	return false;
}

static int open_directory(const void *path)
{
	return open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* The directory where it is to show, O_PATH, or -1: also where this user cannot reach it. */
static int open_target(spank_t sp, const struct data_line *line, const char **failure)
{
	char link[32], path[PATH_MAX];
	bool by_root = strcmp(get_owner(line), "root") == 0, is_same = false;
	struct stat st;
	int fd = by_root ? open_directory(get_target(line))
			 : call_as_job_user(sp, open_directory, get_target(line));

	*failure = "it cannot be opened";
	if (fd < 0)
		return -1;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	ssize_t length = readlink(link, path, sizeof(path) - 1);
	if (length >= 0 && fstat(fd, &st) == 0) {
		path[length] = '\0';
		*failure = "there are links on its way";
		is_same = strcmp(path, get_target(line)) == 0;
		if (is_same && by_root) {
			*failure = "it is not root's alone";
			is_same = st.st_uid == 0 && !(st.st_mode & 022);
		} else if (is_same) {
			*failure = "it is another directory by now";
			is_same = st.st_ino == strtoull(get_owner(line), NULL, 10);
		}
	}
	if (is_same)
		return fd;
	close(fd);
	errno = ESTALE;
	return -1;
}

/*
 * The device is another file's if the helper's was let go of since. While it is open nobody gets its
 * number: the check holds until it is mounted.
 */
static const char *mount_device(const struct data_line *line, int target_fd)
{
	const unsigned long flags = strcmp(get_field(line, 3), "ro") == 0 ? MS_RDONLY : 0;
	const char *failure = "its device is gone";
	char link[32], file_identity[64] = "";
	struct loop_info64 info;
	int device_fd = open(get_field(line, 0), O_RDONLY | O_CLOEXEC);

	if (device_fd < 0)
		return failure;
	if (ioctl(device_fd, LOOP_GET_STATUS64, &info) == 0)
		snprintf(file_identity, sizeof(file_identity), "%llu:%llu",
			 (unsigned long long)info.lo_device, (unsigned long long)info.lo_inode);
	if (strcmp(file_identity, get_field(line, 1)) == 0) {
		snprintf(link, sizeof(link), "/proc/self/fd/%d", target_fd);
		failure = mount(get_field(line, 0), link, get_field(line, 2),
				MS_NOSUID | MS_NODEV | flags, "") == 0
				  ? NULL
				  : "it cannot be mounted";
	}
	int error = errno;
	close(device_fd);
	errno = error;
	return failure;
}

/*
 * Whoever serves it first has a program begin, in the cgroups that Slurm puts this task into. Anew for
 * each try: what was mounted in one that hangs cannot be mounted elsewhere.
 */
const char *fetch_data_mount(struct data_line *line)
{
	static char answer[KEEPER_ANSWER_BYTES];
	const struct timeval timeout = {.tv_sec = FETCH_TIMEOUT_S};
	const char *failure = "nobody serves it";

	if (get_kind(line) != LINE_SERVED)
		return NULL;
	if (line->mount_fd >= 0)
		close(line->mount_fd);
	line->mount_fd = -1;
	int server_fd = connect_keeper(get_field(line, 0));
	if (server_fd < 0)
		return failure;
	setsockopt(server_fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
	line->mount_fd = fetch_mount_clone(server_fd, answer);
	int error = errno;
	close(server_fd);
	errno = error;
	if (line->mount_fd >= 0)
		return NULL;
	return strncmp(answer, "no ", 3) == 0 ? answer + 3 : failure;
}

static bool is_tmpfs_mounted(const struct data_line *line)
{
	for (const struct data_line *other = data_lines; other < line; other++)
		if (other->is_mounted && get_kind(other) == LINE_FOLDER &&
		    strcmp(get_target(other), get_target(line)) == 0)
			return true;
	return false;
}

/* In a tmpfs over the directory, which this task alone sees: on the node nothing is made. */
static const char *make_mount_point(spank_t sp, const struct data_line *line, int *fd)
{
	char link[32], *rest = get_field(line, 0), *name;
	const char *failure;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", *fd);
	if (!is_tmpfs_mounted(line)) {
		if (mount("forestage", link, "tmpfs", MS_NOSUID | MS_NODEV, TMPFS_OPTIONS) < 0)
			return "no tmpfs can be mounted";
		close(*fd);
		if ((*fd = open_target(sp, line, &failure)) < 0)
			return failure;
	}
	mode_t mask = umask(022);
	while ((name = strsep(&rest, "/"))) {
		if (!*name || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
			continue;
		int next = mkdirat(*fd, name, 0755) == 0 || errno == EEXIST
				   ? openat(*fd, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
				   : -1;
		if (next < 0)
			break;
		close(*fd);
		*fd = next;
	}
	umask(mask);
	return name ? "it cannot be made" : NULL;
}

const char *make_data_mount(spank_t sp, struct data_line *line)
{
	const char *failure;
	int fd = open_target(sp, line, &failure);

	if (fd < 0)
		return failure;
	mark_namespace_changed();
	if (get_kind(line) == LINE_DEVICE)
		failure = mount_device(line, fd);
	else if (get_kind(line) == LINE_SERVED)
		failure = attach_mount(line->mount_fd, fd) ? NULL : "it cannot be mounted";
	else
		failure = make_mount_point(sp, line, &fd);
	int error = errno;
	if (fd >= 0)
		close(fd);
	errno = error;
	line->is_mounted = !failure;
	return failure;
}

int list_data_mounts(struct task_mount *mounts)
{
	int count = 0;

	for (struct data_line *line = data_lines; line < data_lines + data_line_count; line++)
		if (get_kind(line) != LINE_ENV)
			mounts[count++] = (struct task_mount){.path = get_target(line),
							      .server_fd = &line->mount_fd,
							      .data_line = line};
	return count;
}
