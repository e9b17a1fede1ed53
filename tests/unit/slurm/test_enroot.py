"""What enroot's configuration says."""

from __future__ import annotations

from forestage.slurm.enroot import LONGEST, UNKNOWN, JobVariables


def test_text_that_its_variables_make_longer_than_any_path_is_not_made() -> None:
    given = JobVariables({"A": "a" * LONGEST, "B": "b"}, all_known=True)
    assert given.expanded("/${A}") == f"/{'a' * LONGEST}"
    assert given.expanded("/${A}${B}") == UNKNOWN
    assert given.asked.keys() == {"A", "B"}
