"""Environments that live longer than a call: each in a process of its own, kept for its episode."""
