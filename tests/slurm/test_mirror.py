"""Debian trees come from where the machine's own apt gets its packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from host import ClusterError
from mirror import mirror, proxy

HERE = "http://127.0.0.1:9/debian"
OTHER = "http://127.0.0.1:9/other"


def apt(folder: Path, **files: str) -> Path:
    """/etc/apt with these files; `_` in a name stands for the dot."""
    (folder / "sources.list.d").mkdir()
    for name, text in files.items():
        place = folder if name == "sources_list" else folder / "sources.list.d"
        (place / name.replace("_", ".")).write_text(text)
    return folder


def deb822(**fields: str) -> str:
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


GOOD = {
    "line": {"sources_list": f"deb {HERE} bookworm main\n"},
    "options": {"sources_list": f"deb [ arch=amd64 signed-by=/k ] {HERE} bookworm main # x\n"},
    "folder": {"debian_list": f"deb {HERE} stable main contrib\n"},
    "stanza": {"debian_sources": deb822(Types="deb", URIs=HERE, Suites="sid", Components="main")},
    "continued": {
        "debian_sources": f"# made by hand\ntypes: deb\nuris:\n {HERE}\n# another\n {OTHER}\n"
        "suites: trixie trixie-updates\ncomponents: main\n"
    },
    "security-first": {
        "sources_list": f"deb {OTHER} bookworm-security main\ndeb {HERE} bookworm main\n"
    },
    "source-only-first": {"sources_list": f"deb-src {OTHER} sid main\ndeb {HERE} sid main\n"},
    "others-first": {
        "a_list": f"deb {OTHER} bookworm stable\ndeb {OTHER} /\n# deb {OTHER} sid main\n",
        "b_list": f"deb cdrom:[x]/ sid main\ndeb mirror+{OTHER} sid main\ndeb {HERE} sid main\n",
    },
    "disabled-first": {
        "a_sources": "Enabled: no\n"
        + deb822(Types="deb", URIs=OTHER, Suites="sid", Components="main")
        + "\n"
        + deb822(Types="deb-src deb", URIs=HERE, Suites="sid", Components="main"),
    },
    "ignored-file": {
        "a_list_disabled": f"deb {OTHER} sid main\n",
        "b_list": f"deb {HERE} sid main\n",
    },
}


@pytest.mark.parametrize("name", GOOD)
def test_mirror_is_apts_first_with_a_release_of_debian(tmp_path: Path, name: str) -> None:
    assert mirror(apt(tmp_path, **GOOD[name])) == HERE


def test_apt_without_debian_is_told(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no Debian mirror"):
        mirror(apt(tmp_path, a_list=f"deb {OTHER} bookworm stable\n"))


@pytest.mark.parametrize(
    ("configured", "environment"),
    [
        ("", {}),
        ('Acquire::http::Proxy "http://127.0.0.1:8/";', {"http_proxy": "http://127.0.0.1:8/"}),
        (
            'Acquire::http::Proxy "http://127.0.0.1:8/";Acquire::http::Proxy::127.0.0.1 "DIRECT";',
            {"no_proxy": "127.0.0.1"},
        ),
    ],
)
def test_apts_proxy_is_debootstraps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: str, environment: dict[str, str]
) -> None:
    file = tmp_path / "apt.conf"
    file.write_text(f'#clear Acquire::http::Proxy;\nDir::Etc "{tmp_path}";\n{configured}\n')
    monkeypatch.setenv("APT_CONFIG", str(file))
    assert proxy(HERE) == environment
