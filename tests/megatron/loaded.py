"""What the processes of jobs (pool.py) are forked from: the libraries, and the tests' own modules, whose functions are the jobs.
None of it is collected again: each process would copy what its collector looks at."""

import gc
from importlib import import_module
from pathlib import Path

import_module("transformers.models.qwen3.modeling_qwen3")
for file in sorted(Path(__file__).parent.glob("test_*.py")):
    import_module(f"tests.megatron.{file.stem}")
gc.collect()
gc.freeze()
