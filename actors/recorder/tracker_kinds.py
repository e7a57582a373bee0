"""The experiment trackers that a run can write to. Each library is imported when its tracker is opened, not before.

A tracker shows a run under its training steps. Where steps are trained again after a crash, TensorBoard forgets the lost ones; the
others show both values.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import posixpath
import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder.otel import Otlp, traced
from actors.recorder.points import Point
from actors.recorder.trackers import FollowedFile, Open
from actors.recorder.trained import FILE, OLDER
from bus.private import write_secret

STEP = "train/step"


class TrackerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings by the same names, `run` and its folder. `config`: the run's settings without secrets, shown beside its curves."""

    run: str
    run_dir: str
    config: dict[str, Any] = {}
    use_tensorboard: bool
    tensorboard_dir: str | None
    use_wandb: bool
    wandb_mode: str | None
    wandb_dir: str | None
    wandb_key: str | None
    wandb_host: str | None
    wandb_team: str | None
    wandb_project: str | None
    wandb_group: str | None
    wandb_run_id: str | None
    use_mlflow: bool
    mlflow_tracking_uri: str | None
    mlflow_experiment_name: str | None
    mlflow_run_name: str | None
    mlflow_run_id: str | None
    use_trackio: bool
    trackio_project: str | None
    otel_endpoint: str | None
    otel_sample_share: float


def opens(spec: TrackerSpec) -> dict[str, Open]:
    """How to open each tracker that the settings ask for, by name."""
    chosen: dict[str, tuple[bool, Any]] = {
        "tensorboard": (spec.use_tensorboard, TensorBoard),
        "wandb": (spec.use_wandb, Wandb),
        "mlflow": (spec.use_mlflow, Mlflow),
        "trackio": (spec.use_trackio, Trackio),
        "otel": (bool(spec.otel_endpoint), lambda s: Otlp(s.otel_endpoint, s.run, _run_id(s))),
    }
    return {name: partial(kind, spec) for name, (on, kind) in chosen.items() if on}


def sources(spec: TrackerSpec) -> dict[str, FollowedFile]:
    """What those follow that take samples, not steps."""
    lives = FollowedFile(FILE, OLDER, lambda: traced(_run_id(spec), spec.otel_sample_share), sums=False)
    return {"otel": lives}


def installed(module: str) -> bool:
    """Whether a library is there, without importing it."""
    return importlib.util.find_spec(module) is not None


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, spec: TrackerSpec) -> None:
        self._dir = spec.tensorboard_dir or str(Path(spec.run_dir) / "tensorboard")
        self._writer = self._open()

    def _open(self) -> Any:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        return EventFileWriter(self._dir)

    def take(self, points: list[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            event = Event(wall_time=point.wall, step=point.step)
            if point.lost:
                # A file that starts its session at a step makes readers forget what older files say from there on.
                self._writer.close()
                self._writer = self._open()
                event.step = point.step + 1
                event.session_log.status = SessionLog.START
            else:
                named = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
                event.summary.CopyFrom(Summary(value=named))
            self._writer.add_event(event)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. The run's id follows from its folder, so a run that is started again goes on in the same one."""

    def __init__(self, spec: TrackerSpec) -> None:
        import wandb

        if spec.wandb_key:
            os.environ["WANDB_API_KEY"] = spec.wandb_key
        folder = Path(spec.wandb_dir or spec.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        host: dict[str, Any] = {"base_url": spec.wandb_host} if spec.wandb_host else {}
        # What went wrong may be the end of its own process, which it starts once: without this, it would be asked for ever.
        with contextlib.suppress(Exception):
            wandb.teardown()
        self._run = wandb.init(
            project=spec.wandb_project or "miles_async",
            entity=spec.wandb_team,
            group=spec.wandb_group,
            name=spec.run,
            id=spec.wandb_run_id or _run_id(spec),
            resume="allow",
            dir=str(folder),
            mode=spec.wandb_mode,  # type: ignore[arg-type] # checked by the settings
            config=spec.config,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, **host),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def take(self, points: list[Point]) -> None:
        for point in points:
            if point.values:
                self._run.log({STEP: point.step, **point.values})

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class Mlflow:
    """An MLflow server, or files: what mlflow_tracking_uri says."""

    def __init__(self, spec: TrackerSpec) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(spec.mlflow_tracking_uri)
        name = spec.mlflow_experiment_name or "miles_async"
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        shown, tag = spec.mlflow_run_name or spec.run, "miles_async.run"
        self._id = spec.mlflow_run_id or ""
        if not self._id:
            ours = self._client.search_runs([number], f"tags.`{tag}` = '{_run_id(spec)}'", max_results=1)
            self._id = ours[0].info.run_id if ours else ""
        if not self._id:
            made = self._client.create_run(number, run_name=shown, tags={tag: _run_id(spec)})
            self._id = made.info.run_id
            params = [Param(k, str(v)[:500]) for k, v in spec.config.items()]
            for start in range(0, len(params), 100):
                self._client.log_batch(self._id, params=params[start : start + 100])
        self._client.update_run(self._id, status="RUNNING")
        self._client.log_batch(self._id, tags=[RunTag("mlflow.runName", shown)])

    def take(self, points: list[Point]) -> None:
        named = [self._metric(mlflow_name(n), v, int(p.wall * 1000), p.step) for p in points for n, v in p.values.items()]
        for start in range(0, len(named), 1000):
            self._client.log_batch(self._id, metrics=named[start : start + 1000])

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, status="FINISHED" if finished else "KILLED")


def mlflow_name(name: str) -> str:
    """A metric's name as MLflow takes it (pass@4 as pass_4): one that it refuses would hold up all that come after."""
    name = re.sub(r"[^\w\-./: ]", "_", name)[:250]
    return name if name and posixpath.normpath(name) == name and name[0] not in "./" else f"_{name.replace('/', '_')}"[:250]


class Trackio:
    """Trackio, local first."""

    def __init__(self, spec: TrackerSpec) -> None:
        import trackio

        project = spec.trackio_project or "miles_async"
        self._run = trackio.init(
            project=project, name=spec.run, config=spec.config, resume="allow", embed=False, auto_log_gpu=False
        )

    def take(self, points: list[Point]) -> None:
        for point in points:
            if point.values:
                self._run.log(dict(point.values), step=point.step)

    def close(self, finished: bool) -> None:
        self._run.finish()


def _run_id(spec: TrackerSpec) -> str:
    """The same for each start of one run, and another one for a run of the same name elsewhere or made anew."""
    made = Path(spec.run_dir) / "tracker_id"
    try:
        return made.read_text().strip()
    except FileNotFoundError:
        fresh = f"{spec.run}-{os.urandom(4).hex()}"[-64:]
        write_secret(made, fresh + "\n")
        return fresh
