"""Counters and the node's state, for Prometheus."""
