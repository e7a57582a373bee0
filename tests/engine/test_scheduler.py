"""The scheduler's thread, without HTTP: what others see when it fails, and when what they ask fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.generation.engines.embedded.batch import Batch
from actors.generation.engines.embedded.config import ModelRefused, read_config
from actors.generation.engines.embedded.model import Decoder
from actors.generation.engines.embedded.request import Request
from actors.generation.engines.embedded.scheduler import Posted, Scheduler
from actors.generation.engines.embedded.weights import load_weights


class Breaking(Decoder):
    """Fails at its third decode step."""

    steps = 0

    def decode(self, *args: Any, **fields: Any) -> Tensor:
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("out of memory")
        return super().decode(*args, **fields)


class Seen:
    """What the scheduler posted, until the last of `n` requests has ended."""

    def __init__(self, n: int) -> None:
        self.posted: Posted = []
        self.deaths: list[BaseException] = []
        self.ended = threading.Event()
        self._left = n

    def post(self, posted: Posted) -> None:
        self.posted += posted
        self._left -= sum(progress.finish is not None for _, progress in posted)
        if self._left == 0:
            self.ended.set()


def start(decoder: Decoder, seen: Seen) -> Scheduler:
    scheduler = Scheduler(
        decoder,
        version="1",
        max_running=4,
        max_total_tokens=1000,
        stream_interval=1,
        post=seen.post,
        on_death=seen.deaths.append,
    )
    scheduler.start()
    return scheduler


@pytest.fixture
def model_dir(models: Callable[[str], tuple[Path, Path]]) -> Path:
    torch.set_num_threads(1)
    return models("qwen3")[0]


def test_a_failing_model_ends_every_request_and_says_so(model_dir: Path) -> None:
    decoder = Breaking(read_config(model_dir))
    load_weights(decoder, model_dir)
    seen = Seen(2)
    scheduler = start(decoder, seen)
    for rid in ("a", "b"):
        scheduler.submit(Request(rid=rid, prompt=[2, 3], limit=50, stream=True))
    assert seen.ended.wait(20)
    scheduler.close(20)
    assert [str(error) for error in seen.deaths] == ["out of memory"]
    for rid in ("a", "b"):
        last = [progress for request, progress in seen.posted if request.rid == rid][-1]
        assert last.finish is not None
        assert (last.finish["type"], last.finish["status_code"]) == ("abort", 500)
        assert "out of memory" in last.finish["message"]


def test_a_refused_update_is_told_to_its_asker_only(model_dir: Path, tmp_path: Path) -> None:
    decoder = Decoder(read_config(model_dir))
    load_weights(decoder, model_dir)
    seen = Seen(1)
    scheduler = start(decoder, seen)
    scheduler.submit(Request(rid="a", prompt=[2, 3], limit=200))
    with pytest.raises(ModelRefused):
        scheduler.call(lambda: scheduler.update_weights(lambda into: load_weights(into, tmp_path), "2")).result(20)
    assert seen.ended.wait(20)
    assert (scheduler.call(scheduler.load).result(20).version, seen.deaths) == ("1", [])
    [(request, last)] = seen.posted
    assert (last.n_tokens, last.version, last.finish) == (200, "1", {"type": "length", "length": 200})
    assert request.retractions == 0
    scheduler.close(20)


def test_who_asked_and_left_costs_the_engine_nothing(model_dir: Path) -> None:
    seen = Seen(1)
    scheduler = start(Decoder(read_config(model_dir)), seen)
    go_on = threading.Event()
    busy = scheduler.call(lambda: go_on.wait(20))
    asked: list[str] = []
    left = scheduler.call(lambda: asked.append("who left"))
    stays = scheduler.call(lambda: asked.append("who stays"))
    assert left.cancel()  # as a handler's is when its client closes the connection
    go_on.set()
    assert busy.result(20)
    stays.result(20)
    assert (asked, seen.deaths) == (["who stays"], [])
    scheduler.close(20)


def test_a_repeatable_engine_gives_a_sample_the_same_numbers_in_any_company(model_dir: Path) -> None:
    decoder = Decoder(read_config(model_dir), repeatable=True)
    load_weights(decoder, model_dir)

    def made(company: int) -> list[tuple[float, int, None]]:
        batch, joining = Batch(decoder, 64, 1 << 16), [Request(rid="one", prompt=[2, 3, 5], limit=40, seed=7)]
        others = [Request(rid=f"{i}", prompt=[i % 30 + 2] * (i % 9 + 1), limit=5 + i % 40) for i in range(company)]
        with torch.inference_mode():
            batch.prefill([*others[::2], *joining])
            batch.decode()
            batch.prefill(others[1::2])
            while joining[0].finish is None:
                batch.decode()
        return joining[0].pairs

    assert made(0) == made(31) == made(7)
