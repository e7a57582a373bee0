"""`miles-async samples`: kept samples as a person reads them."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from actors.recorder import samples
from actors.runtime.readable import readable
from bus.messages.base import pack_floats, pack_ints
from bus.messages.samples import Response, RolloutDone, SampleTask, Scored
from bus.messages.versions import VersionSpan
from miles_async.cli import app
from miles_async.settings.runs import write_run_file

WORDS = ["", "call", "calc", "4", "is", "2+2"]


def scored(group: str, index: int, reward: float, ids: list[int], mask: list[int]) -> dict[str, Any]:
    task = SampleTask(
        sample_id=f"{group}/{index}", group_id=group, index=index, n_samples=2, prompt_id="p", label="4",
        prompt_tokens=pack_ints([5]),
    )  # fmt: skip
    runs = [(made, len(list(run))) for made, run in groupby(mask)]
    response = Response(
        tokens=pack_ints(ids), logprobs=pack_floats([0.0] * len(ids)), loss_mask=memoryview(bytes(mask)),
        spans=tuple(VersionSpan(3, 2, n) if made else VersionSpan(-1, -1, n) for made, n in runs),
    )  # fmt: skip
    one = Scored(rollout=RolloutDone(task=task, response=response, finish="stop"), reward=reward, rewards={"score": reward})
    return readable(one, lambda tokens: " ".join(WORDS[i] for i in tokens))


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "one"
    write_run_file(folder, run="one", bus_url="unix:///gone.sock")
    turns = ([1, 2, 3, 4, 3], [1, 1, 0, 1, 1])
    for step, group in ((1, "g1"), (4, "g2")):
        kept = [scored(group, i, float(i), *turns) for i in range(2)]
        samples.append(folder, [{"step": step, **one} for one in kept])
    return folder


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert app.main(["samples", "--run", "one", *words]) == 0
    return capsys.readouterr().out


def test_the_newest_are_shown_with_turns_tools_and_rewards(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--best", "--count", "1")
    assert text.splitlines() == [
        "g2/1 at step 4, version 3: reward 1, score 1, label '4', 5 tokens, stop",
        "  prompt:      2+2",
        "  model:       call calc",
        "  environment: 4",
        "  model:       is 4",
        "",
        "1 more; --count 2 shows all",
    ]
    assert "g2/0" in shown(capsys, "--worst", "--count", "1")
    assert [one["sample"] for one in json.loads(shown(capsys, "--step", "3", "--json"))] == ["g1/0", "g1/1"]
    assert "g1/0" in shown(capsys, "--group", "g1")


def test_samples_of_an_evaluation_and_none_at_all(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "eval_samples").mkdir()
    line = json.dumps({"step": 2, **scored("e2", 7, 0.5, [3], [1])})
    (run_dir / "eval_samples" / "held_0000002.jsonl").write_text(f"{line}\nnot json\n")
    other = json.dumps({"step": 3, **scored("e3", 7, 0.5, [3], [1])})
    (run_dir / "eval_samples" / "held_hard_0000003.jsonl").write_text(f"{other}\n")
    assert "e2/7 at step 2" in shown(capsys, "--eval", "held"), "not those of another set whose name begins so"
    assert "e3/7 at step 3" in shown(capsys, "--eval", "held_hard")
    assert app.main(["samples", "--run", "one", "--group", "g9"]) == 2
    assert "no such sample is kept" in capsys.readouterr().err


def test_the_file_is_bounded(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST_BYTES", 10)
    samples.append(run_dir, [{"step": 9, "sample": "g3/0", "reward": 0.0}])
    assert [s["step"] for s in samples.read_samples([run_dir / samples.FILE])] == [9]
    assert [s["step"] for s in samples.read_samples([run_dir / samples.OLDER])] == [1, 1, 4, 4]


def test_from_another_host_samples_are_refused_and_no_others_are_shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["samples", "--run", "one", "--bus-url", "redis://10.0.0.5:6379", "--runs-dir", str(run_dir.parent)]
    assert app.main(words) == 2
    shown = capsys.readouterr()
    assert "Run this on its host" in shown.err and not shown.out
