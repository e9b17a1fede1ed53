"""The digest of a tag, from Debian's docker-registry: how it is asked, and what is refused."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

import pytest
from asking import Asker
from registries import Front, Proxy, Registry, certificate, changes, redirects, says, stalls

IMAGE = "team/tool"
FILES = {"etc/motd": b"hello\n"}
HEADS, GETS = ("HEAD",), ("HEAD", "GET")


def asked(front: Front) -> tuple[str, ...]:
    """The methods of what was asked about manifests."""
    return tuple(seen.method for seen in front.log if "/manifests/" in seen.path)


def test_tag_is_resolved_with_one_head_request(alice: Asker, registry: Registry) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == digest
    assert alice.ask(f"docker://{registry.host}/{IMAGE}:1").digest == digest
    assert [(seen.method, seen.path) for seen in registry.log] == [
        ("HEAD", f"/v2/{IMAGE}/manifests/1")
    ] * 2


def test_reference_with_a_digest_is_resolved_without_a_request(
    alice: Asker, registry: Registry
) -> None:
    digest = f"sha256:{'0' * 64}"
    for which in (f"@{digest}", f":1@{digest}", f":{digest}"):
        assert alice.ask(f"{registry.host}#{IMAGE}{which}").digest == digest
    assert registry.log == []


def test_tag_of_a_multi_architecture_index_resolves_to_the_indexs_digest(
    alice: Asker, registry: Registry
) -> None:
    one = registry.push(f"{IMAGE}:amd64", FILES)
    other = registry.push(f"{IMAGE}:arm64", FILES, arch="arm64")
    index = registry.index(f"{IMAGE}:both", {"amd64": one, "arm64": other})
    assert alice.ask(f"{registry.host}#{IMAGE}:both").digest == index
    assert len({one, other, index}) == 3


def test_layer_size_of_an_index_is_that_of_this_nodes_architecture(
    alice: Asker, registry: Registry
) -> None:
    files = {"large": random.Random(1).randbytes(2 << 20)}
    one, other = registry.push(f"{IMAGE}:a", FILES), registry.push(f"{IMAGE}:b", files)
    arch = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    index = registry.index(f"{IMAGE}:both", {"s390x": one, arch: other})
    text = f"{registry.host}#{IMAGE}:both"
    assert 2 << 20 < alice.ask(text, meant=index).layers < 3 << 20
    assert alice.ask(text, meant=other).layers == alice.ask(text, meant="").layers
    assert 0 < alice.ask(text, meant=one).layers < 1 << 20


@pytest.mark.parametrize("answer", [says(404), says(500), says(200)])
def test_layer_size_is_0_if_the_registry_gives_no_manifest(
    alice: Asker, registry: Registry, answer: Callable[..., object]
) -> None:
    registry.front.on(".*", "/v2/.*/manifests/.*", answer)  # type: ignore[arg-type]
    found = alice.ask(f"{registry.host}#{IMAGE}:a", meant="")
    assert (found.layers, found.reason) == (0, "")


def test_moved_tag_resolves_to_the_new_digest(alice: Asker, registry: Registry) -> None:
    before = registry.push(f"{IMAGE}:1", FILES)
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == before
    after = registry.push(f"{IMAGE}:1", {"etc/motd": b"changed\n"})
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == after != before


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "answer",
    [
        *(pytest.param(says(status), id=str(status)) for status in (404, 405, 406, 501)),
        pytest.param(changes(Docker_Content_Digest=""), id="no digest"),
        pytest.param(changes(Docker_Content_Digest="sha256:abc; rm -rf /"), id="no such digest"),
        pytest.param(changes(Docker_Content_Digest=f"sha512:{'0' * 128}"), id="another hash"),
    ],
)
def test_registry_without_a_usable_head_reply_gets_one_get_request(
    alice: Asker, registry: Registry, answer: object
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    registry.front.on("HEAD", ".*", answer)
    registry.front.on("GET", ".*", changes(Docker_Content_Digest=""))
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == digest
    assert asked(registry.front) == GETS


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (changes(Docker_Content_Digest=f"sha256:{'0' * 64}"), "a manifest that is not sha256:000"),
        (says(200, b"<html>Log in here</html>"), "no manifest"),
        (says(200, b'{"schemaVersion":1}'), "no manifest"),
        (says(200, b"[" * 100_000), "no manifest"),
        (says(200, b"{}" + b" " * (5 << 20)), "more than"),
        (says(418), "answers 418"),
        (says(302), "answers 302"),
        (says(400), "answers 400"),
        (says(405), "answers 405"),
    ],
)
def test_malformed_manifest_reply_is_declined_as_registry_odd(
    alice: Asker, registry: Registry, answer: object, words: str
) -> None:
    registry.push(f"{IMAGE}:1", FILES)
    registry.front.on("HEAD", ".*", says(405))
    registry.front.on("GET", ".*", answer)
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert (result.reason, result.transient) == ("registry-odd", False)
    assert words in result.detail
    assert result.detail.startswith(registry.host)


def test_registry_reply_with_huge_headers_is_declined(alice: Asker, registry: Registry) -> None:
    registry.front.on("HEAD", ".*", says(200, Docker_Content_Digest="x" * (60 << 10)))
    registry.front.on("GET", ".*", says(200, **{f"X_{n}": "x" * 60_000 for n in range(12)}))
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert result.reason in ("registry-odd", "registry-silent"), result  # curl has limits as well
    assert not result.digest


@pytest.mark.parametrize("status", [404, 403, 401])
def test_registry_refusal_names_registry_image_status_and_credentials_file(
    alice: Asker, registry: Registry, status: int
) -> None:
    registry.front.on(".*", ".*", says(status))
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert result.reason == ("registry-missing" if status == 404 else "registry-denied")
    assert not result.transient
    assert f"{registry.host} {'has no' if status == 404 else 'refuses'} {IMAGE}:1" in result.detail
    assert f"({status})" in result.detail
    assert "~/.config/enroot/.credentials" in result.detail


def test_missing_tag_is_declined_as_registry_missing(alice: Asker, registry: Registry) -> None:
    assert alice.ask(f"{registry.host}#{IMAGE}:none").reason == "registry-missing"
    assert asked(registry.front) == GETS


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_registry_with_status_5xx_is_declined_as_silent_after_head_and_get(
    alice: Asker, registry: Registry, status: int
) -> None:
    registry.front.on(".*", ".*", says(status))
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert (result.reason, result.transient) == ("registry-silent", True)
    assert asked(registry.front) == GETS  # enroot asks by GET


def test_unreachable_registry_is_declined_as_silent(alice: Asker, registry: Registry) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert alice.ask(f"127.0.0.1:{port}#{IMAGE}:1").reason == "registry-silent"
    registry.kill()
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert result.reason == "registry-silent"
    assert "curl: (" in result.detail


def test_stalling_registry_is_declined_as_silent_at_the_deadline(
    alice: Asker, registry: Registry
) -> None:
    event = threading.Event()
    registry.front.on(".*", ".*", stalls(event))
    result = alice.ask(f"{registry.host}#{IMAGE}:1", patience=1.0)
    event.set()
    assert (result.reason, result.transient) == ("registry-silent", True)


# 429


def test_head_request_is_repeated_after_the_retry_after_seconds(
    alice: Asker, registry: Registry
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    registry.front.on("HEAD", ".*", says(429, Retry_After="10"), times=2)
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert (result.digest, result.slept) == (digest, (10.0, 10.0))
    assert asked(registry.front) == HEADS * 3


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("wanted", "slept"),
    [("12", (12.0, 12.0)), ("31", ()), ("0", (1.0,) * 30), ("", (5.0,) * 6), ("soon", (5.0,) * 6)],
)
def test_retry_after_waits_are_limited_to_half_a_minute_in_total(
    alice: Asker, registry: Registry, wanted: str, slept: tuple[float, ...]
) -> None:
    registry.front.on(".*", ".*", says(429, Retry_After=wanted))
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert (result.reason, result.transient, result.slept) == ("registry-busy", True, slept)


def test_retry_after_date_is_converted_to_seconds(alice: Asker, registry: Registry) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    past = formatdate(time.time() - 3600, usegmt=True)
    registry.front.on(".*", ".*", says(429, Retry_After=past), times=1)
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert (result.digest, result.slept) == (digest, (1.0,))
    far = formatdate(time.time() + 3600, usegmt=True)
    registry.front.on(".*", ".*", says(429, Retry_After=far))
    assert alice.ask(f"{registry.host}#{IMAGE}:1").slept == ()


def test_retry_after_beyond_the_deadline_is_not_waited_for(
    alice: Asker, registry: Registry
) -> None:
    registry.front.on(".*", ".*", says(429, Retry_After="29"))
    result = alice.ask(f"{registry.host}#{IMAGE}:1", patience=20.0)
    assert result.slept == ()
    assert result.reason in ("registry-busy", "registry-silent")


# TLS, proxies


@pytest.mark.parametrize("direct", [False, True], ids=["http/1.1", "http/2"])
@pytest.mark.parametrize("where", ["SSL_CERT_FILE", "CURL_CA_BUNDLE", "enroot.conf", ".curlrc"])
def test_ca_file_is_read_from_curls_and_enroots_settings(
    alice: Asker, started: Callable[..., Registry], where: str, direct: bool
) -> None:
    registry = started(tls=True, direct=direct)
    digest = registry.push(f"{IMAGE}:1", FILES)
    alice.conf.write_text("")
    if where == "enroot.conf":
        alice.conf.write_text(f"SSL_CERT_FILE   {registry.ca}\n")
    elif where == ".curlrc":
        (alice.home / ".curlrc").write_text(f"cacert = {registry.ca}\n")
    else:
        alice.variables[where] = str(registry.ca)
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == digest


def test_registry_with_an_unknown_certificate_authority_is_declined(
    alice: Asker, started: Callable[..., Registry]
) -> None:
    registry = started(tls=True)
    alice.conf.write_text("")
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert result.reason == "registry-silent"
    assert "certificate" in result.detail
    assert registry.log == []


def test_registry_over_http_is_queried_only_if_enroot_conf_allows_http(
    alice: Asker, registry: Registry
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    alice.conf.write_text("ENROOT_ALLOW_HTTP no\n")
    alice.variables["ENROOT_ALLOW_HTTP"] = "yes"  # pyxis keeps it from enroot
    assert alice.ask(f"{registry.host}#{IMAGE}:1").reason == "registry-silent"
    assert registry.log == []
    alice.conf.write_text("ENROOT_ALLOW_HTTP yes\n")
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == digest


def test_registry_request_uses_http_proxy_and_respects_no_proxy(
    alice: Asker, registry: Registry, fronts: Callable[..., Front]
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    proxy = fronts(Proxy)
    alice.variables["http_proxy"] = proxy.url
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == digest
    assert [seen.path for seen in proxy.log] == [f"http://{registry.host}/v2/{IMAGE}/manifests/1"]
    alice.variables["no_proxy"] = "127.0.0.1"
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == digest
    assert len(proxy.log) == 1


def test_https_proxy_from_enroot_conf_tunnels_the_registry_request(
    alice: Asker, started: Callable[..., Registry], fronts: Callable[..., Front]
) -> None:
    registry = started(tls=True)
    digest = registry.push(f"{IMAGE}:1", FILES)
    proxy = fronts(Proxy)
    alice.conf.write_text(f"https_proxy {proxy.url}\nSSL_CERT_FILE {registry.ca}\n")
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == digest
    assert [(seen.method, seen.path) for seen in proxy.log] == [("CONNECT", registry.host)]


def test_unreachable_proxy_is_declined_as_registry_silent(alice: Asker, registry: Registry) -> None:
    alice.variables["http_proxy"] = "http://127.0.0.1:1"
    assert alice.ask(f"{registry.host}#{IMAGE}:1").reason == "registry-silent"
    assert registry.log == []


# Redirects


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_registry_redirect_of_each_status_is_followed_to_the_digest(
    alice: Asker, registry: Registry, fronts: Callable[..., Front], status: int
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    front = fronts()
    front.on(".*", ".*", redirects(f"{registry.front.url}/v2/{IMAGE}/manifests/1", status))
    assert alice.ask(f"{front.host}#other:x").digest == digest
    assert asked(registry.front) == HEADS


def test_registry_redirects_are_followed_at_most_five_times(
    alice: Asker, registry: Registry
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    for n in range(6):
        target = f"/v2/r/manifests/{n - 1}" if n else f"/v2/{IMAGE}/manifests/1"
        registry.front.on(".*", f"/v2/r/manifests/{n}", redirects(target))
    assert alice.ask(f"{registry.host}#r:4").digest == digest
    result = alice.ask(f"{registry.host}#r:5")
    assert (result.reason, "5 redirects" in result.detail) == ("registry-odd", True)


@pytest.mark.parametrize(
    "target",
    [
        *("file:///etc/passwd", "gopher://127.0.0.1/", "http://a b/", "//\\evil/"),
        *("http://alice:secret@127.0.0.1/", "http://127.0.0.1:99999999/", "http://{a,b}/x"),
    ],
)
def test_registry_redirect_to_a_url_that_is_not_http_is_declined(
    alice: Asker, registry: Registry, target: str
) -> None:
    registry.front.on(".*", ".*", redirects(target))
    assert alice.ask(f"{registry.host}#{IMAGE}:1").reason == "registry-odd"
    assert len(registry.log) == 1


def test_registry_redirect_from_https_to_http_is_declined(
    alice: Asker, registry: Registry, fronts: Callable[..., Front], open_path: Path
) -> None:
    registry.push(f"{IMAGE}:1", FILES)
    made = certificate(open_path)
    front = fronts(tls=made.server)
    front.on(".*", ".*", redirects(f"{registry.front.url}/v2/{IMAGE}/manifests/1"))
    alice.conf.write_text(f"SSL_CERT_FILE {made.ca}\n")
    result = alice.ask(f"{front.host}#{IMAGE}:1")
    assert (result.reason, "ENROOT_ALLOW_HTTP" in result.detail) == ("registry-odd", True)
    assert registry.log == []
