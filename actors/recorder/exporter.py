"""One /metrics for Prometheus: every actor and stream of the run, and the newest training step and evaluations.

Reads  what `miles-async status` reads, when it is asked; the history that the recorder keeps    Writes  nothing
Numbers and names only: no prompts, answers or settings.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from aiohttp import web

from actors.recorder.history import History
from actors.runtime.listener import Listener, http_log
from actors.runtime.snapshot import Snapshot, read_snapshot
from bus import Bus
from bus.errors import MilesAsyncError

PREFIX = "miles_async_"
ANSWER_S = 8.0  # a scraper waits 10 by default
AGAIN_S = 30.0
SCRAPE_S = 30.0  # of a connection; who keeps one opens another
VIEWS = ("tokens/generated/worker/", "tokens/generated/version/", "tokens/trained/version/")  # a label a version is too many


class ExporterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where it listens, and the label `run` of every metric."""

    host: str
    port: int
    run: str


Sample = tuple[dict[str, str], float]
Family = tuple[str, str, str, list[Sample]]
"""Name without prefix, type (gauge or counter), help, samples."""


def families(snapshot: Snapshot, history: History) -> Iterator[Family]:
    """What is told (pure). docs/metrics.md lists it."""
    actors = [(a, {"actor": a.vitals.actor, "role": a.vitals.role, "host": a.vitals.host}) for a in snapshot.actors]

    def of_actors(value: Callable[[Any], float | None]) -> list[Sample]:
        return [(labels, number) for a, labels in actors if (number := value(a)) is not None]

    yield "actor_up", "gauge", "1: the actor sends signs of life", of_actors(lambda a: float(a.life == "alive"))
    yield "actor_silent_seconds", "gauge", "since its last sign of life", of_actors(lambda a: a.age_s)
    yield "actor_waited_seconds", "gauge", "how long it has waited for what it waits for", of_actors(lambda a: a.waited_s)
    yield "actor_in_flight", "gauge", "entries or samples that it holds", of_actors(lambda a: float(a.vitals.in_flight))
    yield (
        "actor_counter", "gauge", "counters of the actor since it started",
        [({**labels, "counter": n}, v) for a, labels in actors for n, v in a.vitals.counters.items()],
    )  # fmt: skip
    workers = [(a, labels) for a, labels in actors if a.vitals.role == "generation"]
    yield "worker_slots", "gauge", "samples at once on its engine", [(n, float(a.vitals.slots)) for a, n in workers]
    yield "worker_version", "gauge", "policy version that it serves", [(n, float(a.vitals.version)) for a, n in workers]
    streams = [(s, {"stream": s.name}) for s in snapshot.streams.values()]
    yield "stream_entries", "gauge", "entries on the stream", [(n, float(s.length)) for s, n in streams]
    yield "stream_bytes", "gauge", "bytes not yet acknowledged", [(n, float(s.n_bytes)) for s, n in streams]
    yield "stream_pending", "gauge", "entries delivered and not acknowledged", [(n, float(s.pending)) for s, n in streams]
    yield "stream_lag", "gauge", "entries that no reader has taken yet", [(n, float(s.lag)) for s, n in streams]
    yield "stream_newest_age_seconds", "gauge", "since the newest entry", [(n, s.newest_age_s) for s, n in streams if s.newest_id]
    accounts = {k: v for k, v in snapshot.ledger.items() if not k.startswith(VIEWS)}
    yield "ledger", "gauge", "samples and tokens by account", [({"account": k}, float(v)) for k, v in accounts.items()]
    yield "open_groups", "gauge", "groups issued and not settled", [({}, float(snapshot.open_groups))]
    yield "open_samples", "gauge", "samples issued and not settled", [({}, float(snapshot.open_samples))]
    p = snapshot.policy
    yield "step", "gauge", "training steps done", [({}, float(p.step))]
    yield "step_age_seconds", "gauge", "since the last one", [({}, p.step_age_s)]
    yield "announced_version", "gauge", "newest policy version", [({}, float(p.announced))]
    yield "active_version", "gauge", "newest version that is served", [({}, float(p.active))]
    yield "checkpoint_step", "gauge", "newest durable checkpoint", [({}, float(p.checkpoint_step))]
    yield "finished", "gauge", "1: the last step is done", [({}, float(p.finished))]
    yield "dropped_groups", "counter", "groups dropped, by reason", [({"reason": r}, float(n)) for r, n in history.drops.items()]
    yield "dead_letters", "counter", "entries that failed for good", [({}, float(history.counts["dead"]))]
    yield "faults", "counter", "events of level warning or error", [({}, float(history.counts["fault"]))]
    by = Counter("governor" if r.get("author") == "governor" else "others" for r in history.knobs[1:])
    yield "knob_changes", "counter", "changes of live settings, by whom", [({"by": who}, float(n)) for who, n in by.items()]
    yield "restores", "counter", "starts of the trainer", [({}, float(history.counts["restored"]))]
    used = [({"source": source, "value": name}, n) for source, r in history.system.items() for name, n in r["values"].items()]
    yield "system", "gauge", "what a host or Redis uses", used
    newest = [(name, value, "step") for name, value in history.steps[-1].metrics.items()] if history.steps else []
    evals = [history.evals_of(name)[-1:] for name in history.eval_names()]
    newest += [(name, value, "evaluation") for [one] in filter(None, evals) for name, value in one.metrics.items()]
    shorts: dict[str, list[tuple[str, float, str]]] = {}
    for metric in newest:
        shorts.setdefault(plain(metric[0]) or "metric", []).append(metric)
    for short, found in shorts.items():
        # A name that is in no ASCII, or in another's form, is told as a label: two metrics of one name spoil what is scraped.
        labels = len(found) > 1 or not found[0][0].isascii()
        what = "told by the label" if labels else found[0][0]
        yield short, "gauge", f"{what} of the newest {found[0][2]}", [({"metric": n} if labels else {}, v) for n, v, _ in found]


def plain(metric: str) -> str:
    """A metric's name as Prometheus allows it."""
    return re.sub(r"[^a-zA-Z0-9]+", "_", metric).strip("_")


class _Scrape:
    """A registry for one answer."""

    def __init__(self, told: list[Family], run: str) -> None:
        self._told, self._run = told, run

    def collect(self) -> Iterator[Any]:
        """As prometheus_client asks it."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, kind, text, samples in self._told:
            labels = ["run", *sorted({label for own, _ in samples for label in own})]
            make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            family = make(PREFIX + name, text, labels=labels)
            for own, value in samples:
                family.add_metric([self._run, *(own.get(label, "") for label in labels[1:])], value)
            yield family


class Exporter:
    """Serves until it is cancelled. `say(text)`: told when it cannot listen."""

    def __init__(self, bus: Bus, spec: ExporterSpec, history: Callable[[], History], say: Callable[[str], None]) -> None:
        self._bus, self._spec, self._history, self._say = bus, spec, history, say
        self.port = spec.port

    async def serve(self) -> None:
        """A port that is taken is tried again: the one that has it may be the recorder before this one."""
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        runner = web.AppRunner(app, access_log=None, logger=http_log())
        await runner.setup()
        listener = Listener(runner, within_s=SCRAPE_S)  # there is no key: nobody is admitted for longer
        try:
            said = False
            while True:
                try:
                    self.port = await listener.open(self._spec.host, self._spec.port)
                    break
                except OSError as error:
                    if not said:
                        where = f"{self._spec.host}:{self._spec.port}"
                        self._say(
                            f"Prometheus is not served: {where}: {error.strerror or error}. Free it, or choose another "
                            f"--prometheus-port; tried again every {AGAIN_S:.0f} s"
                        )
                    said = True
                    await asyncio.sleep(AGAIN_S)
            await asyncio.Event().wait()
        finally:
            await listener.close()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        from prometheus_client.exposition import choose_encoder

        try:
            snapshot = await asyncio.wait_for(read_snapshot(self._bus), ANSWER_S)
        except (TimeoutError, MilesAsyncError) as error:
            return web.Response(status=503, text=f"the bus does not answer: {error or 'too slow'}\n")
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
        made: Any = _Scrape(list(families(snapshot, self._history())), self._spec.run)
        return web.Response(body=encode(made), headers={"Content-Type": kind})
