"""A directory as one entry of the cache (to be written)."""
