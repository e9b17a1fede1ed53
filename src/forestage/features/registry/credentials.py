"""enroot's .credentials: a file in netrc's format whose passwords may be shell.

    machine nvcr.io login $oauthtoken password nvapi-…
    machine registry.example.org login alice password $(pass show registry)

enroot has all of it evaluated and given to curl, which takes the first entry of the token server's
host. Here a password is evaluated only if it is for the host that is asked and for the user who was
named or inferred, and goes to no other; `default` entries are for no host. Called as the user only:
the file is theirs, and what it runs.
"""

import base64
import os
import re
from collections.abc import Callable, Iterator

import msgspec

from forestage.system.files import open_descriptor

LONGEST = 1 << 20  # bytes of the file

_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)')
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_SHELL_FIELD = 5  # counted from 0: machine HOST login USER password $…

ShellEvaluator = Callable[[str], str]
"""Has a shell echo the words of a password; returns what it wrote."""


class RegistryLogin(msgspec.Struct, frozen=True):
    """A user's name and password at one host."""

    user: str
    password: str

    @property
    def basic_authorization(self) -> str:
        """The value of an Authorization header."""
        pair = f"{self.user}:{self.password}".encode(errors="surrogateescape")
        return f"Basic {base64.b64encode(pair).decode()}"


def read_text_or_empty(path: str) -> str:
    """Returns what the file says; "" where it cannot be read, is a FIFO, or is too long."""
    try:
        with open_descriptor(path, os.O_RDONLY | os.O_NONBLOCK) as handle:
            found = b"".join(_read_pieces(handle))
    except (OSError, ValueError):
        return ""
    return "" if len(found) > LONGEST else found.decode(errors="surrogateescape")


def _read_pieces(handle: int) -> Iterator[bytes]:
    """An open file's content, one byte more than LONGEST at most."""
    left = LONGEST + 1
    while left and (piece := os.read(handle, left)):
        left -= len(piece)
        yield piece


def infer_user(text: str, registry: str) -> str:
    """Returns the user whom enroot infers for a registry: of the first line that names both."""
    wanted = ["machine", _strip_port(registry), "login"]
    lines = map(str.split, text.split("\n"))
    return next((words[3] for words in lines if len(words) > 3 and words[:3] == wanted), "")


def has_entry(text: str, registry: str, user: str) -> bool:
    """Whether enroot would use this file: a line names the registry, without its port, and user."""
    wanted = ["machine", _strip_port(registry), "login", user]
    return any(
        line.startswith("machine") and line.split()[:4] == wanted and len(line.split()) > 4
        for line in text.split("\n")
    )


def find_login(text: str, host: str, user: str, evaluate: ShellEvaluator) -> RegistryLogin | None:
    """Returns what the file has for this user at this host, without a port; None if nothing."""
    for machine, found in _parse_entries(_evaluate_passwords(text, host, user, evaluate)):
        is_theirs = machine and machine.lower() == host.lower() and found.user == user
        if is_theirs and found.password:
            return found
    return None


def _strip_port(registry: str) -> str:
    """A registry's name without its port, as in enroot's ${registry%:*}."""
    return registry.rpartition(":")[0] or registry


def _evaluate_passwords(text: str, host: str, user: str, evaluate: ShellEvaluator) -> str:
    """The file with this user's passwords at this host evaluated, without all others in shell."""
    lines = []
    for line in text.split("\n"):
        words = line.split(None, _SHELL_FIELD)
        if len(words) > _SHELL_FIELD and words[_SHELL_FIELD].startswith("$"):
            if words[0] != "machine" or words[1].lower() != host.lower() or words[3] != user:
                continue
            line = " ".join((*words[:_SHELL_FIELD], evaluate(words[_SHELL_FIELD])))
        lines.append(line)
    return "\n".join(lines)


def _parse_entries(text: str) -> Iterator[tuple[str, RegistryLogin]]:
    """The entries as curl reads them: words, quoted words, comments, macros up to an empty line."""
    machine, values = "", {"login": "", "password": ""}
    words = iter(_split_words(text))
    for word in words:
        if word in ("machine", "default"):
            yield machine, RegistryLogin(values["login"], values["password"])
            machine = next(words, "") if word == "machine" else ""
            values = {"login": "", "password": ""}
        elif word in values:
            values[word] = next(words, "")
    yield machine, RegistryLogin(values["login"], values["password"])


def _split_words(text: str) -> Iterator[str]:
    in_macro = False
    for line in text.split("\n"):
        in_macro = in_macro and bool(line.strip())
        if in_macro or line.lstrip().startswith("#"):
            continue
        for match in _WORD.finditer(line):
            if match[0] == "macdef":
                in_macro = True
                break
            yield match[2] or re.sub(r"\\(.)", lambda one: _ESCAPED.get(one[1], one[1]), match[1])
