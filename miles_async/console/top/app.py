"""The cockpit in a terminal: `miles-async top`.

Reads  the hub's state of the run, the doctor's word, the verbs    Writes  knobs and dead letters, when asked    Owns  alarms seen
Always true: it looks at the run as often as the hub does, whatever it shows; leaving it leaves the run alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.widgets import Footer, Static, TabbedContent, TabPane

from miles_async.console.top import parts
from miles_async.console.top.listing import Cockpit, Listing
from miles_async.console.top.page import Page
from miles_async.console.top.views import Dead, Doctor, Events, KnobList, Samples
from miles_async.console.verbs import Verbs
from miles_async.console.web.hub import Hub

AGAIN = 75  # return code: attach once more
QUIET_S = 2.0  # without news of the hub, times go on
VIEWS = ("run", "engines", "samples", "knobs", "dead", "events", "doctor")


class Terminal(LinuxDriver):
    """One that may go away, with a connection or a window: what is written to it then is lost, and nobody waits for it."""

    def write(self, data: str) -> None:
        if self._writer_thread is not None and self._writer_thread.is_alive():
            super().write(data)
        else:
            self._app.exit()


class Top(Cockpit):
    """`hub` and `verbs` of one run. `read_only`: why nothing may be changed, empty = it may. `over()`: asked of
    a bus that does not answer, whether the run has ended with it and left something to show; then it exits with AGAIN. `run_dir`:
    where this host has it, keeps which alarms were acknowledged."""

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (140, "-wide")]
    CSS_PATH = "top.tcss"
    BINDINGS: ClassVar[list[Any]] = [
        *(Binding(str(i), f"view('{name}')", name, show=False) for i, name in enumerate(VIEWS, 1)),
        Binding("q", "leave", "leave"),
        Binding("ctrl+c,ctrl+q", "leave", "leave", show=False, priority=True),
        Binding("a", "seen", "alarms seen"),
    ]

    def __init__(
        self,
        hub: Hub,
        verbs: Verbs,
        *,
        read_only: str = "",
        run_dir: Path | None = None,
        driver: type[Driver] | None = None,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(driver_class=driver)
        self.animation_level = "none"  # over ssh each frame is work
        self.hub, self.verbs, self.read_only, self._over = hub, verbs, read_only, over
        self.page = Page(hub, read_only, seen_in=run_dir)
        self._drawing = asyncio.Lock()

    def compose(self) -> ComposeResult:
        yield Static(Text("waiting for the bus", style="dim"), id="head")
        yield Static(id="alarms")
        listings = {"samples": Samples, "knobs": KnobList, "dead": Dead, "events": Events, "doctor": Doctor}
        with TabbedContent(id="views"):
            for i, name in enumerate(VIEWS, 1):
                with TabPane(f"{i} {name.capitalize()}", id=name):
                    if name in listings:
                        yield listings[name]()
                    else:
                        with VerticalScroll(can_focus=True):
                            yield Static()
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.run_worker(self._follow(), exit_on_error=True)

    async def _follow(self) -> None:
        """Until the end; woken by each look of the hub, or by time."""
        with self.page as page:
            while True:
                await page.follow(QUIET_S)
                await self._draw()

    def look(self) -> None:
        """Draw again now."""
        self.run_worker(self._draw())

    async def _draw(self) -> None:
        async with self._drawing:
            try:
                await self._show()
            except NoMatches:
                pass  # it is being left: its parts are gone already

    async def _show(self) -> None:
        page, state, (width, height) = self.page, self.page.state, self.size
        self.query_one("#head", Static).update(page.head(width))
        if "run" not in state:
            return
        if state.get("silent") and self._over():
            self.exit(return_code=AGAIN)
        lines = page.alarm_lines(width, height)
        board = self.query_one("#alarms", Static)
        board.display = bool(lines)
        board.update(lines)
        tabs = self.query_one(TabbedContent)
        dead = state["counts"]["dead"]
        tabs.get_tab("dead").label = f"5 Dead ({dead})" if dead else "5 Dead"
        pane = tabs.active_pane
        if pane is None:
            return
        room = max(20, width - 4)
        if pane.id == "run":
            pane.query_one(Static).update(page.overview(room, height))
        elif pane.id == "engines":
            pane.query_one(Static).update(parts.engines(state, page.wall, room))
        else:
            await pane.query_one(Listing).show(state)

    def action_view(self, name: str) -> None:
        self.query_one(TabbedContent).active = name

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        if event.pane is self.query_one(TabbedContent).active_pane:  # else focus would bring back what was left
            event.pane.query("DataTable, VerticalScroll").first().focus()
        self.look()

    def on_resize(self) -> None:
        self.look()

    def action_seen(self) -> None:
        self.page.acknowledge()
        self.look()

    def action_leave(self) -> None:
        self.exit()
