#!/usr/bin/env python3
"""The names and words of src, and tests' names: what a reader cannot guess, or reads twice.

words.txt lists the exceptions and the counts of today; both may only shrink. Run as a program, this
file writes the list anew, and refuses if anything has been added.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from forestage.features import FEATURES

REPOSITORY = Path(__file__).parent.parent
SOURCE = REPOSITORY / "src"
LIST = Path(__file__).parent / "words.txt"

NO_NOUNS = frozenset(
    re.findall(
        r"\w+",
        "Said Told Kept Seen Found Looked Shown Held Left Begun Noted Wanted Meant Going Gone Own"
        " Others Whose Odd Made Taken Put Order Place Answer Row",
    )
)
"""Participles, pronouns and nouns of no field: no class is called so, nor one of a module alone."""

GLOSSARY = frozenset(
    re.findall(
        r"\w+",
        "Job Step Task Node Image Source Identity Key Cache Entry Part Chunk Digest Map Stage"
        " Stager Lease Redirect Hit Pin Sweep Hook Prolog Epilog Companion Helper Keeper"
        " Server Peer Giver Feature Request Outcome Reason Mode Door Table Pool Declined Failed",
    )
)
"""Words of the project that are a class's name alone; the last two are errors' names."""

EMPTY = {"it", "one", "them", "all", "do", "get", "data", "info", "thing", "of", "at"}

PRONOUNS = re.compile(
    r"_(nobodys?|somebodys?|anybodys?|everybodys?|who|whom|whose|ours|theirs|mine|others|ones|his"
    r"|hers)(?=_|$)"
    r"|_(it|them|one)$"
    r"|_(at|by|for|from|in|of|on|to|with)_(it|them)_"
    r"|_one_(that|which|with|without|is|has|was|goes|comes)_"
    r"|^test_(it|they|nothing|that|these|this|those|what|where)_"
)
"""Words of a test's name that stand for a noun: a list of failed tests does not show which."""

WORDS = ("nobody", "somebody", "whose", "who", "None where")
RULES = ("D205", "D400", "D401")  # a docstring's first line: one sentence, which is imperative

Definition = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield each module of src, as docs write it: `cache/lease`."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE).with_suffix("")).removeprefix("forestage/")
        yield name, ast.parse(path.read_text())


def is_public(module: str, node: Definition) -> bool:
    """Tell whether other modules call this function by its name; doors and commands are not."""
    if node.name.startswith("_"):
        return False
    around = " ".join(map(ast.unparse, node.decorator_list))
    if "command" in around or "group" in around:
        return False
    of = re.fullmatch(r"features/(\w+)/(\w+)", module)
    doors = [door for one in FEATURES if of and one.name == of[1] for door in one.doors]
    return f"{module.rpartition('/')[2]}.{node.name}" not in doors


def find_names() -> dict[str, set[str]]:
    """Return the names that break a rule, by the rule."""
    classes: dict[str, set[str]] = {}
    functions: set[str] = set()
    alone: set[str] = set()
    for module, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).add(f"{module}.{node.name}")
            elif isinstance(node, Definition):
                functions.add(f"{module}.{node.name}")
        alone |= {f"{module}.{name}" for name in public_names(module, tree) if "_" not in name}
    named = {name: name.strip("_") for name in classes}
    camel = re.compile("[a-z][A-Z]")
    no_nouns = {name for name, word in named.items() if word in NO_NOUNS}
    single = {name for name, word in named.items() if not camel.search(word)} - no_nouns
    return {
        "class twice": union(whole for whole in classes.values() if len(whole) > 1),
        "no noun": union(classes[name] for name in no_nouns),
        "one word": union(classes[name] for name in single if named[name] not in GLOSSARY),
        "verb alone": alone,
        "empty word": {name for name in functions if second_word(name) in EMPTY},
        "test name": find_test_names(),
    }


def public_names(module: str, tree: ast.Module) -> list[str]:
    kinds = [node for node in tree.body if isinstance(node, Definition)]
    return [node.name for node in kinds if is_public(module, node)]


def second_word(function: str) -> str:
    return [*function.rpartition(".")[2].strip("_").split("_"), ""][1]


def union(sets: Iterable[set[str]]) -> set[str]:
    return set().union(*sets)


def find_test_names() -> set[str]:
    """Return the tests with a pronoun in their names, as `unit/test_units.test_name`."""
    tests = LIST.parent
    return {
        f"{path.relative_to(tests).with_suffix('')}.{name}"
        for path in tests.rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
        if PRONOUNS.search(name)
    }


def share_of_verbs() -> int:
    """Return how many public functions of modules have names of one word, in per cent."""
    public = [name for module, tree in modules() for name in public_names(module, tree)]
    return round(100 * sum("_" not in name for name in public) / len(public))


def count_words() -> Counter[str]:
    """Return how often src uses each word, and breaks each rule for docstrings."""
    texts = [
        path.read_text().lower()
        for path in SOURCE.rglob("*")
        if path.suffix in (".py", ".c", ".h") and path.is_file()
    ]
    counted: Counter[str] = Counter()
    for word in WORDS:
        whole = re.compile(rf"\b{word.lower()}\b")
        counted[word] = sum(len(whole.findall(text)) for text in texts)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", f"--select={','.join(RULES)}"]
    done = subprocess.run(
        [*ruff, "--exit-zero", "--output-format=json", str(SOURCE)],
        capture_output=True,
        check=True,
    )
    counted.update(dict.fromkeys(RULES, 0))
    counted.update(one["code"] for one in json.loads(done.stdout))
    return counted


def read_list() -> tuple[dict[str, set[str]], Counter[str]]:
    """Return the names that may break a rule, and how often a word may be used."""
    names: dict[str, set[str]] = {}
    counts: Counter[str] = Counter()
    for line in LIST.read_text().splitlines():
        rule, _, item = line.partition(": ")
        if item.isdigit():
            counts[rule] = int(item)
        else:
            names.setdefault(rule, set()).add(item)
    return names, counts


def written(names: dict[str, set[str]], counts: Counter[str]) -> str:
    """Return the text of words.txt."""
    lines = [f"{word}: {number}" for word, number in counts.items()]
    lines += [f"{rule}: {name}" for rule, broken in names.items() for name in sorted(broken)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "rule", ["class twice", "no noun", "one word", "verb alone", "empty word", "test name"]
)
def test_no_new_name_breaks_a_rule_of_names(rule: str) -> None:
    assert find_names()[rule] - read_list()[0].get(rule, set()) == set()


def test_counts_of_unclear_words_and_docstring_errors_do_not_grow() -> None:
    listed = read_list()[1]
    assert {word: n for word, n in count_words().items() if n > listed[word]} == {}


def main() -> None:
    names, counts = find_names(), count_words()
    if LIST.exists():
        listed, most = read_list()
        more = [f"{word}: {n} > {most[word]}" for word, n in counts.items() if n > most[word]]
        for rule, broken in names.items():
            known = listed.get(rule, set())
            if len(broken) > len(known):
                more += [f"{rule}: {name}" for name in sorted(broken - known)]
        if more:
            sys.exit("\n".join(more))
    LIST.write_text(written(names, counts))
    print(f"{share_of_verbs()} % of the public functions of modules are a verb alone")


if __name__ == "__main__":
    main()
