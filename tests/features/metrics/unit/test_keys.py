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
def test_metrics_textfile_key_refuses_a_path_that_node_exporter_would_not_read(
    path: str, what: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        KEYS["metrics.textfile"].parse_value(path)


def test_metrics_textfile_key_quotes_a_path_with_a_hash_when_shown() -> None:
    key = KEYS["metrics.textfile"]
    assert key.format_value(key.parse_value("/a #b.prom")) == '"/a #b.prom"'
