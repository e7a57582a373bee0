"""Processes and models for all tests of this folder: megatron-core is loaded once."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.megatron.pool import Pool

# It is there for Linux on x86_64 only; of these tests the layouts and flags need none of it, but one rule for all is simpler.
collect_ignore_glob = [] if find_spec("megatron") else ["test_*.py"]


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return Pool(tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny Qwen3 with tied embeddings, and one with a head of its own."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from tests.megatron.tiny import SHAPE

    root = tmp_path_factory.mktemp("models")
    for k, tied in enumerate((True, False)):
        torch.manual_seed(k)
        AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE, tie_word_embeddings=tied)).save_pretrained(root / str(tied))
    return {"tied": str(root / "True"), "apart": str(root / "False")}
