"""Publishing an image: spread as asked, whole, and never half there under its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Site
from forestage.admin import publish
from forestage.check import sources
from forestage.cli.exits import Exit
from forestage.errors import Failed
from forestage.stage import reading

DATA = bytes(range(256)) * 300
LUSTRE = "1 0 0:1 / / rw - ext4 /dev/sda rw\n2 1 0:2 / {} rw - lustre ost@tcp:/fs rw\n"

# The real one makes an empty file with the layout, and refuses where there is a file already.
SETSTRIPE = 'for last; do :; done; test ! -e "$last" && : >"$last"'


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    (tmp_path / "target").mkdir()
    (tmp_path / "proc/self").mkdir(parents=True)
    on_lustre(made, tmp_path / "elsewhere")
    return made


def on_lustre(site: Site, folder: Path) -> None:
    table = LUSTRE.format(os.path.realpath(folder))
    (site.places.root / "proc/self/mountinfo").write_text(table)


def target(site: Site) -> Path:
    return site.places.root / "target"


def left(site: Site) -> list[str]:
    return sorted(path.name for path in target(site).iterdir())


def test_lustre_target_is_made_with_layout(site: Site, lfs: Callable[[str], Path]) -> None:
    asked = lfs(SETSTRIPE)
    on_lustre(site, target(site))
    source = site.image("a.sqsh", DATA)
    done = site.run("publish", str(source), str(target(site)))
    assert done.exit_code == Exit.OK, done.output
    words = asked.read_text().split()
    assert words[:-1] == ["setstripe", "-E", "-1", "-c", "-1", "-S", "1M"]
    temporary = Path(words[-1])
    assert temporary.parent == target(site)
    assert temporary.name != "a.sqsh", "the name is there when the bytes are"
    assert (target(site) / "a.sqsh").read_bytes() == DATA
    assert left(site) == ["a.sqsh"]
    assert "all OSTs, in stripes of 1M" in done.output


def test_layout_options_reach_lfs(site: Site, lfs: Callable[[str], Path]) -> None:
    asked = lfs(SETSTRIPE)
    on_lustre(site, target(site))
    words = ["--stripes", "8", "--stripe-size", "4M"]
    printed = site.json("publish", str(site.image("a")), str(target(site)), *words)
    assert "-c 8 -S 4M" in asked.read_text()
    assert (printed["striped"], printed["filesystem"]) == (True, "lustre")


def test_check_advises_the_same_command() -> None:
    words = publish.setstripe(publish.Layout(), Path("/x"))
    assert tuple(words[:-1]) == sources.STRIPE


@pytest.mark.parametrize("script", [f"{SETSTRIPE}; exit 1", ": >/dev/null"])
def test_failing_lfs_publishes_nothing(site: Site, lfs: Callable[[str], Path], script: str) -> None:
    lfs(script)
    on_lustre(site, target(site))
    done = site.run("publish", str(site.image("a")), str(target(site)))
    assert done.exit_code == Exit.FAILED
    assert left(site) == []


def test_target_without_lustre_is_a_plain_copy(site: Site, lfs: Callable[[str], Path]) -> None:
    asked = lfs(SETSTRIPE)
    done = site.run("publish", str(site.image("a", DATA)), str(target(site)))
    assert done.exit_code == Exit.OK
    assert "not striped: ext4 is not Lustre" in done.output
    assert (target(site) / "a").read_bytes() == DATA
    assert asked.read_text() == ""


def test_copy_that_reads_back_differently_is_not_published(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, b"\1" + bytes(data)[1:]))
    done = site.run("publish", str(site.image("a", DATA)), str(target(site)))
    assert done.exit_code == Exit.FAILED
    assert "not what was written" in done.output
    assert left(site) == []


def test_source_written_to_meanwhile_is_not_published(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = site.image("a", DATA)
    write = os.write

    def writing(fd: int, data: memoryview) -> int:
        os.utime(source, ns=(1, 1))
        return write(fd, data)

    monkeypatch.setattr(os, "write", writing)
    done = site.run("publish", str(source), str(target(site)))
    assert "was written to while" in done.output
    assert left(site) == []


def test_existing_file_is_replaced_only_by_force(site: Site, lfs: Callable[[str], Path]) -> None:
    asked = lfs(SETSTRIPE)
    on_lustre(site, target(site))
    (target(site) / "a").write_bytes(b"of somebody")
    words = ["publish", str(site.image("a", DATA)), str(target(site))]
    assert site.run(*words).exit_code == Exit.NOT_FOUND
    assert asked.read_text() == "", "it is known before anything is copied"
    assert (target(site) / "a").read_bytes() == b"of somebody"
    with (target(site) / "a").open("rb") as reader:
        assert site.run(*words, "--force").exit_code == Exit.OK
        assert reader.read() == b"of somebody", "who reads it keeps what he has"
    assert (target(site) / "a").read_bytes() == DATA


def test_file_made_meanwhile_is_not_replaced(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def writing(fd: int, data: memoryview) -> int:
        (target(site) / "a").write_bytes(b"of somebody")
        return write(fd, data)

    monkeypatch.setattr(os, "write", writing)
    assert site.run("publish", str(site.image("a", DATA)), str(target(site))).exit_code
    assert (target(site) / "a").read_bytes() == b"of somebody"
    assert left(site) == ["a"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o4755])
def test_mode_is_kept(site: Site, mode: int) -> None:
    source = site.image("a", DATA)
    source.chmod(mode)
    site.run("publish", str(source), str(target(site)))
    assert (target(site) / "a").stat().st_mode & 0o7777 == mode & 0o777


@pytest.mark.parametrize("name", ["fifo", "target", "none"])
def test_source_that_is_no_file_is_refused(site: Site, name: str) -> None:
    os.mkfifo(site.places.root / "fifo")
    done = site.run("publish", str(site.places.root / name), str(target(site)))
    assert done.exit_code == (Exit.FAILED if name == "none" else Exit.NOT_FOUND), done.output
    assert left(site) == []


def test_missing_directory_is_not_made(site: Site) -> None:
    there = site.places.root / "nowhere"
    assert site.run("publish", str(site.image("a")), str(there)).exit_code == Exit.NOT_FOUND
    assert not there.exists()


def test_empty_and_large_file_are_copied_whole(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", 4096)
    for name, data in (("empty", b""), ("many", DATA)):
        printed = site.json("publish", str(site.image(name, data)), str(target(site)))
        assert ((target(site) / name).read_bytes(), printed["size"]) == (data, len(data))


def test_missing_lfs_is_an_error(site: Site) -> None:
    on_lustre(site, target(site))
    with pytest.raises(Failed, match="lfs is not installed"):
        publish._made(target(site) / "x", publish.Layout())
