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

#define EVENT_BYTES (RECORD_BYTES + 200)
#define MOST_THEIRS 32 /* files of the user's; one with more asks a helper */
#define PROLOG_US 1000000 /* for a Prolog's work; a helper waits longer (hooks/background.py) */

struct note {
	char *events;     /* the event log */
	char *event;      /* the rest of this one's JSON */
	char *answer;     /* as a helper would give it */
	struct line room; /* bytes that stay free on the cache's disk, and the ratio of unpacking */
	struct line theirs[MOST_THEIRS]; /* files that have to be as they were, for the user to look at */
	int count;
};

/* All of a file that only root could write. False where there is none, or more than fits. */
static bool read_all(const char *path, char *text, size_t size)
{
	int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	struct stat st;
	size_t have = 0;
	ssize_t n = 0;

	if (fd < 0)
		return false;
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == 0 && !(st.st_mode & 022))
		while (have < size - 1 && (n = read(fd, text + have, size - 1 - have)) > 0)
			have += (size_t)n;
	close(fd);
	text[have] = '\0';
	return n == 0 && have > 0;
}

/* Whether a file is as it was when the record was made: zeros are for one that was not there. */
static bool unchanged(const struct line *line)
{
	const char *path = line->field[0];
	unsigned long long id[4], found[4] = {0};
	struct stat st;

	take_numbers(line, 1, id);
	if (stat(path, &st) == 0)
		identify(&st, found);
	else if (errno != ENOENT || lstat(path, &st) == 0) /* a dangling link switches off as well */
		return false;
	return memcmp(found, id, sizeof(id)) == 0;
}

static bool same_boot(const char *boot)
{
	char now[64];

	if (!read_all("/proc/sys/kernel/random/boot_id", now, sizeof(now)))
		return false;
	now[strcspn(now, "\n")] = '\0';
	return strcmp(boot, now) == 0;
}

/* Whether that is the `enroot` which pyxis would start: it has our PATH. Empty: there is none. */
static bool is_enroot(const char *program)
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
static bool has_variable(char **variables, const struct line *line)
{
	const char *name = line->field[0], *found = NULL;
	size_t length = strlen(name);

	if (!variables)
		return false;
	for (; *variables; variables++) /* of a name that comes twice the last counts */
		if (strncmp(*variables, name, length) == 0 && (*variables)[length] == '=')
			found = *variables + length + 1;
	return line->count == 2 ? found && strcmp(found, line->field[1]) == 0 : !found;
}

/* Whether what a line says was decided by is still so; one that says nothing of the kind is. */
static bool holds(const struct line *line, const struct asker *who)
{
	switch (line->word) {
	case BOOT:
		return same_boot(line->field[0]);
	case OUR_FILE:
		return unchanged(line);
	case ENROOT:
		return is_enroot(line->field[0]);
	case VARIABLE:
		return has_variable(who->variables, line);
	default:
		return line->word != ODD;
	}
}

/* The line of what this user asks for, if all that was decided before it still holds. */
static bool find(char *text, const char *asked, const struct asker *who, struct note *note)
{
	struct line line;
	char *one = strsep(&text, "\n");

	if (strcmp(one, LANGUAGE) != 0)
		return false;
	while ((one = strsep(&text, "\n")) && text) { /* each ends with a newline */
		const enum word word = understand(one, &line);

		if (!holds(&line, who) || (word == THEIR_FILE && note->count == MOST_THEIRS))
			return false;
		if (word == EVENT_LOG)
			note->events = line.field[0];
		if (word == ROOM)
			note->room = line;
		if (word == THEIR_FILE)
			note->theirs[note->count++] = line;
		if (word != IMAGE || strcmp(line.field[0], asked) != 0 || number(&line, 1) != who->uid)
			continue;
		note->event = line.field[2];
		note->answer = line.field[3];
		return note->events && note->room.word == ROOM;
	}
	return false;
}

/* What the file server says of an open file now: open(2) need not ask it (system/files.read_fresh_stat). */
static int latest(int fd, struct stat *st)
{
	struct statx asked;

	return statx(fd, "", AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &asked) < 0
		       ? -1
		       : fstat(fd, st);
}

/*
 * Whether the path leads this user to the file that was staged, and they may read it. Opened for
 * reading too, which is what says that they may.
 */
static bool leads_there(const struct step *step)
{
	char link[32], path[PATH_MAX];
	unsigned long long found[4] = {0};
	struct stat st;
	bool same = false;
	int fd = open_path(step), source = -1;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	ssize_t length = fd < 0 ? -1 : readlink(link, path, sizeof(path) - 1);
	if (length >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
		path[length] = '\0';
		source = open(link, O_RDONLY | O_NOCTTY | O_CLOEXEC);
		if (source >= 0 && latest(source, &st) == 0)
			identify(&st, found);
		same = strcmp(path, step->path) == 0 &&
		       memcmp(found, step->identity, sizeof(found)) == 0;
	}
	if (source >= 0)
		close(source);
	if (fd >= 0)
		close(fd);
	return same;
}

static long long now_us(clockid_t clock)
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
static void append_for_user(uid_t uid, const char *line)
{
	char name[sizeof(USERS USER_FILE_NAME) + 16];
	struct stat st;

	snprintf(name, sizeof(name), USERS "/%u/" USER_FILE_NAME, uid);
	int fd = open(name, O_RDWR | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0)
		return;
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == 0) {
		append_line(fd, line);
		if (fstat(fd, &st) == 0 && st.st_blocks * 512LL > USER_FILE_BYTES)
			fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, 0,
				  (st.st_size - USER_KEPT_BYTES) / 4096 * 4096);
	}
	close(fd);
}

/* As events/log.py writes it. */
void append_event(const char *log, const struct event *event)
{
	const long long now = now_us(CLOCK_REALTIME), total = event->total;
	static char line[EVENT_BYTES];
	int length = snprintf(line, sizeof(line),
			      "\n{\"time\":%lld.%03lld,\"total\":%lld.%04lld,\"step\":%u,%s\n",
			      now / 1000000, now / 1000 % 1000, total / 1000000,
			      total / 100 % 10000, event->number, event->rest);

	if (length <= 0 || (size_t)length >= sizeof(line))
		return;
	append_for_user(event->uid, line); /* first where no disk hangs */
	/* No link is followed, and a FIFO without a reader is an error and no wait. */
	int fd = open(log, O_RDWR | O_APPEND | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0640);
	if (fd < 0)
		return;
	append_line(fd, line);
	close(fd);
}

/* Whether a step may unpack the entry on its disk, or a helper has to evict before. */
static bool has_room(const struct step *step, const struct line *room)
{
	const unsigned long long min_free = number(room, 0), ratio = number(room, 1);
	unsigned long long free;
	struct statvfs disk;
	struct stat st;

	if (step->through) /* its size is not known here, and its copy was made room for */
		return true;
	if (stat(step->entry, &st) || statvfs(step->entry, &disk))
		return false;
	free = (unsigned long long)disk.f_bavail * disk.f_frsize;
	return ratio == 0 ||
	       (free >= min_free && free - min_free >= ratio * (unsigned long long)st.st_blocks * 512);
}

/* The entry, opened, or the keeper of the copy that is under way. */
static bool is_there(const struct step *step, struct copy *copy)
{
	struct stat st;
	int keeper;

	if (!step->through)
		return !open_entry(step, copy) && fstat(copy->image, &st) == 0 &&
		       S_ISREG(st.st_mode) &&
		       (unsigned long long)st.st_size == step->identity[1];
	keeper = connect_keeper(step->entry);
	if (keeper >= 0)
		close(keeper);
	return keeper >= 0;
}

/* Waits until the Prolog that works in the background has noted what it found. */
static void await_prolog(const char *mark)
{
	const long long until = now_us(CLOCK_MONOTONIC) + PROLOG_US;
	int fd = open(mark, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);

	if (fd < 0)
		return;
	while (flock(fd, LOCK_SH | LOCK_NB) < 0 && now_us(CLOCK_MONOTONIC) < until)
		wait_a_moment();
	close(fd);
}

/* Of this release, or of the one before: jobs outlive an upgrade. */
static bool is_directory_format(const char *line)
{
	char known[64];

	for (int format = DIRECTORY_FORMAT; format > 0 && format >= DIRECTORY_FORMAT - 1; format--) {
		snprintf(known, sizeof(known), "directory %d", format);
		if (strcmp(line, known) == 0)
			return true;
	}
	return false;
}

/*
 * The record says what a helper would (features/data/directory_record.py). It counts while staging
 is off, too:
 * the job has the directory already. That its device still shows its file the task sees (data_mounts.c).
 */
void recall_directory(const struct asker *who, struct step *step)
{
	static char text[RECORD_BYTES], lines[RECORD_BYTES + sizeof(LANGUAGE) + 32];
	char name[64], *rest = text, *one;
	bool is_now = false, is_users = false;
	struct line line;

	(void)step;
	snprintf(name, sizeof(name), LEASES "/%u" DIRECTORY_SUFFIX, who->job);
	if (!read_all(name, text, sizeof(text)) || !is_directory_format(strsep(&rest, "\n")))
		return;
	size_t have = (size_t)snprintf(lines, sizeof(lines), LANGUAGE "\n");
	while ((one = strsep(&rest, "\n")) && rest) { /* each ends with a newline */
		size_t end = have + (size_t)snprintf(lines + have, sizeof(lines) - have, "%s\n", one);

		switch (understand(one, &line)) {
		case BOOT:
			is_now = same_boot(line.field[0]);
			break;
		case OWNER: /* the number may be another job's by now */
			is_users = number(&line, 0) == who->uid;
			break;
		case DEVICE:
		case SERVED:
		case ENV:
			have = end;
			break;
		default:
			return;
		}
	}
	if (!is_now || !is_users)
		return;
	have += (size_t)snprintf(lines + have, sizeof(lines) - have, "leave\tno-helper\n");
	(void)!write(1, lines, have); /* who reads it has waited for too long otherwise */
}

void recall(const struct asker *who, struct step *step)
{
	static char text[RECORD_BYTES], lines[RECORD_BYTES];
	char name[64], asked[2 * PATH_MAX];
	const long long start = now_us(CLOCK_MONOTONIC);
	struct copy copy = {.folder = -1, .image = -1};
	struct note note = {0};
	struct line answer;

	snprintf(name, sizeof(name), LEASES "/%u" PROLOG_SUFFIX, who->job);
	await_prolog(name);
	/* As os.path.join() has it in hooks/step.py. */
	if (step->image[0] == '/')
		snprintf(asked, sizeof(asked), "%s", step->image);
	else
		snprintf(asked, sizeof(asked), "%s/%s", step->folder, step->image);
	snprintf(name, sizeof(name), LEASES "/%u" SHOWN_SUFFIX, who->job);
	if (!read_all(name, text, sizeof(text)) || !find(text, asked, who, &note))
		return;
	int length = snprintf(lines, sizeof(lines), LANGUAGE "\n%s\n", note.answer);
	if (understand(note.answer, &answer) != USE && answer.word != THROUGH)
		return;
	take_answer(&answer, step);
	/* First what is this node's: a file server that hangs may keep the rest. */
	if (!is_there(step, &copy) || !has_room(step, &note.room) ||
	    !act_as(who->uid, who->gid, who->count, who->groups))
		return;
	bool same = leads_there(step);
	for (int i = 0; i < note.count; i++)
		same = same && unchanged(&note.theirs[i]);
	if (!act_as(0, 0, 0, NULL) || !same)
		return;
	if (write(1, lines, (size_t)length) != length)
		return;
	/* The lease keeps the entry, and the Epilog notes the use: the cache's disk may take no writes. */
	append_event(note.events, &(struct event){.uid = who->uid,
						  .number = who->number,
						  .total = now_us(CLOCK_MONOTONIC) - start,
						  .rest = note.event});
}
