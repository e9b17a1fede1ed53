"""A plugin's file tells what it defines; a damaged one tells nothing, and never ends the check."""

from __future__ import annotations

import _ctypes
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forestage import elf
from goodnode import shared_object

SMALL = shared_object({"plugin_version": 0x160508, "slurm_spank_job_prolog": 0})


def test_what_a_file_defines_and_what_it_only_wants() -> None:
    found = elf.parse(SMALL)
    assert found is not None
    assert set(found.symbols) == {"plugin_version", "slurm_spank_job_prolog"}
    assert found.word("plugin_version") == 0x160508
    assert found.word("slurm_spank_job_prolog") == 0
    assert found.word("printf") is None


def test_a_real_shared_object() -> None:
    found = elf.parse(Path(_ctypes.__file__).read_bytes())
    assert found is not None
    assert "PyInit__ctypes" in found.symbols
    assert "malloc" not in found.symbols


@pytest.mark.parametrize("data", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(100)])
def test_what_is_no_such_file_is_none(data: bytes) -> None:
    assert elf.parse(data) is None


@given(st.integers(0, len(SMALL)), st.binary(max_size=64))
@example(46, b"\x00\x80")  # the table of sections beyond what any file can have
def test_a_damaged_file_is_no_error(at: int, noise: bytes) -> None:
    for data in (SMALL[:at], SMALL[:at] + noise + SMALL[at + len(noise) :]):
        found = elf.parse(data)
        if found is not None:
            found.word("plugin_version")
