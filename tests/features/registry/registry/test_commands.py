"""`forestage registry` and pyxis' importer, as users run them on a node."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from imports import ALICE, BOB, IMAGE, NEW, OLD, ROOT, Login, Registry

from forestage.features.registry import store_age, user_notes
from forestage.features.registry.store_age import StoreCollection
from forestage.features.registry.user_notes import RefusalNote
from forestage.paths import NodePaths
from forestage.system import mounts
from forestage.system.as_user import User


def test_imported_image_is_listed_by_registry_ls_and_reused_by_the_importer(login: Login) -> None:
    done = login.forestage("import", f"here#image@{OLD}")
    assert done.returncode == 0, done.stderr
    path = done.stdout.strip()
    (row,) = json.loads(login.forestage("ls", "--json").stdout)
    assert (row["reference"], row["digest"], row["path"]) == (f"here#image@{OLD}", OLD, path)
    assert login.importer("get", IMAGE).stdout == f"{path}\n"
    assert len(login.site.imports) == 1


def test_registry_ls_shows_each_user_only_their_own_images(login: Login) -> None:
    login.forestage("import", f"here#image@{OLD}")
    login.forestage("import", f"here#image@{NEW}", user=BOB)
    rows = {who.uid: json.loads(login.forestage("ls", "--json", user=who).stdout)
            for who in (ALICE, BOB)}  # fmt: skip
    assert [row["digest"] for row in rows[ALICE.uid]] == [OLD]
    assert [row["digest"] for row in rows[BOB.uid]] == [NEW]


def test_importer_get_prints_only_the_path_on_stdout_and_messages_on_stderr(login: Login) -> None:
    done = login.importer("get", IMAGE)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert Path(done.stdout.strip()).read_bytes() == login.site.image.read_bytes()
    assert "imported by" in done.stderr


def test_importer_get_prints_the_bound_copys_path_without_an_import(login: Login) -> None:
    mounts.mount("tmpfs", "/run", 0, "tmpfs", "mode=755")
    Path("/run/forestage/images").mkdir(parents=True)
    place = Path("/run/forestage/images/12.0.sqsh")
    place.write_bytes(bytes(4096))
    assert login.importer("get", IMAGE).stdout.startswith(str(login.site.store))
    shutil.copy(login.site.image, place)
    assert login.importer("get", IMAGE).stdout == f"{place}\n"
    assert login.importer("release").returncode == 0
    assert place.exists()


def test_importer_get_ignores_an_inherited_forestage_image_path(login: Login) -> None:
    """FORESTAGE_IMAGE_PATH of a batch script whose image is a file is inherited."""
    inherited = {"FORESTAGE_IMAGE_PATH": str(login.site.image)}
    assert login.site.image.read_bytes()[:4] == b"hsqs", "else this shows nothing"
    found = login.importer("get", IMAGE, **inherited).stdout
    assert found.startswith(str(login.site.store))


@pytest.mark.parametrize("store", ["null", "/not/mounted", "of the cache"])
def test_importer_without_a_usable_store_imports_for_the_step_and_release_deletes_the_image(
    login: Login, store: str
) -> None:
    if store == "of the cache":
        login.configure(
            f"{{cache: {login.site.store.parent}/cache, registry: {{store: {login.site.store}}}}}"
        )
    else:
        login.configure(f"registry: {{store: {store}}}")
    done = login.importer("get", IMAGE)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.read_bytes() == login.site.image.read_bytes()
    assert path.is_relative_to(login.runtime / str(ALICE.uid) / "forestage-12.0")
    assert not login.site.folder().exists()
    other = login.runtime / str(ALICE.uid) / "other"
    other.mkdir()
    for _ in range(2):
        assert login.importer("release").returncode == 0
    assert list((login.runtime / str(ALICE.uid)).iterdir()) == [other]


@pytest.mark.parametrize("broken", ["#!/bin/sh\nexit 1\n", "#!/none\n", ""])
def test_importer_imports_with_enroot_if_forestage_is_broken_or_missing(
    login: Login, broken: str
) -> None:
    program = Path("/usr/lib/forestage/bin/forestage")
    program.unlink()
    if broken:
        program.write_text(broken)
        program.chmod(0o755)
    temp = login.site.temp / str(ALICE.uid)  # as enroot.conf says, which the stand-in does not read
    done = login.importer("get", IMAGE, ENROOT_TEMP_PATH=str(temp))
    path = Path(done.stdout.strip())
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == login.site.image.read_bytes()
    assert login.importer("release").returncode == 0
    assert not path.exists()


@pytest.mark.parametrize(("job", "step"), [("", ""), ("12.0/../other", "0"), ("*", "*")])
def test_importer_release_without_a_valid_job_and_step_deletes_nothing(
    login: Login, job: str, step: str
) -> None:
    kept = [login.runtime / str(ALICE.uid) / name for name in ("forestage-12.0", "other.0")]
    for folder in kept:
        folder.mkdir(parents=True)
        os.chown(folder, ALICE.uid, ALICE.gid)
    os.chown(kept[0].parent, ALICE.uid, ALICE.gid)
    done = login.importer("release", SLURM_JOB_ID=job, SLURM_STEP_ID=step)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert all(folder.exists() for folder in kept)


def test_importer_get_of_a_missing_image_fails_with_enroots_error(login: Login) -> None:
    done = login.importer("get", IMAGE, STANDIN_FAIL="returned error code: 404 Not Found")
    assert done.returncode != 0
    assert done.stdout == ""
    assert "404 Not Found" in done.stderr


@pytest.mark.parametrize("status", [403, 404, 503, 418])
def test_importer_runs_enroot_once_for_all_tasks_if_the_registry_gives_no_digest(
    login: Login, status: int
) -> None:
    there = Registry(status=status)
    try:
        uri = f"docker://{there.reference()}"
        done = [login.importer("get", uri) for _ in range(2)]
    finally:
        there.stop()
    assert done[0].returncode == 0, done[0].stderr
    assert done[0].stdout == done[1].stdout
    assert [line.split()[0] for line in login.site.imports] == [uri]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("user", "tag", "asked"), [(ALICE, "v1", 0), (ALICE, "v2", 2), (BOB, "v1", 2)]
)
def test_importer_does_not_query_a_registry_that_refused_this_image_to_this_step(
    login: Login, user: User, tag: str, asked: int
) -> None:
    """HEAD and GET, where it is another image's refusal, or another user's."""
    mounts.mount("tmpfs", "/run", 0, "tmpfs", "mode=755")
    Path("/run/forestage/images").mkdir(parents=True)
    there = Registry(status=404)
    said = RefusalNote(there.reference("v1"), "registry-missing", "127.0.0.1 has no image:v1")
    user_notes.record_refusal(NodePaths(), 12, 0, ALICE, said)
    try:
        done = login.importer("get", f"docker://{there.reference(tag)}", user=user)
    finally:
        there.stop()
    assert done.returncode == 0, done.stderr
    assert f"has no image:{tag}" in done.stderr
    assert there.asked == asked
    assert len(login.site.imports) == 1  # enroot has its own try


def test_importer_get_reports_enroots_error_after_a_registry_refusal(login: Login) -> None:
    there = Registry(status=403)
    try:
        uri = f"docker://{there.reference()}"
        done = login.importer("get", uri, STANDIN_FAIL="returned error code: 403 Forbidden")
        assert login.forestage("import", uri).returncode == 1, "no job, no tag"
    finally:
        there.stop()
    assert done.returncode != 0
    assert "403 Forbidden" in done.stderr
    assert len(login.site.imports) == 1


def test_registry_import_without_a_store_exits_1(login: Login) -> None:
    login.configure("enabled: true")
    done = login.forestage("import", f"here#image@{OLD}")
    assert done.returncode == 1
    assert "registry: store:" in done.stderr


def unused_for_years(path: Path) -> None:
    """As the nodes' collections have counted."""
    files = [(file.name, file.stat().st_mtime_ns) for file in (path, path.with_suffix(".json"))]
    known = store_age.make_next_collection(StoreCollection(), files, 0.0, "one")
    known = store_age.make_next_collection(known, files, 1e8, "two")
    stamp = path.with_name("collected-2")
    stamp.write_bytes(msgspec.json.encode(known))
    os.chown(stamp, path.stat().st_uid, path.stat().st_gid)


def test_gc_keeps_an_image_with_old_file_times_that_was_not_counted_as_unused(login: Login) -> None:
    """Who set them had a clock of their own, and so has who asks."""
    path = Path(login.forestage("import", f"here#image@{OLD}").stdout.strip())
    for file in (path, path.with_suffix(".json")):
        os.utime(file, (1, 1))
    assert login.forestage("gc", user=ROOT).returncode == 0
    assert path.exists()


def test_gc_of_root_deletes_unused_images_of_all_users(login: Login) -> None:
    kept = Path(login.forestage("import", f"here#image@{NEW}").stdout.strip())
    old = [
        Path(login.forestage("import", f"here#image@{OLD}", user=user).stdout.strip())
        for user in (ALICE, BOB)
    ]
    for path in old:
        unused_for_years(path)
    (login.site.store / "notes").mkdir()
    dry = json.loads(login.forestage("gc", "--dry-run", "--json", user=ROOT).stdout)
    assert all(path.exists() for path in old)
    done = login.forestage("gc", "--json", user=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dry
    assert kept.exists()
    assert not any(path.exists() for path in old)


def test_gc_of_a_user_keeps_images_of_other_users(login: Login) -> None:
    path = Path(login.forestage("import", f"here#image@{OLD}").stdout.strip())
    unused_for_years(path)
    assert login.forestage("gc", user=BOB).returncode == 0
    assert path.exists()


def test_gc_of_root_follows_no_link_in_the_store(login: Login, open_path: Path) -> None:
    (open_path / "precious").mkdir()
    part = open_path / "precious/a.0123456789abcdef.part"
    part.touch()
    os.utime(part, (1, 1))
    (login.site.store / str(ALICE.uid)).symlink_to(open_path / "precious")
    login.forestage("gc", user=ROOT)
    assert part.exists()
