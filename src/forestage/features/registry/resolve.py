"""The digest that a tag means now, asked of the registry with curl, as the user.

curl takes proxies, certificates and ~/.curlrc as users expect it to. It follows no redirect and
knows no password: both are done here, so that whatever curl's release, a credential goes to the
origin (scheme, host, port) that asked for it and to no other, and none is ever in an argv. What is
to be asked goes to curl's stdin.

    HEAD manifests/TAG        200 with Docker-Content-Digest: that is it
      401, the first time     a token as enroot gets it, or Basic; then again
      403, 404, 405, 406, 5xx, or
      200 without a digest    GET, and the SHA-256 of what comes
      429                     again after Retry-After, as long as that is PATIENCE in all
"""

import hashlib
import os
import re
from collections.abc import Sequence

import msgspec

from forestage.clock import Deadline
from forestage.errors import Declined
from forestage.features.registry import credentials, registry_replies
from forestage.features.registry.environment import EnrootSettings
from forestage.features.registry.reference import ImageReference
from forestage.features.registry.registry_replies import (
    AuthChallenge,
    RegistryDeclined,
    RegistryReply,
    UrlOrigin,
)
from forestage.system import run
from forestage.units import make_printable

ACCEPT = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        *("oci.image.index.v1", "docker.distribution.manifest.list.v2"),
        *("oci.image.manifest.v1", "docker.distribution.manifest.v2"),
    )
)
MANIFEST = 4 << 20  # bytes; registries take none that is larger
TOKENS = 1 << 20  # bytes of a token server's answer
HEADERS = 512 << 10  # bytes
REDIRECTS = 5
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # as registries name those of uname
PATIENCE = 30.0  # seconds that all Retry-After of one resolution may ask for
PAUSE = 5.0  # seconds, where a 429 names none
ECHO = 60.0  # seconds for the command that a password is; its output is kept in memory
CONNECT = 30.0  # seconds, enroot's default

NO_HEAD = (403, 404, 405, 406)  # and all above 499: enroot asks by GET
"""What registries answer to a HEAD, or to one of the types in ACCEPT, that they do not know."""

# curl's exit codes that say that what was answered or named makes no sense; others: no connection.
_ODD = {1, 3, 8, 23, 43, 61}


class _OriginAuthorization(msgspec.Struct, frozen=True):
    """The value of an Authorization header, and the only origin that may see it."""

    origin: UrlOrigin
    value: str


def resolve_digest(reference: ImageReference, settings: EnrootSettings, deadline: Deadline) -> str:
    """Returns "sha256:…", the manifest or index that a reference means now.

    One that has a digest costs no request. Raises RegistryDeclined; Failed without curl.
    """
    if reference.digest:
        return reference.digest
    asking = _RegistryClient(reference, settings, deadline)
    try:
        return asking.resolve_digest()
    except ValueError as error:
        raise asking.make_error("registry-odd", f"answers nonsense: {error}") from None


def sum_layer_bytes(
    reference: ImageReference, settings: EnrootSettings, meant: str, deadline: Deadline
) -> int:
    """Returns how many bytes an image's layers have, packed as they are; 0 where nobody says it.

    `meant` is the digest of its manifest or index, "" where only a tag is known.
    """
    try:
        return _RegistryClient(reference, settings, deadline).sum_layer_bytes(
            meant or reference.tag
        )
    except (ValueError, msgspec.MsgspecError, Declined):
        return 0


class _LayerEntry(msgspec.Struct):
    size: int = 0


class _ManifestPlatform(msgspec.Struct):
    architecture: str = ""
    os: str = ""


class _IndexEntry(msgspec.Struct):
    digest: str = ""
    platform: _ManifestPlatform = msgspec.field(default_factory=_ManifestPlatform)


class _ManifestContent(msgspec.Struct):
    """What counts of a manifest, which has layers, or of an index, which has manifests."""

    layers: list[_LayerEntry] = []
    manifests: list[_IndexEntry] = []


class _RegistryClient:
    """The requests of one resolution."""

    def __init__(
        self, reference: ImageReference, settings: EnrootSettings, deadline: Deadline
    ) -> None:
        self._reference = reference
        self._settings = settings
        self._deadline = deadline
        self._patience = PATIENCE
        self._server = ""  # whom a message names: the registry, or where it sent us
        self._known = False  # whether a password was used

    def resolve_digest(self) -> str:
        """Raises RegistryDeclined; ValueError for an answer that cannot be read."""
        method, answer = self._request_manifest("HEAD", self._reference.tag)
        return answer.digest if method == "HEAD" else self._hash_manifest(answer)

    def sum_layer_bytes(self, meant: str) -> int:
        """Raises RegistryDeclined; ValueError for an answer that cannot be read."""
        found = msgspec.json.decode(
            self._request_manifest("GET", meant)[1].body, type=_ManifestContent
        )
        arch = ARCHITECTURES.get(self._settings.arch, self._settings.arch)
        for one in found.manifests:
            if (one.platform.os, one.platform.architecture) == ("linux", arch):
                answer = self._request_manifest("GET", one.digest)[1]
                found = msgspec.json.decode(answer.body, type=_ManifestContent)
                break
        return sum(max(0, one.size) for one in found.layers)

    def _request_manifest(self, method: str, tag: str) -> tuple[str, RegistryReply]:
        """How a manifest was asked for in the end, and what came.

        Raises as `resolve_digest` does.
        """
        reference, scheme = self._reference, "http" if self._settings.allow_http else "https"
        url = f"{scheme}://{reference.registry}/v2/{reference.repository}/manifests/{tag}"
        proof = None
        while True:
            answer, asked = self._send_with_pauses(method, url, proof, MANIFEST)
            if answer.status == 401 and proof is None:
                proof = self._authorize(answer, asked)
            elif method == "HEAD" and _needs_get_request(answer):
                method = "GET"
            elif answer.status == 200:
                return method, answer
            else:
                raise self._make_status_error(answer)

    def make_error(self, reason: str, what: str) -> RegistryDeclined:
        """The error that names the registry, or the server to which it has sent us."""
        line = make_printable(f"{self._server or self._reference.registry} {what}")
        return RegistryDeclined(reason, line)

    def _make_status_error(self, answer: RegistryReply) -> RegistryDeclined:
        """What an answer that gives no digest means."""
        image = f"{self._reference.repository}:{self._reference.tag}"
        status = answer.status
        if status in (401, 403):
            look = f"look at {self._credentials_path()}"
            return self.make_error("registry-denied", f"refuses {image} ({status}); {look}")
        if status == 404:
            private = (
                ""
                if self._known
                else f"; a private one needs a login in {self._credentials_path()}"
            )
            return self.make_error("registry-missing", f"has no {image} (404){private}")
        if status >= 500:
            return self.make_error("registry-silent", f"fails for {image} ({status})")
        return self.make_error("registry-odd", f"answers {status} for {image}")

    def _credentials_path(self) -> str:
        """The path of .credentials as a user would write it."""
        path, home = self._settings.credentials, self._settings.variables.get("HOME", "")
        return f"~{path.removeprefix(home)}" if home and path.startswith(f"{home}/") else path

    def _hash_manifest(self, answer: RegistryReply) -> str:
        """The digest of a manifest that was sent as a whole."""
        found = f"sha256:{hashlib.sha256(answer.body).hexdigest()}"
        if not registry_replies.is_manifest(answer.body):
            raise ValueError("no manifest")
        if answer.digest not in ("", found):
            raise ValueError(f"a manifest that is not {answer.digest}")
        return found

    def _authorize(self, answer: RegistryReply, asked: UrlOrigin) -> _OriginAuthorization:
        """What the registry wants to see, as enroot gets it (docker::_authenticate)."""
        challenge = registry_replies.find_challenge(answer)
        if challenge is None:
            raise self._make_status_error(answer)
        if challenge.scheme == "basic":
            login = self._find_login(asked.host)
            if login is None:
                raise self._make_status_error(answer)
            return _OriginAuthorization(asked, login.basic_authorization)
        return _OriginAuthorization(asked, f"Bearer {self._request_token(challenge)}")

    def _request_token(self, challenge: AuthChallenge) -> str:
        url = registry_replies.make_token_url(challenge)
        realm = self._check_url(url)
        login = self._find_login(realm.host)
        self._server = realm.host
        proof = _OriginAuthorization(realm, login.basic_authorization) if login else None
        answer, _ = self._send_with_pauses("GET", url, proof, TOKENS)
        if answer.status != 200:
            raise self._make_status_error(answer)
        token = registry_replies.parse_token(answer.body)
        self._server = ""
        return token

    def _find_login(self, host: str) -> credentials.RegistryLogin | None:
        """The user's password for a host; only if enroot would look for one in .credentials."""
        text, registry = (
            credentials.read_text_or_empty(self._settings.credentials),
            self._reference.registry,
        )
        user = self._reference.user or credentials.infer_user(text, registry)
        if not user or not credentials.has_entry(text, registry, user):
            return None
        login = credentials.find_login(text, host, user, self._evaluate_in_shell)
        self._known = self._known or login is not None
        return login

    def _evaluate_in_shell(self, words: str) -> str:
        """What a shell makes of the words of a password; they are its script, not its argv."""
        script = f"echo {words}\n".encode(errors="surrogateescape")
        variables, left = self._settings.variables, min(ECHO, self._deadline.seconds_left())
        ran = run.run_as_current_user(("sh",), variables, left, credentials.LONGEST, script)
        if ran.cut:
            what = f"gets no login: {self._credentials_path()} takes too long, or says too much"
            raise self.make_error("registry-denied", what)
        return ran.out.decode(errors="surrogateescape").rstrip("\n")

    def _send_with_pauses(
        self, method: str, url: str, proof: _OriginAuthorization | None, most: int
    ) -> tuple[RegistryReply, UrlOrigin]:
        """One request, with as many pauses as a 429 asks for; the answer and who gave it."""
        while True:
            answer, asked = self._follow_redirects(method, url, proof, most)
            if answer.status != 429:
                return answer, asked
            self._pause(answer)

    def _pause(self, answer: RegistryReply) -> None:
        """Waits as an answer 429 wants it. Raises RegistryDeclined where that is too long."""
        clock = self._deadline.clock
        wanted = registry_replies.parse_retry_after(answer, clock.wall())
        seconds = PAUSE if wanted is None else max(1.0, wanted)
        if seconds > self._patience or seconds >= self._deadline.seconds_left():
            raise self.make_error("registry-busy", "gets too many requests (429); try again later")
        self._patience -= seconds
        clock.sleep(seconds)

    def _follow_redirects(
        self, method: str, url: str, proof: _OriginAuthorization | None, most: int
    ) -> tuple[RegistryReply, UrlOrigin]:
        """One request, and those to which it is redirected."""
        for _ in range(1 + REDIRECTS):
            asked = self._check_url(url)
            headers = [f"Accept: {ACCEPT}"] if most == MANIFEST else []
            if proof and proof.origin == asked:
                headers.append(f"Authorization: {proof.value}")
            answer = self._run_curl(method, url, headers, most)
            there = registry_replies.find_redirect(answer, url)
            if not there:
                return answer, asked
            url = there
        raise ValueError(f"more than {REDIRECTS} redirects")

    def _check_url(self, url: str) -> UrlOrigin:
        """Whom a URL speaks to. Raises ValueError for http, unless the user's enroot allows it."""
        origin = registry_replies.parse_origin(url)
        if origin.scheme != "https" and not self._settings.allow_http:
            raise ValueError(
                f"a URL of http ({origin.host}), which ENROOT_ALLOW_HTTP does not allow"
            )
        return origin

    def _run_curl(self, method: str, url: str, headers: Sequence[str], most: int) -> RegistryReply:
        """One request without any redirect."""
        left = self._deadline.seconds_left()
        if not left:
            raise self.make_error("registry-silent", "did not answer in time")
        given = _format_curl_config(method, url, headers, self._settings, left)
        variables = self._settings.variables
        ran = run.run_as_current_user(
            ("curl", "--config", "-"), variables, left, HEADERS + most, given
        )
        if ran.cut == "size":
            raise ValueError("more than any registry has to say")
        if ran.cut == "time":
            raise self.make_error("registry-silent", "did not answer in time")
        if ran.code:
            reason = "registry-odd" if ran.code in _ODD else "registry-silent"
            raise self.make_error(reason, f"does not answer: {_curl_message(ran)}")
        return registry_replies.parse_reply(ran.out)


def _needs_get_request(answer: RegistryReply) -> bool:
    """Pure: whether a HEAD that was answered so says nothing of what a GET would get."""
    silent = answer.status == 200 and not answer.digest
    return silent or answer.status in NO_HEAD or answer.status >= 500


def _curl_message(ran: run.ProcessOutput) -> str:
    """curl's own message, without what ~/.curlrc has it say besides."""
    lines = ran.err.decode(errors="replace").splitlines()
    return next((line for line in lines if line.startswith("curl: (")), f"curl: exit {ran.code}")


def _format_curl_config(
    method: str, url: str, headers: Sequence[str], settings: EnrootSettings, left: float
) -> bytes:
    """What curl reads on stdin. The last word on what ~/.curlrc may not change is ours."""
    wanted = settings.variables.get("ENROOT_CONNECT_TIMEOUT", "")
    connect = float(wanted) if re.fullmatch(r"[0-9]{1,8}", wanted) else CONNECT
    values = {
        "url": url,
        "output": "-",
        "proto": "=http,https" if settings.allow_http else "=https",
        "max-time": f"{left:.3f}",
        "connect-timeout": f"{min(connect or left, left):.3f}",
    }
    flags = ["silent", "show-error", "include", "suppress-connect-headers", "globoff"]
    flags += ["no-location", "no-fail", "no-netrc", *(["head"] if method == "HEAD" else [])]
    lines = [f'{key} = "{_quote_for_curl(value)}"' for key, value in values.items()]
    lines += [f'header = "{_quote_for_curl(header)}"' for header in headers]
    return os.fsencode("\n".join([*lines, *flags, ""]))


def _quote_for_curl(value: str) -> str:
    """A value between curl's quotes. Raises ValueError for one that would end its line."""
    if not value.isprintable():
        raise ValueError("a control character")
    return value.replace("\\", "\\\\").replace('"', '\\"')
