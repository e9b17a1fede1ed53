"""What a loader gets from a window: paths, their order, what is kept, and what is refused."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from copiers import copiers, usage
from forestage_window import (
    IN_USE,
    Window,
    _ConsumerPosition,
    _FileList,
    _SourceFile,
    find_next_use,
    list_near_files,
    parse_size,
    window,
)

from conftest import SIZE

FETCHERS = """
import os, shutil

def good(source, target):
    shutil.copyfile(source.replace("s3://bucket", os.environ["BUCKET"]), target)

def large(source, target):
    with open(target, "wb") as file:
        file.write(bytes(1 << 20))

def failing(source, target):
    raise RuntimeError("no such bucket")

def changing(source, target):
    shutil.copyfile(source, target)
    with open(source, "r+b") as file:
        file.write(b"new")
"""


@pytest.fixture
def fetchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "fetchers.py").write_text(FETCHERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fetchers", raising=False)
    return importlib.import_module("fetchers")


def test_window_yields_local_copies_in_the_order_of_the_paths(
    job: Path, data_set: list[Path]
) -> None:
    shards = window(data_set, room=8 * SIZE)
    for source, local in zip(data_set, shards, strict=True):
        assert job in Path(local).parents
        assert local.endswith(source.name)
        assert Path(local).read_bytes() == source.read_bytes()
    assert (shards.stats.local, shards.stats.shared) == (20, 0)
    assert shards.stats.rate > 0


def test_window_copy_stays_until_the_consumer_is_keep_paths_further(
    job: Path, data_set: list[Path]
) -> None:
    given: list[str] = []
    for local in window(data_set, room=4 * SIZE, ahead=1, keep=3):
        given.append(local)
        assert all(map(os.path.exists, given[-3:]))
    assert not any(map(os.path.exists, given[:10]))


def test_second_epoch_of_a_window_copies_only_files_that_did_not_fit(
    job: Path, data_set: list[Path]
) -> None:
    shards = window(data_set, room=10 * SIZE, ahead=2)
    list(shards)
    first = shards.stats.copied
    list(shards)
    # 10 of 20 fit; 3 of these are for what is read and what comes next.
    assert shards.stats.copied - first <= 14 * SIZE
    assert shards.stats.local == 40


def test_end_of_an_epoch_copies_the_first_files_of_the_next_epoch(
    job: Path, data_set: list[Path]
) -> None:
    shards = window(data_set, room=4 * SIZE, ahead=2)
    list(shards)
    stalls = shards.stats.stalls
    assert next(iter(shards)).endswith(data_set[0].name)
    assert shards.stats.stalls <= stalls + 1  # its copy may be on the way


def test_window_local_lists_the_copies_that_exist(job: Path, data_set: list[Path]) -> None:
    shards = window(data_set, room=10 * SIZE, wrap=False)
    assert shards.local() == {}
    last = list(shards)[-1]
    there = shards.local()
    assert len(there) == 10
    assert there[str(data_set[-1])] == last
    assert all(Path(local).read_bytes() == Path(path).read_bytes() for path, local in there.items())


def test_deleted_copy_that_is_still_open_counts_against_the_windows_room(
    job: Path, data_set: list[Path]
) -> None:
    shards = window(data_set, room=2 * SIZE, ahead=0)
    paths = iter(shards)
    with open(next(paths), "rb") as first, open(next(paths), "rb") as second:
        assert next(paths) == str(data_set[2])
        assert next(paths) == str(data_set[3])
        assert "no room" in shards.stats.trouble
        assert first.read() == data_set[0].read_bytes()
        assert second.read() == data_set[1].read_bytes()
        assert usage(job) == 2 * SIZE
    assert next(paths) != str(data_set[4])


def test_file_larger_than_the_windows_room_is_yielded_by_its_source_path(
    job: Path, data_set: list[Path]
) -> None:
    shards = window(data_set, room=SIZE - 1)
    assert list(shards) == list(map(str, data_set))
    assert "larger than the room" in shards.stats.trouble


def test_windows_of_one_job_share_the_smallest_room(job: Path, data_set: list[Path]) -> None:
    shards, small = window(data_set, room=20 * SIZE), window((), room=3 * SIZE)
    for _ in shards:
        assert usage(job) <= 3 * SIZE
    small.close()


def test_changed_source_is_yielded_once_by_its_own_path_and_then_copied_again(
    job: Path, data_set: list[Path]
) -> None:
    shards = window(data_set[:3], room=8 * SIZE)
    list(shards)
    data_set[1].write_bytes(b"new")
    assert list(shards)[1] == str(data_set[1])
    assert "changed" in shards.stats.trouble
    assert Path(list(shards)[1]).read_bytes() == b"new"


def test_missing_source_is_yielded_by_the_given_path(job: Path, data_set: list[Path]) -> None:
    data_set[1].unlink()
    shards = window(data_set, room=8 * SIZE)
    assert list(shards)[1] == str(data_set[1])
    assert shards.stats.local == 19


@pytest.mark.parametrize("kind", ["fifo", "directory", "unreadable"])
def test_fifo_directory_or_unreadable_source_is_yielded_by_the_given_path(
    job: Path, data_set: list[Path], kind: str
) -> None:
    odd = data_set[0].with_name("odd")
    if kind == "fifo":
        os.mkfifo(odd)
    elif kind == "directory":
        odd.mkdir()
    else:
        odd.symlink_to(odd)
    shards = window([odd, data_set[0]], room=8 * SIZE)
    assert next(iter(shards)) == str(odd)
    assert shards.stats.trouble


def test_source_name_of_any_bytes_gets_an_ascii_local_name(job: Path, data_set: list[Path]) -> None:
    odd = os.fsencode(data_set[0].parent) + b"/\xff\n \xc3\xa4.tar"
    Path(os.fsdecode(odd)).write_bytes(b"odd")
    (local,) = window([odd], room=SIZE)
    assert Path(local).read_bytes() == b"odd"
    assert local.isascii()
    assert local.endswith(".tar")


def test_empty_file_and_repeated_path_each_get_one_local_copy(
    job: Path, data_set: list[Path]
) -> None:
    data_set[0].write_bytes(b"")
    paths = [data_set[0], data_set[1], data_set[0], data_set[1]]
    locals_ = list(window(paths, room=8 * SIZE))
    assert locals_[:2] == locals_[2:]
    assert Path(locals_[0]).read_bytes() == b""


@pytest.mark.ci
def test_window_of_a_hundred_thousand_paths_yields_local_copies(
    job: Path, data_set: list[Path]
) -> None:
    folder = data_set[0].parent
    paths = [folder / f"{number}" for number in range(100_000)]
    for path in paths[:300]:
        path.write_bytes(b"x")
    shards = window(paths, room="1MiB")
    for at, local in enumerate(shards):
        assert job in Path(local).parents
        if at == 200:
            break
    assert len(shards) == 100_000


def test_fetch_function_makes_the_windows_copies(
    job: Path, data_set: list[Path], fetchers: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUCKET", str(data_set[0].parent))
    urls = [f"s3://bucket/{path.name}" for path in data_set[:4]]
    shards = window(urls, room=8 * SIZE, fetch=fetchers.good, size=SIZE)  # type: ignore[attr-defined]
    assert [Path(p).read_bytes() for p in shards] == [p.read_bytes() for p in data_set[:4]]


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("large", SIZE, "File too large"),
        ("failing", SIZE, "no such bucket"),
        ("good", None, "give size="),
    ],
)
def test_failing_fetch_function_yields_the_given_path(
    job: Path, fetchers: object, name: str, size: int | None, said: str
) -> None:
    shards = window(["s3://bucket/a"], room="8M", fetch=getattr(fetchers, name), size=size)
    assert list(shards) == ["s3://bucket/a"]
    assert said in shards.stats.trouble
    assert usage(job) == 0


def test_source_changed_during_its_window_copy_is_yielded_by_its_own_path(
    job: Path, data_set: list[Path], fetchers: object
) -> None:
    shards = window(data_set[:1], room=8 * SIZE, fetch=fetchers.changing)  # type: ignore[attr-defined]
    assert list(shards) == [str(data_set[0])]
    assert "changed" in shards.stats.trouble


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"paths": "/lustre/one.tar"}, TypeError),
        ({"room": "400 apples"}, ValueError),
        ({"ahead": -1}, ValueError),
        ({"keep": 0}, ValueError),
        ({"where": "tape"}, ValueError),
        ({"size": "x"}, ValueError),
        ({"fetch": lambda source, target: None}, ValueError),
    ],
)
def test_invalid_window_argument_raises_type_or_value_error(
    job: Path, change: dict[str, object], error: type
) -> None:
    arguments: dict[str, object] = {"paths": [], "room": 1, **change}
    with pytest.raises(error):
        window(**arguments)  # type: ignore[arg-type]


def test_fetch_function_defined_in_a_script_is_refused(tmp_path: Path) -> None:
    """The script would have to run again, in the copier."""
    script = "from forestage_window import window\ndef f(a, b): ...\nwindow([], 1, fetch=f)"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": sys.path[0]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "put it into a module" in ran.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("400GiB", 400 << 30), ("1.5k", 1536), (7, 7), ("2TB", 2 << 40), ("8 M", 8 << 20), ("0", 0)],
)
def test_size_text_is_parsed_into_bytes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("environment", "directory", "expected"),
    [
        ({"FORESTAGE_DIR": "/job", "TMPDIR": "/tmp"}, None, "/job/forestage-window-job-7"),
        ({"TMPDIR": "/tmp"}, None, "/tmp/forestage-window-job-7"),
        ({"FORESTAGE_DIR": "/job"}, "/other", "/other/forestage-window-job-7"),
    ],
)
def test_window_directory_is_below_forestage_dir_tmpdir_or_the_given_directory(
    environment: dict[str, str], directory: str | None, expected: str
) -> None:
    from forestage_window import find_window_directory

    found = find_window_directory(directory, "a", {"SLURM_JOB_ID": "7", **environment})
    assert os.path.dirname(found) == expected
    assert found != find_window_directory(directory, "b", {"SLURM_JOB_ID": "7", **environment})


def test_window_in_memory_without_a_job_directory_in_memory_uses_the_disk_and_warns_once(
    job: Path, data_set: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"room": 8 * SIZE, "where": "ram"}
    with window(data_set, **asked) as shards, window((), **asked):  # type: ignore[arg-type]
        assert next(iter(shards)).startswith(f"{job}/forestage-window-job-7/")
    assert ["stage-dir=SIZE,ram" in line for line in caplog.messages] == [True]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
def test_window_in_memory_uses_the_job_directory_in_memory_without_a_warning(
    job: Path, data_set: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "none", job], check=True)
    try:
        with window(data_set, room=8 * SIZE, where="ram") as shards:
            assert next(iter(shards)).startswith(f"{job}/forestage-window-job-7/")
        assert not caplog.messages
    finally:
        subprocess.run(["umount", "--lazy", job], check=True)


def test_window_without_a_job_directory_yields_the_shared_paths(
    data_set: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORESTAGE_DIR", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")  # not a job's, without Slurm
    shards = window(data_set, room=8 * SIZE)
    assert list(shards) == list(map(str, data_set))
    assert shards.local() == {}
    assert "FORESTAGE_DIR" in shards.stats.trouble


def test_closing_the_last_window_deletes_its_copies(job: Path, data_set: list[Path]) -> None:
    one, two = window(data_set, room=8 * SIZE), window(data_set, room=8 * SIZE)
    next(iter(one))
    assert len(copiers(job)) == 1
    one.close()
    assert two.local()
    two.close()
    assert list(job.iterdir()) == []


# Which files are needed, and how soon

FILES = [_SourceFile(f"/{number}") for number in range(6)]
ORDER = _FileList(FILES)


def position(
    at: int, waits: bool = False, ahead: int = 2, keep: int = 1, wrap: bool = True
) -> _ConsumerPosition:
    return _ConsumerPosition(ORDER, at, waits, ahead, keep, wrap)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([position(-1)], {0: 1, 1: 2}),
        ([position(0, waits=True)], {0: 0, 1: 1, 2: 2}),
        ([position(0)], {0: IN_USE, 1: 1, 2: 2}),
        ([position(3, keep=2)], {2: IN_USE, 3: IN_USE, 4: 1, 5: 2}),
        ([position(3, waits=True, keep=2)], {2: IN_USE, 3: 0, 4: 1, 5: 2}),
        ([position(5)], {5: IN_USE, 0: 1, 1: 2}),
        ([position(5, wrap=False)], {5: IN_USE}),
        ([position(0, ahead=99)], {0: IN_USE, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5}),
        ([position(0), position(1, waits=True)], {0: IN_USE, 1: 0, 2: 1, 3: 2}),
        ([position(2), position(0)], {2: IN_USE, 0: IN_USE, 1: 1, 3: 1, 4: 2}),
    ],
)
def test_near_computes_how_soon_each_file_is_needed(
    positions: list[_ConsumerPosition], expected: dict[int, int]
) -> None:
    assert {
        FILES.index(file): soon for file, soon in list_near_files(positions).items()
    } == expected


def test_furthest_ranks_a_file_just_read_as_needed_last() -> None:
    at = [position(3)]
    distances = [find_next_use(file, at) for file in FILES]
    assert distances == [3, 4, 5, 6, 1, 2]
    assert find_next_use(_SourceFile("/elsewhere"), at) == float("inf")
    assert find_next_use(FILES[0], [position(3, wrap=False)]) == float("inf")
    assert find_next_use(FILES[0], [*at, position(5)]) == 1


def test_window_function_is_the_class_window() -> None:
    assert window is Window
