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

#define PAGE_BYTES 4096
#define PAGES (1 << 20)

/* A byte for each page: a reader waits for it; it may be given. */
static int request_pipe[2], release_pipe[2];

static int memory_getattr(const char *path, struct stat *st, struct fuse_file_info *file)
{
	(void)file;
	memset(st, 0, sizeof *st);
	st->st_mode = path[1] ? S_IFREG | 0444 : S_IFDIR | 0755;
	st->st_uid = getuid();
	st->st_size = (off_t)PAGES * PAGE_BYTES;
	return strcmp(path, "/memory") == 0 || !path[1] ? 0 : -ENOENT;
}

static int memory_read(const char *path, char *out, size_t size, off_t offset,
		       struct fuse_file_info *file)
{
	char byte = 0;

	(void)path, (void)offset, (void)file;
	memset(out, 'W', size);
	return write(request_pipe[1], &byte, 1) == 1 && read(release_pipe[0], &byte, 1) == 1
		       ? (int)size
		       : -EIO;
}

static void serve_memory(char *name, const char *mount_point)
{
	static const struct fuse_operations operations = {.getattr = memory_getattr,
							  .read = memory_read};
	char *argv[] = {name, "-o", "fsname=park"};
	struct fuse_args args = FUSE_ARGS_INIT(3, argv);
	struct fuse *fuse = fuse_new(&args, &operations, sizeof operations, NULL);

	_exit(!fuse || fuse_mount(fuse, mount_point) || fuse_loop(fuse));
}

static int report_error(const char *what)
{
	perror(what);
	return 1;
}

static int hold_inode(const char *path, const char *mode, const char *mount_point,
		      const bool *is_repeated)
{
	char name[4096];
	int memory_fd = -1, lists = strcmp(mode, "list") == 0, writes = strcmp(mode, "write") == 0;
	int flags = lists ? O_RDONLY | O_DIRECTORY : writes ? O_RDWR : O_RDONLY;
	int fd = lists ? -1 : open(path, flags | O_DIRECT);

	snprintf(name, sizeof name, "%s/memory", mount_point);
	for (int i = 0; i < 1000 && (memory_fd = open(name, O_RDONLY)) < 0; i++)
		usleep(10000);
	if (memory_fd < 0 || (fd < 0 && (fd = open(path, flags)) < 0))
		return report_error(path);
	posix_fadvise(memory_fd, 0, 0, POSIX_FADV_RANDOM); /* one page at a time */
	for (off_t page = 0; page == 0 || *is_repeated; page = (page + 1) % PAGES) {
		char *map = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE, memory_fd,
				 page * PAGE_BYTES);
		long n = map == MAP_FAILED ? -1
			 : lists	   ? syscall(SYS_getdents64, fd, map, PAGE_BYTES)
			 : writes	   ? pwrite(fd, map, PAGE_BYTES, PAGE_BYTES)
					   : pread(fd, map, PAGE_BYTES, 0);
		if (n < 0)
			return report_error(mode);
		munmap(map, PAGE_BYTES);
		lseek(fd, 0, SEEK_SET);
	}
	return 0;
}

int main(int argc, char **argv)
{
	bool *is_repeated = mmap(NULL, sizeof *is_repeated, PROT_READ | PROT_WRITE,
				 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int hold_ms = argc > 4 ? atoi(argv[4]) : -1, status = 1, is_reported = 0;
	pid_t main_pid = getpid(), server_pid, holder_pid;
	char byte = 0;

	if (argc < 4 || is_repeated == MAP_FAILED || pipe(request_pipe) || pipe(release_pipe))
		return 2;
	*is_repeated = hold_ms >= 0;
	if ((server_pid = fork()) == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		serve_memory(argv[0], argv[3]);
	}
	if ((holder_pid = fork()) == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(request_pipe[1]); /* so that the end of the others is seen */
		_exit(getppid() == main_pid ? hold_inode(argv[1], argv[2], argv[3], is_repeated)
					    : 1);
	}
	for (bool is_holding = true; waitpid(holder_pid, &status, WNOHANG) == 0;) {
		struct pollfd request = {.fd = request_pipe[0], .events = POLLIN},
			      stdin_end = {.events = POLLIN};
		if (poll(&request, 1, 20) <= 0)
			continue;
		if (!is_reported++) {
			printf("parked\n");
			fflush(stdout);
		}
		if (is_holding && poll(&stdin_end, 1, hold_ms) > 0)
			is_holding = *is_repeated = false;
		if (read(request_pipe[0], &byte, 1) != 1 || write(release_pipe[1], &byte, 1) != 1)
			break;
	}
	kill(server_pid, SIGKILL);
	waitpid(server_pid, NULL, 0);
	char command[4200];
	snprintf(command, sizeof command, "fusermount3 -uz '%s'", argv[3]);
	if (system(command))
		fprintf(stderr, "park: %s stays mounted\n", argv[3]);
	printf("over\n");
	return status != 0;
}
