"""Identity of an image, and which files may be staged: regular, below `sources`, of the user."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import squashfs
from forestage.cache.source_image import (
    AccessRights,
    FileIdentity,
    PathFacts,
    SourceImage,
    check_image,
    check_node_redirect,
    check_not_truncated,
    check_squashfs,
    declined_by_open_error,
    is_below_any,
    resolve_requested_path,
)
from forestage.errors import Declined, Failed
from forestage.slurm.hints import Request
from forestage.system.as_user import User

IDENTITIES = st.builds(
    FileIdentity,
    path=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    inode=st.integers(0, 2**64 - 1),
    size=st.integers(0, 2**63 - 1),
    mtime_ns=st.integers(-(2**63), 2**63 - 1),
    ctime_ns=st.integers(-(2**63), 2**63 - 1),
)


@pytest.mark.parametrize("field", ["path", "inode", "size", "mtime_ns", "ctime_ns"])
def test_each_part_of_an_identity_changes_the_key(field: str) -> None:
    one = FileIdentity("/a", 1, 2, 3, 4)
    other = msgspec.structs.replace(one, **{field: "/b" if field == "path" else 9})
    assert one.key != other.key


@given(IDENTITIES)
def test_key_is_32_hex_digits_and_survives_encoding_of_the_identity(identity: FileIdentity) -> None:
    assert len(identity.key) == 32
    assert set(identity.key) <= set("0123456789abcdef")
    decoded = msgspec.json.decode(msgspec.json.encode(identity), type=FileIdentity)
    assert decoded.key == identity.key


def test_key_of_an_identity_is_the_same_in_every_release() -> None:
    """A changed hash would make every node copy everything again, and keep the old entries."""
    identity = FileIdentity("/lustre/a.sqsh", 1, 2, 3, 4)
    assert identity.key == "e91c67c53b3a6d66c63340198ac67a5e"


@pytest.mark.parametrize(
    ("asked", "work_dir", "expected"),
    [
        ("/lustre/a", "/home", "/lustre/a"),
        ("./a", "/home", "/home/./a"),
        ("../a", "/home", "/home/../a"),
        (".", "/home", "/home/."),
        ("/lustre/a", "", "/lustre/a"),
        ("/" + "x" * 4094, "", "/" + "x" * 4094),
        ("/ü b", "", "/ü b"),
    ],
)
def test_requested_path_is_made_absolute_without_folding_dot_dot(
    asked: str, work_dir: str, expected: str
) -> None:
    # /a/link/../b is not /a/b: only the kernel may resolve it.
    assert resolve_requested_path(Request(asked, "option"), work_dir) == expected


@pytest.mark.parametrize(
    ("asked", "work_dir", "reason"),
    [
        ("docker://x", "/home", "registry"),
        ("nvcr.io#nvidia/pytorch:24.01-py3", "/home", "registry"),
        ("image.sqsh", "/home", "registry"),
        ("~/a", "/home", "registry"),
        (" /a", "/home", "registry"),
        ("./a", "", "bad-path"),
        ("./a", "relative", "bad-path"),
        ("/a\n", "/home", "bad-path"),
        ("/a\0b", "/home", "bad-path"),
        ("/a\x7f", "/home", "bad-path"),
        ("/\udcff", "/home", "bad-path"),
        ("./a", "/\udcff", "bad-path"),
        ("./a", "/b\nc", "bad-path"),
        ("/" + "x" * 4095, "/home", "bad-path"),
        ("/" + "ü" * 2048, "/home", "bad-path"),
    ],
)
def test_request_that_is_no_usable_path_is_declined_with_its_reason(
    asked: str, work_dir: str, reason: str
) -> None:
    with pytest.raises(Declined) as caught:
        resolve_requested_path(Request(asked, "hint"), work_dir)
    assert caught.value.reason == reason
    assert not isinstance(caught.value, Failed)


@pytest.mark.parametrize(("path", "at"), [("set/", ""), ("a.sqsh", "/mnt"), ("a.tar", "job")])
def test_bare_name_of_data_is_declined_with_a_hint_on_how_to_write_the_path(
    path: str, at: str
) -> None:
    with pytest.raises(Declined) as caught:
        resolve_requested_path(Request(path, "hint", at), "/home")
    assert (caught.value.reason, caught.value.what) == ("bad-path", f"{path} is no path")
    assert caught.value.hint == f"write ./{path}, or the path from / on"


@given(st.text(), st.text())
def test_any_request_text_becomes_an_absolute_path_or_is_declined(
    asked: str, work_dir: str
) -> None:
    try:
        path = resolve_requested_path(Request(asked, "hint"), work_dir)
    except Declined:
        return
    assert path.startswith("/")
    path.encode()


@pytest.mark.parametrize(
    ("path", "directories", "expected"),
    [
        ("/lustre/a", ["/lustre"], True),
        ("/lustre/b/a", ["/home", "/lustre/"], True),
        ("/lustre", ["/lustre"], False),
        ("/lustre2/a", ["/lustre"], False),
        ("/lustr", ["/lustre"], False),
        ("/a", [], False),
        ("/a", ["/"], True),
    ],
)
def test_is_below_any_is_true_only_for_paths_inside_a_directory(
    path: str, directories: list[str], expected: bool
) -> None:
    assert is_below_any(path, directories) is expected


def facts_of(
    mode: int = stat.S_IFREG, size: int = 5, path: str = "/lustre/a", with_image: bool = True
) -> PathFacts:
    found = (
        SourceImage(FileIdentity(path, 1, size, 3, 4), AccessRights(0, 0, 0o644))
        if with_image
        else None
    )
    return PathFacts(path, ("/lustre",), mode, found)


def test_ordinary_image_passes_check_image() -> None:
    assert check_image(facts_of(), None) == facts_of().image
    assert check_image(facts_of(size=5), 5) == facts_of().image


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (facts_of(path=""), "bad-path"),
        (facts_of(stat.S_IFDIR), "not-a-file"),
        (facts_of(stat.S_IFIFO), "not-a-file"),
        (facts_of(stat.S_IFCHR), "not-a-file"),
        (facts_of(stat.S_IFBLK), "not-a-file"),
        (facts_of(stat.S_IFSOCK), "not-a-file"),
        (facts_of(path="/home/a"), "outside-sources"),
        (msgspec.structs.replace(facts_of(), sources=()), "outside-sources"),
        (facts_of(with_image=False), "missing"),
        (facts_of(size=0), "empty"),
        (facts_of(size=6), "too-large"),
    ],
)
def test_file_that_may_not_be_staged_is_declined_with_its_reason(
    facts: PathFacts, reason: str
) -> None:
    with pytest.raises(Declined) as caught:
        check_image(facts, 5)
    assert caught.value.reason == reason


HEAD = squashfs.beginning(bytes(96))


@pytest.mark.parametrize("head", [HEAD[:32], HEAD, squashfs.beginning(b"\xff" * 32)])
def test_file_with_a_squashfs_superblock_passes_check_squashfs(head: bytes) -> None:
    check_squashfs(msgspec.structs.replace(facts_of(), head=head))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        HEAD[:31],
        b"a log, of which bob writes the next line now\n",
        b"sqsh" + HEAD[4:],  # big-endian, of a release that no kernel mounts any more
        HEAD[:28] + b"\3\0\1\0",
        HEAD[:28] + b"\4\0\1\0",
        HEAD[:28] + b"\4\1\0\0",
        HEAD[:28] + b"\0\4\0\0",
        bytes(8) + HEAD,
    ],
)
def test_file_without_a_squashfs_superblock_is_declined_as_not_squashfs(head: bytes) -> None:
    with pytest.raises(Declined) as caught:
        check_squashfs(msgspec.structs.replace(facts_of(), head=head))
    assert (caught.value.reason, isinstance(caught.value, Failed)) == ("not-squashfs", False)


@pytest.mark.parametrize(
    ("head", "short"),
    [
        (squashfs.beginning(bytes(5))[:5], False),  # no squashfs
        (HEAD[:40] + (5).to_bytes(8, "little"), False),
        (HEAD[:40] + (4).to_bytes(8, "little"), False),  # padded
        (HEAD[:40] + (6).to_bytes(8, "little"), True),
        (HEAD[:40] + b"\xff" * 8, True),
        (HEAD[:32], False),  # of a copy, which was looked at before
        (b"sqsh" + HEAD[4:40] + b"\xff" * 8, False),
    ],
)
def test_image_shorter_than_its_superblock_says_is_declined_as_truncated(
    head: bytes, short: bool
) -> None:
    found = msgspec.structs.replace(facts_of(), head=head)
    expected = pytest.raises(Declined, match=r"is truncated: it has 5 B of the (6 B|16384 PiB)")
    with expected if short else contextlib.nullcontext():
        check_not_truncated(found)


SUITS = msgspec.structs.replace(facts_of(), head=HEAD, is_listable=True)


def with_mode(mode: int) -> PathFacts:
    assert SUITS.image is not None
    access = msgspec.structs.replace(SUITS.image.access, mode=mode)
    return msgspec.structs.replace(SUITS, image=msgspec.structs.replace(SUITS.image, access=access))


@pytest.mark.parametrize("mode", [0o644, 0o755, 0o1600])
def test_complete_image_in_a_listable_directory_may_be_redirected_for_the_node(mode: int) -> None:
    check_node_redirect(with_mode(mode))


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (msgspec.structs.replace(SUITS, head=b"a log"), "not-squashfs"),
        (with_mode(0o4755), "set-id"),
        (with_mode(0o2755), "set-id"),
        (msgspec.structs.replace(SUITS, is_listable=False), "unlisted"),
        (msgspec.structs.replace(SUITS, has_writer=True), "written"),
    ],
)
def test_image_that_could_harm_other_users_is_declined_for_a_redirect_of_the_node(
    found: PathFacts, reason: str
) -> None:
    with pytest.raises(Declined) as caught:
        check_node_redirect(found)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOENT, "missing"),
        (errno.ENOTDIR, "missing"),
        (errno.EACCES, "no-permission"),
        (errno.EPERM, "no-permission"),
        (errno.ELOOP, "bad-path"),
        (errno.ENAMETOOLONG, "bad-path"),
        (errno.EIO, "source-error"),
        (errno.ESTALE, "source-error"),
        (None, "source-error"),
    ],
)
def test_error_when_the_user_opens_the_source_declines_and_never_fails(
    number: int | None, reason: str
) -> None:
    error = OSError() if number is None else OSError(number, os.strerror(number))
    declined = declined_by_open_error(error, "/a", User("alice", 7, 7))
    assert (declined.reason, isinstance(declined, Failed)) == (reason, False)
