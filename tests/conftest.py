"""What all tests share."""

from hypothesis import settings

# No deadline: a slow machine is not a bug. No database: a run does not depend on the last one.
settings.register_profile("forestage", deadline=None, database=None)
settings.load_profile("forestage")
