"""`python -m actors.generation.engines.sglang.node SPEC PART`: becomes part PART (1, 2, ...) of a server spread over hosts.

SPEC is the worker's, which starts part 0 on its own host and alone speaks to the server. It ends with this process, and whoever
started all parts starts them anew together.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from actors.generation.engines.sglang.args import default_command, sglang_env, sglang_flags
from actors.generation.spec import GenerationSpec
from actors.runtime.child import command_line
from actors.runtime.context import ActorSpec


def words_of(spec: GenerationSpec, part: int) -> list[str]:
    """The command of one part. The API key stays with part 0, which has the only door."""
    args = {**sglang_flags(spec, part), "model-path": spec.model_path}
    return command_line(spec.server_command or default_command(), args)


def main() -> None:
    """Never returns."""
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ActorSpec)
    room = msgspec.convert(spec.room, GenerationSpec)
    words = words_of(room, int(sys.argv[2]))
    os.execvpe(words[0], words, {**os.environ, **sglang_env(room)})


if __name__ == "__main__":
    main()
