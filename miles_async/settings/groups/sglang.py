"""SGLANG: the inference engines and the rollout workers that drive them."""

from typing import Annotated, Literal

import msgspec

from actors.generation.engines.records import DEFAULT, ENGINES
from actors.kinds import help_of
from actors.runtime.transports.records import TRANSPORTS
from miles_async.settings.doc import Group, PassedOn, PositiveInt, doc


class SglangSettings(Group, frozen=True, kw_only=True):
    """Engines and their workers."""

    engine: Annotated[
        str,
        doc(
            f"{help_of(ENGINES)}; or the dotted path of a record of your own (docs/engines.md).",
            shipped=tuple(ENGINES),
            record=True,
            ours=True,
        ),
    ] = DEFAULT.name
    rollout_external_engine_addrs: Annotated[
        tuple[str, ...], doc("Addresses of running engines, host:port, space separated; for engine external.")
    ] = ()
    num_generation_workers: Annotated[
        int,
        doc(
            "Rollout workers, one engine each, started with the run; more may join at any time.",
            unit="processes",
            derived="one per external engine; for SGLang rollout_num_gpus / rollout_num_gpus_per_engine, else 1; none: 1; else 2",
            ge=0,
            ours=True,
        ),
    ]
    rollout_num_gpus: Annotated[
        int,
        doc(
            "GPUs of all SGLang engines together.",
            unit="GPUs",
            derived="num_generation_workers * rollout_num_gpus_per_engine for engine sglang, else 0",
            ge=0,
        ),
    ]
    rollout_num_gpus_per_engine: Annotated[int, doc("GPUs of one SGLang engine: its tensor parallel size.", unit="GPUs", ge=1)] = 1
    sglang_nnodes: Annotated[
        int,
        doc(
            "Hosts of one SGLang engine, which share its GPUs evenly; more than one needs launcher ray.",
            unit="hosts",
            ge=1,
            derived="with colocate as many of the trainer's nodes as the engine fills, else 1",
            ours=True,
        ),
    ]
    rollout_gpu_ids: Annotated[
        tuple[int, ...],
        doc(
            "GPUs of the engines as nvidia-smi counts them (or positions in CUDA_VISIBLE_DEVICES), engine by engine.",
            derived="those after the trainer's (actor_num_gpus_per_node); with colocate or debug_rollout_only 0, 1, ...",
            ours=True,
        ),
    ]
    colocate: Annotated[
        bool,
        doc(
            "Engines on the trainer's GPUs. With the offload fields they take turns: engines give their memory back while a "
            "step is trained, the trainer while they generate. Samples under way go on where they were."
        ),
    ] = False
    offload: Annotated[bool, doc("Both offload_train and offload_rollout.", derived="colocate")]
    offload_train: Annotated[
        bool, doc("The trainer's memory leaves the GPU in the engines' turn, or while it is lent.", derived="offload")
    ]
    offload_rollout: Annotated[
        bool,
        doc(
            "The engines' memory leaves the GPU in the trainer's turn. Off: there are no turns, both fit at once.",
            derived="offload",
        ),
    ]
    offload_rollout_level: Annotated[
        tuple[Literal["kv_cache", "weight"], ...],
        doc("What engines give back: kv_cache (with CUDA graphs), weight (kept in host memory)."),
    ] = ("kv_cache", "weight")
    offload_train_target: Annotated[
        Literal["cpu", "disk"],
        doc("Where the trainer's memory goes: pinned host memory, or a file in the run's folder."),
    ] = "cpu"
    lend_trainer_gpus: Annotated[
        bool,
        doc(
            "Engines on the trainer's GPUs too: they work while the trainer waits long for a batch, and give the GPUs back, their "
            "samples to peers, before it is complete.",
            ours=True,
        ),
    ] = False
    lend_after_s: Annotated[
        float,
        doc(
            "Least expected wait for a batch for which GPUs are lent; what lending costs is measured.",
            unit="seconds",
            ge=0,
            ours=True,
        ),
    ] = 5.0
    lend_return_s: Annotated[
        float,
        doc(
            "Longest time in which lent GPUs are given back; an engine that takes longer is ended.", unit="seconds", gt=0, ours=True
        ),
    ] = 20.0
    lend_mem_fraction: Annotated[
        float,
        doc(
            "Part of a lent GPU's memory that an SGLang engine takes; the trainer's stays beside it, unless offload_train.",
            derived="0.7 with offload_train, else 0.4",
            gt=0,
            lt=1,
            ours=True,
        ),
    ]
    train_memory_margin_bytes: Annotated[
        int,
        doc(
            "Memory of a shared GPU that the check before the start leaves to activations and the CUDA contexts.",
            unit="bytes",
            ge=0,
        ),
    ] = 4 << 30
    server_args: Annotated[
        dict[str, PassedOn],
        doc(
            "SGLang's own server flags, passed on as they are: --sglang-NAME VALUE, or NAME = VALUE in this table; true is a "
            "bare flag, false takes back a default of ours."
        ),
    ] = {}
    sglang_server_command: Annotated[
        tuple[str, ...],
        doc(
            "Program and first words that start an SGLang server, where it has a Python of its own. Empty: this Python's.",
            ours=True,
        ),
    ] = ()
    sglang_fused_sampling: Annotated[
        bool,
        doc(
            "Next tokens are drawn in one pass over the logits, by a kernel of ours inside SGLang servers that we start on one GPU "
            "each. Where top-p, top-k, deterministic mode or anything but temperature is asked for, SGLang draws as before.",
            ours=True,
        ),
    ] = False
    sglang_server_concurrency: Annotated[
        int,
        doc(
            "Most samples in generation on one engine. auto: as many as it has use and space for, found while it runs.",
            unit="samples",
            live="next lease (generation)",
            ge=0,
            auto=0,
        ),
    ] = 512
    sglang_concurrency_min: Annotated[
        int,
        doc(
            "Least that sglang_server_concurrency auto goes down to.",
            unit="samples",
            live="next look at the engine (generation)",
            ge=1,
            ours=True,
        ),
    ] = 8
    sglang_concurrency_max: Annotated[
        PositiveInt | None,
        doc(
            "Most that sglang_server_concurrency auto goes up to. Unset: what the engine runs at once, at most 512.",
            unit="samples",
            live="next look at the engine (generation)",
            ours=True,
        ),
    ] = None
    max_masked_fraction: Annotated[
        Annotated[float, msgspec.Meta(gt=0, lt=1)] | None,
        doc(
            "Share of the tokens that may be masked as too old: sglang_server_concurrency auto takes fewer samples at once when "
            "more are. Unset: it looks for the highest speed whatever is masked.",
            unit="of the tokens",
            live="next look at the engine (generation)",
            ours=True,
        ),
    ] = None
    tail_slots: Annotated[
        PositiveInt | None,
        doc(
            "Samples at once kept for those that outlive tail_after_tokens, on as few workers as possible: a small batch decodes "
            "two to three times as fast. What the tail leaves free takes other samples. Needs two workers and no router.",
            unit="samples",
            live="next lease (generation)",
            ours=True,
        ),
    ] = None
    tail_after_tokens: Annotated[
        PositiveInt | None,
        doc(
            "Response tokens after which a sample goes on in tail_slots.",
            unit="tokens",
            live="next sample started (generation)",
            ours=True,
        ),
    ] = None
    pause_generation_mode: Annotated[
        Literal["retract", "in_place", "abort"],
        doc(
            "Running samples during a weight update: retract recomputes their cache, in_place keeps it, abort parks them.",
            live="next activation ordered (publisher)",
        ),
    ] = "retract"
    update_weight_transport: Annotated[
        str,
        doc(
            "How new weights reach engines that served a version before: "
            f"{', '.join(kind.told for kind in TRANSPORTS.values())}; or the dotted path of a record of your own "
            "(docs/engines.md). What fails goes by disk.",
            derived="ipc with colocate, else disk",
            shipped=tuple(TRANSPORTS),
            record=True,
            ours=True,
        ),
    ]
    update_weight_buffer_size: Annotated[
        int,
        doc(
            "Most bytes of tensors that travel together: a bucket of ipc and nccl, for which an engine needs memory, or a file.",
            unit="bytes",
            ge=1,
        ),
    ] = 512 << 20
    update_weight_copy: Annotated[
        bool,
        doc(
            "For nccl: keep a copy of the version on the GPU, so that training goes on while engines take it. Off: buckets go "
            "straight from the weights, which wait until engines have them: for models that do not fit twice.",
            ours=True,
        ),
    ] = True
    update_weight_deadline_s: Annotated[
        float,
        doc(
            "Longest wait for all engines to be ready for a version, and for its broadcast; then it goes by disk. Also for one "
            "engine to load a version and go on, or to answer any other call but a request; then it is started anew.",
            unit="seconds",
            gt=0,
            ours=True,
        ),
    ] = 60.0
    update_weight_wave_fraction: Annotated[
        float,
        doc(
            "Share of the engines that may be away loading a version at a time, for transport disk; below 1 the others serve on "
            "with the version before. nccl and ipc reach all engines at once.",
            gt=0,
            le=1,
            ours=True,
        ),
    ] = 1.0
    check_weight_update_equal: Annotated[
        bool,
        doc(
            "After each update that came another way than by whole files, load those too and compare the engine's own "
            "checksums; an engine that differs starts anew. Slow: for debugging."
        ),
    ] = False
    sglang_request_deadline_s: Annotated[
        float, doc("Longest time for one sample on one engine.", unit="seconds", gt=0, ours=True)
    ] = 3600.0
    engine_token_deadline_s: Annotated[
        float, doc("An engine without a new token for so long counts as stalled.", unit="seconds", gt=0, ours=True)
    ] = 60.0
    engine_boot_deadline_s: Annotated[
        float, doc("Longest time for an engine to become ready.", unit="seconds", gt=0, ours=True)
    ] = 600.0
    use_router: Annotated[
        bool,
        doc(
            "Send requests through a sglang-router before all engines, ours or the one at sglang_router_ip.",
            derived="true for several SGLang engines, but not with tail_slots, nor where they pause in_place and no router flag is "
            "given; true for an address of a running router",
            ours=True,
        ),
    ]
    router_args: Annotated[
        dict[str, PassedOn],
        doc("sglang-router's own flags, passed on as they are: --router-NAME VALUE, or NAME = VALUE in this table."),
    ] = {}
    sglang_router_ip: Annotated[str | None, doc("Host of a running sglang-router; engines register there.")] = None
    sglang_router_port: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=65535)] | None, doc("Port of the router at sglang_router_ip.")
    ] = None
