"""`miles-async train` on a server that somebody else booted with our functions inside, so that runs share one boot.

    MILES_ASYNC_SHARED_INSIDE='{"127.0.0.1:30000": DIR}' python -m scripts.bench gpu_tails_run train ...

DIR: that server's folder of letters (actors/generation/engines/sglang/inside.py). A run cannot know it of an external engine, and
without it in_place acts like retract.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import msgspec

VARIABLE = "MILES_ASYNC_SHARED_INSIDE"


def main() -> int:
    from miles_async.cli.app import main as miles_async
    from miles_async.launcher import engines

    inside, spec_of = json.loads(os.environ.get(VARIABLE, "{}")), engines.generation_spec

    def with_inside(*args: Any, **fields: Any) -> Any:
        spec = spec_of(*args, **fields)
        return msgspec.structs.replace(spec, inside=inside.get(spec.engine_url.removeprefix("http://"), spec.inside))

    engines.generation_spec = with_inside
    return miles_async()


if __name__ == "__main__":
    sys.exit(main())
