"""Redirects of the whole node (`redirect: bind`), for sites without the companion.

Their only record is the node's mount table. It stands so far down because sources are opened
beneath such redirects.
"""
