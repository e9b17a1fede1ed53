/* What of a job's data is shown in its steps? As the helper's lines say (features/data/wanted.py).
*/
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

#define PATIENCE_SECONDS (SERVED_SECONDS + 7) /* a busy node takes longer */
#define MADE "mode=0755,size=64k" /* of the tmpfs in which missing mount points are made */

/* A line, taken apart in user_init; the tasks inherit it. */
struct datum {
	struct line line; /* of a mount, the last two fields are where, and its inode or `root` */
	char *text;       /* what its fields point into */
	int mount;        /* fetched from who serves it; -1 */
	bool done;
};

static struct datum data[MOST_DATA];
static int data_count;

static enum word kind(const struct datum *one) { return one->line.word; }
static char *field(const struct datum *one, int n) { return one->line.field[n]; }
static const char *target(const struct datum *one) { return field(one, one->line.count - 2); }
static const char *owner(const struct datum *one) { return field(one, one->line.count - 1); }

void forget_data(void)
{
	for (int i = 0; i < data_count; i++)
		free(data[i].text);
	data_count = 0;
}

void take_datum(const struct line *line, char *text)
{
	if (data_count < MOST_DATA) {
		data[data_count++] = (struct datum){.line = *line, .text = text, .mount = -1};
		return;
	}
	slurm_info("forestage: more than %d lines on data: one is left out: %s", MOST_DATA, text);
	free(text);
}

void set_variables(spank_t sp)
{
	for (const struct datum *one = data; one < data + data_count; one++) {
		/* Without a value: what was forestage's is out already, what is there is the user's. */
		if (kind(one) == ENV && one->line.count == 2)
			set_variable(sp, field(one, 0), field(one, 1));
	}
}

bool is_directory_named(void)
{
	for (const struct datum *one = data; one < data + data_count; one++)
		if (kind(one) == ENV && strcmp(field(one, 0), DIRECTORY) == 0)
			return true;
	return false;
}

static int open_folder(const void *path)
{
	return open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* The directory where it is to show, O_PATH, or -1: also where this user cannot reach it. */
static int open_target(spank_t sp, const struct datum *one, const char **wrong)
{
	char link[32], path[PATH_MAX];
	bool by_root = strcmp(owner(one), "root") == 0, same = false;
	struct stat st;
	int fd = by_root ? open_folder(target(one)) : as_job_user(sp, open_folder, target(one));

	*wrong = "it cannot be opened";
	if (fd < 0)
		return -1;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	ssize_t length = readlink(link, path, sizeof(path) - 1);
	if (length >= 0 && fstat(fd, &st) == 0) {
		path[length] = '\0';
		*wrong = "there are links on its way";
		same = strcmp(path, target(one)) == 0;
		if (same && by_root) {
			*wrong = "it is not root's alone";
			same = st.st_uid == 0 && !(st.st_mode & 022);
		} else if (same) {
			*wrong = "it is another directory by now";
			same = st.st_ino == strtoull(owner(one), NULL, 10);
		}
	}
	if (same)
		return fd;
	close(fd);
	errno = ESTALE;
	return -1;
}

/*
 * The device is another file's if the helper's was let go of since. While it is open nobody gets its
 * number: the check holds until it is mounted.
 */
static const char *mount_device(const struct datum *one, int fd)
{
	const unsigned long access = strcmp(field(one, 3), "ro") == 0 ? MS_RDONLY : 0;
	const char *wrong = "its device is gone";
	char link[32], file[64] = "";
	struct loop_info64 info;
	int device = open(field(one, 0), O_RDONLY | O_CLOEXEC);

	if (device < 0)
		return wrong;
	if (ioctl(device, LOOP_GET_STATUS64, &info) == 0)
		snprintf(file, sizeof(file), "%llu:%llu", (unsigned long long)info.lo_device,
			 (unsigned long long)info.lo_inode);
	if (strcmp(file, field(one, 1)) == 0) {
		snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
		wrong = mount(field(one, 0), link, field(one, 2), MS_NOSUID | MS_NODEV | access,
			      "") == 0
				? NULL
				: "it cannot be mounted";
	}
	int error = errno;
	close(device);
	errno = error;
	return wrong;
}

/*
 * Whoever serves it first has a program begin, in the cgroups that Slurm puts this task into. Anew for
 * each try: what was mounted in one that hangs cannot be mounted elsewhere.
 */
const char *fetch_datum(struct datum *one)
{
	static char answer[ANSWER_BYTES];
	const struct timeval patience = {.tv_sec = PATIENCE_SECONDS};
	const char *wrong = "nobody serves it";

	if (kind(one) != SERVED)
		return NULL;
	if (one->mount >= 0)
		close(one->mount);
	one->mount = -1;
	int keeper = connect_keeper(field(one, 0));
	if (keeper < 0)
		return wrong;
	setsockopt(keeper, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	one->mount = fetch_mount(keeper, answer);
	int error = errno;
	close(keeper);
	errno = error;
	if (one->mount >= 0)
		return NULL;
	return strncmp(answer, "no ", 3) == 0 ? answer + 3 : wrong;
}

static bool is_made(const struct datum *one)
{
	for (const struct datum *other = data; other < one; other++)
		if (other->done && kind(other) == FOLDER &&
		    strcmp(target(other), target(one)) == 0)
			return true;
	return false;
}

/* In a tmpfs over the directory, which this task alone sees: on the node nothing is made. */
static const char *make_folder(spank_t sp, const struct datum *one, int *fd)
{
	char link[32], *rest = field(one, 0), *name;
	const char *wrong;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", *fd);
	if (!is_made(one)) {
		if (mount("forestage", link, "tmpfs", MS_NOSUID | MS_NODEV, MADE) < 0)
			return "no tmpfs can be mounted";
		close(*fd);
		if ((*fd = open_target(sp, one, &wrong)) < 0)
			return wrong;
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

const char *show_datum(spank_t sp, struct datum *one)
{
	const char *wrong;
	int fd = open_target(sp, one, &wrong);

	if (fd < 0)
		return wrong;
	will_change();
	if (kind(one) == DEVICE)
		wrong = mount_device(one, fd);
	else if (kind(one) == SERVED)
		wrong = attach_mount(one->mount, fd) ? NULL : "it cannot be mounted";
	else
		wrong = make_folder(sp, one, &fd);
	int error = errno;
	if (fd >= 0)
		close(fd);
	errno = error;
	one->done = !wrong;
	return wrong;
}

int list_data(struct item *items)
{
	int count = 0;

	for (struct datum *one = data; one < data + data_count; one++)
		if (kind(one) != ENV)
			items[count++] = (struct item){
				.path = target(one), .kept = &one->mount, .datum = one};
	return count;
}
