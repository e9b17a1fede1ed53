"""The images below a site's sources: which, whose, how large, and how they are labelled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commands import Site
from forestage.commands.command_context import ExitStatus
from forestage.features.prepare import images


def names(found: images.ImageListing) -> list[str]:
    return [os.path.basename(one.path) for one in found.images]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    (folder / "team/deep").mkdir(parents=True)
    for name in ("b.sqsh", "team/a.squashfs", "team/deep/c.sqfs", "notes.txt"):
        (folder / name).write_bytes(b"x" * 2048)
    (folder / "b.sqsh.label").write_text("PyTorch 25.01\nmore\n")
    return folder


def test_images_command_lists_upper_directories_first_with_size_owner_and_label(
    shared: Path,
) -> None:
    found = images.list_images_below([str(shared)])
    assert names(found) == ["b.sqsh", "a.squashfs", "c.sqfs"]
    first = found.images[0]
    assert (first.size, first.label, found.images[1].label) == (2048, "PyTorch 25.01", "")
    assert first.owner in ("root", str(os.getuid()), os.environ.get("USER", ""))


def test_images_command_skips_links_hidden_directories_and_files_too_deep(shared: Path) -> None:
    (shared / "link.sqsh").symlink_to(shared / "b.sqsh")
    (shared / "loop").symlink_to(shared)
    (shared / "folder.sqsh").mkdir()
    (shared / ".snapshot").mkdir()
    (shared / ".snapshot/old.sqsh").touch()
    deep = shared.joinpath(*["d"] * images.MAX_DEPTH)
    (deep / "below").mkdir(parents=True)
    (deep / "last.sqsh").touch()
    (deep / "below/beyond.sqsh").touch()
    assert names(images.list_images_below([str(shared)])) == [
        "b.sqsh",
        "a.squashfs",
        "c.sqfs",
        "last.sqsh",
    ]


def test_images_command_stops_at_its_limit_and_marks_the_listing_as_cut_off(shared: Path) -> None:
    found = images.list_images_below([str(shared)], most=2)
    assert (names(found), found.cut_off) == (["b.sqsh"], True)
    assert not images.list_images_below([str(shared)]).cut_off


@pytest.mark.parametrize("label", ["fifo", "link", "escape", "long", "bytes"])
def test_bad_label_file_of_an_image_gives_a_printable_or_empty_label(
    shared: Path, label: str
) -> None:
    file = shared / "b.sqsh.label"
    file.unlink()
    if label == "fifo":
        os.mkfifo(file)
    elif label == "link":
        file.symlink_to("/etc/passwd")
    else:
        text = {"escape": b"\x1b[2Jred", "long": b"x" * 5000, "bytes": b"\xff\xfe"}[label]
        file.write_bytes(text)
    said = images.list_images_below([str(shared)]).images[0].label
    assert said.isprintable()
    assert len(said) <= images.MAX_LABEL
    assert bool(said) == (label not in ("fifo", "link"))


def test_images_command_escapes_a_name_that_is_not_utf_8(shared: Path, site: Site) -> None:
    (shared / os.fsdecode(b"\xff\x1b.sqsh")).touch()
    printed = site.json("images", str(shared))
    assert all(one["path"].isprintable() for one in printed["images"])


def test_images_command_lists_below_the_given_directory_or_the_sources(
    shared: Path, site: Site
) -> None:
    done = site.run("images", str(shared / "team"))
    assert done.exit_code == ExitStatus.OK, done.output
    assert "2 images below" in done.output
    empty = site.run("images", str(shared / "nowhere"))
    assert (empty.exit_code, "No file below" in empty.output) == (ExitStatus.OK, True)
    assert site.run("images").exit_code == ExitStatus.OK
