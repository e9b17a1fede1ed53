"""Texts and file names of users: read as they were meant, and one line of the log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings

from forestage.sources import opening
from forestage.system import as_user
from forestage.system.as_user import User
from properties import MORE, TEXT


@given(TEXT)
@hypothesis_settings(
    max_examples=15 * MORE,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_os_error_with_any_file_name_is_passed_from_child_to_parent(me: User, name: str) -> None:
    """A child that died over a name would be our failure, which may drain the node."""

    def work() -> as_user.ChildResult[None]:
        raise OSError(2, "No such file", name)

    with pytest.raises(FileNotFoundError) as caught:
        as_user.run_in_child(work, type(None), 10.0)
    # As bytes: two pieces that are no text may be text together.
    assert os.fsencode(caught.value.filename or "") == os.fsencode(name)


@pytest.mark.parametrize("name", ["\udcff", "a\udc80b", "\n", "x" * 300])
def test_save_path_with_a_non_text_or_long_name_is_resolved(
    tmp_path: Path, me: User, name: str
) -> None:
    assert opening.resolve_save_path(f"{tmp_path}/{name}", me, 10.0)[0] == f"{tmp_path}/{name}"
