"""What enroot is told, and what its words mean."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forestage.features.registry import enroot_import
from forestage.features.registry.enroot_import import ImportFolders
from forestage.features.registry.environment import EnrootSettings
from forestage.system import forked_child


def settings(**variables: str) -> EnrootSettings:
    options = variables.pop("options", "-comp lzo -noD")
    return EnrootSettings(variables, "/home/a/.credentials", False, options, "x86_64", (4, 1, 2))


def test_enroot_max_processors_is_limited_to_the_processs_processors() -> None:
    mine = len(os.sched_getaffinity(0))
    for wanted, found in (("", mine), ("1", 1), ("4096", mine), ("0", mine), ("many", mine)):
        named = enroot_import.make_enroot_environment(settings(ENROOT_MAX_PROCESSORS=wanted), None)
        assert named["ENROOT_MAX_PROCESSORS"] == str(found)


def test_import_limits_mksquashfs_to_a_quarter_of_the_memory_limit() -> None:
    named = enroot_import.make_enroot_environment(settings(), 8 << 30)
    assert named["ENROOT_SQUASH_OPTIONS"] == "-comp lzo -noD -mem 2048M"


@pytest.mark.parametrize("options", ["-mem 1G", "-comp zstd -mem-percent 10"])
def test_import_keeps_the_users_mksquashfs_memory_option(options: str) -> None:
    named = enroot_import.make_enroot_environment(settings(options=options), 8 << 30)
    assert named["ENROOT_SQUASH_OPTIONS"] == options


def test_import_without_a_memory_limit_keeps_the_squash_options() -> None:
    assert (
        enroot_import.make_enroot_environment(settings(), None)["ENROOT_SQUASH_OPTIONS"]
        == "-comp lzo -noD"
    )


def test_import_keeps_the_configured_enroot_temp_path() -> None:
    named = enroot_import.make_enroot_environment(settings(ENROOT_TEMP_PATH="/scratch"), 1 << 30)
    assert named["ENROOT_TEMP_PATH"] == "/scratch"
    assert "ENROOT_TEMP_PATH" not in enroot_import.make_enroot_environment(settings(), 1 << 30)


def groups(root: Path, line: str, limits: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line)
    for name, text in limits.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_limit_of_a_cgroup_v2_is_the_smallest_of_its_parents(tmp_path: Path) -> None:
    limits = {
        "system.slice/job_7/memory.max": "max\n",
        "system.slice/job_7/step_0/memory.max": "8000000\n",
        "system.slice/memory.max": "9000000\n",
    }
    root = groups(tmp_path, "0::/system.slice/job_7/step_0\n", limits)
    assert forked_child.find_own_memory_limit(root) == 8_000_000


def test_memory_limit_of_a_cgroup_v1_is_the_smallest_of_its_parents(tmp_path: Path) -> None:
    limits = {
        "memory/slurm/job_7/memory.limit_in_bytes": "7000000\n",
        "memory/slurm/job_7/step_0/memory.limit_in_bytes": "9223372036854771712\n",
    }
    lines = "5:cpu:/\n4:memory:/slurm/job_7/step_0\n0::/\n"
    assert forked_child.find_own_memory_limit(groups(tmp_path, lines, limits)) == 7_000_000


def test_memory_limit_without_a_cgroup_limit_is_none(tmp_path: Path) -> None:
    assert forked_child.find_own_memory_limit(groups(tmp_path, "0::/\n", {})) is None
    assert forked_child.find_own_memory_limit(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("said", "stage"),
    [
        (b"[INFO] Downloading 20 missing layers...\n", "downloads 20 layers"),
        (b"\x1b[34m[INFO]\x1b[0m Found all layers in cache\n", "has all layers"),
        (
            b"[INFO] Extracting image layers...\n[INFO] Converting whiteouts...",
            "unpacks the layers",
        ),
        (b"[INFO] Creating squashfs filesystem...\nParallel mksquashfs", "writes the image"),
        (b"Downloading 999999999999 missing layers", ""),
        (b"nothing of that", ""),
    ],
)
def test_enroot_output_gives_the_stage_of_the_import(said: bytes, stage: str) -> None:
    assert enroot_import.find_stage(said) == stage


FOLDERS = ImportFolders("/lustre/store/1000", "/tmp", "/home/alice/.cache/enroot")


@pytest.mark.parametrize(
    ("stage", "said", "reason"),
    [
        ("writes the image", b"write failed: No space left on device\n", "store-full"),
        ("writes the image", b"mksquashfs: Disk quota exceeded\n[ERROR] x\n", "store-full"),
        ("writes the image", b"cat: write error: File too large\n", "too-large"),
        ("asks the registry", b"[ERROR] URL https://x returned error code: 401", "import-failed"),
        ("", b"", "import-failed"),
    ],
)
def test_enroot_output_gives_the_reason_of_a_failed_import(
    stage: str, said: bytes, reason: str
) -> None:
    assert enroot_import.classify_failure(1, said, stage, FOLDERS).reason == reason


@pytest.mark.parametrize(
    ("stage", "said", "disk"),
    [
        ("unpacks the layers", b"tar: usr/a: Cannot write: No space left on device", "/tmp"),
        ("downloads 3 layers", b"zstd: cannot write block: Disk quota exceeded", FOLDERS.layers),
        (
            "asks the registry",
            b"mktemp: template '/tmp/enroot.XX': No space left on device\n[ERROR] x\n",
            "/tmp",
        ),
        ("writes the image", b"mkdir: '/tmp/enroot.x/rootfs': No space left on device", "/tmp"),
        (
            "downloads 3 layers",
            b"cp: error writing '/lustre/store/1000/a.part': No space left on device",
            "the store",
        ),
    ],
)
def test_full_disk_of_an_import_is_identified_by_enroots_output_or_stage(
    stage: str, said: bytes, disk: str
) -> None:
    why = enroot_import.classify_failure(1, said, stage, FOLDERS)
    if disk == "the store":
        assert why.reason == "store-full"
    else:
        assert why.reason == "enroot-full"
        assert f", {disk}, is full: " in why.what


def test_import_failure_holds_enroots_last_lines_as_printable_text() -> None:
    said = b"first\nsecond\n\x1b[31mthird\xff\r\n\nfourth\n"
    what = enroot_import.classify_failure(3, said, "", FOLDERS).what
    assert what.startswith("enroot import ended with status 3: second / ")
    assert what.isprintable()
    assert "first" not in what
    assert "signal 9" in enroot_import.classify_failure(-9, said, "", FOLDERS).what
