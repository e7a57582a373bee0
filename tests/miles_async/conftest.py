"""A run on the session's server, and the commands on it."""

from __future__ import annotations

import asyncio
import json

import pytest

from bus import Bus
from miles_async.cli import app
from miles_async.settings.runs import write_run_file
from tests.miles_async.console_data import Story, config


class Run:
    """A run on the session's server, and the commands on it."""

    def __init__(self, url, name, runs_dir, capsys):
        self.url, self.name, self.runs_dir, self._capsys = url, name, runs_dir, capsys
        self.dir = runs_dir / name
        write_run_file(self.dir, run=name, bus_url=url)

    def tell(self, story):
        """`await story(Story)` on the bus; returns its value."""

        async def go():
            async with Bus(config(self.url, self.name)) as bus:
                return await story(Story(bus))

        return asyncio.run(go())

    def ask(self, *words):
        """(status, stdout, stderr) of a command."""
        self._capsys.readouterr()
        status = app.main([*words, "--runs-dir", str(self.runs_dir)])
        shown = self._capsys.readouterr()
        return status, shown.out, shown.err

    def ask_json(self, *words):
        status, out, err = self.ask(*words, "--json")
        assert err == ""
        return status, json.loads(out)


@pytest.fixture
def run(redis_url, run_name, tmp_path, capsys):
    return Run(redis_url, run_name, tmp_path, capsys)


@pytest.fixture
def whole(run):
    run.tell(Story.whole)
    return run
