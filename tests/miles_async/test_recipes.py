"""The recipes in configs/ resolve as they stand, with the places that their first lines ask for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_async.cli.app import main
from miles_async.cli.flags import parse_flags
from miles_async.launcher.memory import Sizes
from miles_async.launcher.plan import courier_spec
from miles_async.launcher.preflight import check_prompt_data, preflight
from miles_async.quickstart.arithmetic import ARITHMETIC
from miles_async.quickstart.tasks import TASKS
from miles_async.quickstart.tokenizer import save_tokenizer
from miles_async.settings.dump import dry_run_text
from miles_async.settings.load import load
from scripts.bench.launch_scripts import CONFIGS
from tests.declared import PLACE
from tests.floors.tree import ROOT

pytestmark = pytest.mark.timeout(200)
RECIPES = sorted((ROOT / "configs").glob("*.toml"))
GSM8K = {"question": "Ann has 3 bags of 14 pens. How many pens?", "answer": "She has 3 * 14 = 42 pens.\n#### 42"}


def gsm8k(tmp_path: Path) -> list[str]:
    """Flags that give a recipe a model directory and rows shaped as the data set has them."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(GSM8K) + "\n", "utf-8")
    words = ["--hf-checkpoint", str(tmp_path), "--prompt-data", str(rows), "--eval-prompt-data", "test", str(rows)]
    return [*words, "--runs-dir", str(tmp_path / "runs")]


def test_there_are_recipes_for_a_laptop_and_for_gpus() -> None:
    assert {path.stem for path in RECIPES} >= {
        "quickstart",
        "long",
        "qwen2.5-0.5b-gsm8k",
        "qwen3-0.6b-gsm8k",
        "qwen3-4b-gsm8k",
    }


@pytest.mark.parametrize(("recipe", "task"), [("quickstart", "arithmetic"), ("long", "columns")])
def test_a_recipe_for_a_laptop_resolves_from_the_checkout(recipe: str, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    s = load(ROOT / "configs" / f"{recipe}.toml", {}).settings
    found = preflight(s)
    assert (s.launch.name, s.model.builtin_name, s.sglang.engine) == (recipe, task, "embedded")
    assert found.prompts.rows == TASKS[task].train
    assert {name: data.rows for name, data in found.held_out.items()} == {"held_out": TASKS[task].held_out}
    longest = max(len(TASKS[task].encode(p.written)) + 1 for problems in TASKS[task].shipped() for p in problems)
    assert longest <= s.rollout.rollout_max_response_len, "the right answer fits"
    assert s.rollout.max_weight_staleness == 2


@pytest.mark.parametrize("path", [p for p in RECIPES if p.stem.endswith("gsm8k")], ids=lambda p: p.stem)
def test_a_recipe_for_gsm8k_resolves(path: Path, tmp_path: Path) -> None:
    loaded = load(path, parse_flags(gsm8k(tmp_path), frozenset()).values)
    s = loaded.settings
    assert s.launch.name == path.stem
    assert path.stem in dry_run_text(loaded)
    assert (s.sglang.engine, s.sglang.rollout_gpu_ids, s.sglang.num_generation_workers) == ("sglang", (1,), 1)
    assert s.sglang.server_args["attention-backend"] == "fa3"
    assert courier_spec(s, PLACE).transport == "nccl"
    assert s.rollout.max_weight_staleness == 2 and s.grpo.use_tis
    assert dict(s.flat.datasets) == {"test": str(tmp_path / "rows.jsonl")}
    keys = {"input_key": s.rollout.input_key, "label_key": s.rollout.label_key}
    assert check_prompt_data(s.rollout.prompt_data, field="prompt_data", keys=keys).rows == 1


@pytest.mark.parametrize(
    ("flags", "engines", "ids"),
    [("--rollout-num-gpus 3", 3, (1, 2, 3)), ("--colocate --update-weight-transport ipc", 1, (0,))],
)
def test_a_recipe_takes_other_gpus_by_one_flag(flags: str, engines: int, ids: tuple[int, ...], tmp_path: Path) -> None:
    path = ROOT / "configs" / "qwen3-0.6b-gsm8k.toml"
    s = load(path, parse_flags([*gsm8k(tmp_path), *flags.split()], frozenset()).values).settings.sglang
    assert (s.num_generation_workers, s.rollout_gpu_ids) == (engines, ids)


def test_a_recipe_is_shown_by_dry_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    words = ["train", str(ROOT / "configs" / "qwen3-0.6b-gsm8k.toml"), *gsm8k(tmp_path), "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-m", "miles_async", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    if importlib.util.find_spec("sglang") is None:
        assert "sglang is not installed in this Python: --sglang-* flags are not verified" in done.stdout
    assert 'update_weight_transport = "nccl"' in done.stdout and 'input_key = "question"' in done.stdout


MEGATRON = {"qwen3-0.6b-megatron": "qwen3-0.6b-fsdp", "qwen3-4b-megatron": "qwen3-4b", "glm4-9b-megatron": "glm4-9b",
            "qwen3-30b-a3b-megatron": "qwen3-30b-a3b"}  # fmt: skip
PARAMETERS = {"qwen3-0.6b-megatron": Sizes(440_467_456, ends=155_582_464, end=155_582_464),
              "qwen3-4b-megatron": Sizes(3_633_511_936, ends=388_956_160, end=388_956_160),
              "glm4-9b-megatron": Sizes(8_158_822_400, ends=1_241_513_984, end=620_756_992),
              "qwen3-30b-a3b-megatron": Sizes(918_300_672, 28_991_029_248, ends=622_329_856, end=311_164_928)}  # fmt: skip


@pytest.mark.parametrize("recipe", MEGATRON)
def test_a_recipe_for_megatron_is_understood_and_fits_without_a_gpu(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--dry-run` with the model's own config.json: layout, flags and, as if on H200s, memory."""
    config = {**CONFIGS[MEGATRON[recipe]], "max_position_embeddings": 40_960}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_tokenizer(tmp_path, ARITHMETIC)
    told = json.loads((tmp_path / "tokenizer_config.json").read_text())
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    turns += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": turns}))
    words = gsm8k(tmp_path)
    if "gsm8k" not in (ROOT / "configs" / f"{recipe}.toml").read_text():
        chat = [{"role": "user", "content": GSM8K["question"]}]
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": chat, "label": "42"}) + "\n")
    monkeypatch.setattr("miles_async.launcher.memory.gpu_bytes", lambda: 143_771 << 20)
    monkeypatch.setattr("miles_async.launcher.memory.host_bytes", lambda: 720 << 30)
    monkeypatch.setattr("miles_async.launcher.memory.parameters", lambda _: PARAMETERS[recipe])
    assert main(["train", str(ROOT / "configs" / f"{recipe}.toml"), *words, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert 'train_backend = "megatron"' in shown.out and not shown.err and "may take" not in shown.out
