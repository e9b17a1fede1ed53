/* How does the path show a file that is still being copied? By a mount that its keeper serves. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "plugin.h"

#define KEEPER_TIMEOUT_S 1 /* for each packet to or from the keeper; below MOUNT_TIMEOUT_MS */
#define MOUNT_REQUEST "mount" /* asks for a clone of its mount: system/daemon.py */

/* Old headers have neither; the numbers are the same on every architecture of Slurm's. */
#ifndef SYS_move_mount
#define SYS_move_mount 429
#endif
#define FROM_AND_TO_DESCRIPTORS 0x44 /* MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH */

int connect_keeper(const char *path)
{
	const struct timeval timeout = {.tv_sec = KEEPER_TIMEOUT_S};
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	uid_t effective_uid = geteuid();
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (strlen(path) >= sizeof(name.sun_path)) {
		errno = ENAMETOOLONG;
		goto failed;
	}
	memcpy(name.sun_path, path, strlen(path));
	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)) < 0 ||
	    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) < 0 ||
	    /* Only root gets there. For this thread alone: the step manager has others. */
	    syscall(SYS_setresuid, -1, 0, -1) < 0)
		goto failed;
	int result = connect(fd, (struct sockaddr *)&name, sizeof(name)), error = errno;
	syscall(SYS_setresuid, -1, effective_uid, -1);
	errno = error;
	if (result == 0)
		return fd;
failed:
	if (fd >= 0)
		close(fd);
	return -1;
}

/* Asks for a mount. The descriptor of the answer, or -1. */
static int request_mount(int keeper_fd, char answer[KEEPER_ANSWER_BYTES])
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct iovec part = {.iov_base = answer, .iov_len = KEEPER_ANSWER_BYTES - 1};
	struct msghdr packet = {.msg_iov = &part,
				.msg_iovlen = 1,
				.msg_control = &control,
				.msg_controllen = sizeof(control)};
	int mount_fd = -1;
	ssize_t n = send(keeper_fd, MOUNT_REQUEST, strlen(MOUNT_REQUEST), MSG_NOSIGNAL);
	if (n >= 0)
		n = recvmsg(keeper_fd, &packet, MSG_CMSG_CLOEXEC);
	if (n <= 0) {
		/* An answer that comes later must not be taken for that to the next task's request;
		 * and nobody else waits for a keeper that does not answer. */
		int error = n < 0 ? errno : ECONNRESET;
		shutdown(keeper_fd, SHUT_RDWR);
		errno = error;
		return -1;
	}
	answer[n] = '\0';
	struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
	if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)))
		memcpy(&mount_fd, CMSG_DATA(header), sizeof(int));
	return mount_fd;
}

static bool is_refusal(const char *answer)
{
	return strncmp(answer, "no", 2) == 0;
}

/* The tasks share a connection, and an answer does not say to whom. */
static bool lock_connection(int keeper_fd, short lock_type)
{
	struct flock lock = {.l_type = lock_type};

	return fcntl(keeper_fd, F_SETLKW, &lock) == 0;
}

int fetch_mount_clone(int keeper_fd, char answer[KEEPER_ANSWER_BYTES])
{
	answer[0] = '\0';
	int mount_fd = lock_connection(keeper_fd, F_WRLCK) ? request_mount(keeper_fd, answer) : -1;
	int error = is_refusal(answer) ? ECONNREFUSED : errno;

	lock_connection(keeper_fd, F_UNLCK);
	errno = error;
	return mount_fd;
}

bool attach_mount(int mount_fd, int target_fd)
{
	return syscall(SYS_move_mount, mount_fd, "", target_fd, "", FROM_AND_TO_DESCRIPTORS) == 0;
}

const char *open_read_through(const struct step *step, struct open_copy *copy)
{
	int keeper_fd = step->keeper_fd >= 0 ? step->keeper_fd : connect_keeper(step->entry_path);
	char answer[KEEPER_ANSWER_BYTES];
	struct stat st;

	if (keeper_fd < 0)
		return "no process serves its copy";
	copy->image_fd = fetch_mount_clone(keeper_fd, answer);
	int error = errno;
	if (keeper_fd != step->keeper_fd)
		close(keeper_fd);
	errno = error;
	if (copy->image_fd < 0)
		return "its copy is not served";
	if (fstat(copy->image_fd, &st) == 0 && S_ISREG(st.st_mode) &&
	    (unsigned long long)st.st_size == step->identity[1])
		return NULL;
	errno = ESTALE;
	return "another file is served";
}
