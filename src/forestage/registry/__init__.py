"""Images from registries: the reference, the user's settings, and the digest that a tag means."""
