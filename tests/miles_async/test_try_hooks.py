"""Functions of the user's that give data or score whole groups are tried before anything starts, and refused in one line."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.generation.rollouts import Trajectory
from actors.reward.sample import Sample
from actors.runtime.child import is_alive
from actors.runtime.hooks import load_hook
from miles_async.launcher import hooks
from miles_async.launcher.try_hooks import HookTrial, problem_of
from tests.declared import data_of

SAMPLE = Sample(sample_id="try/0", prompt="1+1=", response="2", label="2")


def rows(path: str) -> list[dict[str, str]]:
    return [{"prompt": f"{path}+1=", "label": "2"}] * 3


def endless(path: str) -> Any:
    while True:
        yield {"prompt": path, "label": "1"}


def other_columns(path: str) -> list[dict[str, str]]:
    return [*rows(path), {"question": "?"}]


class Source:
    """As Miles': groups of copies, from where it stands."""

    def __init__(self, args: Any) -> None:
        self.args, self.at = args, 0

    def get_samples(self, n: int) -> list[list[Any]]:
        self.at += n
        made = [SimpleNamespace(prompt=f"{self.args.prompt_data}+{i}=", label=str(i), metadata={"i": i}) for i in range(self.at)]
        return [[one] * self.args.n_samples_per_prompt for one in made[-n:]]


class NoSamples(Source):
    def get_samples(self, n: int) -> list[list[Any]]:
        return [["1+1="]]


def as_many(samples: list[dict[str, Any]]) -> list[float]:
    return [float(sample["response"] == sample["label"]) for sample in samples]


def one_for_all(samples: Any) -> float:
    return 1.0


async def of_miles(args: Any, sample: Any) -> dict[str, float]:
    return {"score": float(sample.response == sample.label) * args.rollout_batch_size, "n": sample.response_length}


def whole_of_miles(args: Any, samples: list[Any]) -> list[float]:
    return [float(one.index) for one in samples]


def of_numpy(sample: dict[str, Any]) -> Any:
    return np.float32(sample["response"] == sample["label"])


def table_of_numpy(sample: dict[str, Any]) -> dict[str, Any]:
    return {"score": np.int64(1), "right": np.bool_(sample["response"] == sample["label"])}


def array(samples: list[dict[str, Any]]) -> Any:
    return np.array([len(sample["response"]) for sample in samples])


def loop_of_its_own(sample: dict[str, Any]) -> float:
    return asyncio.run(asyncio.sleep(0, 1.0))


def exits(sample: Any) -> float:
    sys.exit(4)


def keeps_of_miles(args: Any, group: list[Any]) -> Any:
    values = [one.get_reward_value(args) for one in group]
    return SimpleNamespace(keep=max(values) > args.rollout_batch_size, reason="easy")


@pytest.mark.parametrize(
    ("field", "hook", "group_rm", "says"),
    [
        ("data_source_path", "rows", False, ""),
        ("data_source_path", "endless", False, ""),
        ("data_source_path", "other_columns", False, "row 4: it has no key 'prompt'"),
        ("data_source_path", "Source", False, ""),
        ("data_source_path", "NoSamples", False, "get_samples gave '1+1=' where a sample with a prompt belongs"),
        ("custom_rm_path", "as_many", True, ""),
        ("custom_rm_path", "one_for_all", True, "not with a list of as many rewards"),
        ("custom_rm_path", "one_for_all", False, ""),
        ("custom_rm_path", "of_numpy", False, ""),
        ("custom_rm_path", "table_of_numpy", False, ""),
        ("custom_rm_path", "array", True, ""),
        ("custom_rm_path", "loop_of_its_own", False, ""),
        ("custom_rm_path", "exits", False, "raised SystemExit: 4"),
        ("custom_rm_path", "of_miles", False, ""),
        ("custom_rm_path", "whole_of_miles", True, ""),
        ("dynamic_sampling_filter_path", "keeps_of_miles", False, ""),
    ],
)
def test_it_is_called_as_it_will_be(field: str, hook: str, group_rm: bool, says: str) -> None:
    data = data_of(path="7", metadata_key="", tool_key="")
    path, values = f"{__name__}.{hook}", {"reward_key": None, "num_rollout": 2, "rollout_batch_size": 4, "n_samples_per_prompt": 2}
    ask = HookTrial(paths={field: path}, sample=SAMPLE, data=data, group_rm=group_rm, reward_key="score", values=values)
    found = problem_of(field, path, ask)
    assert (says in found) if says else found == ""


class LoopOfItsOwn:
    def reset(self, task: dict[str, Any]) -> str:
        return asyncio.run(asyncio.sleep(0, task["label"]))


async def visits(task: Any, session: Any) -> list[Trajectory]:
    return [Trajectory(task.prompt, [await session.generate(task.prompt)], reward=float(await session.world().reset() == "2"))]


def test_functions_of_megatron_are_found_before_the_trainer_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they import may be on the trainer's hosts alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_mine.py").write_text("import megatron_plugins_elsewhere\n")
    (tmp_path / "sound.py").write_text("def init(core):\n    return None\n")

    def said(path: str) -> str:
        return problem_of("custom_megatron_init_path", path, HookTrial(paths={}, sample=SAMPLE))

    assert said("sound.init") == "" and said("of_mine.init") == ""
    assert said("nope.f") == "cannot be loaded: No module named 'nope'. Give package.module.function or file.py:function."
    assert "no attribute 'it'" in said("sound.it")
    assert "No module named 'sound.more'" in said("sound.more.f")


def test_an_environment_is_called_in_no_loop_also_by_a_program_that_is_tried() -> None:
    paths = {"custom_generate_function_path": f"{__name__}.visits", "environment_path": f"{__name__}.LoopOfItsOwn"}
    ask = HookTrial(paths=paths, sample=SAMPLE)
    assert [problem_of(field, path, ask) for field, path in paths.items()] == ["", ""]


BUSY = """
import subprocess, sys, threading
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
threading.Thread(target=threading.Event().wait).start()
open(PIDS, "w").write(str(left.pid))
def reward(sample):
    subprocess.run(["echo", "checked"])
    return 1.0
"""


def test_what_a_hook_prints_starts_or_leaves_running_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(f"PIDS = {str(tmp_path / 'pid')!r}\n{BUSY}")
    ask = HookTrial(paths={"custom_rm_path": f"{tmp_path}/busy.py:reward"}, sample=SAMPLE)
    hooks._try("miles_async.launcher.try_hooks", "custom_rm_path", msgspec.json.encode(ask))
    assert not is_alive(int((tmp_path / "pid").read_text()))


SCRIPT = """
from __future__ import annotations
from dataclasses import dataclass
from beside import right
@dataclass
class Said:
    text: str
def reward(sample):
    return right(Said(sample["response"]).text)
"""


def test_a_function_in_a_file_may_have_dataclasses_and_import_from_the_folder_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside.py").write_text("def right(text): return float(text == '2')\n")
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "mine.py").write_text(SCRIPT)
    assert load_hook("rewards/mine.py:reward")({"response": "2"}) == 1.0
