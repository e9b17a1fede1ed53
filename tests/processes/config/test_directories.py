"""The configuration's directories where hooks run, and what users' commands read there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Site
from forestage.commands import sweep
from forestage.config import directories, load_config
from forestage.paths import NodePaths
from forestage.system import as_user
from forestage.system.as_user import User

BOB = User("bob", 65534, 65534)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def site() -> Iterator[Site]:
    """Where users may go, with a file in conf.d; hooks run there."""
    root = Path(tempfile.mkdtemp(dir=os.environ["PYTEST_DEBUG_TEMPROOT"]))
    root.chmod(0o755)
    site = Site(root, "deadline: 1h\n")
    site.places.config_parts.mkdir()
    (site.places.config_parts / "50-site.yaml").write_text("deadline: 2h\n")
    site.places.run.mkdir(parents=True)
    for folder in (site.places.etc, site.places.config_parts, site.places.run):
        folder.chmod(0o755)
    site.places.hook_call_mark("prolog").touch()
    yield site
    shutil.rmtree(root)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def as_bob(site: Site, *args: str) -> tuple[str, str]:
    """What a command prints for a user, and what it says on stderr."""

    def work() -> tuple[list[str], list[int]]:
        as_user.set_effective_user(BOB)
        done = site.run(*args)
        return [done.stdout, done.stderr], []

    (out, err), _ = as_user.run_in_child(work, list[str], 60.0)
    return out, err


def deadline(site: Site) -> tuple[str, str]:
    """The deadline that a user's command knows, and what it says on stderr."""
    out, err = as_bob(site, "config")
    (line,) = [line for line in out.splitlines() if line.split()[:1] == ["deadline"]]
    return line.split()[1], err


def test_sweep_makes_configuration_directories_unlistable_where_hooks_run(
    site: Site,
) -> None:
    state = site.places.known_disks.parent
    state.mkdir(parents=True, mode=0o755)
    sweep.make_config_unlistable(site.places)
    assert [mode(site.places.etc), mode(site.places.config_parts)] == [0o711, 0o711]
    assert mode(state) == 0o700
    assert directories.list_listable_directories(site.places) == []


def test_sweep_keeps_configuration_directories_listable_where_no_hook_has_run(site: Site) -> None:
    site.places.hook_call_mark("prolog").unlink()
    sweep.make_config_unlistable(site.places)
    assert [mode(site.places.etc), mode(site.places.config_parts)] == [0o755, 0o755]
    assert not site.places.config_names.exists()


def test_making_a_directory_unlistable_gives_users_no_new_rights(site: Site) -> None:
    site.places.etc.chmod(0o750)
    site.places.config_parts.chmod(0o700)
    sweep.make_config_unlistable(site.places)
    assert [mode(site.places.etc), mode(site.places.config_parts)] == [0o710, 0o700]


def test_users_command_reads_conf_d_by_the_file_names_that_root_listed(site: Site) -> None:
    sweep.make_config_unlistable(site.places)
    assert deadline(site) == ("2h", "")


def test_users_command_without_roots_list_warns_that_conf_d_was_not_read(site: Site) -> None:
    sweep.make_config_unlistable(site.places)
    site.places.config_names.unlink()
    value, said = deadline(site)
    assert value == "1h"
    assert said.startswith(f"forestage: {site.places.config_parts} was not read: ")
    assert said.count("\n") == 1


def test_users_command_warns_that_conf_d_has_changed_since_roots_listing(site: Site) -> None:
    sweep.make_config_unlistable(site.places)
    (site.places.config_parts / "60-new.yaml").write_text("deadline: 3h\n")
    (site.places.config_parts / "50-site.yaml").rename(site.places.root / "elsewhere")
    value, said = deadline(site)
    assert value == "1h"
    assert said.startswith(f"forestage: {site.places.config_parts} has changed: ")
    sweep.make_config_unlistable(site.places)
    assert deadline(site) == ("3h", "")


def test_hook_that_reads_a_changed_configuration_lists_its_file_names_for_users(site: Site) -> None:
    """The first one after a boot, before a step of that job asks anything as its user."""
    sweep.make_config_unlistable(site.places)
    site.places.config_names.unlink()
    places = site.places
    for number, name in enumerate(("50-site.yaml", "60-new.yaml")):
        # The same text under another name as well.
        (places.config_parts / name).write_text("deadline: 2h\n")
        os.utime(places.config_parts, (number, number))
        load_config(places.etc, places.config_memo)
        assert deadline(site) == ("2h", "")
    before = places.config_names.stat().st_ino
    load_config(places.etc, places.config_memo)
    assert places.config_names.stat().st_ino == before, "nothing is written where nothing changed"


def test_non_utf8_file_name_in_conf_d_does_not_hide_the_other_files_from_users(site: Site) -> None:
    os.close(os.open(bytes(site.places.config_parts) + b"/\xff.yaml", os.O_CREAT))
    sweep.make_config_unlistable(site.places)
    assert deadline(site) == ("2h", "")


def test_making_missing_configuration_directories_unlistable_does_not_fail(tmp_path: Path) -> None:
    places = NodePaths(tmp_path)
    directories.make_directories_unlistable(places)
    assert directories.list_listable_directories(places) == []
