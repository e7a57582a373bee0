"""The quickstart task: arithmetic problems (`data`), their tokenizer, and a tiny warm-started Qwen3 (`model`).

Importing this package stays cheap: only `model` and `warm_start` import torch.
"""

from miles_async.quickstart.data import DATA_SEED, Problem, make_problems

__all__ = ("DATA_SEED", "Problem", "make_problems")
