"""The two parts that every view with rows is made of: a table with the whole of its chosen row beside it, and a form that asks.

Texts of models, hooks and errors are shown as they are: nothing of them is markup, nothing of them is obeyed by a terminal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from rich.cells import cell_len
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Container, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Input, Static

from bus.errors import MilesAsyncError, printable
from miles_async.console.verbs import Verbs
from miles_async.console.web.hub import Hub
from miles_async.settings.errors import SettingsError

REFUSED = (MilesAsyncError, SettingsError)  # what a verb refuses, in one line
MOST_TEXT = 20_000  # characters of one row's whole


class ListRow(NamedTuple):
    """`key` is the row's name while it changes; `cells` its columns; `whole` all there is to say; `data` what an action needs."""

    key: str
    cells: Sequence[str]
    whole: str
    style: str = ""
    data: Any = None


class Cockpit(App[None]):
    """What views ask of the app that shows them. `read_only`: why nothing may be changed, empty = it may."""

    hub: Hub
    verbs: Verbs
    read_only: str

    def look(self) -> None:
        """Draw again now."""
        raise NotImplementedError


class Listing(Container):
    """A view with rows. Subclasses say COLUMNS, when their rows are out of date (`stamp`) and what they are (`rows`)."""

    COLUMNS: ClassVar[tuple[str, ...]] = ()
    EMPTY: ClassVar[str] = "nothing yet"
    app: Cockpit

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._rows: list[ListRow] = []
        self._loaded: object = None

    def compose(self) -> ComposeResult:
        yield DataTable[Text](cursor_type="row", zebra_stripes=True)
        with VerticalScroll(classes="whole"):
            yield Static(Text(self.EMPTY, style="dim"))

    def on_mount(self) -> None:
        self.query_one(DataTable).add_columns(*self.COLUMNS)

    def stamp(self, state: dict[str, Any]) -> object:
        """Changes when the rows must be made anew."""
        raise NotImplementedError

    async def rows(self, state: dict[str, Any]) -> list[ListRow]:
        """All rows. Raises what a verb refuses."""
        raise NotImplementedError

    async def show(self, state: dict[str, Any]) -> None:
        """Make the rows anew where they are out of date, the chosen one stays chosen."""
        stamp = self.stamp(state)
        if stamp == self._loaded:
            return
        try:
            rows = await self.rows(state)
        except REFUSED as error:  # asked again at the next look
            return self._tell(str(error))
        self._loaded = stamp
        table, chosen = self.query_one(DataTable), self.chosen
        self._rows = rows
        cells = [[Text(printable(" ".join(cell.split())), style=row.style) for cell in row.cells] for row in rows]
        table.clear(columns=True)
        for i, name in enumerate(self.COLUMNS):  # widths of our own: the table's are right only after it was drawn once
            table.add_column(name, width=max(cell_len(name), *(line[i].cell_len for line in cells), 1))
        for row, line in zip(rows, cells, strict=True):
            table.add_row(*line, key=row.key)
        if chosen is not None:
            table.move_cursor(row=next((i for i, row in enumerate(rows) if row.key == chosen.key), 0))
        self._tell(self.chosen.whole if self.chosen else self.EMPTY)

    @property
    def chosen(self) -> ListRow | None:
        """The row under the cursor."""
        at = self.query_one(DataTable).cursor_row
        return self._rows[at] if 0 <= at < len(self._rows) else None

    def on_data_table_row_highlighted(self) -> None:
        if self.chosen is not None:
            self._tell(self.chosen.whole)

    def _tell(self, text: str) -> None:
        self.query_one(".whole > Static", Static).update(Text(printable(text[:MOST_TEXT]), overflow="fold"))

    def stale(self, *, anew: bool = False) -> None:
        """Something was changed: look again; `anew`: these will be other rows, from the first on."""
        self._loaded = None
        if anew:
            self._rows = []
        self.app.look()

    def ask(self, title: str, fields: Sequence[tuple[str, str]], act: Callable[[list[str]], Awaitable[str]]) -> None:
        """A form, unless nothing may be changed here."""
        if self.app.read_only:
            self.app.notify(f"{self.app.read_only}: nothing is changed", severity="warning", markup=False)
        else:
            self.app.push_screen(AskScreen(title, fields, act), self._answered)

    def _answered(self, text: str | None) -> None:
        if text:
            self.app.notify(text, markup=False)
            self.stale()


class AskScreen(ModalScreen[str | None]):
    """Fields and what to do with them. A refusal stays in the form; Escape changes nothing."""

    BINDINGS = [Binding("escape", "dismiss(None)", "leave it as it is"), Binding("ctrl+s,f2", "go", "do it")]
    app: Cockpit

    def __init__(self, title: str, fields: Sequence[tuple[str, str]], act: Callable[[list[str]], Awaitable[str]]) -> None:
        super().__init__()
        self._title, self._fields, self._act = title, fields, act

    def compose(self) -> ComposeResult:
        with Vertical(id="form"):
            yield Static(Text(printable(self._title), overflow="fold"))
            for label, value in self._fields:
                yield Static(Text(label, style="dim"))
                yield Input(value, select_on_focus=False, compact=True)
            yield Static(id="refused")
            yield Static(Text("Enter: next, then do it · Escape: leave it as it is", style="dim"))

    def key_enter(self) -> None:
        """Of a form without fields."""
        if not self._fields:
            self.action_go()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        fields = list(self.query(Input))
        at = fields.index(event.input)
        if at + 1 < len(fields):
            fields[at + 1].focus()
        else:
            self.action_go()

    def action_go(self) -> None:
        self.run_worker(self._go(), exclusive=True)

    async def _go(self) -> None:
        self.query_one("#refused", Static).update("")
        try:
            text = await self._act([field.value.strip() for field in self.query(Input)])
        except REFUSED as error:
            self.query_one("#refused", Static).update(Text(printable(str(error)), style="bold red", overflow="fold"))
        else:
            self.dismiss(text)
