"""`miles-async train`: check, start the bus, start the actors, keep them, end with a summary and a report.

A closed terminal (SIGHUP, or output that nobody takes) ends the view, not the run: the launcher goes on keeping the actors
and writes what it has to say into logs/launcher.log; `miles-async top` shows it again.
Shutdown, in order: 1 trainer and evaluator are done, or the operator asks, by signal or on the bus · 2 SIGTERM to all actors,
which drain, the recorder last · 3 the console stops · 4 workers that joined by hand leave, if the run is over · 5 the embedded
Redis stops (its append-only file stays) · 6 report and summary.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from actors.recorder.feed import Feed
from actors.recorder.file import stream_records
from actors.runtime.context import STOP_WISH
from actors.runtime.deadline import within
from actors.runtime.drain import Heard
from actors.runtime.fork_server import ForkServer
from actors.runtime.host import processes_name
from actors.runtime.in_memory import in_use
from actors.runtime.logfiles import keep_short
from actors.runtime.loop import run_loop
from actors.runtime.prompts import routed_shape
from actors.runtime.run import EXIT_BUS_BACK, EXIT_BUS_GONE, disk_text
from bus import Bus, Commit, Out, SystemClock
from bus.client import connect, without_secrets
from bus.errors import BusFull, BusUnreachable, BusWentBack, MilesAsyncError, NameTaken
from bus.messages.control import ActorState, Event, Vitals
from bus.messages.events import EventKind
from bus.server.checks import check_server
from bus.server.embedded import EmbeddedRedis
from bus.topology import EVENTS
from miles_async.console.lines import banner, starting
from miles_async.console.live import run_console
from miles_async.console.watchdog import watch
from miles_async.governor.govern import govern
from miles_async.launcher.began import check_began, resumed
from miles_async.launcher.env_report import write_env_report
from miles_async.launcher.eval_sets import is_evaluating
from miles_async.launcher.hooks import PROBES
from miles_async.launcher.joined import let_go
from miles_async.launcher.local import fork_servers
from miles_async.launcher.lock import only_launcher
from miles_async.launcher.place import Place, bus_config
from miles_async.launcher.plan import actor_spec, recorder_spec, room_specs
from miles_async.launcher.preflight import check_prompt_lengths, few_prompts, preflight
from miles_async.launcher.prepare import check_host, check_same, free_weights, place_of, prepare_bus, token_counter
from miles_async.launcher.resume import finished_step
from miles_async.launcher.supervisor import ASKED_S, Placer, RunFailed, Supervisor, furthest_step
from miles_async.settings.redis_need import memory_note, redis_need
from miles_async.settings.run import RunSettings
from miles_async.settings.runs import finished_run, write_run_file

RESTORES = 5  # of a run whose bus came back without it, by one launcher
AGAIN = "begins again, since it keeps no checkpoints (--no-save)"
RESUME = "Checkpoints and streams are kept: the same command with --name {name} goes on."


def train(settings: RunSettings) -> int:
    """Run to the end; exit status 0 done or drained, 1 failed, 2 when an actor refused what it was given, 75 (EXIT_BUS_GONE) when
    the bus was away for longer than its deadline."""
    check_host(settings)
    servers = fork_servers(settings.flat.engine_kind.loads) if settings.flat.launcher_kind.forks else {}
    try:
        return _checked(settings, servers)
    finally:
        for server in set(servers.values()):
            server.end()


def _checked(settings: RunSettings, servers: Mapping[str, ForkServer]) -> int:
    check_began(settings)
    if goes_on := resumed(settings):
        print(goes_on, flush=True)
    if settings.launch.console != "none":  # libraries and data take seconds: say at once that it works
        print(banner(settings), flush=True)
    found = preflight(settings, probes=PROBES)
    for note in (*found.notes, *few_prompts(settings, found)):
        print(f"note: {note}", file=sys.stderr)
    import_module(settings.flat.launcher_kind.module).join_cluster(settings)
    place = place_of(settings)
    run_dir = Path(place.run_dir)
    if (ended := finished_run(run_dir)) is not None and ended.finished >= place.num_rollout:
        free_weights(Path(place.weights_dir))  # the folder in memory was made anew only to be named
        check_same(settings, place, ended.fingerprint, place.run_dir)
        print(
            f"run {settings.launch.name} has finished: {ended.finished} of {place.num_rollout} steps are done, nothing was "
            f"started and nothing changed. What it did is in {run_dir}. Raise --num-rollout to go on, or choose another --name."
        )
        return 0
    counter = token_counter(settings, Path(place.model_dir))
    check_prompt_lengths(settings, found.prompts, counter, found.model_context)
    with only_launcher(run_dir, settings.launch.name), in_use(Path(place.weights_dir).parent):
        threads = {"trainer": settings.perf.trainer_threads, "generation": settings.perf.engine_threads}
        placers = import_module(settings.flat.launcher_kind.module).placer_of(settings, place, threads, servers)
        if settings.launch.env_report:
            write_env_report(run_dir)
        return run_loop(_train(settings, place, run_dir, placers, servers))


async def _train(
    settings: RunSettings, place: Place, run_dir: Path, placers: Callable[[Bus], Placer], servers: Mapping[str, ForkServer]
) -> int:
    embedded: EmbeddedRedis | None = None
    ours = False  # whether what runs is ours to end: not a server and actors that an earlier launcher left alive
    url = settings.bus.bus_url
    if url is None:
        embedded = EmbeddedRedis(run_dir)
        await embedded.open()
        ours = embedded.started_here
        url = embedded.url
    try:
        async with connect(url) as client:
            facts, warnings = await check_server(client, url=url)
        routed = routed_shape(settings.model.hf_checkpoint) if settings.grpo.use_rollout_routing_replay else None
        need = redis_need(settings.flat, expert_bytes=routed.row_bytes if routed else 0)
        for warning in filter(None, (*warnings, memory_note(need, facts.max_memory, without_secrets(url)))):
            print(f"note: {warning}", file=sys.stderr)
        write_run_file(run_dir, run=settings.launch.name, bus_url=url)
        left = RESTORES
        while True:
            async with Bus(bus_config(settings, url, place)) as bus:
                for note in await prepare_bus(bus, settings, place):
                    print(f"note: {note}", file=sys.stderr)
                await bus.commit(Commit(state={STOP_WISH: ""}))
                ours = True
                status, finished = await Launcher(settings, place, bus, embedded, placers(bus), restores=left).run()
            left -= 1
            if status != EXIT_BUS_BACK:
                break
    finally:
        for server in set(servers.values()):
            await server.close()
        if ours:  # published copies; checkpoints lie elsewhere
            await asyncio.to_thread(free_weights, Path(place.weights_dir))
        if ours and embedded is not None:
            await asyncio.to_thread(embedded.stop)
    if finished and not status:
        write_run_file(run_dir, run=settings.launch.name, bus_url=url, finished=finished, fingerprint=place.fingerprint)
    if settings.launch.report:
        from miles_async.console.report import write_report

        try:
            print(f"report: {await asyncio.to_thread(write_report, run_dir)}")
        except OSError as error:
            print(f"note: no report: {disk_text(error, (str(run_dir),)) or error}", file=sys.stderr)
    return status


class Launcher:
    """Keeps one run's actors and shows them, until the run is over or is asked to end."""

    def __init__(
        self,
        settings: RunSettings,
        place: Place,
        bus: Bus,
        embedded: EmbeddedRedis | None,
        placer: Placer,
        *,
        restores: int = 0,
    ) -> None:
        self._placer, self._restores, self._began = placer, restores, bus.clock.monotonic()
        self._settings, self._place, self._bus, self._embedded = settings, place, bus, embedded
        self._run_dir = Path(place.run_dir)
        self._asked = asyncio.Event()  # to stop
        self._wished, self._signals = False, 0  # and it was the operator
        self._heard = Heard(bus)
        self._lost: RunFailed | None = None  # the bus, for longer than its deadline, or what it held
        self._stop = asyncio.Event()
        self._hung_up = False
        self._view_over = asyncio.Event()

    async def run(self) -> tuple[int, int]:
        """Exit status, and the last step where all are done, else 0. EXIT_BUS_BACK: the bus is to be prepared again, and this done
        once more; at most `restores` times."""
        settings, bus = self._settings, self._bus
        feed = await asyncio.to_thread(Feed, bus, stream_records(self._run_dir))
        placer, budget = self._placer, settings.launch.restart_budget
        supervisor = Supervisor(placer, SystemClock(), budget=budget, furthest=lambda: furthest_step(bus, feed.history))
        recorder = ("recorder", "recorder", recorder_spec(settings, self._place))
        for name, role, room in (recorder, *room_specs(settings, self._place, evaluating=await is_evaluating(bus))):
            supervisor.add(actor_spec(settings, self._place, bus.config, name, role, room))
        if settings.launch.console != "none":
            print(starting((k.spec.role for k in supervisor.kept.values()), settings), flush=True)
        await placer.open()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        (self._run_dir / "launcher.pid").write_text(f"{os.getpid()}\n")  # from now on it may be signalled
        failure: RunFailed | None = None
        async with asyncio.TaskGroup() as tasks:
            looks = {"view": self._show(feed), "watchdog": watch(bus, self._stop), "governor": govern(bus, feed, self._stop)}
            if settings.launch.console == "web":
                looks["web console"] = self._serve(feed)
            beside = [tasks.create_task(_aside(what, work, supervisor)) for what, work in looks.items()]
            tasks.create_task(_aside("placer", placer.follow(self._stop), supervisor))
            tasks.create_task(_aside("bound on logs", keep_short(self._run_dir, self._stop), supervisor))
            beside.append(tasks.create_task(self._tell(supervisor)))
            if self._embedded is not None:
                tasks.create_task(self._keep_redis(self._embedded))
            watches = {name: asyncio.create_task(supervisor.watch(k)) for name, k in supervisor.kept.items()}
            try:
                failure = await _until_over(watches, self._asked) or self._lost
            finally:
                late = await supervisor.drain(
                    timeout_s=settings.launch.drain_timeout_s + 5.0, finishes=self._heard.finishes, records=self._lost is None
                )
                await asyncio.gather(*watches.values(), return_exceptions=True)
                self._stop.set()
                self._view_over.set()
                if self._lost is not None:  # each would wait for the bus until its deadline once more
                    for task in (await asyncio.wait(beside, timeout=ASKED_S))[1]:
                        task.cancel()
        await placer.close()
        await feed.close()
        for name in late:
            text = f"note: {name} did not drain within --drain-timeout-s and was killed; its entries stay pending"
            print(text, file=sys.stderr)
        name = settings.launch.name
        if failure and failure.status == EXIT_BUS_BACK:
            if settings.ckpt.no_save and feed.history.furthest:
                failure = RunFailed(f"{failure} With --no-save there is nothing to go on from.", status=1, resumes=False)
            elif self._restores and not self._wished:
                print(f"note: {failure} That is done now.", file=sys.stderr, flush=True)
                return failure.status, 0
            else:
                failure = RunFailed(str(failure), status=1)
        if failure:
            again = f" {RESUME.format(name=name)}" if failure.resumes else ""
            print(f"miles-async: run {name} ended with status {failure.status}: {failure}{again}", file=sys.stderr)
            return failure.status, 0
        finished = await finished_step(bus, self._place.num_rollout)
        # Workers that joined by hand would keep their GPUs.
        within_s = settings.launch.drain_timeout_s if self._embedded is not None else 0.0
        beats_s = settings.launch.heartbeat_s
        await let_go(bus, supervisor.kept, finished=bool(finished), heartbeat_s=beats_s, within_s=within_s)
        if not finished:
            then = AGAIN if settings.ckpt.no_save else "goes on from its last checkpoint"
            print(f"run {name} stopped; the same command with --name {name} {then}")
        return 0, finished

    def _signalled(self) -> None:
        """A second one waits for nothing beyond the drain's deadline. A wish on the bus, which is heard at every beat, is none."""
        self._signals += 1
        self._heard.hurries = self._signals > 1
        self._end_by_wish()

    def _end_by_wish(self) -> None:
        self._wished = True
        self._asked.set()

    def _hang_up(self) -> None:
        """Nobody looks any more: go on without the terminal."""
        if not self._hung_up:
            self._hung_up = True
            _redirect(Path(os.devnull))
            self._view_over.set()

    async def _show(self, feed: Feed) -> None:
        total, chosen = self._place.num_rollout, self._settings.launch.console
        mode = "plain" if chosen == "web" else chosen
        try:
            await run_console(self._bus, feed, mode=mode, total_steps=total, stop=self._view_over, folder=self._run_dir)
        except* OSError:  # a terminal or a pipe that is gone
            self._hang_up()
        if self._hung_up:
            _redirect(self._run_dir / "logs" / "launcher.log")
            name = self._settings.launch.name
            print(f"the terminal is gone, run {name} goes on; miles-async top {name} shows it", flush=True)
            await run_console(self._bus, feed, mode="none", total_steps=total, stop=self._stop)

    async def _serve(self, feed: Feed) -> None:
        """The page, which a closed terminal does not end."""
        from miles_async.console.web.app import serve

        port, total = self._settings.launch.console_port, self._place.num_rollout
        say, folder = partial(print, flush=True), self._run_dir
        await serve(self._bus, feed, folder, total_steps=total, port=port, stop=self._stop, say=say)

    async def _tell(self, supervisor: Supervisor) -> None:
        """Put what the supervisor notes (restarts, adoptions) on the events stream, show that this launcher lives, and hear a
        wish to stop that lies on the bus; woken by time or the end."""
        bus, told, next_beat_s = self._bus, 0, 0.0
        while True:
            over = self._stop.is_set()
            try:
                for kind, text in supervisor.notes[told:]:
                    event = Event(actor="launcher", kind=kind, text=text, wall=bus.clock.wall(), level=kind.level)
                    await bus.append([Out(EVENTS, event)], repeatable=True)
                    told += 1
                if over or bus.clock.monotonic() >= next_beat_s:
                    await bus.set_vitals("launcher", self._vitals("stopped" if over else "running"), leaves=over)
                    next_beat_s = bus.clock.monotonic() + self._settings.launch.heartbeat_s
                    if await bus.state(STOP_WISH):
                        self._end_by_wish()
            except (BusUnreachable, BusFull) as error:
                status = EXIT_BUS_GONE if isinstance(error, BusUnreachable) else 1
                self._lost = self._lost or RunFailed(str(error), status=status)
                self._asked.set()
            except NameTaken as error:
                text = f"another launcher has taken this run over. {error}"
                self._lost = self._lost or RunFailed(text, status=1, resumes=False)
                self._asked.set()
            except BusWentBack as error:
                self._lost = self._lost or RunFailed(str(error), status=EXIT_BUS_BACK)
                self._asked.set()
            if over:
                return
            await within(0.5, self._stop)

    async def _keep_redis(self, embedded: EmbeddedRedis) -> None:
        """Start the embedded server again when it died; its append-only file brings the streams back. One that cannot be started
        ends the run, and is named at once: what has to be ended without a bus takes its time."""
        while not await within(0.2, self._stop):
            if await asyncio.to_thread(embedded.is_alive):
                continue
            try:
                await embedded.open()
            except (MilesAsyncError, OSError) as error:
                text = disk_text(error, (str(self._run_dir),)) or str(error)
                print(f"note: Redis died and does not start again: {text} All actors end now.", file=sys.stderr, flush=True)
                self._lost = self._lost or RunFailed(text, status=EXIT_BUS_GONE, resumes=False)
                self._asked.set()
                return

    def _vitals(self, state: ActorState) -> Vitals:
        wall, host = self._bus.clock.wall(), socket.gethostname()
        pid, processes = os.getpid(), processes_name()
        up = {"up_s": self._bus.clock.monotonic() - self._began}
        return Vitals(
            actor="launcher", role="launcher", state=state, wall=wall, pid=pid, host=host, processes=processes, counters=up
        )


async def _aside(what: str, work: Coroutine[Any, Any, None], supervisor: Supervisor) -> None:
    """Looking at a run must not end it: what goes wrong there is told, and the run goes on."""
    try:
        await work
    except Exception as raised:  # noqa: BLE001 - see above
        why: BaseException = raised
        while isinstance(why, BaseExceptionGroup):
            why = why.exceptions[0]
        supervisor.notes.append((EventKind.RESTART, f"the {what} ended: {type(why).__name__}: {why}; the run goes on without it"))


def _redirect(file: Path) -> None:
    """Let what this process prints go to a file from now on."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(handle, number)
    os.close(handle)


async def _until_over(watches: dict[str, asyncio.Task[None]], asked: asyncio.Event) -> RunFailed | None:
    """Waits for trainer and evaluator to be done, for a failure (returned), or for the operator."""
    wanted = {name for name in watches if name in ("trainer", "evaluator")}
    asking = asyncio.create_task(asked.wait())
    try:
        while True:
            await asyncio.wait([asking, *watches.values()], return_when=asyncio.FIRST_COMPLETED)
            for name, task in list(watches.items()):
                if task.done():
                    error = task.exception()
                    if isinstance(error, RunFailed):
                        if error.status == EXIT_BUS_BACK or not _peers(name, watches):
                            return error
                        print(f"note: {error}; the other engines go on", file=sys.stderr)
                        error = None
                    if error is not None:
                        raise error
                    wanted.discard(name)
                    del watches[name]
            if asked.is_set() or not wanted:
                return None
    finally:
        asking.cancel()


def _peers(name: str, watches: Collection[str]) -> list[str]:
    """Rollout workers that can do the work of the one that gave up; nobody can stand in for other actors."""
    return [w for w in watches if w != name and name.startswith(("generation-", "lent-")) and w.startswith("generation-")]
