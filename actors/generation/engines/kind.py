"""What a kind of inference engine is: one record, which with the adapters that it opens is all there is of an engine.

Importable without torch or an engine's library, since settings read it too: what a worker runs is imported in `open`.

    KIND = MyEngine(name="mine", told="my own server")        my_module.py, for --engine my_module:KIND
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actors.kinds import KindRecord

if TYPE_CHECKING:
    from pathlib import Path

    from actors.generation.engine import Opened
    from actors.generation.spec import GenerationSpec
    from actors.runtime.child import Child
    from actors.runtime.context import Context

APART = 0.03
"""|trainer - engine| log-prob under equal weights, of a trainer in float32 and another program."""
BFLOAT16 = 0.1
"""With a trainer in bfloat16: models of 135M to 4B showed 0.008 to 0.043; another temperature or other weights show 0.2 or more."""


class EngineKind(KindRecord, frozen=True, kw_only=True):
    """A kind of engine. What has no default here must be said; what depends on settings is a method."""

    title: str = ""
    """What messages call its servers; empty = its name."""
    needs_gpu: bool = False
    """It computes on GPUs of the run, `rollout_num_gpus_per_engine` each; else on CPUs, or elsewhere."""
    boots: bool = True
    """Its worker starts it. Else it runs at an address that the settings name, or there is none."""
    generates: bool = True
    """There are engines at all."""
    attached: bool = False
    """It runs at an address of `rollout_external_engine_addrs`."""
    reads_ids: bool = False
    """Token ids reach its model as they are also beside pictures; else its own tokenizer makes text of them, and ids anew."""
    exact: bool = False
    """A chunk never mixes tokens of two versions, whatever becomes of running requests at an update."""
    pauses: tuple[str, ...] = ("retract", "in_place", "abort")
    """What may become of running requests at an update, as `pause_generation_mode` says it."""
    ways: tuple[str, ...] = ("files",)
    """What a transport may ask of it (`Asks` in actors/runtime/transports/kind.py); all take whole files."""
    takes_flags: bool = False
    """Flags of its own are passed on to it (server_args)."""
    spans_hosts: bool = False
    """One engine may have GPUs of several hosts."""
    behind_router: bool = False
    """Several of a host share a router's load unless the settings say otherwise."""
    takes_adapters: bool = False
    """Versions may be adapters alone, beside a base that it loads itself (lora_publish)."""
    repeats: bool = False
    """It can compute as the trainer does, to the last bit (true_on_policy_mode)."""
    module: str = ""
    """Python package that must be installed where it starts; empty = none but ours."""
    command: str = ""
    """Module whose flags are passed on; empty = it has none."""
    parser: tuple[str, str] = ("", "")
    """Python lines that load that module's own parser of flags, and that fill `parser` with them."""
    node: str = ""
    """Module of ours that becomes a further part of an engine that spans hosts."""
    loads: tuple[str, ...] = ()
    """Modules that each of its workers imports: loaded once for all that are forked on a host."""
    spare: tuple[str, ...] = ()
    """Module and words of a process that loads its libraries ahead of a boot; empty = it has none."""

    def open(self, context: Context, spec: GenerationSpec, folder: Path, spare: Child | None = None) -> Opened:
        """A worker's engine of this kind; nothing is started yet. `folder`: its own in the run's, which need not exist.
        `spare`: see `spare` above."""
        raise NotImplementedError(f"engine {self.name} cannot be opened")

    def lacks(self) -> str:
        return "has no method open, which a worker calls" if type(self).open is EngineKind.open else ""

    def workers(self, v: Mapping[str, Any]) -> int:
        """Engines of a run that does not say how many. `v`: settings by name, as far as they are known."""
        return 2

    def gpus(self, v: Mapping[str, Any]) -> int:
        """GPUs of all engines of a run that does not say how many."""
        return int(v["num_generation_workers"]) * int(v["rollout_num_gpus_per_engine"]) if self.needs_gpu else 0

    def cpus(self, threads: int) -> float:
        """CPUs of one worker and its engine. `threads`: engine_threads."""
        return 1.0

    def memory(self, fraction: float, total: int) -> int:
        """Bytes that it holds of a GPU of `total` bytes, of which it is given a `fraction`."""
        return int(fraction * total) if self.needs_gpu else 0

    def tolerance(self, v: Mapping[str, Any]) -> float:
        """Mean |trainer - engine| log-prob that equal weights may show."""
        return BFLOAT16 if v["model_dtype"] == "bfloat16" else APART
