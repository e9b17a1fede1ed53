"""What `metrics:` may say."""

from __future__ import annotations

import re

import pytest

from forestage.config import KEYS


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/a/b", "a name that ends in .prom, got '/a/b'"),
        ("/", "a path below /, got '/'"),
        ("//", "a path below /"),
        ("a.prom", "an absolute path, got 'a.prom'"),
        ("", "an absolute path, got ''"),
        ("/a/../b.prom", "'/b.prom', got '/a/../b.prom'"),
        ("/a\nb.prom", "without control characters"),
    ],
)
def test_file_that_node_exporter_would_not_read_is_refused(path: str, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        KEYS["metrics.textfile"].read(path)


def test_file_with_a_hash_is_shown_as_it_is_read() -> None:
    key = KEYS["metrics.textfile"]
    assert key.show(key.read("/a #b.prom")) == '"/a #b.prom"'
