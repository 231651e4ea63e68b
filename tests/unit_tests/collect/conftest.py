"""Fixtures of the tests of collect."""

from tests.helpers.collecting import collect  # noqa: F401
from tests.helpers.postgres import postgres  # noqa: F401
