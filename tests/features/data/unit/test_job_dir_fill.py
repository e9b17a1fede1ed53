"""Names in a job's own directory, and what may be put there; no file is touched."""

from __future__ import annotations

import stat

import pytest

from forestage.cache.job_notes import JobData
from forestage.errors import Declined
from forestage.features.data import copy_in, job_dir_fill
from forestage.slurm.hints import Request


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "_X", "A", "CACHE2", "HOMES", "A" * 64])
def test_seed_request_accepts_a_valid_variable_name(name: str) -> None:
    assert job_dir_fill.is_seed_variable(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", "lower", "2X", "A-B", "A B", "A=B", "A\n", "Ä", "A" * 65),
        *("PATH", "HOME", "SHELL", "USER", "LOGNAME", "IFS", "ENV", "TMPDIR"),
        *("LD_PRELOAD", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURMD_NODENAME", "SPANK_X"),
        *("ENROOT_DATA_PATH", "PYXIS_X", "PYTHONPATH", "PYTHON", "BASH_ENV", "FORESTAGE_DIR"),
    ],
)
def test_seed_request_with_an_invalid_or_reserved_variable_name_is_declined(name: str) -> None:
    assert not job_dir_fill.is_seed_variable(name)
    with pytest.raises(Declined):
        job_dir_fill.name_in_job_dir(Request("/a/b", "hint", f"seed:{name}"))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/lustre/data", "data"),
        ("/lustre/data/", "data"),
        ("/lustre/x.tar", "x"),
        ("/lustre/x.tar.gz", "x"),
        ("/lustre/x.y.tar.zst", "x.y"),
        ("/lustre/x.tgz", "x"),
        ("/lustre/x.TXZ", "x"),
        ("/lustre/x.tar/", "x.tar"),  # a directory that is called so
        ("/lustre/model.safetensors", "model.safetensors"),
        ("./data", "data"),
    ],
)
def test_name_in_the_job_directory_is_the_paths_last_part_without_the_tar_suffix(
    path: str, name: str
) -> None:
    assert job_dir_fill.name_in_job_dir(Request(path, "hint", "job")) == name
    assert job_dir_fill.name_in_job_dir(Request(path, "hint", "seed:CACHE")) == "seed/CACHE"


@pytest.mark.parametrize("path", ["/", "/a/..", "/a/.", "/a/seed", "/a/.forestage-0", "/a/.tar"])
def test_path_without_a_usable_last_part_is_declined_for_the_job_directory(path: str) -> None:
    with pytest.raises(Declined) as refused:
        job_dir_fill.name_in_job_dir(Request(path, "hint", "job"))
    assert refused.value.reason == "bad-hint"


def test_second_request_of_a_name_is_declined_and_a_declined_request_takes_no_name() -> None:
    bad = Request("/a/x", "hint", "seed:PATH")
    first, second = Request("/a/x", "hint", "job"), Request("/b/x.tar", "hint", "job")
    image = Request("/c/x", "hint", "/mnt/x")
    noted = JobData((bad, image, first, second), 1 << 30)
    assert job_dir_fill.check_request_name(noted, first) == "x"
    with pytest.raises(Declined, match="has the name x already"):
        job_dir_fill.check_request_name(noted, second)


def test_job_directory_request_is_impossible_without_stage_dir() -> None:
    request = Request("/a/x", "hint", "job")
    with pytest.raises(Declined, match="stage-dir=SIZE"):
        job_dir_fill.check_request_name(JobData((request,)), request)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a/b", "a/b"), ("/a//b/", "a/b"), ("./a/./b", "a/b"), (".", ""), ("/", ""), ("", "")],
)
def test_archive_member_names_are_normalized_to_relative_paths(name: str, expected: str) -> None:
    assert copy_in.path_inside_root(name) == expected


@pytest.mark.parametrize("name", ["..", "../a", "a/../../b", "/..", "a/.."])
def test_archive_member_that_leaves_the_directory_raises(name: str) -> None:
    with pytest.raises(copy_in.CopyInError):
        copy_in.path_inside_root(name)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (stat.S_IFREG | 0o444, 0o644),
        (stat.S_IFREG | 0o6755, 0o755),
        (stat.S_IFREG, 0o600),
        (stat.S_IFDIR | 0o555, 0o755),
        (stat.S_IFDIR | 0o1777, 0o777),
        (stat.S_IFDIR, 0o700),
    ],
)
def test_file_copied_into_the_job_directory_gains_owner_write_and_loses_set_id_bits(
    mode: int, expected: int
) -> None:
    assert copy_in.choose_copy_mode(mode) == expected
