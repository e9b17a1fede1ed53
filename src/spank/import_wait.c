/*
 * How does a task wait for an image that has to be imported? At a socket of its own.
 *
 * srun ends a launch after 600 s, and user_init holds the launch up; a task that waits does not
 * (facts of Slurm 22.05 to 26.05: the launch response is sent before). Each packet is a line, as a
 * helper writes it. Whoever answers goes on for as long as a task waits.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "plugin.h"

#define NAME "forestage-wait"

/* One line into `line`; false at the end. No time limit: the end of either side ends the wait. */
static bool receive(int fd, char line[MAX_LINE])
{
	ssize_t n;

	do {
		n = recv(fd, line, MAX_LINE - 1, 0);
	} while (n < 0 && (errno == EINTR || errno == EAGAIN));
	line[n > 0 ? n : 0] = '\0';
	return n > 0;
}

/*
 * A task that has not run its program yet blocks all signals (22.05) or has the step manager's
 * handlers (24.11), and it has that one's name, by which proctrack/linuxproc passes it over: scancel
 * would leave the node COMPLETING for as long as we wait, or KillWait. So a task that waits has a
 * name of its own, and ends by what it is sent, as its program would.
 */
static void be_killable(bool yes)
{
	static const int ends[] = {SIGTERM, SIGINT, SIGHUP};
	enum { ENDS = sizeof ends / sizeof *ends };
	static struct sigaction actions[ENDS];
	static char name[16];
	static sigset_t before;
	const struct sigaction plain = {.sa_handler = SIG_DFL};
	sigset_t set;

	if (!yes) {
		sigprocmask(SIG_SETMASK, &before, NULL);
		for (int i = 0; i < ENDS; i++)
			sigaction(ends[i], &actions[i], NULL);
		prctl(PR_SET_NAME, name);
		return;
	}
	sigemptyset(&set);
	for (int i = 0; i < ENDS; i++) {
		sigaddset(&set, ends[i]);
		sigaction(ends[i], &plain, &actions[i]);
	}
	prctl(PR_GET_NAME, name);
	prctl(PR_SET_NAME, NAME);
	sigprocmask(SIG_UNBLOCK, &set, &before);
}

void await_answer(spank_t sp, struct step *step)
{
	const char *wrong = "nobody answers";
	char packet[MAX_LINE];
	struct line line;
	int task = 0;

	be_killable(true);
	int fd = connect_keeper(step->entry);
	step->later = false;
	spank_get_item(sp, S_TASK_ID, &task);
	bool known = fd >= 0 && receive(fd, packet) && strcmp(packet, LANGUAGE) == 0;
	while (known && wrong && receive(fd, packet)) {
		const enum word word = understand(packet, &line);
		if (word == USE || word == THROUGH || word == LEAVE) {
			take_answer(&line, step);
			wrong = NULL;
		} else if (word == SAY && task == 0) {
			slurm_spank_log("%s", line.field[0]);
		} else if (word == ENV && line.count == 2 && strcmp(line.field[0], RESULT) == 0) {
			spank_setenv(sp, RESULT, line.field[1], 1);
		}
	}
	be_killable(false);
	if (fd >= 0)
		close(fd);
	if (wrong)
		slurm_info("forestage: %s stays as it is: %s", step->image, wrong);
	if (step->use) /* a reference is no path; this is where the importer looks */
		memcpy(step->image, step->path, PATH_MAX);
}
