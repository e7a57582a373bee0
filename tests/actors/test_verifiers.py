"""An environment of the package verifiers, played by its own harness through our endpoint. Needs the package, which wants an older
openai than our tests have, and uv, with which it starts its harness: run by hand in an environment of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from actors.generation.endpoint.agent import AgentProgram
from actors.generation.endpoint.server import Endpoint
from scripts.bench.chat_tokenizer import make_chat
from tests.actors.agent_house import ScriptedSession, task

TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class Sum(vf.TaskData):
    total: int


class SumTask(vf.Task[Sum]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.total) in trace.last_reply)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        return [SumTask(Sum(prompt=f"{n}+{n}=", total=2 * n), self.config.task) for n in range(3)]
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("uv") is None, reason="verifiers starts its harness by uv")
async def test_an_environment_of_verifiers_is_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers wants openai < 3")
    from actors.generation.endpoint.verifiers import Played

    (tmp_path / "sums_of_ours.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    played = Played("sums_of_ours", agent={"harness": {"id": "null"}, "runtime": {"type": "subprocess"}})
    rows = list(played.rows("-"))
    assert [row["prompt"] for row in rows] == ["0+0=", "1+1=", "2+2="]

    chat = make_chat(tmp_path / "chat")
    session = ScriptedSession(chat, task(metadata=rows[2]["metadata"]), lambda seen: "4" if "2+2=" in seen else "?")
    async with Endpoint(chat, "hermes", lambda *_: None) as endpoint:
        [found] = await AgentProgram(played.agent, endpoint, idle_s=200.0)(session.task, session)
    assert found.reward == 1.0 and found.segments[-1].tokens == session.made[-1].tokens
