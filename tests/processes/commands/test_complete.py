"""What a shell is offered: what is there, nothing that harms; silence where nothing can be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from click.shell_completion import BashComplete

from commands import NOW, Site
from forestage.cache.lease import EntryUse
from forestage.commands.main import main
from forestage.events import EventRecord, RequestOutcome, append_events


def offered(site: Site, *words: str) -> list[str]:
    """For the last word, which may be empty."""
    shell = BashComplete(main, {"obj": site.world}, "forestage", "_FORESTAGE_COMPLETE")
    return [one.value for one in shell.get_completions(list(words[:-1]), words[-1])]


def test_completion_offers_keys_and_paths_of_entries(site: Site) -> None:
    path = site.image("a.sqsh")
    key = site.publish(path)
    assert offered(site, "show", "") == [key[:12]]
    assert offered(site, "evict", key[:2]) == [key[:12]]
    assert offered(site, "verify", str(path)[:-3]) == [str(path)]
    assert offered(site, "pin", "zz") == offered(site, "ls", "/nowhere") == []


def test_completion_offers_no_path_with_control_characters(site: Site) -> None:
    site.publish(site.image("a\x1b[31m.sqsh"))
    assert offered(site, "show", str(site.lustre) + "/") == []


def test_completion_offers_jobs_with_leases_first_then_the_latest_jobs(site: Site) -> None:
    site.lease(41, EntryUse("k" * 32))
    hit = RequestOutcome("hit", key="k")
    append_events(
        site.places.events, [EventRecord(NOW, "prolog", job, hit) for job in (40, 41, 42)]
    )
    assert offered(site, "explain", "") == ["41", "42", "40"]
    assert offered(site, "explain", "42") == ["42"]


def test_completion_offers_nothing_if_configuration_and_leases_cannot_be_read(site: Site) -> None:
    site.configure("nonsense: true\n")
    site.places.leases.parent.mkdir(parents=True, exist_ok=True)
    site.places.leases.touch()
    assert offered(site, "show", "") == offered(site, "explain", "") == []


def test_bash_completion_prints_words_and_nothing_on_stderr(tmp_path: Path) -> None:
    """With the program itself, and whatever this machine has at the usual places."""
    environ = {
        "_FORESTAGE_COMPLETE": "bash_complete",
        "COMP_WORDS": "forestage sta",
        "COMP_CWORD": "1",
        "PATH": os.environ["PATH"],
    }
    code = "import sys; sys.argv[0] = 'forestage'; from forestage.commands.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert "plain,status" in done.stdout.splitlines()
    assert done.stderr == ""
