"""The Redis behind the bus: find a binary, run a private one, connect safely, refuse an unfit one."""

from bus.server.binary import find_server
from bus.server.embedded import EmbeddedRedis

__all__ = ("EmbeddedRedis", "find_server")
