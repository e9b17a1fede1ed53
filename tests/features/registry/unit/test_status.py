"""What `forestage status` says of steps that wait for an image of a registry."""

from __future__ import annotations

import io

from forestage.features.registry.status import format_imports
from forestage.features.registry.step_files import StepImport
from forestage.system.terminal import write_plain

NOW = 1_800_000_000.0
REFERENCE = "nvcr.io#nvidia/pytorch:25.01-py3"


def test_status_table_of_imports_lists_step_user_node_and_stage() -> None:
    said = "enroot writes the image, 3 GiB"
    one = StepImport(4243, 0, "bob", REFERENCE, NOW - 200, 1, "n7", said)
    out = io.StringIO()
    write_plain(format_imports((one,), NOW), out)
    for word in ("1 import under way", "4243.0", "bob", "n7", REFERENCE, said):
        assert word in out.getvalue()
    assert format_imports((), NOW) == ()
