"""The command `forestage`, for people and timers: a module for each command, or for a pair."""
