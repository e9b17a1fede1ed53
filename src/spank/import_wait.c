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

#define WAITING_NAME "forestage-wait"

/* One line into `line`; false at the end. No time limit: the end of either side ends the wait. */
static bool receive_line(int fd, char line[MAX_LINE_BYTES])
{
	ssize_t n;

	do {
		n = recv(fd, line, MAX_LINE_BYTES - 1, 0);
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
static void set_killable(bool is_killable)
{
	static const int end_signals[] = {SIGTERM, SIGINT, SIGHUP};
	enum { END_SIGNALS = sizeof end_signals / sizeof *end_signals };
	static struct sigaction actions[END_SIGNALS];
	static char name[16];
	static sigset_t blocked_before;
	const struct sigaction default_action = {.sa_handler = SIG_DFL};
	sigset_t unblocked;

	if (!is_killable) {
		sigprocmask(SIG_SETMASK, &blocked_before, NULL);
		for (int i = 0; i < END_SIGNALS; i++)
			sigaction(end_signals[i], &actions[i], NULL);
		prctl(PR_SET_NAME, name);
		return;
	}
	sigemptyset(&unblocked);
	for (int i = 0; i < END_SIGNALS; i++) {
		sigaddset(&unblocked, end_signals[i]);
		sigaction(end_signals[i], &default_action, &actions[i]);
	}
	prctl(PR_GET_NAME, name);
	prctl(PR_SET_NAME, WAITING_NAME);
	sigprocmask(SIG_UNBLOCK, &unblocked, &blocked_before);
}

void await_answer(spank_t sp, struct step *step)
{
	const char *failure = "nobody answers";
	char packet[MAX_LINE_BYTES];
	struct protocol_line line;
	int task = 0;

	set_killable(true);
	int fd = connect_keeper(step->entry_path);
	step->is_pending = false;
	spank_get_item(sp, S_TASK_ID, &task);
	bool is_protocol_known =
		fd >= 0 && receive_line(fd, packet) && strcmp(packet, PROTOCOL_GREETING) == 0;
	while (is_protocol_known && failure && receive_line(fd, packet)) {
		const enum line_kind kind = parse_line(packet, &line);
		if (kind == LINE_USE || kind == LINE_THROUGH || kind == LINE_LEAVE) {
			apply_answer(&line, step);
			failure = NULL;
		} else if (kind == LINE_SAY && task == 0) {
			slurm_spank_log("%s", line.fields[0]);
		} else if (kind == LINE_ENV && line.field_count == 2 &&
			   strcmp(line.fields[0], RESULT_VARIABLE) == 0) {
			spank_setenv(sp, RESULT_VARIABLE, line.fields[1], 1);
		}
	}
	set_killable(false);
	if (fd >= 0)
		close(fd);
	if (failure)
		slurm_info("forestage: %s stays as it is: %s", step->image, failure);
	if (step->uses_copy) /* a reference is no path; this is where the importer looks */
		memcpy(step->image, step->resolved_path, PATH_MAX);
}
