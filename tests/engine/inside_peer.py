"""A process that treats our function inside SGLang as SGLang does: an HTTP server, a scheduler, a model runner with groups, a
model that fuses tensors. Writes its port into the file it is given; the second word is its number of GPUs, each with weights of
its own."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from actors.generation.engines.sglang import inside
from actors.generation.engines.sglang.args import INSIDE, LOADER
from actors.generation.engines.sglang.inside_client import NO_TENSORS
from actors.runtime.broadcast import join_group
from tests.engine.test_quick_load import Model


class Runner:
    """Owns the groups, and calls the function with its model and whatever tensors came."""

    def __init__(self, rank: int, gpus: int) -> None:
        self.model = Model()
        self.device, self.sampler = "cpu", object()
        self.server_args = SimpleNamespace(
            tp_size=gpus, dp_size=1, enable_deterministic_inference=False, rl_on_policy_target=None,
            enable_nan_detection=False, speculative_algorithm=None, random_seed=1,
        )  # fmt: skip
        self.model.norm.data += rank
        self._model_update_group: dict[str, Any] = {}

    def update_weights_from_tensor(self, tensors: list[Any], load_format: str) -> None:
        assert load_format == INSIDE
        inside.run(self.model, tensors)


class Scheduler:
    """Paused, with one request whose step is kept back."""

    def __init__(self, rank: int, gpus: int) -> None:
        self.runner = Runner(rank, gpus)
        request = SimpleNamespace(rid="r", output_ids=[1, 2, 3], finished=lambda: False, is_retracted=False, is_chunked=0)
        batch = SimpleNamespace(reqs=[request], forward_mode=SimpleNamespace(is_extend=lambda: False))
        self._engine_paused = True
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.pp_size = self.dp_size = 1
        self.tp_rank = rank
        self.waiting_queue: list[Any] = []
        self.running_batch = self.last_batch = batch
        self.result_queue = [(batch, None)]

    def update(self, body: dict[str, Any]) -> None:
        assert body["serialized_named_tensors"][self.tp_rank] == NO_TENSORS
        self.runner.update_weights_from_tensor([], body["load_format"])


async def main(port_file: Path, gpus: int) -> None:
    schedulers, said = [Scheduler(rank, gpus) for rank in range(gpus)], {"version": "default"}
    scheduler = schedulers[0]

    async def update(request: web.Request) -> web.Response:
        for one in schedulers:
            await asyncio.to_thread(one.update, await request.json())
        return web.json_response({"success": True})

    async def join(request: web.Request) -> web.Response:
        body = await request.json()
        group = await asyncio.to_thread(
            join_group, body["master_address"], body["master_port"], body["rank_offset"], body["world_size"],
            body["group_name"], backend=body["backend"], deadline=timedelta(seconds=20),
        )  # fmt: skip
        scheduler.runner._model_update_group[body["group_name"]] = group
        return web.json_response({"success": True})

    async def label(request: web.Request) -> web.Response:
        said["version"] = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"custom_weight_loader": [LOADER, INSIDE], "tp_size": gpus, "version": inside.TESTED[0]})

    async def state(request: web.Request) -> web.Response:
        model = scheduler.runner.model
        weights = {"qkv": model.qkv.tolist(), "norm": model.norm.tolist()}
        return web.json_response({**said, **weights, "asked": model.asked, "sampler": type(scheduler.runner.sampler).__name__})

    async def pause(request: web.Request) -> web.Response:
        scheduler._engine_paused = request.path == "/pause_generation"
        return web.json_response({"success": True})

    app = web.Application()
    app.router.add_post("/update_weights_from_tensor", update)
    app.router.add_post("/init_weights_update_group", join)
    app.router.add_post("/update_weight_version", label)
    app.router.add_post("/pause_generation", pause)
    app.router.add_post("/continue_generation", pause)
    app.router.add_get("/server_info", info)
    app.router.add_get("/state", state)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port_file.write_text(str(runner.addresses[0][1]))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
