/* One answer, of a helper or of the record of one (shown.c): which entry a step is shown. */
#define _GNU_SOURCE
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "forestage.h"

const char *understand(const char *line, struct step *step)
{
	unsigned long long *id = step->identity; /* a time before 1970 wraps, in redirect.c too */
	char what[8];
	int tell, end = 0;

	if (strncmp(line, "leave\t", 6) == 0) {
		slurm_verbose("forestage: %s stays as it is: %s", step->image, line + 6);
		return NULL;
	}
	if (strncmp(line, "later\t/", 7) == 0) {
		step->later = (size_t)snprintf(step->entry, PATH_MAX, "%s", line + 6) < PATH_MAX;
		return step->later ? NULL : "its answer cannot be understood";
	}
	_Static_assert(PATH_MAX == 4096, "the widths below");
	if (sscanf(line, "%7[a-z]\t%4095[^\t]\t%4095[^\t]\t%llu\t%llu\t%llu\t%llu\t%d%n", what,
		   step->entry, step->path, &id[0], &id[1], &id[2], &id[3], &tell, &end) != 8 ||
	    line[end] || step->entry[0] != '/' || step->path[0] != '/')
		return "its answer cannot be understood";
	step->through = strcmp(what, "through") == 0;
	if (!step->through && strcmp(what, "use") != 0)
		return "its answer cannot be understood";
	step->tell = tell != 0;
	step->use = true;
	return NULL;
}
