"""Proof that a peer is root on a node of this cluster, and MACs of requests and responses.

The client sends a credential that holds the key it will ask for, and a fresh secret. The credential
is one of munge's, which encrypts it for root of this cluster, or is made with a key that all nodes
share: of a file of the site's, or derived from Slurm's own where AuthType is auth/slurm. From then
on each request and each response carries a MAC (HMAC-SHA256) that only a holder of the secret can
make.

A credential that was recorded is good for CREDENTIAL_SECONDS, on the nodes that have not seen it.
It opens a session whose secret the replayer does not have, and a recorded request does not fit that
session: its MAC holds the name of the one it was made for. docs/security.md has the argument.
"""

import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path
from typing import Protocol

import msgspec

from forestage.errors import PeerError
from forestage.features.peers import auth_key
from forestage.paths import NodePaths
from forestage.system import run
from forestage.system.files import open_descriptor

PROTOCOL = "forestage-1"
CREDENTIAL_SECONDS = 60  # by the wall clocks of two nodes, which may differ by some seconds
MUNGE_TIMEOUT = 5.0  # seconds for munge or unmunge
SECRET_BYTES = 32
MAX_CREDENTIAL_BYTES = 4096  # bytes of a credential; ours have some 500
MAX_KEY_FILE = 4096  # bytes
HKDF_PURPOSE = b"forestage 1: credentials of peer services"  # HKDF's `info`


class BadCredential(Exception):
    """A credential that proves nothing; the text is for the service's own log."""


class NoCredential(PeerError):
    """This node has nothing by which it could prove itself, and will not have it by waiting."""


class Credential(msgspec.Struct, frozen=True):
    """A credential, and the secret that those who may read it find in it."""

    text: str
    secret: bytes


class VerifiedClaim(msgspec.Struct, frozen=True):
    """What a credential says, once it is known that root of this cluster made it."""

    key: str
    secret: bytes


class SessionReply(msgspec.Struct, frozen=True):
    """A service's response to a credential; the MAC shows that it could read that."""

    session: str
    mac: str


class Authenticator(Protocol):
    """A way to make credentials and to read them. Both raise BadCredential and ForestageErrors."""

    def make_credential(self, key: str) -> Credential: ...

    def read_credential(self, text: str) -> VerifiedClaim: ...


class _MungePayload(msgspec.Struct, frozen=True):
    """What munge carries; it is encrypted on the way. `secret` in hex."""

    protocol: str
    key: str
    secret: str


class _SignedCredential(msgspec.Struct, frozen=True):
    """The credential where a key file takes munge's place; `nonce` and `mac` in hex.

    `made`: milliseconds since the epoch, by the client's clock.
    """

    protocol: str
    key: str
    made: int
    nonce: str
    mac: str


class MungeAuthenticator(msgspec.Struct, frozen=True):
    """munged proves the uid, encrypts, and decodes each credential only once on a node.

    `socket` of another munged than the node's own, which is "".
    """

    socket: str = ""

    def make_credential(self, key: str) -> Credential:
        secret = secrets.token_bytes(SECRET_BYTES)
        said = msgspec.json.encode(_MungePayload(PROTOCOL, key, secret.hex()))
        ran = self._run_munge(said, "munge", "--restrict-uid=0", f"--ttl={CREDENTIAL_SECONDS}")
        if ran.code:
            raise PeerError(ran.format_ending(), "is munged running?")
        return Credential(ran.out.strip(), secret)

    def read_credential(self, text: str) -> VerifiedClaim:
        uid, payload = self._decode(text)
        if uid != 0:
            raise BadCredential(f"made by uid {uid}, expected root")
        try:
            said = msgspec.json.decode(payload, type=_MungePayload)
            secret = bytes.fromhex(said.secret)
        except (msgspec.MsgspecError, ValueError) as error:
            raise BadCredential(f"not of this kind: {error}") from None
        if said.protocol != PROTOCOL or len(secret) != SECRET_BYTES:
            raise BadCredential("of another protocol")
        return VerifiedClaim(said.key, secret)

    def _decode(self, text: str) -> tuple[int, str]:
        """Who made a credential, and what is in it."""
        ran = self._run_munge(text.encode(), "unmunge", "--numeric", "--keys=UID")
        if ran.code:
            raise BadCredential(ran.format_ending())
        facts, _, payload = ran.out.partition("\n\n")
        name, _, uid = facts.partition(":")
        if name.strip() != "UID" or not uid.strip().isdigit():
            raise BadCredential("made by nobody knows whom")
        return int(uid), payload

    def _run_munge(self, said: bytes, *argv: str) -> run.ProcessResult:
        where = [f"--socket={self.socket}"] if self.socket else []
        # A file without a name: what is secret is no argument, and run.py has no stdin.
        fd = os.memfd_create("credential", os.MFD_CLOEXEC)
        try:
            os.pwrite(fd, said, 0)
            words = [*argv, f"--input=/proc/self/fd/{fd}", *where]
            return run.run_program(words, [fd], timeout=MUNGE_TIMEOUT)
        finally:
            os.close(fd)


class KeyFileAuthenticator(msgspec.Struct, frozen=True):
    """A secret that all nodes share. The secret of a session is derived from it and never sent.

    `also_accepted_keys` are read as well, and make no credential: a site replaces its key node by
    node.
    """

    shared_key: bytes
    also_accepted_keys: tuple[bytes, ...] = ()

    @classmethod
    def from_file(cls, path: Path) -> "KeyFileAuthenticator":
        """Raises PeerError unless it is root's own, of some length, and nobody else can read it."""
        with open_descriptor(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
            facts = os.fstat(fd)
            if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
                raise PeerError(f"{path} is not root's with mode 0600", "chmod it")
            shared = os.read(fd, MAX_KEY_FILE)
        if len(shared) < SECRET_BYTES:
            raise PeerError(
                f"{path} holds {len(shared)} bytes, expected {SECRET_BYTES} or more",
                "head -c 64 /dev/urandom makes a good one",
            )
        return cls(shared)

    def make_credential(self, key: str) -> Credential:
        made, nonce = round(time.time() * 1000), secrets.token_hex(SECRET_BYTES)
        mac = _compute_protocol_mac(self.shared_key, "session", key, str(made), nonce).hex()
        text = msgspec.json.encode(_SignedCredential(PROTOCOL, key, made, nonce, mac)).decode()
        return Credential(
            text, _compute_protocol_mac(self.shared_key, "secret", key, str(made), nonce)
        )

    def read_credential(self, text: str) -> VerifiedClaim:
        try:
            said = msgspec.json.decode(text, type=_SignedCredential)
        except msgspec.MsgspecError as error:
            raise BadCredential(f"not of this kind: {error}") from None
        about = said.key, str(said.made), said.nonce
        shared = next(
            (
                one
                for one in (self.shared_key, *self.also_accepted_keys)
                if _is_signed_with(one, said)
            ),
            None,
        )
        if said.protocol != PROTOCOL or shared is None:
            raise BadCredential("made with another key")
        # As munge does: the other node's clock may be ahead of this one's.
        age = time.time() - said.made / 1000
        if abs(age) > CREDENTIAL_SECONDS:
            raise BadCredential(f"made {age:.0f}s ago, by another node's clock")
        return VerifiedClaim(said.key, _compute_protocol_mac(shared, "secret", *about))


class SlurmKeyAuthenticator(msgspec.Struct, frozen=True):
    """The keys of auth/slurm, for our own purpose. They are read each time: a site replaces them.

    Who can read the file can make a token of root's for slurmd. What is derived (HKDF, RFC 5869)
    tells nothing of the key, fits no token, and no token fits it: docs/security.md.
    """

    file: Path

    def make_credential(self, key: str) -> Credential:
        return self._derive_authenticator().make_credential(key)

    def read_credential(self, text: str) -> VerifiedClaim:
        return self._derive_authenticator().read_credential(text)

    def _derive_authenticator(self) -> KeyFileAuthenticator:
        """Raises PeerError where the file cannot be used."""
        try:
            keys = auth_key.load_keys(self.file, time.time())
        except OSError as error:
            raise PeerError(f"{self.file}: {error.strerror}") from None
        except ValueError as error:
            raise PeerError(str(error), "peers.key_file takes its place") from None
        return KeyFileAuthenticator(derive_key(keys.default), tuple(map(derive_key, keys.others)))


def make_authenticator(key_file: str | None, places: NodePaths) -> Authenticator:
    """The prover that the configuration names, else that of Slurm's AuthType.

    Raises PeerError, OSError; NoCredential where there is none.
    """
    if key_file is not None:
        return KeyFileAuthenticator.from_file(Path(key_file))
    if places.munge:
        return MungeAuthenticator(places.munge)
    kind = auth_key.read_auth_type(places.slurm_conf, places.root)
    if kind == "munge":
        if not run.find_program("munge"):
            raise NoCredential("munge is not installed", "or set peers.key_file")
        return MungeAuthenticator()
    file = auth_key.find_key_file(places.slurm_conf, places.root) if kind == "slurm" else None
    if file is None:
        what = "no slurm.key is beside slurm.conf" if kind == "slurm" else "AuthType proves nothing"
        raise NoCredential(what, "set peers.key_file")
    return SlurmKeyAuthenticator(file)


def derive_key(key: bytes, info: bytes = HKDF_PURPOSE) -> bytes:
    """Pure: a key of SECRET_BYTES for one purpose, by HKDF-SHA256 (RFC 5869) without a salt."""
    extracted = hmac.digest(bytes(hashlib.sha256().digest_size), key, hashlib.sha256)
    return hmac.digest(extracted, info + b"\1", hashlib.sha256)


def check_authenticator(authenticator: Authenticator) -> None:
    """Reads a credential of its own: what fails here fails with every peer. Raises PeerError."""
    try:
        authenticator.read_credential(authenticator.make_credential("").text)
    except BadCredential as refused:
        raise PeerError(str(refused), "run it as root, and see munged") from None


def session_mac(secret: bytes, session: str) -> str:
    """The MAC of a server's first response: it could read the credential."""
    return _compute_mac(secret, "session", session).hex()


def request_mac(
    secret: bytes, session: str, method: str, path: str, span: str, counter: int
) -> str:
    """The MAC of a request; `span` is its Range header.

    It holds the session's name: else a recorded request would be right in the session that a
    recorded credential opens on another node.
    """
    return _compute_mac(secret, "request", session, method, path, span, str(counter)).hex()


def response_mac(
    secret: bytes, counter: int, status: int, has: str, digest: str = "", length: int = 0
) -> str:
    """The MAC of a response. `digest`: hex, "" where no chunk follows; `has`: "" without a copy."""
    return _compute_mac(secret, "answer", str(counter), str(status), has, digest, str(length)).hex()


def is_same_mac(mac: str, other: str) -> bool:
    """Compares in a time that does not depend on how much of it is right."""
    return hmac.compare_digest(mac.encode(), other.encode(errors="replace"))


def _is_signed_with(shared: bytes, said: _SignedCredential) -> bool:
    right = _compute_protocol_mac(shared, "session", said.key, str(said.made), said.nonce)
    return is_same_mac(right.hex(), said.mac)


def _compute_protocol_mac(shared: bytes, purpose: str, *said: str) -> bytes:
    return _compute_mac(shared, PROTOCOL, purpose, *said)


def _compute_mac(secret: bytes, *said: str) -> bytes:
    # Each with its length: no two lists of words are the same bytes.
    message = "".join(f"{len(word)}:{word}" for word in said)
    return hmac.digest(secret, message.encode(errors="surrogateescape"), hashlib.sha256)
