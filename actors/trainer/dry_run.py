"""`python -m actors.trainer.dry_run < OBJECTIVE.json`: try the hooks of an objective before any model loads.

The launcher runs this in a process of its own, since it loads torch and the user's code. Prints one JSON object on stdout,
`{}` when all hooks are sound, else field, path, problem and remedy; exit status 0 or 2. What hooks print goes to stderr.
"""

from __future__ import annotations

import os
import sys

import msgspec

from actors.runtime.hooks import own_stdout
from actors.trainer.objective_config import HookError, ObjectiveConfig


def main() -> int:
    """Read, probe, answer."""
    cfg = msgspec.json.decode(sys.stdin.buffer.read(), type=ObjectiveConfig)
    answer: dict[str, str] = {}
    with own_stdout() as answers:
        from actors.trainer.hooks import probe

        try:
            probe(cfg)
        except HookError as error:
            answer = {"field": error.field, "path": error.path, "problem": error.problem, "remedy": error.remedy}
        answers.write(msgspec.json.encode(answer))
    return 2 if answer else 0


if __name__ == "__main__":
    os._exit(main())  # no thread that a hook began is waited for
