"""The fixtures of this suite."""

from suites import fixtures_of

globals().update(fixtures_of("features/peers/hooks"))
