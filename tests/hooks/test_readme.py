"""What the README promises, in the order in which a node meets it. Begin here to read the tests."""

from __future__ import annotations

import pytest

from node import ALICE, SIZE, Node, content, read_as


@pytest.mark.always
def test_readme_story_of_an_image_copied_hit_changed_and_evicted_holds(node: Node) -> None:
    path = node.put("alice/image.sqsh", content(1))

    # Cold: the Prolog copies the image, and its path shows the copy until the job has ended.
    cold = node.prolog(1, path)
    assert cold.outcome.result == "copied"
    assert node.shows_entry(path, cold.outcome.key)
    assert read_as(ALICE, path) == content(1)
    node.epilog(1)
    assert node.shows_source(path)

    # Warm: the next job finds the copy where it is.
    warm = node.prolog(2, path)
    assert (warm.outcome.result, warm.outcome.bytes) == ("hit", 0)
    assert node.shows_entry(path, cold.outcome.key)
    node.epilog(2)

    # Changed: a job reads what the image is now, never what it was.
    node.put("alice/image.sqsh", content(2))
    changed = node.prolog(3, path)
    assert changed.outcome.result == "copied"
    assert read_as(ALICE, path) == content(2)

    # Evicted: for another image the old copy makes way; the one that a job uses stays.
    node.configure(max_size=5 * SIZE // 2)
    other = node.prolog(4, node.put("alice/other.sqsh", content(3)))
    assert other.outcome.result == "copied"
    assert node.entries() == {changed.outcome.key, other.outcome.key}
    assert node.shows_entry(path, changed.outcome.key)
