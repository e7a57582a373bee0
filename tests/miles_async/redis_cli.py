"""`redis-cli` where there is none: one command, sent to a real server, its reply on stdout as a script of redis-cli's has it.

Of its options it knows what our pages use: -s SOCKET, and the password in REDISCLI_AUTH. That redis-cli itself takes the words as
written is not shown by it; that the server knows the command, the keys are there and the reply is one, is. A refusal: status 1.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import hiredis

DEADLINE_S = 10.0


def ask(path: str, *commands: Sequence[str]) -> list[Any]:
    """The reply to each command, a refusal as an exception in its place."""
    reader = hiredis.Reader(notEnoughData=Ellipsis)
    replies: list[Any] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(DEADLINE_S)
        server.connect(path)
        server.sendall(b"".join(hiredis.pack_command(tuple(command)) for command in commands))
        while len(replies) < len(commands):
            if (reply := reader.gets()) is not Ellipsis:
                replies.append(reply)
            elif not (data := server.recv(1 << 16)):
                raise ConnectionError(f"{path} closed the connection")
            else:
                reader.feed(data)
    return replies


def lines(reply: Any) -> list[str]:
    """As redis-cli prints them into a pipe: a line for each value, an empty one for none."""
    if isinstance(reply, list):
        return [line for one in reply for line in lines(one)]
    return ["" if reply is None else reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)]


def main(words: Sequence[str]) -> int:
    """Command line."""
    if len(words) < 3 or words[0] != "-s":
        print(f"not known here: {' '.join(words)}", file=sys.stderr)
        return 2
    secret = os.environ.get("REDISCLI_AUTH")
    replies = ask(words[1], *([("AUTH", secret)] if secret else []), words[2:])
    if refused := [reply for reply in replies if isinstance(reply, Exception)]:
        print(refused[0], file=sys.stderr)
        return 1
    print("\n".join(lines(replies[-1])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
