/* Has this job been shown that image before? By the record of who looked (cache/step_record.py). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "plugin.h"

#define EVENT_BYTES (MAX_RECORD_BYTES + 200)
#define MAX_USER_FILES 32 /* files of the user's; one with more asks a helper */
#define PROLOG_TIMEOUT_US 1000000 /* for a Prolog's work; a helper waits longer (hooks/background_prolog.py) */

struct recorded_image {
	char *event_log;  /* its path */
	char *event_json; /* the rest of the event's JSON */
	char *answer;     /* as a helper would give it */
	struct protocol_line room; /* bytes that stay free on the cache's disk; ratio of unpacking */
	/* Files that must not have changed, checked as the user. */
	struct protocol_line user_files[MAX_USER_FILES];
	int user_file_count;
};

/* All of a file that only root could write. False where there is none, or more than fits. */
static bool read_root_file(const char *path, char *text, size_t size)
{
	int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	struct stat st;
	size_t length = 0;
	ssize_t n = 0;

	if (fd < 0)
		return false;
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == 0 && !(st.st_mode & 022))
		while (length < size - 1 && (n = read(fd, text + length, size - 1 - length)) > 0)
			length += (size_t)n;
	close(fd);
	text[length] = '\0';
	return n == 0 && length > 0;
}

/* Whether a file is as it was when the record was made: zeros are for one that was not there. */
static bool is_unchanged(const struct protocol_line *line)
{
	const char *path = line->fields[0];
	unsigned long long recorded[4], current[4] = {0};
	struct stat st;

	read_numbers(line, 1, recorded);
	if (stat(path, &st) == 0)
		identity_from_stat(&st, current);
	else if (errno != ENOENT || lstat(path, &st) == 0) /* a dangling link switches off as well */
		return false;
	return memcmp(current, recorded, sizeof(recorded)) == 0;
}

static bool is_current_boot(const char *boot)
{
	char current[64];

	if (!read_root_file("/proc/sys/kernel/random/boot_id", current, sizeof(current)))
		return false;
	current[strcspn(current, "\n")] = '\0';
	return strcmp(boot, current) == 0;
}

/* Whether that is the `enroot` which pyxis would start: it has our PATH. Empty: there is none. */
static bool is_enroot_on_path(const char *program)
{
	static char path[PATH_MAX];
	struct stat st;

	for (const char *folder = getenv("PATH"); folder && *folder;) {
		size_t length = strcspn(folder, ":");
		int size = snprintf(path, sizeof(path), "%.*s/enroot", (int)length, folder);

		if (folder[0] == '/' && size > 0 && (size_t)size < sizeof(path) &&
		    stat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_mode & 0111)
			return strcmp(path, program) == 0;
		folder += length + (folder[length] == ':');
	}
	return !*program;
}

/* Whether the step has the variable with that value, or not at all where the line says none. */
static bool matches_variable(char **environment, const struct protocol_line *line)
{
	const char *name = line->fields[0], *value = NULL;
	size_t length = strlen(name);

	if (!environment)
		return false;
	for (; *environment; environment++) /* of a name that comes twice the last counts */
		if (strncmp(*environment, name, length) == 0 && (*environment)[length] == '=')
			value = *environment + length + 1;
	return line->field_count == 2 ? value && strcmp(value, line->fields[1]) == 0 : !value;
}

/* Whether what a line says was decided by is still so; one that says nothing of the kind is. */
static bool is_still_valid(const struct protocol_line *line, const struct requester *requester)
{
	switch (line->kind) {
	case LINE_BOOT:
		return is_current_boot(line->fields[0]);
	case LINE_FILE:
		return is_unchanged(line);
	case LINE_ENROOT:
		return is_enroot_on_path(line->fields[0]);
	case LINE_VARIABLE:
		return matches_variable(requester->environment, line);
	default:
		return line->kind != LINE_UNKNOWN;
	}
}

/* The line of what this user asks for, if all that was decided before it still holds. */
static bool find_recorded_image(char *text, const char *path, const struct requester *requester,
				struct recorded_image *image)
{
	struct protocol_line line;
	char *line_text = strsep(&text, "\n");

	if (strcmp(line_text, PROTOCOL_GREETING) != 0)
		return false;
	while ((line_text = strsep(&text, "\n")) && text) { /* each ends with a newline */
		const enum line_kind kind = parse_line(line_text, &line);

		if (!is_still_valid(&line, requester) ||
		    (kind == LINE_THEIRS && image->user_file_count == MAX_USER_FILES))
			return false;
		if (kind == LINE_EVENTS)
			image->event_log = line.fields[0];
		if (kind == LINE_ROOM)
			image->room = line;
		if (kind == LINE_THEIRS)
			image->user_files[image->user_file_count++] = line;
		if (kind != LINE_IMAGE || strcmp(line.fields[0], path) != 0 ||
		    read_number(&line, 1) != requester->uid)
			continue;
		image->event_json = line.fields[2];
		image->answer = line.fields[3];
		return image->event_log && image->room.kind == LINE_ROOM;
	}
	return false;
}

/* Asks the file server, which open(2) need not do (system/files.read_fresh_stat). -1, and errno. */
static int stat_from_server(int fd, struct stat *st)
{
	struct statx fresh;

	return statx(fd, "", AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &fresh) < 0
		       ? -1
		       : fstat(fd, st);
}

/*
 * Whether the path leads this user to the file that was staged, and they may read it. Opened for
 * reading too, which is what says that they may.
 */
static bool is_staged_source(const struct step *step)
{
	char link[32], path[PATH_MAX];
	unsigned long long found[4] = {0};
	struct stat st;
	bool is_same = false;
	int fd = open_image_path(step), source_fd = -1;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	ssize_t length = fd < 0 ? -1 : readlink(link, path, sizeof(path) - 1);
	if (length >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
		path[length] = '\0';
		source_fd = open(link, O_RDONLY | O_NOCTTY | O_CLOEXEC);
		if (source_fd >= 0 && stat_from_server(source_fd, &st) == 0)
			identity_from_stat(&st, found);
		is_same = strcmp(path, step->resolved_path) == 0 &&
			  memcmp(found, step->identity, sizeof(found)) == 0;
	}
	if (source_fd >= 0)
		close(source_fd);
	if (fd >= 0)
		close(fd);
	return is_same;
}

static long long read_clock_us(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

/* As events/user_files.py has it, whatever the last line was cut short by. */
static void append_line(int fd, const char *line)
{
	struct stat st;
	char last = '\n';

	if (fstat(fd, &st) == 0 && st.st_size > 0)
		last = pread(fd, &last, 1, st.st_size - 1) == 1 ? last : '\n';
	/* The step is served all the same. What cannot be written now is lost. */
	(void)!write(fd, line + (last == '\n'), strlen(line + (last == '\n')));
}

/*
 * Only hooks make the file. Many steps may come before the next hook, so a full one gives its front
 * back here, too.
 */
static void append_user_event(uid_t uid, const char *line)
{
	char path[sizeof(USER_LOG_DIRECTORY USER_FILE_NAME) + 16];
	struct stat st;

	snprintf(path, sizeof(path), USER_LOG_DIRECTORY "/%u/" USER_FILE_NAME, uid);
	int fd = open(path, O_RDWR | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0)
		return;
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == 0) {
		append_line(fd, line);
		if (fstat(fd, &st) == 0 && st.st_blocks * 512LL > MAX_USER_FILE_BYTES)
			fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, 0,
				  (st.st_size - KEPT_USER_FILE_BYTES) / 4096 * 4096);
	}
	close(fd);
}

/* As events/event_log.py writes it. */
void append_event(const char *log_path, const struct event *event)
{
	const long long now = read_clock_us(CLOCK_REALTIME), duration_us = event->duration_us;
	static char line[EVENT_BYTES];
	int length = snprintf(line, sizeof(line),
			      "\n{\"time\":%lld.%03lld,\"total\":%lld.%04lld,\"step\":%u,%s\n",
			      now / 1000000, now / 1000 % 1000, duration_us / 1000000,
			      duration_us / 100 % 10000, event->step_id, event->json_rest);

	if (length <= 0 || (size_t)length >= sizeof(line))
		return;
	append_user_event(event->uid, line); /* first where no disk hangs */
	/* No link is followed, and a FIFO without a reader is an error and no wait. */
	int fd = open(log_path, O_RDWR | O_APPEND | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC,
		      0640);
	if (fd < 0)
		return;
	append_line(fd, line);
	close(fd);
}

/* Whether a step may unpack the entry on its disk, or a helper has to evict before. */
static bool has_room(const struct step *step, const struct protocol_line *room)
{
	const unsigned long long min_free = read_number(room, 0), ratio = read_number(room, 1);
	unsigned long long free;
	struct statvfs disk;
	struct stat st;

	if (step->reads_through) /* its size is not known here, and its copy was made room for */
		return true;
	if (stat(step->entry_path, &st) || statvfs(step->entry_path, &disk))
		return false;
	free = (unsigned long long)disk.f_bavail * disk.f_frsize;
	return ratio == 0 ||
	       (free >= min_free && free - min_free >= ratio * (unsigned long long)st.st_blocks * 512);
}

/* The entry, opened, or the keeper of the copy that is under way. */
static bool is_copy_available(const struct step *step, struct open_copy *copy)
{
	struct stat st;
	int keeper_fd;

	if (!step->reads_through)
		return !open_entry(step, copy) && fstat(copy->image_fd, &st) == 0 &&
		       S_ISREG(st.st_mode) && (unsigned long long)st.st_size == step->identity[1];
	keeper_fd = connect_keeper(step->entry_path);
	if (keeper_fd >= 0)
		close(keeper_fd);
	return keeper_fd >= 0;
}

/* Waits until the Prolog that works in the background has noted what it found. */
static void await_prolog(const char *mark_path)
{
	const long long end_us = read_clock_us(CLOCK_MONOTONIC) + PROLOG_TIMEOUT_US;
	int fd = open(mark_path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);

	if (fd < 0)
		return;
	while (flock(fd, LOCK_SH | LOCK_NB) < 0 && read_clock_us(CLOCK_MONOTONIC) < end_us)
		sleep_poll_interval();
	close(fd);
}

/* Of this release, or of the one before: jobs outlive an upgrade. */
static bool is_directory_format(const char *line)
{
	char expected[64];

	for (int format = DIRECTORY_RECORD_FORMAT;
	     format > 0 && format >= DIRECTORY_RECORD_FORMAT - 1; format--) {
		snprintf(expected, sizeof(expected), "directory %d", format);
		if (strcmp(line, expected) == 0)
			return true;
	}
	return false;
}

/*
 * The record says what a helper would (features/data/directory_record.py). It counts while staging is
 * off, too: the job has the directory already. The task checks that its device still shows its file
 * (data_mounts.c).
 */
void answer_from_directory_record(const struct requester *requester, struct step *step)
{
	static char text[MAX_RECORD_BYTES],
		answer[MAX_RECORD_BYTES + sizeof(PROTOCOL_GREETING) + 32];
	char path[64], *rest = text, *line_text;
	bool is_same_boot = false, is_of_user = false;
	struct protocol_line line;

	(void)step;
	snprintf(path, sizeof(path), LEASE_DIRECTORY "/%u" DIRECTORY_RECORD_SUFFIX,
		 requester->job_id);
	if (!read_root_file(path, text, sizeof(text)) || !is_directory_format(strsep(&rest, "\n")))
		return;
	size_t length = (size_t)snprintf(answer, sizeof(answer), PROTOCOL_GREETING "\n");
	while ((line_text = strsep(&rest, "\n")) && rest) { /* each ends with a newline */
		size_t end = length + (size_t)snprintf(answer + length, sizeof(answer) - length,
						       "%s\n", line_text);

		switch (parse_line(line_text, &line)) {
		case LINE_BOOT:
			is_same_boot = is_current_boot(line.fields[0]);
			break;
		case LINE_OWNER: /* the number may be another job's by now */
			is_of_user = read_number(&line, 0) == requester->uid;
			break;
		case LINE_DEVICE:
		case LINE_SERVED:
		case LINE_ENV:
			length = end;
			break;
		default:
			return;
		}
	}
	if (!is_same_boot || !is_of_user)
		return;
	length += (size_t)snprintf(answer + length, sizeof(answer) - length, "leave\tno-helper\n");
	(void)!write(1, answer, length); /* who reads it has waited for too long otherwise */
}

void answer_from_record(const struct requester *requester, struct step *step)
{
	static char text[MAX_RECORD_BYTES], output[MAX_RECORD_BYTES];
	char path[64], image_path[2 * PATH_MAX];
	const long long start = read_clock_us(CLOCK_MONOTONIC);
	struct open_copy copy = {.directory_fd = -1, .image_fd = -1};
	struct recorded_image image = {0};
	struct protocol_line answer;

	snprintf(path, sizeof(path), LEASE_DIRECTORY "/%u" PROLOG_MARK_SUFFIX, requester->job_id);
	await_prolog(path);
	/* As os.path.join() has it in hooks/step.py. */
	if (step->image[0] == '/')
		snprintf(image_path, sizeof(image_path), "%s", step->image);
	else
		snprintf(image_path, sizeof(image_path), "%s/%s", step->working_directory,
			 step->image);
	snprintf(path, sizeof(path), LEASE_DIRECTORY "/%u" STEP_RECORD_SUFFIX, requester->job_id);
	if (!read_root_file(path, text, sizeof(text)) ||
	    !find_recorded_image(text, image_path, requester, &image))
		return;
	int length = snprintf(output, sizeof(output), PROTOCOL_GREETING "\n%s\n", image.answer);
	if (parse_line(image.answer, &answer) != LINE_USE && answer.kind != LINE_THROUGH)
		return;
	apply_answer(&answer, step);
	/* First what is this node's: a file server that hangs may keep the rest. */
	if (!is_copy_available(step, &copy) || !has_room(step, &image.room) ||
	    !set_effective_user(requester->uid, requester->gid, requester->group_count,
				requester->groups))
		return;
	bool is_same = is_staged_source(step);
	for (int i = 0; i < image.user_file_count; i++)
		is_same = is_same && is_unchanged(&image.user_files[i]);
	if (!set_effective_user(0, 0, 0, NULL) || !is_same)
		return;
	if (write(1, output, (size_t)length) != length)
		return;
	/* The cache's disk may take no writes: the lease keeps the entry, the Epilog notes the use. */
	append_event(image.event_log,
		     &(struct event){.uid = requester->uid,
				     .step_id = requester->step_id,
				     .duration_us = read_clock_us(CLOCK_MONOTONIC) - start,
				     .json_rest = image.event_json});
}
