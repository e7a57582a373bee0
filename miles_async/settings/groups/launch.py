"""LAUNCH: the run as a whole. Its name, its folder, its supervision, what it shows."""

from typing import Annotated, Literal

import msgspec

from actors.kinds import help_of
from miles_async.settings.doc import Group, PositiveInt, doc
from miles_async.settings.launchers import LAUNCHERS, LOCAL, LauncherName

NaturalInt = Annotated[int, msgspec.Meta(ge=0)]


class LaunchSettings(Group, frozen=True, kw_only=True):
    """The run as a whole."""

    name: Annotated[
        str,
        doc(
            "Name of the run: its folder and its keys on the bus.",
            derived="file name of CONFIG, else a fresh one of model, date and time",
            ours=True,
        ),
    ]
    runs_dir: Annotated[str, doc("Folder that holds one folder per run.", ours=True)] = "runs"
    seed: Annotated[int, doc("Seed of everything random that has no seed of its own.", ge=0)] = 1234
    console: Annotated[
        Literal["live", "plain", "none", "web"],
        doc(
            "live: one view that updates in place; plain: a line per step; none: only errors; web: a line per step, and a page on "
            "loopback whose address is printed (also beside a run, at any time: miles-async console).",
            ours=True,
        ),
    ] = "live"
    console_port: Annotated[
        int, doc("Port of console web on 127.0.0.1. 0: 8420, or any free one where that is taken.", ge=0, le=65535, ours=True)
    ] = 0
    drain_timeout_s: Annotated[
        float,
        doc(
            "Time for an actor to finish or park what it holds when it is asked to stop. A step under way and the trainer's last "
            "checkpoint are waited for beyond it (10 minutes, 2 hours), unless the launcher is asked again.",
            unit="seconds",
            gt=0,
            ours=True,
        ),
    ] = 30.0
    restart_budget: Annotated[
        int,
        doc(
            "Restarts of one actor within a minute, or of a trainer that crashes before the same step however long it takes, "
            "before the run ends with its error.",
            unit="restarts",
            ge=0,
            ours=True,
        ),
    ] = 5
    loop_deadline_s: Annotated[
        float,
        doc(
            "An actor whose event loop stands still for so long is ended with its Python stack in the log, also in the middle of a "
            "call in C that lets no other thread run; what it held goes on elsewhere, and a sample that did this to two workers is "
            "a dead letter. Twenty times as long for the trainer, sampler, evaluator, publisher and recorder, and ten minutes at "
            "least while a library is loaded. 0: nobody looks.",
            unit="seconds",
            ge=0,
            ours=True,
        ),
    ] = 30.0
    heartbeat_s: Annotated[float, doc("Seconds between two signs of life of an actor.", unit="seconds", gt=0, ours=True)] = 2.0
    debug_rollout_only: Annotated[
        bool, doc("Run everything but training: groups are taken and counted, the weights stay as they are.")
    ] = False
    debug_train_only: Annotated[
        bool, doc("Run the trainer alone, on the batches of load_debug_rollout_data, which turns it on by itself.")
    ] = False
    debug_rollout_print_every: Annotated[
        PositiveInt | None,
        doc(
            "Every so many steps a sample of the batch is shown as text: in the recorder's log, as 'First rollout sample', and by "
            "--console plain. Unset: a few at the start.",
            unit="steps",
        ),
    ] = None
    debug_determinism: Annotated[
        bool,
        doc(
            "Write hashes of every step's batch and of the weights behind it, loss and gradient norm to the last bit, to "
            "determinism.jsonl in the run's folder; two runs that should be alike differ in the first line that differs.",
            derived="true with dump_details, else false",
        ),
    ]
    debug_weight_sync: Annotated[
        int,
        doc(
            "How much is said of versions on their way, in lines with weight_sync: 1: in the trainer's log each version, the order "
            "to send it, and each worker that took it, with times; 2: every tensor of each version with its checksum as well.",
            ge=0,
            le=2,
        ),
    ] = 0
    deterministic_mode: Annotated[
        bool,
        doc(
            "The trainer and the engines compute the same from the same, to the last bit: torch's deterministic algorithms (an "
            "operation that has none is refused), a fixed order in cuBLAS, NCCL and Transformer Engine, and SGLang's deterministic "
            "inference; the embedded engine computes each sample alone. Slower. Which samples a batch has still depends on time, "
            "but not at max_weight_staleness 0 without a filter and oversampling, nor with load_debug_rollout_data.",
        ),
    ] = False
    env_report: Annotated[
        bool,
        doc(
            "Write env_report.json in the run's folder at the start: host, GPUs, packages and the variables that libraries read.",
            derived="true with dump_details, else false",
        ),
    ]
    ci_test: Annotated[
        bool,
        doc(
            "End the run with status 1 when its first training step fails its self-check: ratio 1, reference KL 0, small "
            "gradient, log-probs of trainer and engine alike. Off: a failed check is only reported."
        ),
    ] = False
    selfcheck_logprob_tolerance: Annotated[
        float,
        doc(
            "Mean difference between log-probs of trainer and engine that the first step's self-check allows. What bfloat16 alone "
            "makes grows with a model's width and depth; engines that serve FP8 show more.",
            unit="nats",
            derived="0.1 in bfloat16; in float32 1e-4 with the embedded engine, else 0.03; 1e-9 with true_on_policy_mode",
            gt=0,
            ours=True,
        ),
    ]
    launcher: Annotated[LauncherName, doc(f"Who places the run's processes: {help_of(LAUNCHERS)}.", ours=True)] = LOCAL.name
    ray_address: Annotated[
        str, doc("The Ray cluster: auto (the one of this host) or HOST:PORT of its head. This host is one of its nodes.", ours=True)
    ] = "auto"
    ray_wait_s: Annotated[
        float,
        doc(
            "How long the start waits for space on the Ray cluster before it is refused; one that grows by demand needs minutes.",
            unit="seconds",
            gt=0,
            ours=True,
        ),
    ] = 20.0
    min_workers: Annotated[
        NaturalInt | None,
        doc(
            "Rollout workers that must have a place before the run starts. Unset: num_generation_workers.",
            unit="workers",
            ours=True,
        ),
    ] = None
    max_workers: Annotated[
        PositiveInt | None,
        doc("Most rollout workers, as nodes join the Ray cluster. Unset: num_generation_workers.", unit="workers", ours=True),
    ] = None
    report: Annotated[bool, doc("Write report.html at the end of the run.", ours=True)] = True
