/*
 * The lines in which a helper answers (slurm/lines.py), taken apart. All that reads them does so here:
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
	const char *fields;
	enum word means;
} GRAMMAR[] = {
	{"say", "*", SAY},
	{"env", "n?.", ENV},
	{"use", "//####b", USE},
	{"through", "//####b", THROUGH},
	{"also", "*", ALSO},
	{"device", "d.kwmi", DEVICE},
	{"served", "/mi", SERVED},
	{"folder", ".mr", FOLDER},
	{"later", "/", LATER},
	{"leave", "*", LEAVE},
	/* Of a record alone (cache/step_record.py). */
	{"boot", ".", BOOT},
	{"events", "/", EVENT_LOG},
	{"file", "/####", OUR_FILE},
	{"theirs", "/####", THEIR_FILE},
	{"room", "##", ROOM},
	{"enroot", ".", ENROOT},
	{"variable", ".?.", VARIABLE},
	{"image", ".#.*", IMAGE},
	{"owner", "#", OWNER}, /* features/data/directory_record.py */
};

#define DIGITS "0123456789"
#define SMALL "abcdefghijklmnopqrstuvwxyz"
#define CAPITALS "ABCDEFGHIJKLMNOPQRSTUVWXYZ_"

static bool is_all(const char *text, const char *characters)
{
	return *text && text[strspn(text, characters)] == '\0';
}

static bool is_number(const char *text)
{
	errno = 0;
	strtoull(text, NULL, 10);
	return errno == 0 && is_all(text, DIGITS);
}

static bool fits(char kind, const char *text)
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
		return is_all(text, SMALL DIGITS);
	case 'w':
		return strcmp(text, "ro") == 0 || strcmp(text, "rw") == 0;
	case 'n':
		return is_all(text, CAPITALS DIGITS) && strspn(text, DIGITS) == 0;
	default:
		return true;
	}
}

static bool cut(char *rest, const char *kinds, struct line *line)
{
	for (line->count = 0; *kinds; kinds++) {
		if (*kinds == '?' && !rest)
			return true;
		if (*kinds == '?')
			continue;
		if (!rest)
			return false;
		char *field = rest;
		if (*kinds == '*')
			rest = NULL;
		else
			strsep(&rest, "\t");
		if (!fits(*kinds, field))
			return false;
		line->field[line->count++] = field;
	}
	return !rest;
}

enum word understand(char *text, struct line *line)
{
	char *rest = text;
	const char *word = strsep(&rest, "\t");

	for (size_t i = 0; i < sizeof(GRAMMAR) / sizeof(*GRAMMAR); i++)
		if (strcmp(word, GRAMMAR[i].word) == 0)
			return line->word = cut(rest, GRAMMAR[i].fields, line) ? GRAMMAR[i].means : ODD;
	return line->word = ODD;
}

unsigned long long number(const struct line *line, int field)
{
	return strtoull(line->field[field], NULL, 10); /* a time before 1970 wraps, in redirect.c too */
}

void take_numbers(const struct line *line, int first, unsigned long long numbers[4])
{
	for (int i = 0; i < 4; i++)
		numbers[i] = number(line, first + i);
}
