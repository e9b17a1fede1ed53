"""The command `forestage`."""
