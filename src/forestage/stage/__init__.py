"""How the bytes come: the wait, the stager, its pipeline and engines."""
