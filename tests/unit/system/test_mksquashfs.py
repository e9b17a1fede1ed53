"""What mksquashfs is told of the memory that it may take."""

from __future__ import annotations

import pytest

from forestage.system import mksquashfs


@pytest.mark.parametrize(
    ("version", "knows"),
    [
        (b"mksquashfs version 4.5.1 (2022/03/17)\n", True),
        (b"mksquashfs version 4.10 (2030/01/01)\n", True),
        (b"mksquashfs version 4.3 (2014/05/12)\n", False),
        (b"", False),
    ],
)
def test_mksquashfs_version_with_a_memory_option_is_recognised(version: bytes, knows: bool) -> None:
    assert mksquashfs.has_memory_option(version) is knows


@pytest.mark.parametrize(
    ("limit", "named"), [(8 << 30, "2048M"), (300 << 20, "75M"), (150 << 20, "64M"), (0, "64M")]
)
def test_memory_option_of_mksquashfs_is_a_quarter_of_the_limit_and_at_least_64_mib(
    limit: int, named: str
) -> None:
    assert mksquashfs.format_memory_options(limit) == ("-mem", named)
