"""What a worker is told at its start."""

from __future__ import annotations

from typing import Any

import msgspec

from actors.runtime.child import ArgValue
from actors.runtime.lora import AdapterShape


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout of several turns: with the tools that ship, or an agent of the user's behind the OpenAI interface."""

    tools: tuple[str, ...]
    corpus: str
    max_turns: int
    parser: str
    """Format of tool calls; auto = the one of the chat template."""
    function: str
    """The agent's dotted path; empty = the tools."""
    idle_s: float
    template_path: str
    """File with a chat template; empty = the model's own."""
    template_kwargs: str
    """Arguments of the template, a JSON object."""
    allow_weak_sandbox: bool


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Start-up settings of a worker. `engine`: its kind (engines/records.py), by name or dotted path; `engine_url`: where it runs,
    if its worker does not start it. `router_url`: the router before all engines, empty = none."""

    model_path: str = ""
    engine: str = "embedded"
    engine_url: str = ""
    router_url: str = ""
    threads: int = 1
    max_running: int = 256
    request_deadline_s: float = 3600.0
    token_deadline_s: float = 60.0
    control_deadline_s: float = 60.0
    boot_deadline_s: float = 180.0
    verify_checksum: bool = True
    check_equal: bool = False
    """Compare what came without files with the files of the same version, by the engine's own checksums."""
    hold_s: float = 60.0
    """Longest wait of a sample here for the version it needs; then it is parked, for a peer that has it."""
    mask_offpolicy: bool = False
    program: str = ""
    """Rollout program by dotted path; empty = one turn in answer to the prompt."""
    program_values: dict[str, Any] = {}
    """What a program of Miles' signature finds on its `args`, beside the settings."""
    program_deadline_s: float = 3600.0
    """Longest run of such a program on one worker; then its sample is tried again, and given up after some tries."""
    rollout_function: str = ""
    """Function of Miles' that makes whole groups, by dotted path; empty = none. Only one worker has it."""
    takes_samples: bool = True
    """False: its engine answers for the worker with the rollout function, and it takes no samples itself."""
    agent: AgentSpec | None = None
    environments_s: float = 0.0
    """Longest time of one action of an environment in the environments room; 0 = the run has none."""
    context_length: int = 0
    gpus: tuple[int, ...] = ()
    """GPUs of this worker's SGLang server, as this host counts them; empty = all visible ones."""
    maps: tuple[int, ...] = ()
    """GPUs of the same count whose memory that server maps: the trainer's that exports weights (ipc)."""
    tp_size: int = 1
    nodes: int = 1
    """Hosts of the SGLang server. We start the first part of it, the launcher the others (node.py)."""
    meeting: str = ""
    """HOST:PORT where the parts meet, on the first one's host."""
    server_command: tuple[str, ...] = ()
    """Program and first words of an SGLang server; empty = this Python's."""
    server_args: dict[str, ArgValue] = {}
    """SGLang's own flags without dashes, passed on as they are."""
    seed: int = 0
    tail_wait_s: float = 10.0
    """Longest wait of a sample for a worker of the tail's lane; then any worker takes it."""
    inside: str = ""
    """Folder of the letters to our function inside the server at `engine_url`, if it runs it (inside.py)."""
    draws: bool = False
    """Our function inside an SGLang server draws next tokens where sampling is plain (sampling.py)."""
    token: str = ""
    """What the engines and the router of this run ask of their callers; empty = nothing. Made by the launcher."""
    transport: str = ""
    """How versions come that are not whole files: a record, by name or the dotted path of a user's own; no other path is loaded."""
    serves: bool = False
    """Versions that came to this host over the network are served to the next one."""
    serve_at: str = ""
    """HOST[:PORT] at which they are; empty = our address on the bus, any port."""
    weights_token: str = ""
    """What hosts ask of each other for weights."""
    adapters: AdapterShape | None = None
    """Versions are adapters of this shape, beside the base that the engine has; None = whole weights."""
    routed: bool = False
    """Samples bring the experts that the engine chose for their tokens."""
    gives_back: tuple[str, ...] = ()
    """What the engine gives back in the trainer's turn on the GPU they share, by SGLang's tags; empty = it shares none."""
    lent_s: float = 0.0
    """The GPU is lent by the trainer, which has it back within so many seconds; 0 = it is not (sharing.py)."""
