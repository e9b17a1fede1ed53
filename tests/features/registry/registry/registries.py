"""Registries for tests: Debian's docker-registry on loopback, and a server of ours in front of it.

    registry = registries.start(folder)                   plain HTTP
    registry = registries.start(folder, tls=True)         with a certificate of registry.ca
    registry = registries.start(folder, password=True)    docker-registry asks alice for PASSWORD
    registry.push("team/tool:1", {"etc/x": b"1"})         an image of one layer; returns its digest
    registry.host, registry.log                           what users name; what was asked so far
    registry.stop()

All requests for `host` come through the `Front`, which logs them and can answer in other ways:

    registry.front.on("HEAD", "/v2/.*", says(405))          as often as it is asked
    registry.front.on("GET", ".*", stalls(event), times=1)  the first time
    registry.front.wants_token(token_server, {"alice": "secret"})

`token_server = Front()` has nothing behind it: a token server, or where a redirect leads. `Proxy`
is an HTTP proxy that logs. `direct=True` has docker-registry itself do TLS, with HTTP/2 and without
a log. Fronts are threads of this process.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import http.server
import json
import os
import re
import secrets
import select
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from node import until

USER, PASSWORD = "alice", "a word of alice's"
# bcrypt, the only hash that docker-registry takes: crypt(PASSWORD, "$2b$04$…")
HTPASSWD = "alice:$2b$04$0upWrfnUwMOUy0prxQG3uOyAMH16mB4sOXAE0nwUp7CX6PN5lA5Qe\n"
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Seen(NamedTuple):
    """One request; `authorization` as it came, "" without."""

    method: str
    path: str
    authorization: str
    host: str
    accept: str = ""


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str] = {}
    body: bytes = b""


Behind = Callable[[], Reply]
"""What docker-registry says to the same request."""
Action = Callable[[Seen, Behind], Reply]


def says(status: int, body: bytes = b"", **headers: str) -> Action:
    """Answers so; underscores in a header's name are dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda seen, behind: Reply(status, named, body)


def redirects(url: str, status: int = 307) -> Action:
    return says(status, Location=url)


def changes(**headers: str) -> Action:
    """The registry's answer with these headers; "" for without."""

    def changed(seen: Seen, behind: Behind) -> Reply:
        reply = behind()
        named = {name.replace("_", "-").lower(): value for name, value in headers.items()}
        kept = {n: v for n, v in reply.headers.items() if n.lower() not in named}
        return reply._replace(headers=kept | {n: v for n, v in named.items() if v})

    return changed


def stalls(event: threading.Event) -> Action:
    """Answers what it should, once the event is set."""

    def stalled(seen: Seen, behind: Behind) -> Reply:
        event.wait()
        return behind()

    return stalled


class Front:
    """An HTTP server that logs, does what a test wants, and asks the registry `behind` it."""

    def __init__(
        self, behind: str = "", tls: ssl.SSLContext | None = None, bind: str = "127.0.0.1"
    ) -> None:
        self.log: list[Seen] = []
        self.spy: Callable[[Seen], None] = lambda seen: None  # called before each answer
        self._behind = behind
        self._rules: list[list[Any]] = []  # method, path, action, times left
        self._tokens: set[str] = set()
        self._token_server: Front | None = None
        self._server = http.server.ThreadingHTTPServer((bind, 0), _handler(self))
        self._server.daemon_threads = True
        if tls:
            # The handshake comes with the first read, in the connection's own thread.
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.scheme = "https" if tls else "http"
        self.host = f"{bind}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}"

    def on(self, method: str, path: str, action: Action, times: int = -1) -> None:
        """Does this for requests that match both, `times` times; what was said last counts."""
        self._rules.insert(0, [method, path, action, times])

    def wants_token(
        self,
        server: Front,
        logins: Mapping[str, str],
        anonymous: bool = False,
        challenge: str = 'Bearer realm="{realm}",service="tests",scope="repository:{name}:pull"',
    ) -> None:
        """Answers 401 to what has no token of `server`, which gives one for a user's password."""
        self._token_server = server
        realm = f"{server.url}/token"
        pairs = {_basic(user, word) for user, word in logins.items()}

        def granted(seen: Seen, behind: Behind) -> Reply:
            if seen.authorization not in pairs and not (anonymous and not seen.authorization):
                return Reply(401)
            token = secrets.token_urlsafe(24)
            self._tokens.add(token)
            return Reply(200, {"Content-Type": "application/json"}, _json({"token": token}))

        def checked(seen: Seen, behind: Behind) -> Reply:
            if seen.authorization.removeprefix("Bearer ") in self._tokens:
                return behind()
            name = seen.path.removeprefix("/v2/").partition("/manifests/")[0]
            asked = challenge.format(realm=realm, name=name)
            return Reply(401, {"WWW-Authenticate": asked})

        server.on("GET", "/token.*", granted)
        self.on(".*", "/v2/.*", checked)

    @property
    def tokens(self) -> set[str]:
        """All that were given so far."""
        return self._tokens

    def count(self, method: str, path: str = "/v2/.*/manifests/.*") -> int:
        """How many such requests came."""
        return sum(
            seen.method == method and bool(re.fullmatch(path, seen.path)) for seen in self.log
        )

    def answer(self, seen: Seen, headers: Mapping[str, str]) -> Reply:
        self.log.append(seen)
        self.spy(seen)
        for rule in self._rules:
            method, path, action, left = rule
            if left and re.fullmatch(method, seen.method) and re.fullmatch(path, seen.path):
                rule[3] -= 1
                return action(seen, lambda: self._ask(seen, headers))  # type: ignore[no-any-return]
        return self._ask(seen, headers)

    def _ask(self, seen: Seen, headers: Mapping[str, str]) -> Reply:
        if not self._behind:
            return Reply(404)
        own = {"host", "connection"} | ({"authorization"} if self._token_server else set())
        return _fetch(
            self._behind, seen, {n: v for n, v in headers.items() if n.lower() not in own}
        )

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _fetch(host: str, seen: Seen, headers: Mapping[str, str], path: str = "") -> Reply:
    connection = http.client.HTTPConnection(host)
    with contextlib.closing(connection):
        connection.request(seen.method, path or seen.path, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read()
    return Reply(answer.status, dict(answer.getheaders()), body)


def _handler(front: Front) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            given = {
                name: self.headers.get(name, "") for name in ("Authorization", "Host", "Accept")
            }
            seen = Seen(self.command, self.path, *given.values())
            # skopeo sends a line of Accept for each type.
            names = dict.fromkeys(self.headers)
            all_of = {name: ", ".join(self.headers.get_all(name, [])) for name in names}
            reply = front.answer(seen, all_of)
            with contextlib.suppress(OSError):  # curl went when it had enough
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    if name.lower() not in ("content-length", "connection", "server", "date"):
                        self.send_header(name, value)
                length = next(
                    (v for n, v in reply.headers.items() if n.lower() == "content-length"), ""
                )
                is_head = self.command == "HEAD"
                self.send_header("Content-Length", (is_head and length) or str(len(reply.body)))
                self.end_headers()
                if not is_head:
                    self.wfile.write(reply.body)

        def do_CONNECT(self) -> None:
            front.log.append(Seen("CONNECT", self.path, "", self.headers.get("Host", "")))
            host, _, port = self.path.rpartition(":")
            with socket.create_connection((host, int(port))) as there:
                self.send_response(200)
                self.end_headers()
                _tunnel(self.connection, there)
            self.close_connection = True

        do_GET = do_HEAD = _do

        def handle(self) -> None:
            with contextlib.suppress(OSError):  # a client that does not trust us
                super().handle()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _tunnel(one: socket.socket, other: socket.socket) -> None:
    while True:
        for ready in select.select([one, other], [], [])[0]:
            data = ready.recv(1 << 16)
            if not data:
                return
            (other if ready is one else one).sendall(data)


class Proxy(Front):
    """What http_proxy and https_proxy name: its log has whole URLs, and CONNECT."""

    def _ask(self, seen: Seen, headers: Mapping[str, str]) -> Reply:
        host, _, path = seen.path.removeprefix("http://").partition("/")
        return _fetch(host, seen, headers, f"/{path}")


class Certificate(NamedTuple):
    """A server's key and certificate, and the authority that signed it."""

    ca: Path
    pem: Path

    @property
    def server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.pem)
        return context


def certificate(folder: Path) -> Certificate:
    """An authority of our own, and what it signed for 127.0.0.1, 127.0.0.2 and localhost."""
    made = Certificate(folder / "ca.pem", folder / "server.pem")
    if made.pem.exists():
        return made
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = "subjectAltName=IP:127.0.0.1,IP:127.0.0.2,DNS:localhost"
    ca = ["-x509", "-subj", "/CN=tests", "-keyout", "ca.key", "-out", "ca.pem"]
    server = ["-x509", "-CA", "ca.pem", "-CAkey", "ca.key", "-subj", "/CN=registry"]
    server += ["-addext", names, "-addext", "basicConstraints=critical,CA:FALSE"]
    _run("openssl", "req", *key, *ca, cwd=folder)
    _run("openssl", "req", *key, *server, "-keyout", "key.pem", "-out", "cert.pem", cwd=folder)
    made.pem.write_bytes((folder / "key.pem").read_bytes() + (folder / "cert.pem").read_bytes())
    made.ca.chmod(0o644)
    return made


class Registry:
    """A docker-registry that runs, and the Front before it; see `start`."""

    def __init__(
        self, folder: Path, process: subprocess.Popen[bytes], own: str, front: Front | None
    ) -> None:
        self.folder = folder
        self.own = own  # docker-registry's own host:port
        self.front = front or Front()
        self.host = front.host if front else own
        self.ca = folder / "ca.pem"  # there with TLS only
        self._process = process

    @property
    def log(self) -> list[Seen]:
        return self.front.log

    def push(self, name: str, files: Mapping[str, bytes], arch: str = "amd64") -> str:
        """Makes an image of these files with umoci, pushes it with skopeo; returns its digest."""
        has_password = (self.folder / "htpasswd").exists()
        login = ["--dest-creds", f"{USER}:{PASSWORD}"] if has_password else []
        digest = self.folder / "digest"
        to = ["--dest-tls-verify=false", "--digestfile", str(digest), *login]
        image, place = _image(tuple(files.items()), arch), f"docker://{self.own}/{name}"
        _run("skopeo", "--insecure-policy", "copy", *to, f"oci:{image}", place)
        return digest.read_text()

    def index(self, name: str, digests: Mapping[str, str]) -> str:
        """Puts an index, architecture to digest, over a tag; returns the index's digest."""
        repository, _, tag = name.rpartition(":")
        headers = {"Accept": MANIFEST}
        manifests = []
        for arch, digest in digests.items():
            seen = Seen("GET", f"/v2/{repository}/manifests/{digest}", "", "")
            size = len(_fetch(self.own, seen, headers).body)
            platform = {"architecture": arch, "os": "linux"}
            manifests.append(
                {"mediaType": MANIFEST, "digest": digest, "size": size, "platform": platform}
            )
        body = _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests})
        connection = http.client.HTTPConnection(self.own)
        with contextlib.closing(connection):
            path = f"/v2/{repository}/manifests/{tag}"
            connection.request("PUT", path, body, {"Content-Type": INDEX})
            answer = connection.getresponse()
            assert answer.status == 201, answer.read()
            return answer.headers["Docker-Content-Digest"]

    def kill(self) -> None:
        """docker-registry goes at once; the Front stays, and ends connections without an answer."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self.front.stop()
        self.kill()


@cache
def _image(files: tuple[tuple[str, bytes], ...], arch: str) -> str:
    """Makes an image once in this process: umoci is called five times for it."""
    made = Path(tempfile.mkdtemp(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
    tree, image = made / "tree", f"{made}/image:x"
    for path, content in files:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(content)
        (tree / path).chmod(0o755)
    _run("umoci", "init", "--layout", f"{made}/image")
    _run("umoci", "new", "--image", image)
    # `umoci insert` ends its archive too early for tar, and so for enroot.
    _run("umoci", "unpack", "--rootless", "--image", image, f"{made}/bundle")
    shutil.copytree(tree, made / "bundle/rootfs", dirs_exist_ok=True)
    _run("umoci", "repack", "--image", image, f"{made}/bundle")
    _run("umoci", "config", "--image", image, "--architecture", arch, "--os", "linux")
    return image


def start(
    folder: Path,
    tls: bool = False,
    password: bool = False,
    direct: bool = False,
    bind: str = "127.0.0.1",
) -> Registry:
    """Starts a registry that keeps its images below `folder`, which must be empty."""
    folder.mkdir(parents=True, exist_ok=True)
    listens: dict[str, object] = {"addr": f"{bind}:0"}
    made = certificate(folder) if tls else None
    if made and direct:
        listens["tls"] = {"certificate": str(made.pem), "key": str(folder / "key.pem")}
    told: dict[str, object] = {
        "version": "0.1",
        "log": {"level": "info", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": listens,
    }
    if password:
        (folder / "htpasswd").write_text(HTPASSWD)
        told["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}
    (folder / "config.yml").write_text(json.dumps(told))  # JSON is YAML
    said = folder / "said"
    with said.open("wb") as out:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(folder / "config.yml")],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    until(lambda: "listening on" in said.read_text() or process.poll() is not None, "a registry")
    found = re.search(r"listening on ([0-9.:]+)", said.read_text())
    assert found, said.read_text()
    front = None if direct else Front(found[1], made.server if made else None, bind)
    return Registry(folder, process, found[1], front)


def _basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _run(*argv: str, cwd: Path | None = None) -> None:
    ran = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{argv}: {ran.stderr}"
