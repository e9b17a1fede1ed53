"""What `forestage explain` says of an image of a registry."""

from __future__ import annotations

from histories import event, hit, printed


def test_image_of_a_registry_is_told_with_the_digest_that_was_meant() -> None:
    assert "digest   sha256:abc" in printed(event(hit(request="here#a", digest="sha256:abc")))
    assert "digest" not in printed(event(hit()))
