"""Answers of registries and token servers, as curl prints them: parsed and checked. Pure.

All of it was written by others: every field is matched against a pattern before it is used, and
what does not match is a ValueError.
"""

import datetime
import email.utils
import re
from typing import Literal
from urllib.parse import urlencode, urljoin

import msgspec

from forestage.errors import Declined
from forestage.features.registry.reference import is_digest

LONGEST_URL = 4096
LONGEST_TOKEN = 64 * 1024
_CHALLENGE = 8192  # characters of a header that are read

_STATUS = re.compile(rb"HTTP/[0-9.]{1,3} ([0-9]{3})(?: .*)?")
_BLANK = re.compile(rb"\r?\n\r?\n")
_HOST = r"[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]"
# No user and password before the host, nothing that two parsers of URLs read differently.
_URL = re.compile(rf"(?i:(https?))://({_HOST})(?::([0-9]{{1,5}}))?([/?][!$-;=?-Z_a-z~]*)?")
_PARAMETER = re.compile(r'([A-Za-z_]+)\s*=\s*(?:"([^"]*)"|([^\s,"]+))')
_TOKEN = re.compile(r"[!#-\[\]-~]+")  # printable, without a space, a quote or a backslash


class RegistryDeclined(Declined):
    """A registry gives no digest; the message is one printable line for the user.

    Reasons: registry-denied (401, 403), registry-missing (404), registry-busy (429),
    registry-silent (no connection, 5xx, no answer in time), registry-odd (nonsense).
    """

    @property
    def is_transient(self) -> bool:
        """Whether a digest of earlier may stand in for it, where the admin says so."""
        return self.reason in ("registry-silent", "registry-busy")


class UrlOrigin(msgspec.Struct, frozen=True):
    """Whom a URL speaks to: a credential for one is sent to no other."""

    scheme: str
    host: str
    port: int


class RegistryReply(msgspec.Struct, frozen=True):
    """One answer; names of headers are in lower case."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str:
        """Returns the first header of this name; "" if there is none."""
        return next((value for found, value in self.headers if found == name), "")

    @property
    def digest(self) -> str:
        """What the registry calls the manifest; "" if it says nothing that is a digest."""
        value = self.header("docker-content-digest")
        return value if is_digest(value) else ""


class AuthChallenge(msgspec.Struct, frozen=True):
    """How the registry wants to be asked; `realm` is the token server's URL."""

    scheme: Literal["bearer", "basic"]
    realm: str = ""
    parameters: tuple[tuple[str, str], ...] = ()


class _ManifestSchema(msgspec.Struct):
    schema: Literal[2] = msgspec.field(name="schemaVersion")


class _TokenReply(msgspec.Struct):
    token: str | None = None
    access_token: str | None = None


def parse_reply(raw: bytes) -> RegistryReply:
    """Reads headers and body; informational answers (1xx) before them are skipped."""
    while True:
        end = _BLANK.search(raw)
        if not end:
            raise ValueError("no end of the headers")
        first, *lines = re.split(rb"\r?\n", raw[: end.start()])
        status = _STATUS.fullmatch(first)
        if not status:
            raise ValueError("no HTTP")
        raw = raw[end.end() :]
        if not status[1].startswith(b"1"):
            break
    fields = (line.decode("latin-1").partition(":") for line in lines)
    headers = tuple((name.strip().lower(), value.strip()) for name, _, value in fields)
    return RegistryReply(int(status[1]), headers, raw)


def parse_origin(url: str) -> UrlOrigin:
    """Whom a URL speaks to. Raises ValueError for one that is not plain http or https."""
    match = _URL.fullmatch(url) if len(url) <= LONGEST_URL else None
    if not match:
        raise ValueError("no URL that is followed")
    scheme = match[1].lower()
    port = int(match[3] or (443 if scheme == "https" else 80))
    return UrlOrigin(scheme, match[2].lower(), port)


def find_redirect(answer: RegistryReply, url: str) -> str:
    """Returns where an answer to `url` sends us, without a fragment; "" if nowhere."""
    there = answer.header("location") if answer.status in (301, 302, 303, 307, 308) else ""
    return urljoin(url, there).partition("#")[0] if there else ""


def find_challenge(answer: RegistryReply) -> AuthChallenge | None:
    """Returns the challenge of a 401 that can be met, Bearer before Basic."""
    values = [value[:_CHALLENGE] for name, value in answer.headers if name == "www-authenticate"]
    for value in values:
        if bearer := re.search(r"(?i)(?:^|,)\s*bearer\s+(.*)", value):
            found = [(key.lower(), a or b) for key, a, b in _PARAMETER.findall(bearer[1])]
            given = dict(reversed(found))  # the first of each name counts
            known = tuple((key, given[key]) for key in ("service", "scope") if key in given)
            return AuthChallenge("bearer", given.get("realm", ""), known)
    if any(re.search(r"(?i)(?:^|,)\s*basic(?:\s|$)", value) for value in values):
        return AuthChallenge("basic")
    return None


def make_token_url(asked: AuthChallenge) -> str:
    """Returns the URL at which a Bearer token is to be had; its origin is not checked here."""
    query = urlencode(asked.parameters)
    joint = "&" if "?" in asked.realm else "?"
    return f"{asked.realm}{joint}{query}" if query else asked.realm


def parse_token(body: bytes) -> str:
    """Returns the token in a token server's answer. Raises ValueError if there is none."""
    found = msgspec.json.decode(body, type=_TokenReply)
    text = found.token or found.access_token or ""
    if len(text) > LONGEST_TOKEN or not _TOKEN.fullmatch(text):
        raise ValueError("no token")
    return text


def is_manifest(body: bytes) -> bool:
    """Whether this may be a manifest or an index, and not, say, a page that asks for a login."""
    try:
        msgspec.json.decode(body, type=_ManifestSchema)
    except (ValueError, RecursionError):  # msgspec's own errors are ValueErrors
        return False
    return True


def parse_retry_after(answer: RegistryReply, now: float) -> float | None:
    """Returns the seconds that an answer asks to wait; `now` is in seconds since the epoch."""
    value = answer.header("retry-after")
    if re.fullmatch(r"[0-9]{1,9}", value):
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.timezone.utc)
    return max(0.0, date.timestamp() - now)
