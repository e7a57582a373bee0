"""LAUNCH: the run as a whole. Its name, its folder, its supervision, what it shows."""

from typing import Annotated, Literal

from miles_async.settings.doc import Group, doc


class LaunchSettings(Group, frozen=True, kw_only=True):
    """The run as a whole."""

    name: Annotated[
        str,
        doc("Name of the run: its folder and its keys on the bus.", derived="file name of CONFIG, else run"),
    ]
    runs_dir: Annotated[str, doc("Folder that holds one folder per run.")] = "runs"
    seed: Annotated[int, doc("Seed of everything random that has no seed of its own.", ge=0)] = 1234
    console: Annotated[
        Literal["live", "plain", "none"],
        doc("live: one view that updates in place; plain: a line per step; none: only errors."),
    ] = "live"
    drain_timeout_s: Annotated[
        float, doc("Time for an actor to finish or park what it holds when it is asked to stop.", unit="seconds", gt=0)
    ] = 30.0
    restart_budget: Annotated[
        int, doc("Restarts of one actor before the run ends with its error.", unit="restarts", ge=0)
    ] = 5
    heartbeat_s: Annotated[float, doc("Seconds between two signs of life of an actor.", unit="seconds", gt=0)] = 2.0
    debug_rollout_only: Annotated[
        bool, doc("Run everything but training: groups are taken and counted, the weights stay as they are.")
    ] = False
    debug_train_only: Annotated[
        bool, doc("Run the trainer alone on the batches of load_debug_rollout_data; implied by it.")
    ] = False
    ci_test: Annotated[
        bool,
        doc(
            "End the run with status 1 when its first training step fails its self-check: ratio 1, reference KL 0, small "
            "gradient, log-probs of trainer and engine alike. Off: a failed check is only reported."
        ),
    ] = False
    report: Annotated[bool, doc("Write report.html at the end of the run.")] = True
