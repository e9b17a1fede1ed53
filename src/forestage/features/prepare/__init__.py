"""Before jobs: images are packed, published, staged and warmed by hand."""
