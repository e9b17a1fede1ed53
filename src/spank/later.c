/*
 * How does a task wait for an image that has to be imported? At a socket of its own.
 *
 * srun ends a launch after 600 s, and user_init holds the launch up; a task that waits does not
 * (facts of Slurm 22.05 to 26.05: the launch response is sent before). Each packet is a line of the
 * helper's language. Whoever answers goes on for as long as a task waits.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "forestage.h"

#define PACKET_BYTES 16384

/* One line into `line`; false at the end. No time limit: the end of either side ends the wait. */
static bool receive(int fd, char line[PACKET_BYTES])
{
	ssize_t n;

	do {
		n = recv(fd, line, PACKET_BYTES - 1, 0);
	} while (n < 0 && (errno == EINTR || errno == EAGAIN));
	line[n > 0 ? n : 0] = '\0';
	return n > 0;
}

void await_answer(spank_t sp, struct step *step)
{
	int fd = connect_keeper(step->entry), task = 0;
	const char *wrong = "nobody answers";
	char line[PACKET_BYTES];

	step->later = false;
	spank_get_item(sp, S_TASK_ID, &task);
	while (fd >= 0 && receive(fd, line)) {
		if (strncmp(line, "say\t", 4) != 0) {
			wrong = understand(line, step);
			break;
		}
		if (task == 0)
			slurm_spank_log("%s", line + 4);
	}
	if (fd >= 0)
		close(fd);
	if (wrong)
		slurm_info("forestage: %s stays as it is: %s", step->image, wrong);
	if (step->use) /* a reference is no path; this is where the importer looks */
		memcpy(step->image, step->path, PATH_MAX);
}
