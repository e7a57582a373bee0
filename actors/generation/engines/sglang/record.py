"""What everybody else asks of SGLang: a server that its worker starts, and one that runs at an address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from actors.generation.engines.kind import EngineKind
from actors.kinds import HostFacts, Lack, RuleBroken

if TYPE_CHECKING:
    from pathlib import Path

    from actors.generation.engine import Opened
    from actors.generation.spec import GenerationSpec
    from actors.runtime.child import Child
    from actors.runtime.context import Context


class StartedSGLang(EngineKind, frozen=True, kw_only=True):
    """A server on GPUs of the run, as a child of its worker."""

    def open(self, context: Context, spec: GenerationSpec, folder: Path, spare: Child | None = None) -> Opened:
        from actors.generation.engines.sglang.opening import open_started

        return open_started(context, spec, folder)

    def workers(self, v: Mapping[str, Any]) -> int:
        """As many as the GPUs make."""
        each = int(v["rollout_num_gpus_per_engine"])
        shared = int(v["actor_num_gpus_per_node"]) * (int(v["actor_num_nodes"]) if v["train_master"] is None else 1)
        return int(shared if v["colocate"] else v.get("rollout_num_gpus") or each) // each

    def rules(self, settings: Any) -> Iterator[RuleBroken]:
        """sglang_fused_sampling needs servers of this Python, of one GPU each: ranks would not draw alike."""
        s = settings
        if s.lora_publish == "adapters":
            yield from _adapters(s)
        if not s.sglang_fused_sampling:
            return
        remedy = "Leave it out: SGLang draws by itself."
        if s.sglang_server_command:
            yield RuleBroken("sglang_fused_sampling", True, "sglang_server_command runs another Python", remedy)
        elif s.rollout_num_gpus_per_engine > 1:
            why = f"rollout_num_gpus_per_engine is {s.rollout_num_gpus_per_engine}"
            yield RuleBroken("sglang_fused_sampling", True, why, remedy)

    def findings(self, settings: Any, host: HostFacts) -> Iterator[Lack]:
        from actors.generation.engines.sglang.host import findings

        return findings(settings, host)


def _adapters(s: Any) -> Iterator[RuleBroken]:
    """Of lora_publish = adapters."""
    remedy = "Set --lora-publish merged."
    if s.colocate or s.lend_trainer_gpus:
        why = "servers that give their memory back lose the base, which is not sent again (lora_publish = adapters)"
        yield RuleBroken("colocate" if s.colocate else "lend_trainer_gpus", True, why, remedy)
    if s.transport_kind.asks == "group":
        why = "SGLang takes adapters from files or by ipc (lora_publish = adapters)"
        yield RuleBroken("update_weight_transport", s.update_weight_transport, why, f"Set it to ipc or disk. Or: {remedy}")
    if s.rollout_num_gpus_per_engine > 1 and s.sglang_nnodes > 1:
        yield RuleBroken("sglang_nnodes", s.sglang_nnodes, "adapters go to engines of one host (lora_publish = adapters)", remedy)


class AttachedSGLang(EngineKind, frozen=True, kw_only=True):
    """A server that somebody else started."""

    def open(self, context: Context, spec: GenerationSpec, folder: Path, spare: Child | None = None) -> Opened:
        from actors.generation.engine import Opened
        from actors.generation.engines.sglang.opening import connecting

        return Opened(connecting(spec))

    def workers(self, v: Mapping[str, Any]) -> int:
        return len(v["rollout_external_engine_addrs"])


OPENING = ("actors.generation.engines.sglang.opening",)
SGLANG = StartedSGLang(
    name="sglang",
    told="SGLang servers started by us",
    title="SGLang",
    extra="sglang",
    needs_gpu=True,
    ways=("files", "tensors", "group"),
    takes_flags=True,
    spans_hosts=True,
    behind_router=True,
    takes_adapters=True,
    repeats=True,
    module="sglang",
    command="sglang.launch_server",
    parser=(
        "from sglang.srt.server_args import ServerArgs",
        'ServerArgs.add_cli_args(parser); sys.argv[1:1] = ["--model-path", "-"]',
    ),
    loads=OPENING,
    node="actors.generation.engines.sglang.node",
)
EXTERNAL = AttachedSGLang(
    name="external", told="running ones", boots=False, attached=True, ways=("files", "tensors", "group"), loads=OPENING
)
