/*
 * Holds the inode of a file or directory for as long as it likes, as any user may who can read it.
 *
 *   park PATH write|read|list POINT [MS]
 *
 * By a system call whose memory is a page of a FUSE of its own, mounted at the directory POINT, that is
 * answered when stdin ends; `write` then writes a page of W at offset 4096. With MS it holds the
 * inode for so many milliseconds, again and again, until stdin ends. Says "parked" when it holds it
 * the first time, and "over" at the end.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 312
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096
#define PAGES (1 << 20)

static int asked[2], go[2]; /* a byte for each page: somebody wants it, it may come */

static int far_getattr(const char *path, struct stat *st, struct fuse_file_info *file)
{
	(void)file;
	memset(st, 0, sizeof *st);
	st->st_mode = path[1] ? S_IFREG | 0444 : S_IFDIR | 0755;
	st->st_uid = getuid();
	st->st_size = (off_t)PAGES * PAGE;
	return strcmp(path, "/memory") == 0 || !path[1] ? 0 : -ENOENT;
}

static int far_read(const char *path, char *out, size_t size, off_t at, struct fuse_file_info *file)
{
	char byte = 0;

	(void)path, (void)at, (void)file;
	memset(out, 'W', size);
	return write(asked[1], &byte, 1) == 1 && read(go[0], &byte, 1) == 1 ? (int)size : -EIO;
}

static void serve(char *name, const char *point)
{
	static const struct fuse_operations calls = {.getattr = far_getattr, .read = far_read};
	char *argv[] = {name, "-o", "fsname=park"};
	struct fuse_args args = FUSE_ARGS_INIT(3, argv);
	struct fuse *fuse = fuse_new(&args, &calls, sizeof calls, NULL);

	_exit(!fuse || fuse_mount(fuse, point) || fuse_loop(fuse));
}

static int fail(const char *what)
{
	perror(what);
	return 1;
}

static int park(const char *path, const char *how, const char *point, const bool *again)
{
	char name[4096];
	int memory = -1, lists = strcmp(how, "list") == 0, writes = strcmp(how, "write") == 0;
	int flags = lists ? O_RDONLY | O_DIRECTORY : writes ? O_RDWR : O_RDONLY;
	int fd = lists ? -1 : open(path, flags | O_DIRECT);

	snprintf(name, sizeof name, "%s/memory", point);
	for (int i = 0; i < 1000 && (memory = open(name, O_RDONLY)) < 0; i++)
		usleep(10000);
	if (memory < 0 || (fd < 0 && (fd = open(path, flags)) < 0))
		return fail(path);
	posix_fadvise(memory, 0, 0, POSIX_FADV_RANDOM); /* one page at a time */
	for (off_t page = 0; page == 0 || *again; page = (page + 1) % PAGES) {
		char *map = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, memory, page * PAGE);
		long n = map == MAP_FAILED ? -1
			 : lists           ? syscall(SYS_getdents64, fd, map, PAGE)
			 : writes          ? pwrite(fd, map, PAGE, PAGE)
					   : pread(fd, map, PAGE, 0);
		if (n < 0)
			return fail(how);
		munmap(map, PAGE);
		lseek(fd, 0, SEEK_SET);
	}
	return 0;
}

int main(int argc, char **argv)
{
	bool *again = mmap(NULL, sizeof *again, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int hold = argc > 4 ? atoi(argv[4]) : -1, status = 1, said = 0;
	pid_t me = getpid(), server, parker;
	char byte = 0;

	if (argc < 4 || again == MAP_FAILED || pipe(asked) || pipe(go))
		return 2;
	*again = hold >= 0;
	if ((server = fork()) == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		serve(argv[0], argv[3]);
	}
	if ((parker = fork()) == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(asked[1]); /* so that the end of the others is seen */
		_exit(getppid() == me ? park(argv[1], argv[2], argv[3], again) : 1);
	}
	for (bool on = true; waitpid(parker, &status, WNOHANG) == 0;) {
		struct pollfd ready = {.fd = asked[0], .events = POLLIN}, over = {.events = POLLIN};
		if (poll(&ready, 1, 20) <= 0)
			continue;
		if (!said++) {
			printf("parked\n");
			fflush(stdout);
		}
		if (on && poll(&over, 1, hold) > 0)
			on = *again = false;
		if (read(asked[0], &byte, 1) != 1 || write(go[1], &byte, 1) != 1)
			break;
	}
	kill(server, SIGKILL);
	waitpid(server, NULL, 0);
	char command[4200];
	snprintf(command, sizeof command, "fusermount3 -uz '%s'", argv[3]);
	if (system(command))
		fprintf(stderr, "park: %s stays mounted\n", argv[3]);
	printf("over\n");
	return status != 0;
}
