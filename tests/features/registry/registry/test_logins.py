"""Passwords and tokens: taken as enroot takes them, and shown to no host but their own."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from asking import BOB, Asker
from registries import PASSWORD, Behind, Front, Registry, Reply, Seen, certificate, redirects, says

IMAGE = "team/tool"
FILES = {"etc/motd": b"hello\n"}
SECRET = "nvapi-Zm9yZXN0YWdl"
SHELL = "$(printf %s nvapi-Zm9y; echo ZXN0YWdl)"  # SECRET, which no file has

BASIC = f"Basic {base64.b64encode(f'joe:{SECRET}'.encode()).decode()}"


@pytest.fixture
def elsewhere(fronts: Callable[..., Front]) -> Front:
    """A server on another address than the registry's."""
    return fronts(bind="127.0.0.2")


def authorized(front: Front) -> list[str]:
    """Every Authorization that a server has seen."""
    return [seen.authorization for seen in front.log if seen.authorization]


def status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


def family(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    try:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from family(int(child))
    except (FileNotFoundError, ProcessLookupError):
        return


# Basic


@pytest.mark.parametrize("word", [f'"{PASSWORD}"', "$(word)"])
def test_password_from_the_credentials_is_sent_to_a_registry_that_requests_a_login(
    alice: Asker, started: Callable[..., Registry], word: str
) -> None:
    registry = started(password=True)
    digest = registry.push(f"{IMAGE}:1", FILES)
    alice.program("word", f"""cat <<'END'\n"{PASSWORD}"\nEND""")
    alice.has(f"machine 127.0.0.1 login alice password {word}")
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == digest
    assert [bool(seen.authorization) for seen in registry.log] == [False, True]


def test_wrong_password_is_declined_as_registry_denied(
    alice: Asker, started: Callable[..., Registry]
) -> None:
    registry = started(password=True)
    registry.push(f"{IMAGE}:1", FILES)
    alice.has("machine 127.0.0.1 login alice password wrong")
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert result.reason == "registry-denied"
    assert result.detail == (
        f"{registry.host} refuses {IMAGE}:1 (401); look at ~/.config/enroot/.credentials"
    )
    assert len(registry.log) == 2


def test_registry_login_without_matching_credentials_is_declined_as_registry_denied(
    alice: Asker, started: Callable[..., Registry]
) -> None:
    registry = started(password=True)
    alice.has("machine registry.example.org login alice password x")
    assert alice.ask(f"{registry.host}#{IMAGE}:1").reason == "registry-denied"
    assert len(registry.log) == 1


# Tokens


def test_anonymous_token_is_requested_without_credentials(
    alice: Asker, registry: Registry, fronts: Callable[..., Front]
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    tokens = fronts()
    registry.front.wants_token(tokens, {}, anonymous=True)
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == digest
    (asked,) = tokens.log
    assert asked.path == "/token?service=tests&scope=repository%3Ateam%2Ftool%3Apull"
    assert authorized(tokens) == []
    (token,) = registry.front.tokens
    assert authorized(registry.front) == [f"Bearer {token}"]


@pytest.mark.parametrize("user", ["", "joe@"], ids=["inferred", "named"])
def test_token_server_gets_the_password_of_its_own_host(
    alice: Asker, registry: Registry, elsewhere: Front, user: str
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    registry.front.wants_token(elsewhere, {"joe": SECRET})
    alice.has(
        "machine 127.0.0.1 login joe password for-the-registry",
        f"machine 127.0.0.2 login joe password {SHELL}",
    )
    assert alice.ask(f"{user}{registry.host}#{IMAGE}:1").digest == digest
    assert authorized(elsewhere) == [BASIC]
    assert all(seen.startswith("Bearer ") for seen in authorized(registry.front))


def test_user_name_in_the_reference_selects_that_users_password(
    alice: Asker, registry: Registry, fronts: Callable[..., Front]
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    registry.front.wants_token(fronts(), {"joe": SECRET})
    alice.has(
        "machine 127.0.0.1 login ann password another",
        f"machine 127.0.0.1 login joe password {SECRET}",
    )
    assert alice.ask(f"joe@{registry.host}#{IMAGE}:1").digest == digest
    assert alice.ask(f"{registry.host}#{IMAGE}:1").reason == "registry-denied"


def test_other_user_without_access_to_the_credentials_file_is_declined(
    alice: Asker, open_path: Path, registry: Registry, fronts: Callable[..., Front]
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    registry.front.wants_token(fronts(), {"joe": SECRET})
    alice.has(f"machine 127.0.0.1 login joe password {SECRET}")
    alice.credentials.chmod(0o600)
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == digest
    bob = Asker(open_path / "bob", BOB)
    bob.conf.write_text("ENROOT_ALLOW_HTTP yes\n")
    bob.variables["ENROOT_CONFIG_PATH"] = str(alice.credentials.parent)
    assert bob.ask(f"{registry.host}#{IMAGE}:1").reason == "registry-denied"


def test_refusal_by_a_token_server_names_the_token_server(
    alice: Asker, registry: Registry, elsewhere: Front
) -> None:
    registry.front.wants_token(elsewhere, {"joe": SECRET})
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert result.reason == "registry-denied"
    assert result.detail.startswith(f"127.0.0.2 refuses {IMAGE}:1 (401)")


def test_registry_that_rejects_a_token_is_not_tried_with_a_second_token(
    alice: Asker, registry: Registry, fronts: Callable[..., Front]
) -> None:
    tokens = fronts()
    registry.front.wants_token(tokens, {}, anonymous=True)
    registry.front.on("HEAD|GET", ".*", says(403))
    assert alice.ask(f"{registry.host}#{IMAGE}:1").reason == "registry-denied"
    again = says(401, WWW_Authenticate=f'Bearer realm="{tokens.url}/token"')
    registry.front.on("HEAD", ".*", again, times=2)
    assert alice.ask(f"{registry.host}#{IMAGE}:1").reason == "registry-denied"
    assert len(tokens.log) == 1


def test_token_request_waits_for_retry_after(
    alice: Asker, registry: Registry, elsewhere: Front
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    registry.front.wants_token(elsewhere, {}, anonymous=True)
    elsewhere.on("GET", ".*", says(429, Retry_After="3"), times=1)
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert (result.digest, result.slept) == (digest, (3.0,))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"null", b"{}", b"[]", b'{"token": 7}', b'{"token": ""}', b"<html>"),
        *(b'{"token": "a b"}', b'{"token": "a\\r\\nHost: evil"}', b'{"token": "\\"\\nurl = x"}'),
        b'{"token": "' + b"x" * 70_000 + b'"}',
        b" " * (2 << 20),
    ],
    ids=range(12),
)
def test_malformed_token_reply_is_declined_as_registry_odd(
    alice: Asker, registry: Registry, elsewhere: Front, body: bytes
) -> None:
    registry.front.wants_token(elsewhere, {}, anonymous=True)
    elsewhere.on("GET", ".*", says(200, body))
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert result.reason == "registry-odd"
    assert result.detail.startswith("127.0.0.2 ")
    assert len(registry.log) == 1


@pytest.mark.parametrize(
    "challenge",
    [
        *("", "Bearer", 'Bearer realm=""', 'Bearer realm="file:///etc/passwd"', "Negotiate"),
        *('Bearer realm="//x"', 'Bearer realm="http://a:b@127.0.0.1/"', "Digest realm=x"),
    ],
)
def test_unsupported_authentication_challenge_is_declined_without_a_second_request(
    alice: Asker, registry: Registry, challenge: str
) -> None:
    registry.front.on(".*", ".*", says(401, WWW_Authenticate=challenge))
    assert alice.ask(f"{registry.host}#{IMAGE}:1").reason in ("registry-denied", "registry-odd")
    assert len(registry.log) == 1


def test_token_realm_over_http_is_not_queried_for_a_registry_over_tls(
    alice: Asker, started: Callable[..., Registry], elsewhere: Front
) -> None:
    registry = started(tls=True)
    registry.front.wants_token(elsewhere, {}, anonymous=True)
    alice.conf.write_text(f"SSL_CERT_FILE {registry.ca}\n")
    assert alice.ask(f"{registry.host}#{IMAGE}:1").reason == "registry-odd"
    assert elsewhere.log == []


# A credential goes to no other host


@pytest.mark.parametrize(
    "line",
    [
        f"machine 127.0.0.1 login joe password {SECRET}",
        f"machine 127.0.0.1 login joe password x\ndefault login joe password {SECRET}",
        f"machine 127.0.0.1 login joe password x\nmachine 127.0.0.2 login ann password {SECRET}",
        f"machine 127.0.0.2 login joe password {SECRET}",  # the registry itself is not in it
    ],
)
def test_password_of_another_host_or_user_is_not_sent_to_a_token_server(
    alice: Asker, registry: Registry, elsewhere: Front, line: str
) -> None:
    registry.front.wants_token(elsewhere, {"joe": SECRET})
    alice.has(line)
    assert alice.ask(f"joe@{registry.host}#{IMAGE}:1").reason == "registry-denied"
    assert (authorized(elsewhere), len(elsewhere.log)) == ([], 1)


def test_credentials_commands_of_other_hosts_and_users_are_not_run(
    alice: Asker, registry: Registry, fronts: Callable[..., Front]
) -> None:
    registry.front.wants_token(fronts(), {"joe": SECRET})
    ran = alice.home / "ran"
    alice.has(
        f"machine nvcr.io login joe password $(touch {ran})",
        f"machine 127.0.0.1 login ann password $(touch {ran})",
        f"machine 127.0.0.1 login joe password {SHELL}",
        f"default login joe password $(touch {ran})",
    )
    alice.ask(f"joe@{registry.host}#{IMAGE}:1")
    assert not ran.exists()


@pytest.mark.cases(2)
@pytest.mark.parametrize("curlrc", ["", "location-trusted\n", "location\nmax-redirs = 9\n"])
@pytest.mark.parametrize("where", ["another port", "another address", "another scheme"])
def test_password_is_not_sent_to_the_target_of_a_redirect(
    alice: Asker,
    started: Callable[..., Registry],
    fronts: Callable[..., Front],
    open_path: Path,
    where: str,
    curlrc: str,
) -> None:
    """curl before 7.58 sent a header to any host; before 7.83 to any port of the same."""
    registry = started(password=True)
    registry.push(f"{IMAGE}:1", FILES)
    made = certificate(open_path)
    how = {"another port": {}, "another address": {"bind": "127.0.0.2"}}
    there = fronts(**how.get(where, {"tls": made.server}))
    (alice.home / ".curlrc").write_text(curlrc)
    alice.variables["SSL_CERT_FILE"] = str(made.ca)
    alice.has(f'machine 127.0.0.1 login alice password "{PASSWORD}"')

    def led_away(seen: Seen, behind: Behind) -> Reply:
        away = redirects(f"{there.url}{seen.path}")
        return away(seen, behind) if seen.authorization else behind()

    registry.front.on(".*", ".*", led_away)
    assert alice.ask(f"{registry.host}#{IMAGE}:1").reason == "registry-missing"
    assert authorized(there) == []
    assert [seen.method for seen in there.log] == ["HEAD", "GET"]
    registry.front.wants_token(fronts(), {"alice": PASSWORD})
    registry.front.on(".*", ".*", led_away)
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == ""
    assert authorized(there) == []


def test_password_is_not_redirected_by_a_token_server(
    alice: Asker, registry: Registry, fronts: Callable[..., Front], elsewhere: Front
) -> None:
    tokens = fronts()
    registry.front.wants_token(tokens, {"joe": SECRET})
    tokens.on("GET", "/token.*", redirects(f"{elsewhere.url}/token"))
    elsewhere.on("GET", ".*", says(401))
    alice.has(f"machine 127.0.0.1 login joe password {SECRET}")
    assert alice.ask(f"{registry.host}#{IMAGE}:1").reason == "registry-denied"
    assert authorized(tokens) == [BASIC]
    assert (authorized(elsewhere), len(elsewhere.log)) == ([], 1)


def test_token_is_sent_to_a_redirect_target_only_after_its_own_challenge(
    alice: Asker, registry: Registry, fronts: Callable[..., Front], elsewhere: Front
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    registry.front.wants_token(fronts(), {}, anonymous=True)
    elsewhere.on(".*", "/v2/.*", redirects(f"{registry.front.url}/v2/{IMAGE}/manifests/1"))
    assert alice.ask(f"{elsewhere.host}#x:y").digest == digest
    assert authorized(elsewhere) == []
    assert len(authorized(registry.front)) == 1


# As the user, and unseen by others


def test_registry_programs_run_as_the_user_without_secrets_in_command_lines(
    alice: Asker, registry: Registry, fronts: Callable[..., Front]
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    tokens = fronts()
    registry.front.wants_token(tokens, {"joe": SECRET})
    alice.has(f"machine 127.0.0.1 login joe password {SHELL}")
    programs, argvs = [], []

    def look(seen: Seen) -> None:
        for pid in family(alice.pid):
            found = status(pid)
            assert found["Uid"] == found["Gid"] == [str(alice.uid)] * 4
            assert (found["Groups"], found["NoNewPrivs"]) == ([], ["1"])
            assert not int(found["CapEff"][0], 16)
            programs.append(found["Name"][0])
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                argvs.append(Path(f"/proc/{pid}/cmdline").read_bytes())
            except (FileNotFoundError, ProcessLookupError):
                continue

    registry.front.spy = tokens.spy = look
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == digest
    assert programs.count("curl") == 3
    secrets = {SECRET, BASIC.removeprefix("Basic "), *registry.front.tokens}
    assert len(secrets) == 3
    assert not [argv for argv in argvs for secret in secrets if secret.encode() in argv]


def test_credentials_command_runs_as_the_user(
    alice: Asker, registry: Registry, fronts: Callable[..., Front]
) -> None:
    registry.front.wants_token(fronts(), {"joe": SECRET})
    said = alice.home / "said"
    alice.program(
        "word", f"grep -E '^(Uid|Gid|NoNewPrivs):' /proc/self/status > {said}; bash -c id"
    )
    alice.has("machine 127.0.0.1 login joe password $(word) # not a word of this")
    alice.ask(f"{registry.host}#{IMAGE}:1")
    found = [line.split()[1:] for line in said.read_text().splitlines()]
    assert found == [[str(alice.uid)] * 4, [str(alice.uid)] * 4, ["1"]]


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "large", "binary", "unreadable"])
def test_unreadable_or_invalid_credentials_file_is_ignored(
    alice: Asker, registry: Registry, fronts: Callable[..., Front], kind: str
) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    registry.front.wants_token(fronts(), {"joe": SECRET}, anonymous=True)
    path = alice.credentials
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/etc/shadow")
    elif kind == "large":
        path.write_text(f"machine 127.0.0.1 login joe password wrong\n{'x' * (1 << 20)}")
    elif kind == "binary":
        path.write_bytes(os.urandom(4096))
    else:
        path.write_text("machine 127.0.0.1 login joe password wrong\n")
        path.chmod(0)
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == digest


def test_credentials_command_with_more_than_a_mebibyte_of_output_is_declined(
    alice: Asker, registry: Registry, fronts: Callable[..., Front]
) -> None:
    registry.front.wants_token(fronts(), {"joe": SECRET})
    alice.has("machine 127.0.0.1 login joe password $(yes | head -c 3000000)")
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert result.reason == "registry-denied"
    assert "too much" in result.detail


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BASH_ENV", "{home}/evil"),
        ("ENV", "{home}/evil"),
        ("BASH_FUNC_env%%", "() { echo gotcha; }"),
        ("SHELLOPTS", "noexec"),
        ("BASHOPTS", "extdebug"),
        ("CURL_HOME", "/etc"),
        ("LD_PRELOAD", "{home}/evil.so"),
        ("LD_AUDIT", "{home}/evil.so"),
        ("GLIBC_TUNABLES", "glibc.malloc.check=3"),
        ("PYTHONPATH", "{home}"),
        ("PATH", "{home}"),
        ("HOME", "/proc/self/root"),
        ("ENROOT_CONFIG_PATH", "/root"),
        ("IFS", "/"),
        ("LC_ALL", "\udcff"),
    ],
)
def test_hostile_environment_variables_run_programs_only_as_the_user(
    alice: Asker, registry: Registry, name: str, value: str
) -> None:
    """It may keep them from their image; it says nothing that a registry has not said."""
    digest = registry.push(f"{IMAGE}:1", FILES)
    (alice.home / "evil").write_text(f"id -u > {alice.home}/ran\n")
    alice.variables[name] = value.replace("{home}", str(alice.home))
    ids = set()

    def look(seen: Seen) -> None:
        ids.update(uid for pid in family(alice.pid) for uid in status(pid)["Uid"])

    registry.front.spy = look
    result = alice.ask(f"{registry.host}#{IMAGE}:1")
    assert result.digest in ("", digest)
    assert ids <= {str(alice.uid)}
    ran = alice.home / "ran"
    assert not ran.exists() or ran.read_text() == f"{alice.uid}\n"


def test_users_curlrc_does_not_break_the_digest_request(alice: Asker, registry: Registry) -> None:
    digest = registry.push(f"{IMAGE}:1", FILES)
    (alice.home / ".curlrc").write_text("verbose\nfail\nlocation\nnetrc\nretry = 2\nno-silent\n")
    assert alice.ask(f"{registry.host}#{IMAGE}:1").digest == digest
