"""Weights that reach the embedded engine without files, and files that hold only what changed: the calls of SGLang, over gloo
and shared memory instead of NCCL and CUDA IPC.

Owns the broadcast groups it joined. Always true: a bucket is received whole and checked before any of it is loaded, and what
comes in is bytes of tensors and JSON; nothing is unpickled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from aiohttp import web
from torch import Tensor

from actors.generation.engines.embedded.config import ModelRefused
from actors.generation.engines.embedded.decoders import Decodes
from actors.generation.engines.embedded.weights import checksums, load_tensors
from actors.generation.engines.embedded.wire import (
    BadRequest,
    BroadcastBody,
    CheckerBody,
    GroupBody,
    LeaveBody,
    TensorBody,
    decode_body,
    json_answer,
)
from actors.runtime.broadcast import join_group, leave_group
from actors.runtime.flat import size_of, views
from bus.messages.weights import FileHandle, TensorMeta

GROUP_DEADLINE = timedelta(seconds=60)


class LoadInto(Protocol):
    """Runs a function on the model, between two steps of generation."""

    async def __call__(self, load: Callable[[Decodes], Any], version: str | None, *, changes: bool = True) -> Any: ...


class Receiver:
    """Routes of the server; `load_into` reaches its model."""

    def __init__(self, load_into: LoadInto) -> None:
        self._load_into = load_into
        self._groups: dict[str, Any] = {}

    def routes(self, router: web.UrlDispatcher) -> None:
        """Add the calls of this file."""
        router.add_post("/init_weights_update_group", self._join)
        router.add_post("/destroy_weights_update_group", self._leave)
        router.add_post("/update_weights_from_distributed", self._from_broadcast)
        router.add_post("/update_weights_from_tensor", self._from_shared_memory)
        router.add_post("/weights_checker", self._check)

    async def _join(self, http: web.Request) -> web.Response:
        body = decode_body(await http.read(), GroupBody)
        if body.group_name in self._groups:
            return _said(f"already in group {body.group_name}.", 400)

        def join() -> Any:
            return join_group(
                body.master_address,
                body.master_port,
                body.rank_offset,
                body.world_size,
                body.group_name,
                backend=body.backend,
                deadline=GROUP_DEADLINE,
            )

        try:
            self._groups[body.group_name] = await asyncio.to_thread(join)
        except (RuntimeError, OSError, ValueError) as error:
            return _said(f"group {body.group_name} cannot be joined: {error}", 400)
        return _said("Succeeded to initialize custom process group.")

    async def _leave(self, http: web.Request) -> web.Response:
        body = decode_body(await http.read(), LeaveBody)
        group = self._groups.pop(body.group_name, None)
        if group is None:
            return _said(f"not in group {body.group_name}.", 400)
        await asyncio.to_thread(leave_group, group)
        return _said("Succeeded to destroy custom process group.")

    async def _from_broadcast(self, http: web.Request) -> web.Response:
        body = decode_body(await http.read(), BroadcastBody)
        metas = body.tensors()
        flat = torch.empty(_size_of(metas), dtype=torch.uint8)
        group = self._groups.get(body.group_name)
        if group is None:
            return _said(f"not in group {body.group_name}.", 400)

        def receive() -> None:
            torch.distributed.broadcast(flat, src=0, group=group)

        try:
            await asyncio.to_thread(receive)
        except (RuntimeError, ValueError) as error:
            del self._groups[body.group_name]
            return _said(f"The weights may be partially updated: broadcast in group {body.group_name} failed: {error}", 400)
        return await self._load(flat, metas, body.weight_version)

    async def _from_shared_memory(self, http: web.Request) -> web.Response:
        body = decode_body(await http.read(), TensorBody)
        if len(body.serialized_named_tensors) != 1:
            raise BadRequest(f"{len(body.serialized_named_tensors)} handles for an engine of one rank.")
        handle = decode_body(body.serialized_named_tensors[0].encode(), FileHandle)
        n_bytes = _size_of(handle.tensors)
        try:
            if Path(handle.path).stat().st_size < n_bytes:
                return _said(f"{handle.path} is shorter than its {len(handle.tensors)} tensors.", 400)
            flat = torch.from_file(handle.path, shared=True, size=n_bytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            return _said(f"{handle.path} cannot be mapped: {error}", 400)
        return await self._load(flat, handle.tensors, body.weight_version)

    async def _load(self, flat: Tensor, metas: Sequence[TensorMeta], version: str | None) -> web.Response:
        try:
            tensors = dict(views(flat, metas))
            await self._load_into(lambda decoder: load_tensors(decoder, tensors), version)
        except ModelRefused as error:
            return _said(f"The weights may be partially updated: {error}", 400)
        return _said("Succeeded to update model weights.")

    async def _check(self, http: web.Request) -> web.Response:
        decode_body(await http.read(), CheckerBody)
        try:
            found = await self._load_into(checksums, None, changes=False)
        except ModelRefused as error:
            return _said(str(error), 400)
        return json_answer({"success": True, "message": "Success.", "ranks": [{"checksums": found}]})


def _size_of(metas: Sequence[TensorMeta]) -> int:
    try:
        return size_of(metas)
    except ValueError as error:
        raise BadRequest(str(error)) from None


def _said(message: str, status: int = 200) -> web.Response:
    return json_answer({"success": status == 200, "message": message}, status)
