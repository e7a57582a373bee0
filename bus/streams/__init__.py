"""Streams, delivery and commits on Redis."""
