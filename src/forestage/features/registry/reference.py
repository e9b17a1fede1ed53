"""Grammar of image references: what users write after --container-image=, as enroot reads it. Pure.

    [docker://][USER@][REGISTRY#]IMAGE[:TAG][@DIGEST]      enroot's own form
    [docker://][USER@][REGISTRY/]IMAGE[:TAG][@DIGEST]      Docker's, known to enroot since 4.0

The patterns and their order are those of docker::_parse_uri in enroot 4.1: Docker Hub where no
registry is named, its three names are one, a TAG beside a DIGEST is ignored. What enroot's patterns
let through besides (white space, control characters, `..`, a name that begins with `-`) is in no
registry: it is declined here, so that each part may be used in a URL, a file's name or an argv.
"""

import hashlib
import re

import msgspec

from forestage.errors import Declined
from forestage.units import quote_value

DOCKER_HUB = "registry-1.docker.io"
LONGEST = 1024  # characters of a reference; Docker allows 255 for a name and 128 for a tag
AT_DIGEST = (4, 0, 0)
"""The first enroot that imports IMAGE@DIGEST (its commit f29a45c)."""
TAG_DIGEST = (3, 0, 1)
"""The first that takes a digest in the place of a tag, IMAGE:sha256:… (its commit 0a48a03)."""

_ALIASES = {"docker.io", "index.docker.io", DOCKER_HUB}
_OTHERS = {"dockerd": "the Docker daemon", "podman": "podman"}

# enroot's brackets as the C locale reads them. ",-@" is a range there: it has / : < = > ? and @.
_USER = r"[A-Za-z0-9_.!~*\\'()%;:&=+$,\-./<>?@]+"
_IMAGE = r"[a-z0-9/._-]+"
_TAG = r"[A-Za-z0-9._:-]+"
_DIGEST = r"sha256:[A-Za-z0-9]+"

_PLACES = (
    rf"(?P<registry>[^/#]+)/(?P<image>{_IMAGE})",
    r"(?P<hub>[^/@#:]+)",
    rf"(?P<named>[^#/@]+)#(?P<image>{_IMAGE})",
)
_ENDINGS = (
    rf":{_TAG}@(?P<digest>{_DIGEST})",
    rf"@(?P<digest>{_DIGEST})",
    rf"(?::(?P<tag>{_TAG}))?",
)
_PATTERNS = tuple(
    re.compile(rf"(?:(?P<user>{_USER})@)?{place}{ending}")
    for place in _PLACES
    for ending in _ENDINGS
)

_A_REGISTRY = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_A_REPOSITORY = re.compile(r"[a-z0-9][a-z0-9._-]*(?:/[a-z0-9][a-z0-9._-]*)*")
_A_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_A_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ImageReference(msgspec.Struct, frozen=True):
    """An image in a registry; `digest` is "" where a tag is named, else `tag` is.

    `user` is whose password is used, "" where none is named. `registry` may have a port.
    """

    user: str
    registry: str
    repository: str
    tag: str
    digest: str

    @property
    def canonical_text(self) -> str:
        """What is meant, without the user: for logs, records and keys."""
        which = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"{self.registry}#{self.repository}{which}"

    def enroot_uri(self, digest: str, enroot: tuple[int, int, int] = AT_DIGEST) -> str:
        """Returns what has this release of enroot import exactly this manifest.

        Before TAG_DIGEST there is no such word: the tag is named, and may have moved meanwhile.
        """
        user = f"{self.user}@" if self.user else ""
        which = f"@{digest}" if enroot >= AT_DIGEST else f":{digest}"
        if enroot < TAG_DIGEST:
            which = f":{self.tag}"
        return f"docker://{user}{self.registry}#{self.repository}{which}"


def is_digest(text: str) -> bool:
    """Whether this names a manifest by its SHA-256, as registries write it."""
    return bool(_A_DIGEST.fullmatch(text))


def parse_reference(text: str) -> ImageReference:
    """Reads a reference as pyxis gets it, with or without docker://.

    Raises Declined: `bad-reference`, or `registry` for what comes from a daemon of the node.
    """
    scheme, separator, rest = text.partition("://")
    if separator and scheme in _OTHERS:
        raise Declined(
            "registry", f"{quote_value(text)} comes from {_OTHERS[scheme]}, not a registry"
        )
    if len(text) > LONGEST:
        raise Declined("bad-reference", f"{quote_value(text)} is too long for an image's reference")
    rest = rest if separator and scheme == "docker" else text
    match = next(filter(None, (pattern.fullmatch(rest) for pattern in _PATTERNS)), None)
    found = _reference_from_match(match.groupdict()) if match else None
    if found is None or not _is_valid(found):
        raise Declined(
            "bad-reference", f"{quote_value(text)} is no reference of an image in a registry"
        )
    return found


def _reference_from_match(parts: dict[str, str | None]) -> ImageReference:
    """The reference that the parts of a match mean."""
    registry = parts.get("registry") or parts.get("named") or ""
    repository = parts.get("image") or parts.get("hub") or ""
    if parts.get("registry") and not re.search(r"[.:]", registry):
        registry, repository = "", f"{registry}/{repository}"
    if not registry or registry in _ALIASES:
        registry = DOCKER_HUB
        repository = repository if "/" in repository else f"library/{repository}"
    tag, digest = parts.get("tag") or "latest", parts.get("digest") or ""
    if tag.startswith("sha256:"):
        digest = tag  # in the URL that enroot asks both are the same
    return ImageReference(parts["user"] or "", registry, repository, "" if digest else tag, digest)


def _is_valid(found: ImageReference) -> bool:
    return bool(
        not found.user.startswith("-")
        and _A_REGISTRY.fullmatch(found.registry)
        and _A_REPOSITORY.fullmatch(found.repository)
        and (is_digest(found.digest) if found.digest else _A_TAG.fullmatch(found.tag))
    )


def make_image_name(reference: ImageReference, digest: str, arch: str, options: str) -> str:
    """Returns the name, without a suffix, of the squashfs file that is made of a manifest.

    `arch` is the machine's, `options` are those of mksquashfs: with others it is another file.
    """
    made_of = "\0".join((reference.registry, reference.repository, options))
    rest = hashlib.sha256(made_of.encode(errors="surrogateescape")).hexdigest()[:16]
    return f"{digest.removeprefix('sha256:')}-{arch}-{rest}"
