"""Whatever a line is, the companion takes it as the grammar has it, or leaves it out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from companion import FOLDER, SANITIZERS, WARNINGS
from hypothesis import given
from hypothesis import strategies as st

import properties  # noqa: F401 - before the first example

PARSER = """
#include <stdio.h>
#include <string.h>
#include "plugin.h"

int main(void)
{
	static char text[1 << 16];
	struct protocol_line line;

	while (fgets(text, sizeof(text), stdin)) {
		text[strcspn(text, "\\n")] = '\\0';
		printf("%d", parse_line(text, &line));
		for (int i = 0; line.kind != LINE_UNKNOWN && i < line.field_count; i++)
			printf("\\t%s", line.fields[i]);
		putchar('\\n');
	}
	return 0;
}
"""

TEXT, REST, NAME = r"[^\t]*", r".*", r"[A-Z_][A-Z0-9_]*"
PATH, POINT = r"/[^\t]{0,4094}", r"/[^\t]{1,4094}"
FACTS = r"\t".join(rf"(?P<n{number}>-?[0-9]+)" for number in range(4))
INODE = r"(?P<n0>[0-9]+|root)"
GRAMMAR = {
    "say": f"({REST})",
    "env": f"({NAME})(?:\t({TEXT}))?",
    "use": f"({PATH})\t({PATH})\t{FACTS}\t([01])",
    "through": f"({PATH})\t({PATH})\t{FACTS}\t([01])",
    "also": f"({REST})",
    "device": f"(/dev/{TEXT})\t({TEXT})\t([a-z0-9]+)\t(r[ow])\t({POINT})\t{INODE}",
    "served": f"({PATH})\t({POINT})\t{INODE}",
    "folder": f"({TEXT})\t({POINT})\t(root)",
    "later": f"({PATH})",
    "leave": f"({REST})",
    "boot": f"({TEXT})",
    "events": f"({PATH})",
    "file": f"({PATH})\t{FACTS}",
    "theirs": f"({PATH})\t{FACTS}",
    "room": r"(?P<n0>-?[0-9]+)\t(?P<n1>-?[0-9]+)",
    "enroot": f"({TEXT})",
    "variable": f"({TEXT})(?:\t({TEXT}))?",
    "image": f"({TEXT})\t(?P<n0>-?[0-9]+)\t({TEXT})\t({REST})",
}
"""As slurm/step_protocol.py and cache/step_record have it, in other words than step_protocol.c."""

FIELDS = ("/a", "/", "/dev/loop9", "/x y/%d", "5", "-5", str(2**64), str(2**64 - 1), "0", "1", "7x")
MORE = (
    "root",
    "ro",
    "rw",
    "ext4",
    "erofs",
    "A_1",
    "A=B",
    "a",
    "",
    "-",
    "+5",
    " 5",
    "\x01",
    "é\udcff",
)
fields = st.sampled_from((*FIELDS, *MORE, f"/{'x' * 4094}", f"/{'x' * 4095}"))
word = st.sampled_from((*GRAMMAR, "SAY", "uses", ""))
shaped = st.tuples(word, st.lists(fields, max_size=9)).map(lambda one: "\t".join((one[0], *one[1])))
chars = st.characters(exclude_characters="\n\0", codec="utf-8")
lines = st.lists(st.one_of(shaped, st.text(chars, max_size=60)), min_size=1, max_size=200)


@pytest.fixture(scope="module")
def parser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answer")
    (folder / "main.c").write_text(PARSER)
    out = folder / "parser"
    command = ["gcc", "-std=gnu11", f"-I{FOLDER}", *WARNINGS, *SANITIZERS, "-o", str(out)]
    subprocess.run([*command, str(folder / "main.c"), str(FOLDER / "step_protocol.c")], check=True)
    return out


def understood(line: str) -> list[str]:
    """Its word's number (enum line_kind) and its fields, by GRAMMAR; 0 for what is left out."""
    name, tab, rest = line.partition("\t")
    found = re.fullmatch(GRAMMAR.get(name, "(?!)"), rest, re.DOTALL) if tab else None
    numbers = found.groupdict().values() if found else ()
    if found is None or any(one != "root" and abs(int(one)) >= 2**64 for one in numbers):
        return ["0"]
    taken = [one for one in found.groups() if one is not None]
    return [str([*GRAMMAR].index(name) + 1), *taken]


@given(lines)
def test_answer_line_is_parsed_by_the_grammar_or_left_out(parser: Path, lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
    ran = subprocess.run([parser], input=text, capture_output=True, check=True)
    found = ran.stdout.decode(errors="surrogateescape").split("\n")[:-1]
    assert [one.split("\t") for one in found] == [
        "\t".join(understood(line)).split("\t") for line in lines
    ]


@given(st.binary(max_size=3000))
def test_answer_parser_does_not_crash_on_any_bytes(parser: Path, data: bytes) -> None:
    subprocess.run([parser], input=data, capture_output=True, check=True)
