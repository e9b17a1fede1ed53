/* Stands before mount(2) in fake: $SWAP runs, as root, just before the companion's first bind. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <unistd.h>

int mount(const char *source, const char *target, const char *type, unsigned long flags,
	  const void *data)
{
	const char *command = flags == MS_BIND ? getenv("SWAP") : NULL;

	if (command) {
		if (system(command))
			abort();
		unsetenv("SWAP");
	}
	return (int)syscall(SYS_mount, source, target, type, flags, data);
}
