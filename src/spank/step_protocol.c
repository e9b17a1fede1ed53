/*
 * The lines in which a helper answers (slurm/step_protocol.py), taken apart. All that reads them does so here:
 * a line that is not as the table has it counts for nothing, and what it means is never guessed.
 */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "plugin.h"

/*
 * The fields after a line's word, a letter each:
 *
 *   .  any text without tabs       /  an absolute path         #  a number
 *   *  all the rest                m  one that is not the root  b  0 or 1
 *   ?  the next may be missing     i  a number, or `root`       r  `root`
 *   n  [A-Z_][A-Z0-9_]*            d  below /dev                k  [a-z0-9]+    w  ro or rw
 */
static const struct {
	const char *word;
	const char *field_kinds;
	enum line_kind kind;
} GRAMMAR[] = {
	{"say", "*", LINE_SAY},
	{"env", "n?.", LINE_ENV},
	{"use", "//####b", LINE_USE},
	{"through", "//####b", LINE_THROUGH},
	{"also", "*", LINE_ALSO},
	{"device", "d.kwmi", LINE_DEVICE},
	{"served", "/mi", LINE_SERVED},
	{"folder", ".mr", LINE_FOLDER},
	{"later", "/", LINE_LATER},
	{"leave", "*", LINE_LEAVE},
	/* Of a record alone (cache/step_record.py). */
	{"boot", ".", LINE_BOOT},
	{"events", "/", LINE_EVENTS},
	{"file", "/####", LINE_FILE},
	{"theirs", "/####", LINE_THEIRS},
	{"room", "##", LINE_ROOM},
	{"enroot", ".", LINE_ENROOT},
	{"variable", ".?.", LINE_VARIABLE},
	{"image", ".#.*", LINE_IMAGE},
	{"owner", "#", LINE_OWNER}, /* features/data/directory_record.py */
};

#define DIGITS "0123456789"
#define LOWER_CASE "abcdefghijklmnopqrstuvwxyz"
#define UPPER_CASE "ABCDEFGHIJKLMNOPQRSTUVWXYZ_"

static bool consists_of(const char *text, const char *characters)
{
	return *text && text[strspn(text, characters)] == '\0';
}

static bool is_number(const char *text)
{
	errno = 0;
	strtoull(text, NULL, 10);
	return errno == 0 && consists_of(text, DIGITS);
}

static bool matches_kind(char kind, const char *text)
{
	switch (kind) {
	case '/':
	case 'm':
		return text[0] == '/' && (text[1] || kind == '/') && strlen(text) < PATH_MAX;
	case '#': /* a time before 1970 has a sign */
		return is_number(text + (text[0] == '-'));
	case 'i':
		return is_number(text) || strcmp(text, "root") == 0;
	case 'r':
		return strcmp(text, "root") == 0;
	case 'b':
		return strcmp(text, "0") == 0 || strcmp(text, "1") == 0;
	case 'd':
		return strncmp(text, "/dev/", 5) == 0;
	case 'k':
		return consists_of(text, LOWER_CASE DIGITS);
	case 'w':
		return strcmp(text, "ro") == 0 || strcmp(text, "rw") == 0;
	case 'n':
		return consists_of(text, UPPER_CASE DIGITS) && strspn(text, DIGITS) == 0;
	default:
		return true;
	}
}

static bool split_fields(char *rest, const char *field_kinds, struct protocol_line *line)
{
	for (line->field_count = 0; *field_kinds; field_kinds++) {
		if (*field_kinds == '?' && !rest)
			return true;
		if (*field_kinds == '?')
			continue;
		if (!rest)
			return false;
		char *field = rest;
		if (*field_kinds == '*')
			rest = NULL;
		else
			strsep(&rest, "\t");
		if (!matches_kind(*field_kinds, field))
			return false;
		line->fields[line->field_count++] = field;
	}
	return !rest;
}

enum line_kind parse_line(char *text, struct protocol_line *line)
{
	char *rest = text;
	const char *word = strsep(&rest, "\t");

	for (size_t i = 0; i < sizeof(GRAMMAR) / sizeof(*GRAMMAR); i++)
		if (strcmp(word, GRAMMAR[i].word) == 0)
			return line->kind = split_fields(rest, GRAMMAR[i].field_kinds, line)
						    ? GRAMMAR[i].kind
						    : LINE_UNKNOWN;
	return line->kind = LINE_UNKNOWN;
}

unsigned long long read_number(const struct protocol_line *line, int index)
{
	/* A time before 1970 wraps, in redirect.c too. */
	return strtoull(line->fields[index], NULL, 10);
}

void read_numbers(const struct protocol_line *line, int first_index, unsigned long long numbers[4])
{
	for (int i = 0; i < 4; i++)
		numbers[i] = read_number(line, first_index + i);
}
