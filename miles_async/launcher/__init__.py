"""Starts and keeps a run's processes. Owns only what it started: never kills by name, never flushes a Redis."""
