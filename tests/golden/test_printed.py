"""What commands print: their help, and what they say of a node that a test has made.

What they say of a job and of a feature that is in use: test_hooks.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from commands import NOW, Site
from forestage.cache.lease import EntryUse
from forestage.commands.main import main
from forestage.events import (
    BadEntryOutcome,
    CopyOutcome,
    EventRecord,
    Outcome,
    ReleaseOutcome,
    RequestOutcome,
    append_events,
)
from forestage.slurm.slurm_client import SlurmClient
from goldens import as_text, compare, must_be_as_kept, normalise
from node import Idle

GIB = 1 << 30


class Answers(Idle):
    """A Slurm that needs no daemon."""

    def with_pyslurm(self) -> SlurmClient:
        return self


@pytest.fixture(autouse=True)
def surroundings(as_root: None, terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlurmClient, "from_environ", lambda environ: Answers("", node="n1"))


def groups(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of a command and of all below it."""
    yield words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from groups(below, (*words, name))


def test_help_of_each_command_equals_the_golden_file() -> None:
    printed = {
        " ".join(("forestage", *words, "--help")): CliRunner()
        .invoke(main, [*words, "--help"], prog_name="forestage")
        .output.splitlines()
        for words in groups(main)
    }
    assert len(printed) > 30
    must_be_as_kept(compare("help.txt", as_text(printed)))


def fields(value: object, name: str = "") -> Iterator[str]:
    """Each field by its path, in the document's order; those of a list's items once."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from fields(below, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list) and value:
        for below in value:
            yield from fields(below, f"{name}[]")
    else:
        yield f"{name}: {type(value).__name__}"


class Printed:
    """A node's commands, and what they have printed."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.keys = site.keys()
        self.sections: dict[str, list[str]] = {}

    def run(self, *words: str) -> None:
        done = self.site.run(*words)
        end = [f"exit status {done.exit_code}"] if done.exit_code else []
        shown = " ".join(word.replace(str(self.site.places.root), "") for word in words)
        heading = f"forestage {shown}"
        while heading in self.sections:
            heading += ", again"
        self.sections[heading] = [*done.output.splitlines(), *end]

    def json(self, *words: str) -> None:
        """The fields of its document, and what kind of value each has."""
        document = json.loads(self.site.run(*words, "--json").stdout)
        self.sections[f"forestage {' '.join(words)} --json"] = [*dict.fromkeys(fields(document))]

    def complete(self, *words: str) -> None:
        """What bash is offered for the last word."""
        shell = BashComplete(main, {"obj": self.site.world}, "forestage", "_FORESTAGE_COMPLETE")
        found = shell.get_completions(list(words[:-1]), words[-1])
        lines = [f"{one.value}  {one.help or ''}".rstrip() for one in found]
        self.sections[f"completion of forestage {' '.join(words)}|"] = lines

    def compare(self, name: str) -> None:
        text = normalise(as_text(self.sections), self.site.places.root, keys=self.keys)
        must_be_as_kept(compare(f"{name}.txt", text))


@pytest.fixture
def printed(site: Site) -> Printed:
    """Two images, of which one is leased; a copy under way; jobs of the last days."""
    site.configure(f"sources: [{site.lustre}]\nmin_free: 0\nmax_size: 1G\nlow_watermark: 50%\n")
    first = site.publish(site.image("a.sqsh", b"a" * 5000), age=7200.0)
    site.publish(site.image("b.sqsh", b"b" * 9000), age=60.0, expected=NOW - 90)
    site.publish(site.image("old.sqsh", b"c" * 100), age=86400.0)
    site.lease(7, EntryUse(first, str(site.lustre / "a.sqsh")))
    append_events(site.places.events, [*happened(str(site.lustre / "a.sqsh"), first)])
    return Printed(site)


def happened(image: str, key: str) -> Iterator[EventRecord]:
    facts = {"request": image, "via": "option", "image": image, "key": key, "size": GIB}

    def of(job: int, hook: str, outcome: Outcome, **more: object) -> EventRecord:
        known = {"user": "alice", "uid": 1000, "node": "n1", "partition": "gpu", **more}
        return EventRecord(NOW - 9000 + 60 * job, hook, job, outcome, total=3.0, **known)  # type: ignore[arg-type]

    def handled(result: str, **more: object) -> RequestOutcome:
        return RequestOutcome(result, **{**facts, **more})  # type: ignore[arg-type]

    yield of(
        5, "stager", CopyOutcome("copied", image=image, key=key, size=GIB, wait=9.0, copying=8.0)
    )
    yield of(5, "prolog", handled("copied", wait=9.0, redirect="mounted"))
    yield of(5, "epilog", ReleaseOutcome("released", unmounted=1))
    yield of(6, "prolog", handled("hit", redirect="spank", baseline=8.0))
    yield of(6, "step", handled("hit", redirect="spank", baseline=8.0), step=0)
    yield of(7, "prolog", handled("declined", reason="deadline", detail="1 GiB is missing"))
    yield of(8, "prolog", handled("failed", reason="io", detail="Input/output error"))
    came = {"digest": "sha256:" + "d" * 64, "came": "imported", "redirect": "spank"}
    yield of(9, "step", handled("copied", request="docker://here#image", wait=40.0, **came), step=0)
    given = CopyOutcome("copied", image=image, key=key, size=GIB, wait=2.0, copying=2.0,
                   from_peers=GIB, from_others=GIB // 2, givers=("n2",), uploaded=7)  # fmt: skip
    yield of(10, "stager", given)
    yield of(10, "step", handled("through", redirect="spank"), step=0)
    yield of(11, "step", handled("hit", data=True, redirect="spank"), step=0)
    yield of(
        12, "stager", CopyOutcome("copied", image=image, key=key, size=9, wait=1.0, expected=NOW)
    )
    yield of(
        0, "sweep", BadEntryOutcome("bad", image=image, key=key, since=NOW - 9000, evicted=(key,))
    )


def test_output_of_commands_on_a_node_equals_the_golden_file(printed: Printed) -> None:
    for words in (
        ("status",),
        ("status", "--oneline"),
        ("ls",),
        ("show", str(printed.site.lustre / "b.sqsh")),
        ("path", str(printed.site.lustre / "b.sqsh")),
        ("path", "/nowhere"),
        ("config",),
        ("pin", str(printed.site.lustre / "old.sqsh")),
        ("evict", "--dry-run", "--all"),
        ("evict", "--dry-run"),
        ("sweep", "--dry-run"),
        ("unpin", str(printed.site.lustre / "old.sqsh")),
        ("off", "INC-42"),
        ("status",),
        ("on",),
        ("images",),
        ("registry", "ls"),
        ("prefetch", "--dry-run"),
        ("explain", "99"),
        ("nonsense",),
        ("sweep",),
        ("evict", "--all"),
    ):
        printed.run(*words)
    printed.compare("commands")


def test_fields_of_json_documents_equal_the_golden_file(printed: Printed) -> None:
    for words in (
        ("status",),
        ("ls",),
        ("show", str(printed.site.lustre / "b.sqsh")),
        ("explain", "9"),
        ("explain", "10"),
        ("report",),
        ("check",),
        ("images",),
        ("sweep", "--dry-run"),
        ("evict", "--dry-run", "--all"),
        ("verify", "--dry-run", "--all"),
    ):
        printed.json(*words)
    printed.compare("json")


def test_output_of_explain_equals_the_golden_file(printed: Printed) -> None:
    for job in (5, 6, 7, 8, 9, 10, 11, 12):
        printed.run("explain", str(job))
    printed.compare("explain")


def test_output_of_report_and_metrics_equals_the_golden_file(printed: Printed) -> None:
    printed.run("report")
    printed.run("metrics", "--print")
    printed.compare("report")


def test_shell_completion_equals_the_golden_file(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (("",), ("re",), ("registry", ""), ("show", ""), ("explain", ""), ("sweep", "--")):
        printed.complete(*words)
    printed.complete("evict", f"{printed.site.lustre}/")
    printed.compare("completion")
