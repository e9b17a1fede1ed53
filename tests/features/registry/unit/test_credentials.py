"""enroot's .credentials: which entry is used, and which commands in it are run."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.features.registry import credentials
from forestage.features.registry.credentials import RegistryLogin

FILE = """\
# NVIDIA GPU Cloud
machine nvcr.io login $oauthtoken password nvapi-1
machine authn.nvidia.com login $oauthtoken password nvapi-2
  machine indented.io login joe password x
machine a.io   login\tjoe password $(pass show a)
machine a.io login ann password $(pass show ann) # hers
machine b.io
    login joe
    password "with a \\"quoted\\" word\\n"
macdef init
machine c.io login joe password in-a-macro

machine c.io password first login joe
machine json.io login _json_key password {"a":"b\\u0020c"}
machine empty.io login joe password ""
machine nothing.io login joe
default login joe password for-all
"""


def said(words: str) -> str:
    return {"$(pass show a)": "of-a", "$(pass show ann) # hers": "of-ann"}[words]


@pytest.mark.parametrize(
    ("host", "user", "password"),
    [
        ("nvcr.io", "$oauthtoken", "nvapi-1"),
        ("NVCR.io", "$oauthtoken", "nvapi-1"),
        ("nvcr.io", "joe", None),
        ("authn.nvidia.com", "$oauthtoken", "nvapi-2"),
        ("indented.io", "joe", "x"),
        ("a.io", "joe", "of-a"),
        ("a.io", "ann", "of-ann"),
        ("b.io", "joe", 'with a "quoted" word\n'),
        ("c.io", "joe", "first"),
        ("json.io", "_json_key", '{"a":"b\\u0020c"}'),
        ("empty.io", "joe", None),
        ("nothing.io", "joe", None),
        ("other.io", "joe", None),
        ("", "joe", None),
    ],
)
def test_registry_login_is_selected_by_host_and_user(
    host: str, user: str, password: str | None
) -> None:
    found = credentials.find_login(FILE, host, user, said)
    assert found == (None if password is None else RegistryLogin(user, password))


def test_only_the_credentials_command_of_the_host_and_user_is_run() -> None:
    ran: list[str] = []

    def run(words: str) -> str:
        ran.append(words)
        return "secret"

    credentials.find_login(FILE, "a.io", "ann", run)
    assert ran == ["$(pass show ann) # hers"]
    for host, user in (("nvcr.io", "joe"), ("b.io", "joe"), ("default", "joe"), ("a.io", "bob")):
        credentials.find_login(FILE, host, user, run)
    assert len(ran) == 1


def test_output_of_a_credentials_command_adds_no_entry_for_another_host() -> None:
    """It may have lines, as a JSON key has whose \\n the shell's echo turns into them."""
    text = "machine a.io login joe password $x\n"
    found = credentials.find_login(text, "a.io", "joe", lambda words: "one\nmachine b.io login joe")
    assert found == RegistryLogin("joe", "one")


@pytest.mark.parametrize(
    ("registry", "user"),
    [
        *(("nvcr.io", "$oauthtoken"), ("nvcr.io:443", "$oauthtoken"), ("indented.io", "joe")),
        *(("a.io:5000", "joe"), ("b.io", ""), ("vcr.io", ""), ("other.io", ""), ("nvcrXio", "")),
    ],
)
def test_user_is_inferred_from_the_registrys_first_credentials_line(
    registry: str, user: str
) -> None:
    assert credentials.infer_user(FILE, registry) == user


@pytest.mark.parametrize(
    ("registry", "user", "known"),
    [
        ("nvcr.io", "$oauthtoken", True),
        ("nvcr.io:443", "$oauthtoken", True),
        ("a.io", "ann", True),
        ("nvcr.io", "joe", False),
        ("indented.io", "joe", False),  # enroot's grep is for lines that begin with machine
        ("b.io", "joe", False),
        ("nothing.io", "joe", False),
        ("other.io", "joe", False),
    ],
)
def test_credentials_file_matches_a_registry_and_user_as_in_enroot(
    registry: str, user: str, known: bool
) -> None:
    assert credentials.has_entry(FILE, registry, user) is known


@given(st.text(st.sampled_from('machine a.iologndefaultpsw"\\$# \t\n'), max_size=200))
def test_credentials_file_with_any_password_text_is_parsed(text: str) -> None:
    found = credentials.find_login(
        f"machine a.io login joe {text}", "a.io", "joe", lambda words: words
    )
    assert found is None or (found.user == "joe" and found.password)


def test_login_is_encoded_as_a_basic_authorization_header() -> None:
    pair = base64.b64decode(
        RegistryLogin("joe", "pä:ss").basic_authorization.removeprefix("Basic ")
    )
    assert pair.decode() == "joe:pä:ss"


def test_credentials_file_over_a_mebibyte_or_no_regular_file_is_read_as_empty(
    tmp_path: Path,
) -> None:
    file = tmp_path / "c"
    assert credentials.read_text_or_empty(str(file)) == ""
    file.write_bytes(b"x" * credentials.LONGEST)
    assert len(credentials.read_text_or_empty(str(file))) == credentials.LONGEST
    file.write_bytes(b"x" * (credentials.LONGEST + 1))
    assert credentials.read_text_or_empty(str(file)) == ""
    os.mkfifo(tmp_path / "fifo")
    for odd in (tmp_path, tmp_path / "fifo", "/dev/zero", "a\0b"):
        assert credentials.read_text_or_empty(str(odd)) == ""
