"""References as enroot reads them: the expectations are what its docker::_parse_uri prints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.errors import Declined
from forestage.features.registry import reference
from forestage.features.registry.reference import ImageReference, make_image_name, parse_reference

HUB = "registry-1.docker.io"
HEX = "0123456789abcdef" * 4
DIGEST = f"sha256:{HEX}"


@pytest.mark.parametrize(
    ("text", "user", "registry", "repository", "which"),
    [
        ("ubuntu", "", HUB, "library/ubuntu", "latest"),
        ("ubuntu:24.04", "", HUB, "library/ubuntu", "24.04"),
        ("docker://ubuntu:24.04", "", HUB, "library/ubuntu", "24.04"),
        ("joe@ubuntu", "joe", HUB, "library/ubuntu", "latest"),
        ("team/tool", "", HUB, "team/tool", "latest"),
        ("localhost/tool", "", HUB, "localhost/tool", "latest"),
        ("docker.io/ubuntu", "", HUB, "library/ubuntu", "latest"),
        ("docker.io#ubuntu", "", HUB, "library/ubuntu", "latest"),
        ("index.docker.io#team/tool:1", "", HUB, "team/tool", "1"),
        ("registry-1.docker.io/library/ubuntu", "", HUB, "library/ubuntu", "latest"),
        ("nvcr.io#nvidia/pytorch:25.01-py3", "", "nvcr.io", "nvidia/pytorch", "25.01-py3"),
        ("nvcr.io/nvidia/pytorch:25.01-py3", "", "nvcr.io", "nvidia/pytorch", "25.01-py3"),
        (
            "$oauthtoken@nvcr.io#nvidia/pytorch",
            "$oauthtoken",
            "nvcr.io",
            "nvidia/pytorch",
            "latest",
        ),
        ("localhost:5000/tool", "", "localhost:5000", "tool", "latest"),
        ("localhost:5000#tool", "", "localhost:5000", "tool", "latest"),
        ("node1#a/b/c-d.e_f", "", "node1", "a/b/c-d.e_f", "latest"),
        ("[::1]:5000/tool:1", "", "[::1]:5000", "tool", "1"),
        (f"ubuntu@{DIGEST}", "", HUB, "library/ubuntu", DIGEST),
        (f"ubuntu:24.04@{DIGEST}", "", HUB, "library/ubuntu", DIGEST),
        (f"team/tool@{DIGEST}", "", HUB, "team/tool", DIGEST),
        (f"nvcr.io/nvidia/pytorch:1@{DIGEST}", "", "nvcr.io", "nvidia/pytorch", DIGEST),
        (f"joe@nvcr.io#nvidia/pytorch:1@{DIGEST}", "joe", "nvcr.io", "nvidia/pytorch", DIGEST),
        (f"nvcr.io#nvidia/pytorch@{DIGEST}", "", "nvcr.io", "nvidia/pytorch", DIGEST),
        (f"nvcr.io#nvidia/pytorch:{DIGEST}", "", "nvcr.io", "nvidia/pytorch", DIGEST),
        # enroot's set of a user's characters has / and @, and it takes as many as it can.
        ("nvcr.io/joe@example.org/tool", "nvcr.io/joe", "example.org", "tool", "latest"),
        ("a@b@example.org/tool", "a@b", "example.org", "tool", "latest"),
        ("joe=<;>!@example.org#tool", "joe=<;>!", "example.org", "tool", "latest"),
    ],
)
def test_image_reference_is_parsed_as_by_enroot(
    text: str, user: str, registry: str, repository: str, which: str
) -> None:
    tag, digest = ("", which) if which.startswith("sha256:") else (which, "")
    assert parse_reference(text) == ImageReference(user, registry, repository, tag, digest)


@pytest.mark.parametrize(
    "text",
    [
        *("", "docker://", "/lustre/a.sqsh", "./a.sqsh", "#tool", "nvcr.io#", "nvcr.io/", "a b"),
        *("Ubuntu", "nvcr.io#Team/Tool", "nvcr.io#-rf", "-rf", "--output=x", "-u@nvcr.io#tool"),
        *(
            "nvcr.io#a/../b",
            "nvcr.io#a//b",
            "nvcr.io#/a",
            "nvcr.io#a/",
            "nvcr.io/./a",
            "nvcr.io#.a",
        ),
        *("-x.io#tool", "a;b.io#tool", "$(id).io#tool", "a`id`/tool", "evil.io?x#tool", "x:y#tool"),
        *("a.io:123456#tool", "a.io:#tool", "[::1#tool", "a.io\\b#tool", "http://a.io/tool"),
        *("a.io#tool:-x", "a.io#tool:.x", "a.io#tool:a:b", f"a.io#tool:{'x' * 129}", "a.io#tool: "),
        *("a.io#tool\n", "a.io\n#tool", "a\0b#tool", "a.io#tool:1\r\nHost: b", "ü.io#tool"),
        *("a.io#tool@sha256:12", f"a.io#tool@{DIGEST.upper()}", f"a.io#tool@sha512:{HEX}"),
        *(f"a.io#tool@{DIGEST}0", f"a.io#tool@{DIGEST}@{DIGEST}", f"a.io#tool:{DIGEST}0"),
        *("a.io#" + "a" * 1100, "joe@@", "@", ":", "docker://docker://a.io/b", "x\udcff"),
    ],
)
def test_invalid_image_reference_is_declined_as_bad_reference(text: str) -> None:
    with pytest.raises(Declined) as caught:
        parse_reference(text)
    assert caught.value.reason == "bad-reference"
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["dockerd://ubuntu", "podman://localhost/tool:1", "dockerd://"])
def test_dockerd_or_podman_reference_is_declined(text: str) -> None:
    with pytest.raises(Declined) as caught:
        parse_reference(text)
    assert caught.value.reason == "registry"


ALPHABET = "ab0Z.:/@#_-$sha256 \n%~?=;\\é"


@given(st.text(st.sampled_from(ALPHABET), max_size=30) | st.text(max_size=40))
def test_parsed_reference_is_safe_in_urls_command_lines_and_file_names(text: str) -> None:
    try:
        found = parse_reference(text)
    except Declined:
        return
    for part in (found.user, found.registry, found.repository, found.tag, found.digest):
        assert part.isascii()
        assert part.isprintable()
        assert not part.startswith("-")
        assert " " not in part
    assert bool(found.tag) != bool(found.digest)
    assert not set("/.@ ") & {found.registry[0], found.repository[0]}
    assert not set("\\'\"`$&|;<>()*?!~%#") & set(found.registry + found.repository + found.tag)
    assert not {"..", ".", ""} & set(found.repository.split("/"))


@given(st.sampled_from(["nvcr.io#a/b:1", "joe@h:5000#a", "ubuntu", "$x@a.io/b/c:2", "a@b@c.d/e"]))
def test_enroot_uri_with_a_digest_parses_back_for_every_release(text: str) -> None:
    found = parse_reference(text)
    for release in ((4, 1, 2), (4, 0, 0), (3, 5, 0), (3, 0, 1)):
        again = parse_reference(found.enroot_uri(DIGEST, release))
        assert again == ImageReference(found.user, found.registry, found.repository, "", DIGEST)


def test_enroot_uri_has_the_form_of_each_enroot_release() -> None:
    found = parse_reference("joe@nvcr.io#nvidia/pytorch:25.01-py3")
    begin = "docker://joe@nvcr.io#nvidia/pytorch"
    assert found.enroot_uri(DIGEST) == f"{begin}@{DIGEST}"
    assert found.enroot_uri(DIGEST, (3, 5, 0)) == f"{begin}:{DIGEST}"
    assert found.enroot_uri(DIGEST, (3, 0, 0)) == f"{begin}:25.01-py3"
    assert (
        parse_reference(f"nvcr.io#x@{DIGEST}").enroot_uri(DIGEST, (4, 0, 0))
        == f"docker://nvcr.io#x@{DIGEST}"
    )


def test_reference_text_contains_no_user_name() -> None:
    assert parse_reference("joe@docker.io/ubuntu").canonical_text == f"{HUB}#library/ubuntu:latest"
    assert parse_reference(f"joe@a.io/x:1@{DIGEST}").canonical_text == f"a.io#x@{DIGEST}"


def test_store_name_differs_by_digest_architecture_options_and_repository() -> None:
    found = parse_reference("nvcr.io#nvidia/pytorch:1")
    names = {
        make_image_name(found, DIGEST, "x86_64", "-comp lzo"),
        make_image_name(found, DIGEST, "aarch64", "-comp lzo"),
        make_image_name(found, DIGEST, "x86_64", "-comp zstd\udcff"),
        make_image_name(found, f"sha256:{'0' * 64}", "x86_64", "-comp lzo"),
        make_image_name(parse_reference("nvcr.io#nvidia/pytorc:1"), DIGEST, "x86_64", "-comp lzo"),
        make_image_name(
            parse_reference("nvcr.i#o/nvidia/pytorch:1"), DIGEST, "x86_64", "-comp lzo"
        ),
    }
    assert len(names) == 6
    assert all(len(made) < 120 and "/" not in made and ":" not in made for made in names)
    same = make_image_name(
        parse_reference("joe@nvcr.io/nvidia/pytorch:other"), DIGEST, "x86_64", "-comp lzo"
    )
    assert same in names, "neither the user nor the tag makes another file"
    assert same.startswith(f"{HEX}-x86_64-")


def test_digest_is_valid_only_as_lower_case_sha256() -> None:
    assert reference.is_digest(DIGEST)
    assert not any(map(reference.is_digest, ("", HEX, DIGEST[:-1], f"{DIGEST}\n", DIGEST.upper())))
