"""Fixtures of the tests of collect."""

from tests.helpers.collecting import collect, output, source  # noqa: F401
