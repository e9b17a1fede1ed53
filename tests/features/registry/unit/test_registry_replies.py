"""What registries answer, as curl prints it: read, or a ValueError."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.features.registry import registry_replies
from forestage.features.registry.registry_replies import (
    AuthChallenge,
    RegistryDeclined,
    RegistryReply,
    UrlOrigin,
)

DIGEST = f"sha256:{'0' * 64}"


def answer(*headers: tuple[str, str], status: int = 200, body: bytes = b"") -> RegistryReply:
    return RegistryReply(status, headers, body)


@pytest.mark.parametrize(
    ("raw", "status", "headers", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nA: b\r\n\r\nbody", 200, (("a", "b"),), b"body"),
        (b"HTTP/2 404 \r\ncontent-type:x\r\n\r\n", 404, (("content-type", "x"),), b""),
        (b"HTTP/1.0 204\n\n", 204, (), b""),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 401 No\r\nA:  b \r\n\r\n",
            401,
            (("a", "b"),),
            b"",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 500 x\r\n\r\n", 200, (), b"HTTP/1.1 500 x\r\n\r\n"),
    ],
)
def test_registry_reply_is_parsed_into_status_headers_and_body(
    raw: bytes, status: int, headers: tuple[tuple[str, str], ...], body: bytes
) -> None:
    assert registry_replies.parse_reply(raw) == RegistryReply(status, headers, body)


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"\r\n\r\n", b"200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 2000 OK\r\n\r\n"),
        *(b"HTTP/1.1 100 Continue\r\n\r\n", b"<html>\n\n", b"HTTP/1.1 abc OK\r\n\r\n"),
    ],
)
def test_registry_reply_that_is_not_http_raises_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match="no "):
        registry_replies.parse_reply(raw)


@given(st.binary(max_size=60).map(lambda tail: b"HTTP/1.1 200 OK\r\n" + tail) | st.binary())
def test_registry_reply_of_any_bytes_is_parsed_or_raises_value_error(raw: bytes) -> None:
    with contextlib.suppress(ValueError):
        found = registry_replies.parse_reply(raw)
        assert 0 <= found.status <= 999
        assert found.digest == ""


def test_digest_header_is_accepted_only_as_a_valid_sha256_digest() -> None:
    name = "docker-content-digest"
    assert answer((name, DIGEST)).digest == DIGEST
    for value in ("", "sha256:0", f"{DIGEST} ", f"{DIGEST},{DIGEST}", f"sha512:{'0' * 64}"):
        assert answer((name, value)).digest == ""


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (
            ['Bearer realm="https://a/t",service="s",scope="repository:x:pull"'],
            AuthChallenge(
                "bearer", "https://a/t", (("service", "s"), ("scope", "repository:x:pull"))
            ),
        ),
        (["bearer realm=https://a/t"], AuthChallenge("bearer", "https://a/t")),
        (['Basic realm="x"', 'Bearer realm="https://a"'], AuthChallenge("bearer", "https://a")),
        (['Basic realm="x", Bearer realm="https://a"'], AuthChallenge("bearer", "https://a")),
        (['Bearer realm="a",realm="b",error="x"'], AuthChallenge("bearer", "a")),
        (['Bearer scope="a,b",realm="r"'], AuthChallenge("bearer", "r", (("scope", "a,b"),))),
        (["Basic"], AuthChallenge("basic")),
        (['basic realm="Registry"'], AuthChallenge("basic")),
        (["Bearer error=x"], AuthChallenge("bearer")),
        ([], None),
        (["Negotiate"], None),
        (["Basically", "Digest realm=x"], None),
        (["x" * 9000 + ", Basic"], None),
    ],
)
def test_best_supported_authentication_challenge_is_chosen(
    values: list[str], found: AuthChallenge | None
) -> None:
    assert (
        registry_replies.find_challenge(answer(*(("www-authenticate", v) for v in values))) == found
    )


@pytest.mark.parametrize(
    ("realm", "url"),
    [
        ("https://a/t", "https://a/t?service=a+b&scope=repository%3Ax%3Apull%26y"),
        ("https://a/t?x=1", "https://a/t?x=1&service=a+b&scope=repository%3Ax%3Apull%26y"),
    ],
)
def test_token_url_contains_the_parameters_of_the_challenge(realm: str, url: str) -> None:
    asked = (("service", "a b"), ("scope", "repository:x:pull&y"))
    assert registry_replies.make_token_url(AuthChallenge("bearer", realm, asked)) == url
    assert registry_replies.make_token_url(AuthChallenge("bearer", realm)) == realm


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("https://nvcr.io/v2/", UrlOrigin("https", "nvcr.io", 443)),
        ("HTTP://NVCR.io", UrlOrigin("http", "nvcr.io", 80)),
        ("https://nvcr.io:8443?x", UrlOrigin("https", "nvcr.io", 8443)),
        ("https://[::1]:5000/x", UrlOrigin("https", "[::1]", 5000)),
    ],
)
def test_url_origin_is_scheme_host_and_port(url: str, found: UrlOrigin) -> None:
    assert registry_replies.parse_origin(url) == found


@pytest.mark.parametrize(
    "url",
    [
        *("", "nvcr.io", "/v2/", "ftp://a/", "file:///etc/passwd", "https://", "https:///x"),
        *("https://a@b/", "https://a:b@c/", "https://a\\@b/", "https://a b/", "https://a/\n"),
        *('https://a/"', "https://a/{1,2}", "https://a/[1-9]", "https://a/#x", "https://ü/"),
        *("https://-a/", "https://a:/", "https://a:x/", "https://a/" + "x" * 5000, "https://a;b/"),
    ],
)
def test_ambiguous_url_raises_value_error(url: str) -> None:
    with pytest.raises(ValueError, match="no URL"):
        registry_replies.parse_origin(url)


def test_location_header_is_used_only_with_a_redirect_status() -> None:
    there = ("location", "../x#y")
    assert (
        registry_replies.find_redirect(answer(there, status=307), "https://a/b/c") == "https://a/x"
    )
    assert registry_replies.find_redirect(answer(there, status=200), "https://a/b/c") == ""
    assert registry_replies.find_redirect(answer(status=307), "https://a/b/c") == ""
    assert registry_replies.find_redirect(answer(there, status=304), "https://a/b/c") == ""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"token": "abc.def-_~+/="}', "abc.def-_~+/="),
        (b'{"access_token": "a", "expires_in": 300}', "a"),
        (b'{"token": "", "access_token": "a"}', "a"),
        (b'{"token": "t", "access_token": "a"}', "t"),
    ],
)
def test_token_is_read_from_token_or_access_token(body: bytes, found: str) -> None:
    assert registry_replies.parse_token(body) == found


@pytest.mark.parametrize("text", ["", "a b", 'a"b', "a\\b", "a\nb", "é", "x" * 70_000])
def test_token_that_does_not_fit_a_header_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="no token"):
        registry_replies.parse_token(json.dumps({"token": text}).encode())


@pytest.mark.parametrize(
    ("body", "is_one"),
    [
        (b'{"schemaVersion": 2, "manifests": []}', True),
        (b'{"schemaVersion": 1}', False),
        (b'{"schemaVersion": "2"}', False),
        (b"{}", False),
        (b"<html>", False),
        (b"\xff", False),
        (b"[" * 100_000, False),
    ],
)
def test_manifest_is_recognized_by_schema_version_2(body: bytes, is_one: bool) -> None:
    assert registry_replies.is_manifest(body) is is_one


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *(("0", 0.0), ("120", 120.0), ("", None), ("-1", None), ("1.5", None), ("soon", None)),
        ("9" * 400, None),
        ("Thu, 01 Jan 1970 00:02:00 GMT", 60.0),
        ("Thu, 01 Jan 1970 00:02:00 -0000", 60.0),
        ("Thu, 01 Jan 1970 00:00:30 GMT", 0.0),
        ("Thu, 99 Jan 1970 00:00:30 GMT", None),
    ],
)
def test_retry_after_header_is_parsed_as_seconds_or_date(value: str, seconds: float | None) -> None:
    assert registry_replies.parse_retry_after(answer(("retry-after", value)), now=60.0) == seconds


def test_only_silent_and_busy_registry_declines_are_transient() -> None:
    kinds = {"denied": False, "missing": False, "odd": False, "silent": True, "busy": True}
    assert {k: RegistryDeclined(f"registry-{k}", "x").is_transient for k in kinds} == kinds
