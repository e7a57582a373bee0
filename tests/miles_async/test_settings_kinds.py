"""A record of a user's own, by dotted path: settings ask it what they ask of those that ship."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.generation.engines.records import DEFAULT, ENGINES
from miles_async.launcher.engines import generation_spec
from miles_async.launcher.place import Place
from miles_async.settings.catalog import catalog
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from miles_async.settings.run import RunSettings

OWN = "tests.engine.own_engine:KIND"
GPU = """
from actors.generation.engines.kind import EngineKind
from actors.kinds import RuleBroken


class Mine(EngineKind, frozen=True, kw_only=True):
    def open(self, context, spec, folder, spare=None): ...

    def rules(self, s):
        if s.rollout_top_k > 0:
            yield RuleBroken("rollout_top_k", s.rollout_top_k, "mine has no top-k", "Leave it out.")

    def notes(self, s):
        yield "mine is slow"


KIND = Mine(name="mine", needs_gpu=True)
"""


def make(**fields: Any) -> RunSettings:
    words = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "x.jsonl", "num_rollout": 3, "rm_type": "math"}
    return settings_from(**words | fields)


def refusal(**fields: Any) -> str:
    with pytest.raises(SettingsError) as refused:
        make(**fields)
    text = str(refused.value)
    assert "\n" not in text
    return text


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(GPU)
    return f"{tmp_path}/mine.py:KIND"


def test_an_engine_of_ones_own_is_taken_by_its_path() -> None:
    s = make(engine=OWN)
    assert s.flat.engine_kind.name == "own" and s.flat.engine_kind.told == "a server of the tests"
    assert (s.sglang.num_generation_workers, s.sglang.rollout_num_gpus, s.sglang.use_router) == (2, 0, False)
    assert s.flat.selfcheck_logprob_tolerance == 0.03, "it runs another program than the trainer"


def test_what_its_record_says_holds(mine: str) -> None:
    assert make(engine=mine, num_generation_workers=3, rollout_num_gpus_per_engine=2).sglang.rollout_gpu_ids == tuple(range(1, 7))
    assert "mine has no top-k" in refusal(engine=mine, rollout_top_k=5)
    assert "cannot pause so" in refusal(engine=OWN, pause_generation_mode="in_place")
    text = refusal(engine=OWN, update_weight_transport="nccl")
    assert "takes no weights so" in text and "Set it to disk" in text
    assert "it is for SGLang engines" in refusal(engine=OWN, server_args={"mem-fraction-static": 0.5})


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("sgland", "Did you mean sglang?"),
        ("no.such:KIND", "No module named"),
        ("tests.engine.own_engine:MODULE", "is a str, no EngineKind"),
        ("tests.engine.own_engine:NOBODY", "NOBODY"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(path: str, words: str) -> None:
    assert words in refusal(engine=path)


def test_a_record_without_what_a_worker_calls_is_refused_before_a_start(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(
        "from actors.generation.engines.kind import EngineKind\n"
        "from actors.runtime.transports.kind import TransportKind\n"
        "ENGINE = EngineKind(name='half')\n"
        "WAY = TransportKind(name='half', sender='half.open')\n"
    )
    assert "half.py:ENGINE has no method open" in refusal(engine=f"{tmp_path}/half.py:ENGINE")
    said = refusal(update_weight_transport=f"{tmp_path}/half.py:WAY")
    assert "half.py:WAY has a sender and no method load" in said and "\n" not in said


def test_a_worker_is_told_of_it_by_its_path(tmp_path: Path) -> None:
    where = {"run_dir": str(tmp_path), "model_dir": "m", "weights_dir": "w", "blob_dir": "b"}
    place = Place(stop_token_ids=(), num_rollout=3, fingerprint="", **where)
    assert generation_spec(make(engine=OWN), place).engine == OWN
    assert generation_spec(make(engine=OWN), place, engine_url="http://h:1").engine == "external"


def test_help_and_choices_are_of_the_records() -> None:
    field = catalog()["engine"]
    assert field.text.startswith("embedded: the small server of this package; sglang: SGLang servers started by us; ")
    assert field.shipped == tuple(ENGINES) and field.default == DEFAULT.name
