"""What enroot's configuration says."""

from __future__ import annotations

from forestage.slurm.enroot import LONGEST, UNKNOWN, JobVariables


def test_enroot_variable_expansion_longer_than_a_path_is_unknown() -> None:
    given = JobVariables({"A": "a" * LONGEST, "B": "b"}, all_known=True)
    assert given.expand("/${A}") == f"/{'a' * LONGEST}"
    assert given.expand("/${A}${B}") == UNKNOWN
    assert given.queried.keys() == {"A", "B"}
