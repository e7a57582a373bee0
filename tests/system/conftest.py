"""Whole runs of the real launcher, with the toy of the crash tests."""

from tests.crash.conftest import pytest_runtest_makereport, run_of, toy

__all__ = ("pytest_runtest_makereport", "run_of", "toy")
