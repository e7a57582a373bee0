"""An SGLang server whose versions are adapters beside a base that it loaded itself.

Each version is an adapter of a name of its own, and each request names one. Always true: tokens of a request were made by the
version whose adapter it named, whatever the server states, since an adapter never changes under its name; SGLang (0.5.23) keeps
keys and values by adapter; and one is unloaded only when two newer ones are there and no request of ours names it.

When a version comes, requests end with what they have and go on as new ones that name the new adapter: one that stayed would go on
with the old one to its end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec

from actors.generation.engine import Attached, BootRefused, Chunk, EngineUnavailable, GenerateRequest, RequestRefused
from actors.generation.engines.sglang.args import too_old
from actors.generation.engines.sglang.client import FLAT, SGLangClient
from actors.runtime.lora import AdapterShape
from bus.messages.weights import Bucket


class AdapterClient(SGLangClient):
    """See above. `adapters`: what every version has the shape of."""

    def __init__(self, base_url: str, *, adapters: AdapterShape, **told: Any) -> None:
        super().__init__(base_url, **told)
        self._shape = adapters
        self._loads = itertools.count(1)
        self._name = ""  # the adapter of new requests; empty = none has come
        self._label = ""  # the version that it is
        self._loaded: list[str] = []  # on the server, oldest first
        self._named: Counter[str] = Counter()  # adapter -> requests of ours that name it

    async def look(self, *, own: bool, model_path: str, routed: bool) -> Attached:
        return replace(await super().look(own=own, model_path=model_path, routed=routed), exact=False, exact_in_place=False)

    async def info(self) -> Mapping[str, Any]:
        info = await super().info()
        self.counts_when_receiving = False
        if why := too_old(str(info.get("version") or "")):
            raise BootRefused(f"{self.base_url}: {why}.")
        if not info.get("enable_lora"):
            raise BootRefused(f"{self.base_url} was started without --enable-lora, which lora_publish = adapters needs.")
        return info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        name, label = self._name, self._label
        if not name:
            raise EngineUnavailable(f"{self.base_url} was asked for request {request.rid} before it had an adapter.")
        self._named[name] += 1
        try:
            async with aclosing(super().generate(msgspec.structs.replace(request, adapter=name))) as chunks:
                async for chunk in chunks:
                    yield msgspec.structs.replace(chunk, weight_version=label)
        finally:
            self._named[name] -= 1

    async def pause_counted(self, version: str) -> int | None:
        return None

    def count_as_older(self, version: str) -> bool:
        return False  # its requests must end: they name the older adapter

    async def update_weights_from_disk(self, path: str, version: str) -> None:
        await self._load("/load_lora_adapter", {"lora_path": path}, version)

    async def update_weights_from_tensor(self, handles: Sequence[str], version: str | None, quick: Sequence[str] = ()) -> None:
        if version is None:
            raise RequestRefused(f"{self.base_url} takes an adapter in one bucket: raise --update-weight-buffer-size")
        plain = {"peft_type": "LORA", "bias": "none", "target_modules": self._shape.targets}
        config = plain | {"r": self._shape.rank, "lora_alpha": self._shape.alpha}
        body = {"config_dict": config, "serialized_named_tensors": handles, "load_format": FLAT}
        await self._load("/load_lora_adapter_from_tensors", body, version)

    async def _load(self, path: str, body: dict[str, Any], version: str) -> None:
        """An adapter under a new name, which requests name from then on. RequestRefused: those go on with the one before."""
        name = f"{version}.{next(self._loads)}"
        await self._calls.post(path, {"lora_name": name} | body)
        self._loaded.append(name)
        self._name, self._label = name, version
        for old in [n for n in self._loaded[:-2] if not self._named[n]]:
            await self._calls.post("/unload_lora_adapter", {"lora_name": old})
            self._loaded.remove(old)
            del self._named[old]
        await super().set_version(version)

    async def set_version(self, version: str) -> None:
        await super().set_version(version)
        self._label = version

    async def init_weights_update_group(self, **_: Any) -> None:
        raise RequestRefused(f"{self.base_url} takes adapters from files or by ipc, not over a group")

    async def receive(self, buckets: Sequence[Bucket], group: str, version: str, before: str | None = None) -> bool:
        return False

    async def weights_checksum(self) -> Mapping[str, Any]:
        raise RequestRefused(f"{self.base_url} tells no checksums of adapters")
