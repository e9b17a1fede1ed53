"""What `forestage explain` says of an image of a registry."""

from __future__ import annotations

from histories import event, hit, printed


def test_explain_of_a_registry_image_shows_its_digest() -> None:
    assert "digest   sha256:abc" in printed(event(hit(request="here#a", digest="sha256:abc")))
    assert "digest" not in printed(event(hit()))
