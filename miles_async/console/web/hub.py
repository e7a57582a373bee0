"""Looks at a run for all open pages and screens: a state every `refresh_s` while somebody watches, the doctor's word more seldom.

Reads  snapshots, the history that somebody else's feed keeps, the doctor's scene    Writes  nothing    Owns  the pages' state
While nobody watches it does nothing. Where a look is slow, looks are rarer.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from actors.recorder.feed import Feed
from actors.runtime.deadline import first_of, within
from actors.runtime.snapshot import read_snapshot
from bus import Bus
from bus.errors import BusUnreachable
from miles_async.console.doctor.diagnosis import diagnose
from miles_async.console.explain import explain, open_text
from miles_async.console.scene import OfLate, read_scene
from miles_async.console.watchdog import Audits
from miles_async.console.web.curves import Curves
from miles_async.console.web.looks import Looks
from miles_async.console.web.state import DoctorWord, State, state_of, waiting
from miles_async.settings.runs import read_settings

REFRESH_S, DOCTOR_S = 0.5, 2.0
OLDEST_WORD_S = 10.0  # of the doctor, however busy the host is
LOOK_SHARE, DOCTOR_SHARE = 0.2, 0.01  # of the time that they may take
SILENT_S = 3.0  # a bus that has not answered for so long is worth a word


class Hub:
    """`run` in a task; pages call `enter`, then `news`. `total_steps` 0 = unknown. `kept`: the bus is a copy of an ended run's."""

    def __init__(
        self,
        bus: Bus,
        feed: Feed,
        run_dir: Path | None,
        *,
        total_steps: int,
        kept: bool = False,
        refresh_s: float = REFRESH_S,
    ) -> None:
        self._refresh_s = refresh_s
        self._bus, self._feed, self._total, self._kept = bus, feed, total_steps, kept
        self._settings = read_settings(run_dir) if run_dir is not None else {}
        self._looks, self.curves, self.word = Looks(), Curves(), DoctorWord()
        self._sections: dict[str, tuple[int, bytes]] = {}  # name -> (number of the look at which it changed, JSON)
        self._look, self.wall = 0, 0.0  # of the newest look, seconds
        self._answered = 0.0  # when the bus did last
        self._changed = asyncio.Condition()
        self._watched = asyncio.Event()
        self._watchers = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`; woken by the first watcher, then by time."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(stop))
            tasks.create_task(self._consult(stop))

    def enter(self) -> None:
        """One more page watches."""
        self._watchers += 1
        self._watched.set()

    def leave(self) -> None:
        """One page fewer."""
        self._watchers -= 1
        if not self._watchers:
            self._watched.clear()

    async def news(self, since: int, wait_s: float) -> tuple[int, dict[str, bytes]]:
        """Number of the newest look, and the sections that changed after look `since`; waits for them, at most `wait_s`."""
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: self._look > since)
        except TimeoutError:
            pass
        return self._look, {name: body for name, (at, body) in self._sections.items() if at > since}

    async def _follow(self, stop: asyncio.Event) -> None:
        clock = self._bus.clock
        self._answered = clock.monotonic()
        while await self._somebody(stop):
            began = clock.monotonic()
            share = LOOK_SHARE if await self.look() else 1.0  # nothing was spent but time: ask again at once
            spent = clock.monotonic() - began
            await within(max(self._refresh_s - spent, spent / share - spent), stop)

    async def look(self) -> bool:
        """Look once more; whether the bus answered."""
        try:
            state = await self._seen()
            self._answered = self._bus.clock.monotonic()
        except BusUnreachable:
            state = {}
        silent_s = self._bus.clock.monotonic() - self._answered
        await self._tell(state | {"silent": round(silent_s) if silent_s > SILENT_S else 0})
        return bool(state)

    async def _seen(self) -> State:
        snapshot, history = await read_snapshot(self._bus), self._feed.history
        self._looks.see(snapshot)
        self.curves.follow(history.steps)
        return state_of(
            snapshot, history, self._looks, self.word, total_steps=self._total, settings=self._settings, kept=self._kept
        )

    async def _tell(self, state: State) -> None:
        """Number the sections that are not as before, and wake who waits for news."""
        self._look += 1
        self.wall = self._bus.clock.wall()
        for name, value in state.items():
            body = msgspec.json.encode(value)
            if name not in self._sections or self._sections[name][1] != body:
                self._sections[name] = (self._look, body)
        async with self._changed:
            self._changed.notify_all()

    async def _consult(self, stop: asyncio.Event) -> None:
        """The doctor's word, as seldom as it must be to take DOCTOR_SHARE of the time, within OLDEST_WORD_S; audits
        of the ledger as the watchdog's."""
        clock, audits, of_late = self._bus.clock, Audits(), OfLate()
        while await self._somebody(stop):
            began, share = clock.monotonic(), DOCTOR_SHARE
            try:
                ledger = await audits.newest(self._bus)
                steps = list(self._feed.history.steps)
                first = next((s.metrics for s in steps[:1] if s.step == 1), {})
                scene = msgspec.structs.replace(
                    await read_scene(self._bus, ledger=ledger, of_late=of_late), first_step=first, steps=steps
                )
                findings, said = await asyncio.to_thread(lambda s: (diagnose(s), dict(explain(s))), scene)
                of_trainer = said.get("trainer", "")
                lately = clock.wall() - self.word.wall < 2 * OLDEST_WORD_S  # else nobody has watched for a while
                waited = of_trainer if waiting(of_trainer) else self.word.waited if lately else ""
                self.word = DoctorWord(tuple(findings), said, clock.wall(), waited, open_text(scene))
            except BusUnreachable:
                share = 1.0  # `silent` says so
            spent = clock.monotonic() - began
            await within(max(DOCTOR_S, min(spent / share, OLDEST_WORD_S)), stop)

    async def _somebody(self, stop: asyncio.Event) -> bool:
        """Wait until somebody watches; False when it is over."""
        while not stop.is_set() and not self._watched.is_set():
            await first_of(self._watched.wait(), stop.wait())
        return not stop.is_set()
