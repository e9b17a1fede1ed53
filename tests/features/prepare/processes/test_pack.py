"""Packing a tree: everything in it, under its name only when it is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import Site
from forestage.commands.command_context import ExitStatus
from forestage.features.prepare import hints, pack


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Nine inodes: what a virtual environment has, and what is easily lost."""
    folder = tmp_path / "venv"
    (folder / "lib/deep").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "lib/a.py").write_text("a = 1\n" * 1000)
    os.link(folder / "lib/a.py", folder / "lib/deep/same.py")
    (folder / "lib/deep/b.py").write_text("b\n")
    (folder / "python").symlink_to("/usr/bin/python3")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "fifo")
    return folder


def listed(image: Path) -> list[str]:
    words = ["unsquashfs", "-l", "-d", "", str(image)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return sorted(line for line in done.stdout.splitlines() if line.startswith("/"))


def test_packed_image_lists_all_files_of_the_directory(
    site: Site, tree: Path, tmp_path: Path
) -> None:
    printed = site.json("pack", str(tree), "-o", str(tmp_path / "venv.sqsh"))
    assert (printed["inodes"], printed["compression"]) == (9, "zstd")
    assert printed["size"] == (tmp_path / "venv.sqsh").stat().st_size
    expected = sorted("/" + str(path.relative_to(tree)) for path in tree.rglob("*"))
    assert [line for line in listed(tmp_path / "venv.sqsh") if line != "/"] == expected
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_pack_resolves_relative_paths_from_the_current_directory(
    site: Site, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = site.run("pack", "venv", "-o", "venv.sqsh")
    assert done.exit_code == ExitStatus.OK, done.output
    assert "inodes" in done.output
    comment = f"stage={tmp_path}/venv.sqsh@{tmp_path}/venv"
    assert f'sbatch --comment="{comment}" ...' in done.output.splitlines()[-1]
    assert (tmp_path / "venv.sqsh").exists()


def test_pack_uses_gzip_if_mksquashfs_does_not_support_zstd(
    site: Site, tree: Path, tmp_path: Path, programs: Callable[..., Path]
) -> None:
    says = 'echo "mksquashfs: Compressor \\"zstd\\" is not supported!" >&2; exit 1'
    programs(mksquashfs=f'case "$*" in *zstd*) {says};; esac; exec /usr/bin/mksquashfs "$@"')
    printed = site.json("pack", str(tree), "-o", str(tmp_path / "x"))
    assert (printed["compression"], printed["inodes"]) == ("gzip", 9)


@pytest.mark.cases(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_pack_ended_by_a_signal_leaves_no_file_and_no_mksquashfs_process(
    site: Site,
    tree: Path,
    tmp_path: Path,
    programs: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    pid = tmp_path / "pid"
    programs(mksquashfs=f": >$2; echo $$ >{pid}; exec sleep 600")
    communicate = subprocess.Popen.communicate

    def end(process: subprocess.Popen[bytes], *args: Any, **how: Any) -> Any:
        if pid.exists() and pid.read_text().endswith("\n"):
            os.kill(os.getpid(), number)
        return communicate(process, *args, **how)

    monkeypatch.setattr(subprocess.Popen, "communicate", end)
    before, files = signal.getsignal(number), {*tmp_path.iterdir()}
    done = site.run("pack", str(tree), "-o", str(tmp_path / "x.sqsh"))
    assert done.exit_code == ExitStatus.INTERRUPTED
    assert {path.name for path in {*tmp_path.iterdir()} - files} == {"pid"}
    assert not Path("/proc", pid.read_text().strip()).exists()
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    "script",
    [
        "echo 'No space left on device' >&2; exit 1",
        "kill -KILL $$",
        ": >$2",
        # What mksquashfs says and does with a file that it may not read.
        "/usr/bin/mksquashfs \"$@\"; echo 'Failed to read file a, creating empty file' >&2",
    ],
)
def test_pack_exits_with_failed_and_no_image_if_mksquashfs_loses_files(
    site: Site, tree: Path, tmp_path: Path, programs: Callable[..., Path], script: str
) -> None:
    programs(mksquashfs=script)
    done = site.run("pack", str(tree), "-o", str(tmp_path / "x"))
    assert done.exit_code == ExitStatus.FAILED, done.output
    assert "nothing was packed" in done.output.lower()
    assert [path.name for path in tmp_path.iterdir() if "x" in path.name] == []


@pytest.mark.parametrize("secret", ["file", "directory"])
def test_unreadable_file_is_recognized_in_the_output_of_mksquashfs(
    as_root: None, secret: str
) -> None:
    """It goes on and ends with 0; pytest's own folders are root's, so not there."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        tree.mkdir()
        (tree / "file").write_text("secret")
        (tree / "directory").mkdir()
        (tree / secret).chmod(0o000)
        Path(folder).chmod(0o777)
        setpriv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        words = [
            *setpriv,
            *pack.format_mksquashfs_command(tree, Path(folder, "x"), ("-comp", "zstd")),
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, bool(pack._LOST.search(done.stderr))) == (0, True), done.stderr


def test_pack_replaces_an_existing_file_only_with_force(
    site: Site, tree: Path, tmp_path: Path, programs: Callable[..., Path]
) -> None:
    image = tmp_path / "x"
    asked = programs(mksquashfs=f'echo of somebody >{image}; exec /usr/bin/mksquashfs "$@"')
    words = ["pack", str(tree), "-o", str(image)]
    assert site.run(*words).exit_code == ExitStatus.NOT_FOUND
    assert image.read_text() == "of somebody\n", "the name was taken while it was packed"
    assert len(asked.read_text().splitlines()) == 1
    assert site.run(*words).exit_code == ExitStatus.NOT_FOUND
    assert len(asked.read_text().splitlines()) == 1, "it is known before anything is packed"
    assert site.run(*words, "--force").exit_code == ExitStatus.OK
    assert image.read_bytes()[:4] == b"hsqs"


def test_pack_refuses_an_output_inside_the_packed_directory(
    site: Site, tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tree / "lib")
    for place in (tree / "x", tree / "lib/x", tmp_path / "link/x"):
        done = site.run("pack", str(tree), "-o", str(place))
        assert (done.exit_code, "part of itself" in done.output) == (ExitStatus.NOT_FOUND, True)
        assert not place.exists()


def test_pack_here_prints_the_stage_option_for_the_directorys_own_path(
    site: Site, tree: Path
) -> None:
    done = site.run("pack", "--here", str(tree))
    assert done.exit_code == ExitStatus.OK, done.output
    assert f"srun --stage={tree}.sqsh@{tree} ..." in done.output
    assert hints.list_refusals([f"stage={tree}.sqsh@{tree}"]) == ()
    assert listed(Path(f"{tree}.sqsh"))


def test_pack_here_refuses_a_directory_that_may_not_be_mounted_over(
    site: Site, tmp_path: Path
) -> None:
    done = site.run("pack", "--here", "/usr/lib", "-o", str(tmp_path / "x"))
    assert done.exit_code == ExitStatus.NOT_FOUND
    assert "nothing may be mounted over /usr" in done.output
    assert not (tmp_path / "x").exists()


def test_pack_without_an_output_name_exits_with_usage(site: Site, tree: Path) -> None:
    assert site.run("pack", str(tree)).exit_code == ExitStatus.USAGE


def test_packed_image_on_lustre_is_created_with_stripes_over_all_osts(
    site: Site, tree: Path, tmp_path: Path, programs: Callable[..., Path]
) -> None:
    lustre = tmp_path / "lustre"
    lustre.mkdir(exist_ok=True)
    site.places.root.joinpath("proc/self").mkdir(parents=True, exist_ok=True)
    table = f"1 0 0:1 / / rw - ext4 /dev/sda rw\n2 1 0:2 / {lustre} rw - lustre ost@tcp:/fs rw\n"
    site.places.root.joinpath("proc/self/mountinfo").write_text(table)
    asked = programs(lfs=f'for last; do :; done; : >"$last"; stat -c %i "$last" >{tmp_path}/inode')
    done = site.run("pack", "--here", str(tree), "-o", str(lustre / "x"))
    assert done.exit_code == ExitStatus.OK, done.output
    assert asked.read_text().startswith("lfs setstripe -E -1 -c -1 -S 1M ")
    # mksquashfs has written into the file that has the layout.
    assert (lustre / "x").stat().st_ino == int((tmp_path / "inode").read_text())
    assert listed(lustre / "x")


def limit_memory(site: Site, limit: str) -> None:
    """Has the node's files say that this process is in a cgroup with this limit."""
    for name, text in (
        ("proc/self/cgroup", "0::/job_7\n"),
        ("sys/fs/cgroup/job_7/memory.max", limit),
    ):
        file = site.places.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_pack_limits_mksquashfs_to_the_memory_and_processors_of_its_cgroup(
    site: Site, tree: Path, tmp_path: Path, programs: Callable[..., Path]
) -> None:
    limit_memory(site, f"{300 << 20}\n")
    asked = programs(mksquashfs='exec /usr/bin/mksquashfs "$@"')
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(affinity)})
    try:
        assert site.json("pack", str(tree), "-o", str(tmp_path / "x"))["inodes"] == 9
    finally:
        os.sched_setaffinity(0, affinity)
    assert " -processors 1 -mem 75M -comp zstd " in asked.read_text().splitlines()[-1]


@pytest.mark.parametrize("version", ["4.3", ""])
def test_pack_omits_the_mem_option_for_an_old_or_unknown_mksquashfs(
    site: Site, tree: Path, tmp_path: Path, programs: Callable[..., Path], version: str
) -> None:
    limit_memory(site, f"{300 << 20}\n")
    says = f'echo "mksquashfs version {version}"'
    asked = programs(
        mksquashfs=f'case "$*" in -version) {says};; *) exec /usr/bin/mksquashfs "$@";; esac'
    )
    assert site.json("pack", str(tree), "-o", str(tmp_path / "x"))["inodes"] == 9
    assert "-mem" not in asked.read_text()


def test_pack_reports_a_killed_mksquashfs_as_probably_out_of_memory(
    site: Site, tree: Path, tmp_path: Path, programs: Callable[..., Path]
) -> None:
    programs(mksquashfs="kill -KILL $$")
    done = site.run("pack", str(tree), "-o", str(tmp_path / "x"))
    assert done.exit_code == ExitStatus.FAILED
    assert "mksquashfs was killed by signal 9: its memory may have run out" in done.output
    assert "a larger --mem" in done.output
