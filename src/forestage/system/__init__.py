"""The kernel's doors: acting as a user, processes, mounts, locks, files, terminals."""
