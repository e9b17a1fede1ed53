"""The layer and the values for slurmd in a container, as files; tests/slurm runs them."""

from __future__ import annotations

import os
import re
import select
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).resolve().parents[3]
VALUES = yaml.safe_load((REPO / "packaging/container/values.yaml").read_text())
CONTAINERFILE = (REPO / "packaging/container/Containerfile").read_text()


@pytest.mark.parametrize("kind", ["prolog", "epilog"])
def test_container_values_contain_the_prolog_and_epilog_scripts_of_this_release(kind: str) -> None:
    """They are mounted into all pods, of which some may have the image without the layer."""
    script = (REPO / f"packaging/{kind}.d/50-all-forestage").read_text()
    assert VALUES[f"{kind}Scripts"] == {"50-all-forestage": script}


def test_container_values_load_the_companion_before_pyxis_for_the_images_slurm_release() -> None:
    first, second = VALUES["configFiles"]["plugstack.conf"].splitlines()
    assert "pyxis" in second
    release = re.fullmatch(r"include /usr/lib/forestage/spank/plugstack-([\d.]+)\*\.conf", first)
    assert release
    (nodes,) = VALUES["nodesets"].values()
    assert nodes["slurmd"]["image"]["tag"].startswith(f"{release[1]}-")


def test_container_values_have_a_volume_for_each_mount_and_for_the_cache() -> None:
    (nodes,) = VALUES["nodesets"].values()
    volumes = {one["name"] for one in nodes["podSpec"]["volumes"]}
    mounts = {one["mountPath"]: one for one in nodes["slurmd"]["volumeMounts"]}
    assert {one["name"] for one in mounts.values()} == volumes
    assert "/mnt/nvme" in mounts, "the default cache lies there"
    assert mounts["/lustre"]["mountPropagation"] == "HostToContainer"


def test_container_values_name_the_health_check_of_the_package() -> None:
    conf = VALUES["controller"]["extraConfMap"]
    assert conf["HealthCheckProgram"] == "/usr/lib/forestage/bin/forestage-health"
    assert (
        'packaging/health" "$home/bin/forestage-health"' in (REPO / "packaging/build").read_text()
    )


def test_containerfile_copies_the_packages_onto_a_base_given_as_argument() -> None:
    assert "ARG BASE\nFROM ${BASE}\n" in CONTAINERFILE
    assert "COPY forestage*.deb " in CONTAINERFILE
    assert "apt-get update" not in CONTAINERFILE, "another one's image decides its sources"


def health(tmp_path: Path, *words: str, program: str, around: Sequence[str] = ()) -> None:
    """packaging/health with another program, on a node whose note is known."""
    tools = {"forestage": program, "scontrol": "#!/bin/sh\nexit 1\n"}
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = (REPO / "packaging/health").read_text()
    for old, new in (
        ("/usr/lib/forestage/bin/forestage\n", f"{tmp_path}/forestage\n"),
        ("/run/", f"{tmp_path}/run/"),
    ):
        assert old in script
        script = script.replace(old, new)
    env = {"PATH": f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin"}
    argv = [*around, "sh", "-c", script, "health", *words]
    subprocess.run(argv, env=env, check=True, timeout=60)


def fifo(path: Path) -> Path:
    """Whose reader waits until its writer has written, and the other way round."""
    os.mkfifo(path)
    return path


def test_health_check_without_systemd_starts_tend_and_the_peer_service(tmp_path: Path) -> None:
    """Apart from slurmd's own child, of which slurmd would wait for no more than 60 s."""
    said = fifo(tmp_path / "said")
    program = f'#!/bin/sh\n[ "$1" = status ] || echo "$*" >{said}\n'
    # Open for writing, too: between the two there may be no writer, or both.
    with os.fdopen(os.open(said, os.O_RDWR)) as lines:
        health(tmp_path, program=program)
        assert sorted([lines.readline(), lines.readline()]) == ["peer\n", "tend\n"]


def test_peer_service_started_by_the_health_check_inherits_no_lock_of_the_caller(
    tmp_path: Path,
) -> None:
    said, end = fifo(tmp_path / "said"), fifo(tmp_path / "end")
    program = f'#!/bin/sh\n[ "$1" = peer ] || exit 0\necho began >{said}\nread _ <{end}\n'
    with (
        os.fdopen(os.open(said, os.O_RDWR)) as lines,
        os.fdopen(os.open(end, os.O_RDWR), "w") as go,
    ):
        health(tmp_path, program=program, around=("flock", str(tmp_path / "own.lock")))
        assert lines.readline() == "began\n"
        subprocess.run(["flock", tmp_path / "own.lock", "true"], check=True, timeout=60)
        print(file=go, flush=True)


def test_health_check_starts_the_peer_service_again_only_once_it_has_ended(tmp_path: Path) -> None:
    said, end = fifo(tmp_path / "said"), fifo(tmp_path / "end")
    program = f'#!/bin/sh\n[ "$1" = peer ] || exit 0\necho began >{said}\nread _ <{end}\n'
    lock = tmp_path / "run/forestage/peer.lock"
    with (
        os.fdopen(os.open(said, os.O_RDWR)) as lines,
        os.fdopen(os.open(end, os.O_RDWR), "w") as go,
    ):
        health(tmp_path, program=program)
        assert lines.readline() == "began\n"
        assert lock.stat().st_mode & 0o7777 == 0o600, "else a user could hold the lock"
        health(tmp_path, program=program)  # it does not wait for the lock
        print(file=go, flush=True)
        subprocess.run(["flock", lock, "true"], check=True, timeout=60)
        health(tmp_path, program=program)
        assert lines.readline() == "began\n"
        assert not select.select([lines], [], [], 0)[0], "the second one has begun nothing"
        print(file=go, flush=True)
        subprocess.run(["flock", lock, "true"], check=True, timeout=60)


@pytest.mark.parametrize(("words", "systemd"), [(("--print",), ""), ((), "run/systemd/system")])
def test_health_check_with_systemd_or_print_starts_no_service(
    tmp_path: Path, words: tuple[str, ...], systemd: str
) -> None:
    """The timer does it, or nobody asked for it."""
    (tmp_path / systemd).mkdir(parents=True, exist_ok=True)
    health(tmp_path, *words, program=f"#!/bin/sh\necho $1 >>{tmp_path}/ran\n")
    assert set((tmp_path / "ran").read_text().split()) == {"status"}
