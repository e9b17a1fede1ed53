/*
 * Has a process of the same user become another program: inject PID PROGRAM. For x86_64.
 *
 * What a user may do to any process of theirs; a debugger does the same.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>

#define PATH_OFFSET 33 /* after the code below, to which its first instruction points */

static const unsigned char EXECVE_CODE[] = {
	0x48, 0x8d, 0x3d, PATH_OFFSET - 7,
	0,    0,    0,	  /* lea  path(%rip), %rdi */
	0x48, 0x31, 0xd2, /* xor  %rdx, %rdx */
	0x52, 0x57, 0x48, 0x89,
	0xe6, /* argv: push NULL, push the path, mov %rsp, %rsi */
	0xb8, 0x3b, 0,	  0,
	0,    0x0f, 0x05, /* execve(2) */
};

int main(int argc, char **argv)
{
	unsigned char code[256] = {0};
	struct user_regs_struct regs;
	long word;

	if (argc != 3 || strlen(argv[2]) >= sizeof(code) - PATH_OFFSET)
		return 2;
	pid_t pid = atoi(argv[1]);
	memcpy(code, EXECVE_CODE, sizeof(EXECVE_CODE));
	strcpy((char *)code + PATH_OFFSET, argv[2]);
	if (ptrace(PTRACE_ATTACH, pid, 0, 0) < 0 || waitpid(pid, NULL, 0) < 0 ||
	    ptrace(PTRACE_GETREGS, pid, 0, &regs) < 0)
		return perror("attach"), 1;
	for (size_t i = 0; i < sizeof(code); i += sizeof(word)) {
		memcpy(&word, code + i, sizeof(word));
		if (ptrace(PTRACE_POKETEXT, pid, regs.rip + i, word) < 0)
			return perror("poke"), 1;
	}
	regs.orig_rax = -1; /* no system call is to be restarted */
	if (ptrace(PTRACE_SETREGS, pid, 0, &regs) < 0 || ptrace(PTRACE_DETACH, pid, 0, 0) < 0)
		return perror("go on"), 1;
	return 0;
}
