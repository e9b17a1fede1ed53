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

#define ANSWER_SECONDS 1 /* for each packet to or from the keeper; below LIMIT_MS */
#define MOUNT "mount"    /* asks for a clone of its mount: system/holder.py */

/* Old headers have neither; the numbers are the same on every architecture of Slurm's. */
#ifndef SYS_move_mount
#define SYS_move_mount 429
#endif
#define FROM_AND_TO_DESCRIPTORS 0x44 /* MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH */

int connect_keeper(const char *path)
{
	const struct timeval patience = {.tv_sec = ANSWER_SECONDS};
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	uid_t user = geteuid();
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (strlen(path) >= sizeof(name.sun_path)) {
		errno = ENAMETOOLONG;
		goto failed;
	}
	memcpy(name.sun_path, path, strlen(path));
	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) < 0 ||
	    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) < 0 ||
	    /* Only root gets there. For this thread alone: the step manager has others. */
	    syscall(SYS_setresuid, -1, 0, -1) < 0)
		goto failed;
	int connected = connect(fd, (struct sockaddr *)&name, sizeof(name)), error = errno;
	syscall(SYS_setresuid, -1, user, -1);
	errno = error;
	if (connected == 0)
		return fd;
failed:
	if (fd >= 0)
		close(fd);
	return -1;
}

/* Asks for a mount. The descriptor of the answer, or -1. */
static int exchange(int keeper, char answer[ANSWER_BYTES])
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct iovec part = {.iov_base = answer, .iov_len = ANSWER_BYTES - 1};
	struct msghdr packet = {.msg_iov = &part,
				.msg_iovlen = 1,
				.msg_control = &control,
				.msg_controllen = sizeof(control)};
	int got = -1;
	ssize_t n = send(keeper, MOUNT, strlen(MOUNT), MSG_NOSIGNAL);
	if (n >= 0)
		n = recvmsg(keeper, &packet, MSG_CMSG_CLOEXEC);
	if (n <= 0) {
		/* An answer that comes later must not be taken for that to the next task's request;
		 * and nobody else waits for a keeper that does not answer. */
		int error = n < 0 ? errno : ECONNRESET;
		shutdown(keeper, SHUT_RDWR);
		errno = error;
		return -1;
	}
	answer[n] = '\0';
	struct cmsghdr *came = CMSG_FIRSTHDR(&packet);
	if (came && came->cmsg_type == SCM_RIGHTS && came->cmsg_len == CMSG_LEN(sizeof(int)))
		memcpy(&got, CMSG_DATA(came), sizeof(int));
	return got;
}

static bool refused(const char *answer)
{
	return strncmp(answer, "no", 2) == 0;
}

/* The tasks share a connection, and an answer does not say to whom. */
static bool take_turn(int keeper, short how)
{
	struct flock turn = {.l_type = how};

	return fcntl(keeper, F_SETLKW, &turn) == 0;
}

int fetch_mount(int keeper, char answer[ANSWER_BYTES])
{
	answer[0] = '\0';
	int mount = take_turn(keeper, F_WRLCK) ? exchange(keeper, answer) : -1;
	int error = refused(answer) ? ECONNREFUSED : errno;

	take_turn(keeper, F_UNLCK);
	errno = error;
	return mount;
}

bool attach_mount(int mount, int target)
{
	return syscall(SYS_move_mount, mount, "", target, "", FROM_AND_TO_DESCRIPTORS) == 0;
}

const char *open_through(const struct step *step, struct copy *copy)
{
	int keeper = step->keeper >= 0 ? step->keeper : connect_keeper(step->entry);
	char answer[ANSWER_BYTES];
	struct stat st;

	if (keeper < 0)
		return "no process serves its copy";
	copy->image = fetch_mount(keeper, answer);
	int error = errno;
	if (keeper != step->keeper)
		close(keeper);
	errno = error;
	if (copy->image < 0)
		return "its copy is not served";
	if (fstat(copy->image, &st) == 0 && S_ISREG(st.st_mode) &&
	    (unsigned long long)st.st_size == step->identity[1])
		return NULL;
	errno = ESTALE;
	return "another file is served";
}
