"""Claim checks: large bodies beside the streams."""
