"""Publishing an image: spread as asked, whole, and never half there under its name."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Site
from forestage.commands.command_context import ExitStatus
from forestage.system import run

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


@pytest.fixture
def while_copying(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], object]], None]:
    """Has something happen between the bytes' being written and their being read back."""
    copyfile = shutil.copyfile

    def put(then: Callable[[Path], object]) -> None:
        def copying(source: Path, part: Path) -> None:
            copyfile(source, part)
            then(part)

        monkeypatch.setattr(shutil, "copyfile", copying)

    return put


@pytest.mark.parametrize(
    ("options", "asked_for", "printed"),
    [
        ([], "-c -1 -S 1M", "all OSTs, in stripes of 1M"),
        (["--stripes", "8", "--stripe-size", "4M"], "-c 8 -S 4M", "8 OSTs, in stripes of 4M"),
    ],
)
def test_publish_on_lustre_creates_the_file_with_the_requested_stripes(
    site: Site, programs: Callable[..., Path], options: list[str], asked_for: str, printed: str
) -> None:
    asked = programs(lfs=SETSTRIPE)
    on_lustre(site, target(site))
    done = site.run("publish", str(site.image("a.sqsh", DATA)), str(target(site)), *options)
    assert done.exit_code == ExitStatus.OK, done.output
    words = asked.read_text().split()
    assert " ".join(words[:-1]) == f"lfs setstripe -E -1 {asked_for}"
    temporary = Path(words[-1])
    assert temporary.parent == target(site)
    assert temporary.name != "a.sqsh", "the name is there when the bytes are"
    assert (target(site) / "a.sqsh").read_bytes() == DATA
    assert left(site) == ["a.sqsh"]
    assert printed in done.output


@pytest.mark.parametrize("script", [f"{SETSTRIPE}; exit 1", ": >/dev/null", None])
def test_publish_fails_and_leaves_no_file_if_lfs_fails_or_is_missing(
    site: Site, programs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    if script:
        programs(lfs=script)
    else:
        monkeypatch.setattr(run, "PATH", "/nowhere")
    on_lustre(site, target(site))
    done = site.run("publish", str(site.image("a")), str(target(site)))
    assert done.exit_code == ExitStatus.FAILED
    assert left(site) == []


@pytest.mark.parametrize("data", [DATA, b""])
def test_publish_outside_of_lustre_makes_a_plain_copy(
    site: Site, programs: Callable[..., Path], data: bytes
) -> None:
    asked = programs(lfs=SETSTRIPE)
    done = site.run("publish", str(site.image("a", data)), str(target(site)))
    assert done.exit_code == ExitStatus.OK
    assert "not striped: ext4 is not Lustre" in done.output
    assert (target(site) / "a").read_bytes() == data
    assert asked.read_text() == ""


@pytest.mark.parametrize("changed", ["copy", "image"])
def test_publish_fails_if_the_copy_or_the_image_changed_during_the_copy(
    site: Site, while_copying: Callable[[Callable[[Path], object]], None], changed: str
) -> None:
    source = site.image("a", DATA)
    other = b"\1" + DATA[1:]
    while_copying(lambda part: (part if changed == "copy" else source).write_bytes(other))
    done = site.run("publish", str(source), str(target(site)))
    assert done.exit_code == ExitStatus.FAILED
    assert "read back is not what the image has (was it written to meanwhile?" in done.output
    assert left(site) == []


def test_publish_does_not_follow_a_link_that_replaced_the_unfinished_copy(
    site: Site, while_copying: Callable[[Callable[[Path], object]], None]
) -> None:
    """The folder's owner may put one there while root compares."""
    secret = site.places.root / "secret"
    secret.write_bytes(DATA)
    secret.chmod(0o600)

    def swap(_: Path) -> None:
        (part,) = target(site).iterdir()
        part.unlink()
        part.symlink_to(secret)

    while_copying(swap)
    done = site.run("publish", str(site.image("a", DATA)), str(target(site)))
    assert done.exit_code != ExitStatus.OK
    assert secret.stat().st_mode & 0o777 == 0o600
    assert left(site) == []


def test_publish_replaces_an_existing_file_only_with_force(
    site: Site, programs: Callable[..., Path]
) -> None:
    asked = programs(lfs=SETSTRIPE)
    on_lustre(site, target(site))
    (target(site) / "a").write_bytes(b"of somebody")
    words = ["publish", str(site.image("a", DATA)), str(target(site))]
    assert site.run(*words).exit_code == ExitStatus.NOT_FOUND
    assert asked.read_text() == "", "it is known before anything is copied"
    assert (target(site) / "a").read_bytes() == b"of somebody"
    with (target(site) / "a").open("rb") as reader:
        assert site.run(*words, "--force").exit_code == ExitStatus.OK
        assert reader.read() == b"of somebody", "who reads it keeps what they have"
    assert (target(site) / "a").read_bytes() == DATA


def test_publish_does_not_replace_a_file_created_during_the_copy(
    site: Site, while_copying: Callable[[Callable[[Path], object]], None]
) -> None:
    while_copying(lambda part: (target(site) / "a").write_bytes(b"of somebody"))
    assert site.run("publish", str(site.image("a", DATA)), str(target(site))).exit_code
    assert (target(site) / "a").read_bytes() == b"of somebody"
    assert left(site) == ["a"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o4755])
def test_published_file_keeps_its_mode_and_is_private_until_complete(
    site: Site, while_copying: Callable[[Callable[[Path], object]], None], mode: int
) -> None:
    source = site.image("a", DATA)
    source.chmod(mode)
    meanwhile: list[int] = []
    while_copying(lambda part: meanwhile.append(part.stat().st_mode & 0o7777))
    site.run("publish", str(source), str(target(site)))
    assert (target(site) / "a").stat().st_mode & 0o7777 == mode & 0o777
    assert meanwhile == [0o600]


@pytest.mark.parametrize(
    ("image", "folder"),
    [("fifo", "target"), ("target", "target"), ("none", "target"), ("lustre/a", "nowhere")],
)
def test_publish_refuses_a_source_that_is_no_file_or_a_target_that_is_no_directory(
    site: Site, image: str, folder: str
) -> None:
    site.image("a")
    os.mkfifo(site.places.root / "fifo")
    root = site.places.root
    done = site.run("publish", str(root / image), str(root / folder))
    assert done.exit_code == ExitStatus.NOT_FOUND, done.output
    assert left(site) == []
    assert not (root / "nowhere").exists()


ENDS = (signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("numbers", [ENDS[:1], ENDS[1:], ENDS])
def test_publish_ended_by_signals_leaves_no_file(
    site: Site,
    while_copying: Callable[[Callable[[Path], object]], None],
    numbers: tuple[signal.Signals, ...],
) -> None:
    """With two at the same moment, as of a terminal's end and its shell's, the second one comes
    while the part is being removed.
    """

    def end(part: Path) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        for number in numbers:
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)

    while_copying(end)
    done = site.run("publish", str(site.image("a.sqsh", DATA)), str(target(site)))
    assert done.exit_code == ExitStatus.INTERRUPTED
    assert left(site) == []


def test_publish_continues_after_an_ignored_hangup_signal(
    site: Site, while_copying: Callable[[Callable[[Path], object]], None]
) -> None:
    """As with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        while_copying(lambda part: os.kill(os.getpid(), signal.SIGHUP))
        done = site.run("publish", str(site.image("a.sqsh", DATA)), str(target(site)))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.exit_code == ExitStatus.OK, done.output
    assert left(site) == ["a.sqsh"]
