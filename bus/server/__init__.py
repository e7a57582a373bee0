"""The Redis behind the bus: find a binary, run a private one, connect safely, refuse an unfit one."""

from bus.server.binary import MINIMUM_VERSION, ServerBinary, find_server, parse_version
from bus.server.checks import ServerFacts, check_server
from bus.server.embedded import EmbeddedRedis

__all__ = (
    "MINIMUM_VERSION",
    "EmbeddedRedis",
    "ServerBinary",
    "ServerFacts",
    "check_server",
    "find_server",
    "parse_version",
)
