"""Debian trees come from where the machine's own apt gets its packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from host import ClusterError
from mirror import mirror, proxy

HERE = "http://127.0.0.1:9/debian"
OTHER = "http://127.0.0.1:9/other"
NO_DEBIAN = f"deb {OTHER} bookworm stable\ndeb {OTHER} /\ndeb {OTHER} bookworm-security main\n"


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of apt's own, whose sources are in the same folder."""
    file = tmp_path / "apt.conf"
    file.write_text(f'#clear Acquire::http::Proxy;\nDir::Etc "{tmp_path}";\n')
    (tmp_path / "sources.list.d").mkdir()
    monkeypatch.setenv("APT_CONFIG", str(file))
    return file


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sources.list", f"{NO_DEBIAN}deb mirror+{OTHER} sid main\ndeb {HERE} sid main\n"),
        ("sources.list.d/a.sources", f"Types: deb\nURIs: {HERE}\nSuites: sid\nComponents: main\n"),
    ],
)
def test_mirror_is_apts_first_with_a_release_of_debian(apt: Path, name: str, text: str) -> None:
    (apt.parent / name).write_text(text)
    assert mirror() == HERE


def test_apt_without_debian_is_an_error(apt: Path) -> None:
    (apt.parent / "sources.list").write_text(NO_DEBIAN)
    with pytest.raises(ClusterError, match="no Debian mirror"):
        mirror()


PROXY = 'Acquire::http::Proxy "http://127.0.0.1:8/";\n'


@pytest.mark.parametrize(
    ("configured", "environment"),
    [
        ("", {}),
        (PROXY, {"http_proxy": "http://127.0.0.1:8/"}),
        (f'{PROXY}Acquire::http::Proxy::127.0.0.1 "DIRECT";\n', {"no_proxy": "127.0.0.1"}),
    ],
)
def test_proxy_of_apt_is_debootstraps(
    apt: Path, configured: str, environment: dict[str, str]
) -> None:
    with apt.open("a") as file:
        file.write(configured)
    assert proxy(HERE) == environment
