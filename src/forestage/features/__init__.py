"""What is not the core: a folder for each feature, which could be deleted."""
