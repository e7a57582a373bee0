"""Fully asynchronous RL post-training: long-lived actors that meet only on Redis streams."""

__version__ = "0.1.0"
