"""The pages that admins read say what this version does."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from choice import read_rules
from forestage.commands.main import main

REPO = Path(__file__).parents[2]
PAGES = REPO / "packaging/man"
DOCS = (
    *sorted((REPO / "docs").rglob("*.md")),
    *sorted(REPO.glob("*.md")),
    *sorted((REPO / "tests").glob("*.md")),
)


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.[0-9]")), ids=lambda page: page.name)
def test_man_page_uses_only_known_roff_requests(page: Path) -> None:
    """A line of text that begins with a dot or a quote would be taken for a request."""
    known = {"TH", "SH", "SS", "TP", "IP", "PP", "B", "I", "BR", "RB", "IR", "RI", "BI", "IB"}
    known |= {"EX", "EE", "in", "br", "nf", "fi", "RS", "RE", '\\"'}
    for line in page.read_text().splitlines():
        if line.startswith("."):
            assert line[1:].split(" ")[0] in known, line
        assert not line.startswith("'"), line


def commands(text: str) -> list[list[str]]:
    """Calls of forestage: in lines of code, up to two spaces or an operator; in inline code."""
    lines = re.findall(r"^ {4}(?:# |\$ )?(forestage .*)$", text, re.MULTILINE)
    lines += re.findall(r"`(forestage [^`]*)`", text)
    return [shlex.split(re.split(r"  +|;|\||>", line)[0])[1:] for line in lines]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(REPO)))
def test_command_and_option_named_in_the_documents_exist(page: Path) -> None:
    for words in commands(page.read_text()):
        if not words or words[0] == "step" or not re.fullmatch(r"[a-z][a-z-]*", words[0]):
            continue  # a sentence, or what the companion runs
        context = click.Context(main)
        command = main.get_command(context, words[0])
        assert command is not None, words
        options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        for word in words[1:]:
            if word.startswith("-"):
                assert word.partition("=")[0] in options | {"--help", "-h"}, words


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get: lower case, hyphens for spaces, a number if twice."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(REPO)))
def test_link_in_the_documents_leads_to_an_existing_file_and_heading(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if "://" in name:
            continue
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), (name, anchor)


def test_anchor_of_a_repeated_heading_has_a_number(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# `a: b`, and [c](d.md)\n\n## What\n\n## What\n")
    assert anchors(page) == {"a-b-and-c", "what", "what-1"}


def test_safety_rule_names_a_test_that_exists() -> None:
    """That the test fails without its rule was tried when the row was written."""
    files = {
        str(file.relative_to(REPO / "tests")): set(re.findall(r"def (test_\w+)", file.read_text()))
        for file in (REPO / "tests").rglob("test_*.py")
    }
    assert len(read_rules()) > 100
    for rule, _, named in read_rules():
        assert named, rule
        for file, name in named:
            has = [path for path, tests in files.items() if name in tests and file in ("", path)]
            assert len(has) == 1, (rule, name, has)


def test_safety_rule_names_code_that_exists() -> None:
    places = [
        place
        for _, where, _ in read_rules()
        for place in re.findall(r"`([a-z_]+(?:/[^`]*|\.[^`]*)?)`", where)
    ]
    assert len(places) > 100
    for place in places:
        if (REPO / place).exists():
            continue
        module, _, names = place.partition(".")
        file = REPO / "src/forestage" / f"{module}.py"
        text = file.read_text() if file.exists() else (REPO / module).read_text()
        for name in re.findall(r"\w+", names):
            assert re.search(rf"(def|class) {name}\b|^{name}\b.* = ", text, re.MULTILINE), place


MODULE = re.compile(r"`((?:[a-z_]+/)+[a-z_]+)((?:\.\w+)*)`")


def test_module_and_function_that_the_architecture_names_exists() -> None:
    found = MODULE.findall((REPO / "docs/architecture.md").read_text())
    assert len(found) > 100
    for module, names in found:
        file = REPO / f"src/forestage/{module}.py"
        if not file.exists():
            bases = (REPO / base / module for base in ("src/forestage", "src", "", "tests"))
            files = (one for base in bases for one in (base, base.with_suffix(names or ".py")))
            assert any(map(Path.exists, files)), module
            continue
        for name in re.findall(r"\w+", names):
            is_there = re.search(rf"(def|class) {name}\b|^{name}\b", file.read_text(), re.MULTILINE)
            assert is_there, f"{module}.{name}"


SOURCES = [
    file
    for folder in ("src", "packaging", "prolog", "epilog", "bench")
    for file in sorted((REPO / folder).rglob("*"))
    if file.is_file() and not {".venv", "__pycache__"} & set(file.parts)
]


def texts() -> Iterator[tuple[str, str]]:
    """The program's and the packages' files that are text, Python or not, by their paths."""
    for file in SOURCES:
        with contextlib.suppress(UnicodeDecodeError):
            yield str(file.relative_to(REPO)), file.read_text()


def leads_to(name: str, beside: str = "") -> Path | None:
    """The file of ours that a comment means by a path."""
    bases = ("", "src", "src/forestage", "tests", str(Path(beside).parent))
    return next((one for base in bases if (one := REPO / base / name).is_file()), None)


def test_repository_file_named_in_a_source_exists() -> None:
    named = re.compile(r"(?<![\w/.${}*-])((?:[a-z_]+/)+\w+\.py|(?:src/)?spank/\w+\.[ch])\b")
    outside = {"slurm/spank.h"}
    found = [(file, name) for file, text in texts() for name in named.findall(text)]
    assert {"packaging/man/forestage.1", "src/spank/step_protocol.c"} <= {file for file, _ in found}
    for file, name in found:
        assert name in outside or leads_to(name, file), f"{file} names {name}"


def test_test_file_named_in_a_source_names_the_source_too() -> None:
    """As what compares a generated file with the program that makes it."""
    for file, text in texts():
        if file == "src/forestage/features/__init__.py":
            continue  # these know of a feature, as its row says
        for name in re.findall(r"tests/[\w/]*test_\w+\.py", text):
            knows = re.search(rf'[/"]{re.escape(Path(file).name)}\b', (REPO / name).read_text())
            assert knows, f"{file} names {name}"


def test_safety_rule_of_the_companion_names_a_function_that_exists() -> None:
    found = [
        (file, name)
        for _, where, _ in read_rules()
        for file, names in re.findall(r"(\w+\.c)((?:, \w+\b(?!\.c))+)", where)
        for name in re.findall(r"\w+", names)
    ]
    assert len(found) > 30
    for file, name in found:
        assert re.search(rf"\b{name}\(", (REPO / "src/spank" / file).read_text()), (file, name)


def unmarked(text: str) -> list[str]:
    """Blocks of a page without a line above that says which test runs them, or why none does."""
    blocks = re.finditer(r"^([^\n]*)\n```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    mark = re.compile(r"<!-- (?:run by (slurm/\w+\.py)|not run here: .+) -->")
    bad = re.findall(r"^ {4}\S.*$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    for above, kind, block in (one.groups() for one in blocks):
        found = mark.fullmatch(above)
        test = REPO / "tests" / found[1] if found and found[1] else None
        if not found or (test and (kind != "sh" or f'told("{test.name}")' not in test.read_text())):
            bad.append(block)
    return bad


def test_each_code_block_of_sites_md_names_the_test_that_runs_the_block_or_why_none_does() -> None:
    assert unmarked((REPO / "docs/sites.md").read_text()) == []


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("<!-- not run here: no cloud -->\n```yaml\na: 1\n```\n", []),
        ("words\n```sh\ntrue\n```\n", ["true\n"]),
        ("words\n\n    true\n", ["    true"]),
        ("<!-- run by slurm/test_check.py -->\n```sh\ntrue\n```\n", ["true\n"]),
    ],
)
def test_code_block_without_a_mark_is_reported(text: str, bad: list[str]) -> None:
    assert unmarked(text) == bad
