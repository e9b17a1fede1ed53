"""Golden files: what the program prints and logs, kept beside the tests that compare it.

    FORESTAGE_GOLDEN=write .venv/bin/python3 -m pytest tests/golden

writes them anew, as root, since most tests there need a node. `git diff` then shows what changed.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
WRITE = "FORESTAGE_GOLDEN"
COMMAND = f"{WRITE}=write .venv/bin/python3 -m pytest tests/golden"
AGAIN = f"if that is meant: {COMMAND}"

Sections = Mapping[str, Sequence[str]]
"""Lines by their heading."""

# What differs from run to run, and what stands for it; in this order.
VARIES = (
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?( [+-]\d{4}|Z|[+-]\d\d:\d\d)?", "DATE"),
    (r'version="[^"]*"', 'version="VERSION"'),
    (r"((?:cache|kind)_bytes(?:\{.*\})?) [1-9][\d.]*$", r"\1 SIZE"),
    (r"^(inode +)\d+", r"\1INODE"),
    (r"\b\d+(\.\d+)? ?([KMGTP]i?B?/s|[KMGTP]i?B|B/s|B|bytes)(?!\w)", "SIZE"),
    (r'(?<=")(time|total|wait|copying|baseline|expected|rate)":[\d.e+-]+', r'\1":N'),
    (r"\b(bytes|pid|total|wait|time)=[\d.]+s?\b", r"\1=N"),
    (r"(less than )?\b(\d+(\.\d+)?(d|h|min|ms|m|s))+(?![\w-])", "TIME"),
    (r"\b\d+(\.\d+)? (seconds|minutes|hours|days)\b", "TIME"),
    (r"\bpid \d+", "pid N"),
    (r"mounted at /\S*", "mounted at POINT"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"^((?:also\t)?use\t\S+\t\S+\t)\d+", r"\1INODE"),
    (r"^((?:device|served)\t.*\t)\d+$", r"\1INODE"),
    (r"/served/[\d-]+", "/served/NAME"),
    (r"/dev/loop\d+\t\d+:\d+", "/dev/loopN\tMAJOR:MINOR"),
    (r"\b\d{9,}(\.\d+)?\b", "NUMBER"),  # inodes, times in nanoseconds
    (r"\b\d+\.\d{3,}\b", "NUMBER"),
)


def normalise(text: str, *roots: Path, keys: Iterable[str] = ()) -> str:
    """Return the text with a word for all that differs from run to run, and paths below `roots`.

    A key or digest gets a number in the order in which the text has them, also where it is short.
    Of a short one that is nowhere whole the `keys` must be given: it may look like a number.
    """
    for root in roots:
        text = text.replace(f"{root}/", "/").replace(str(root), "/")
    text = re.sub(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "UUID", text)
    text = re.sub(r"\b\d+(\.\d+)?e[+-]\d+\b", "NUMBER", text)
    found = {*keys, *re.findall(r"\b(?:[0-9a-f]{32,64}|[0-9a-f]{16}(?=\.sqsh))\b", text)}
    short = {key[:12] for key in found if key[:12] in text}
    for number, key in enumerate(sorted(short, key=text.index), 1):
        text = re.sub(rf"\b{key}[0-9a-f]*\b", f"KEY{number}", text)
    for pattern, word in VARIES:
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    text = re.sub(r"(?<=\S) {2,}", "  ", text)  # columns are as wide as what is in them
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def as_text(sections: Sections) -> str:
    return "\n".join(
        "\n".join((f"== {heading}", *lines)) + "\n" for heading, lines in sections.items()
    )


def parse(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("== "):
            found[line[3:]] = []
        elif line:
            found[list(found)[-1]].append(line)
    return found


def compare(name: str, text: str) -> list[str]:
    """Return in lines how the text differs from the golden file, which is written where asked."""
    file = GOLDEN / name
    if os.environ.get(WRITE) == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    kept = file.read_text() if file.exists() else ""
    if kept == text:
        return []
    differs = difflib.unified_diff(
        kept.splitlines(), text.splitlines(), f"tests/golden/{name}", "now", lineterm=""
    )
    return [*differs, AGAIN]


def compare_imports(name: str, now: Sections) -> list[str]:
    """Return in lines which modules are imported that the golden file has not, and the reverse."""
    file = GOLDEN / name
    kept = parse(file.read_text()) if file.exists() else {}
    if not compare(name, as_text(now)):
        return []
    told = [f"tests/golden/{name}:"]
    for heading in {**kept, **now}:
        before, after = set(kept.get(heading, ())), set(now.get(heading, ()))
        told += _told(heading, "imports more, which it must not", after - before)
        told += _told(heading, "imports no longer", before - after)
    return [*told, f"a list may only get shorter, and paths may change: then {COMMAND}"]


def _told(heading: str, what: str, modules: Iterable[str]) -> list[str]:
    listed = ", ".join(sorted(modules))
    return [f"{heading} {what}: {listed}"] if listed else []


def must_be_as_kept(*differences: Sequence[str]) -> None:
    """Fail with the differences, if there are any."""
    told = [line for one in differences for line in one]
    assert not told, "\n" + "\n".join(told)
