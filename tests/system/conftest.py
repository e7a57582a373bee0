"""Whole runs of the real launcher, with the toy of the crash tests."""

from tests.crash.conftest import run_of, toy

__all__ = ("run_of", "toy")
