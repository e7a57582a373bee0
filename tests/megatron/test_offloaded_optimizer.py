"""Checkpoints of a training whose optimizer keeps its state on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.offloaded import trained
from tests.megatron.pool import Pool

pytestmark = pytest.mark.timeout(180)


def run(path: str, steps: int, places: dict[str, Any]) -> Any:
    return trained(path, steps, **places)


@pytest.mark.parametrize("before", [0, 1], ids=["in a new process", "in a process that has trained"])
def test_it_goes_on_to_the_last_bit_and_its_checkpoint_holds_plain_values(
    before: int, model_dirs: dict[str, str], tmp_path: Path, pool: Pool
) -> None:
    """Masters and moments; the optimizers that it is made of are this process's own, not the checkpoint's."""
    path, saved = model_dirs["apart"], tmp_path / "saved"
    saved.mkdir()
    [(whole, end, _)] = pool.run(1, run, path, 4, {})
    [(first, _, group)] = pool.run(1, run, path, 2, {"end": str(saved)})
    common = torch.load(saved / "common.pt", weights_only=True)
    assert common["optimizer"]["optimizer"]["param_groups"][0]["step"] == 2
    [(rest, again, resumed)] = pool.run(1, run, path, 2, {"begin": str(saved), "first": 2, "before": before})
    assert first + rest == whole
    assert [name for name, t in again.items() if not torch.equal(t, end[name])] == []
    assert {k: v for k, v in resumed.items() if k != "step"} == {k: v for k, v in group.items() if k != "step"}
