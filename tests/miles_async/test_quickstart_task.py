"""The tasks that are shipped: their problems are right and apart, their tokenizers and model directories load everywhere."""

from __future__ import annotations

import ast
import json
import operator
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_async.quickstart import words
from miles_async.quickstart.arithmetic import ARITHMETIC, KINDS, MIX, draw
from miles_async.quickstart.model import ModelDirectoryTaken, make_model
from miles_async.quickstart.task import EOS_ID, UNK_ID, Problem, Task, WarmStart
from miles_async.quickstart.tasks import TASKS, row_of, write_jsonl
from miles_async.quickstart.warm_start import WarmStartFailed, accuracy, development_problems

DATA = Path(__file__).parents[2] / "configs" / "data"
SHORT = WarmStart(learn_steps=6, careless_steps=3, batch_size=8, parts=2, development=20, accepted=(0.0, 1.0))
ALL = pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)

OPERATIONS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def value(node: ast.expr) -> int:
    """Integer arithmetic over a parsed expression; nothing is executed."""
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATIONS[type(op)](value(left), value(right))
        case ast.Constant(value=int(number)):
            return number
    raise AssertionError(ast.dump(node))


def short(task: Task, lessons: WarmStart = SHORT) -> Task:
    """The task with a warm start of a second."""
    return replace(task, lessons=lessons)


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory of every task."""
    home = tmp_path_factory.mktemp("models")
    for name, task in TASKS.items():
        make_model(home / name, short(task), seed=5)
    return {name: home / name for name in TASKS}


@pytest.fixture(scope="module")
def model_directory(directories: dict[str, Path]) -> Path:
    return directories["arithmetic"]


@pytest.mark.parametrize(("name", "least"), [("arithmetic_train.jsonl", 2000), ("arithmetic_held_out.jsonl", 200)])
def test_shipped_labels_are_what_the_prompts_evaluate_to(name: str, least: int) -> None:
    shipped = rows(name)
    assert len(shipped) >= least
    for row in shipped:
        assert set(row) == {"prompt", "label"}
        assert row["prompt"].endswith("=")
        expression = ast.parse(row["prompt"][:-1], mode="eval").body
        assert row["label"] == str(value(expression)), row


@ALL
def test_no_prompt_occurs_twice_and_the_held_out_ones_are_apart(task: Task) -> None:
    train = [row["prompt"] for row in rows(f"{task.name}_train.jsonl")]
    held_out = [row["prompt"] for row in rows(f"{task.name}_held_out.jsonl")]
    assert len(set(train) | set(held_out)) == len(train) + len(held_out)


def test_shipped_problems_have_all_operators_brackets_and_several_lengths() -> None:
    for name in ("arithmetic_train.jsonl", "arithmetic_held_out.jsonl"):
        prompts = [row["prompt"] for row in rows(name)]
        assert all(any(character in prompt for prompt in prompts) for character in "+-*(")
        assert {sum(character in "+-*" for character in prompt) for prompt in prompts} == {1, 2}
        assert len({len(prompt) for prompt in prompts}) >= 3


@ALL
def test_the_shipped_files_are_made_from_the_shipped_seed(tmp_path: Path, task: Task) -> None:
    train, held_out = task.shipped()
    for name, problems in ((f"{task.name}_train.jsonl", train), (f"{task.name}_held_out.jsonl", held_out)):
        write_jsonl(tmp_path / name, map(row_of, problems))
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_the_shipped_word_problems_are_made_from_their_seed_right_and_apart(tmp_path: Path) -> None:
    asked = re.compile(r"has (\d+) (?:(\w+) with (\d+) \w+ in each|\w+ and (\w+)(?: away)? (\d+))")
    seen = set()
    for name, problems in zip(("words_train.jsonl", "words_held_out.jsonl"), words.make_words(), strict=True):
        write_jsonl(tmp_path / name, map(words.row_of, problems))
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()
        for line in (DATA / name).read_text("utf-8").splitlines():
            row = json.loads(line)
            text = row["prompt"][-1]["content"]
            first, places, inner, verb, second = asked.search(text).groups()
            sign = 1 if verb in ("gets", "finds", "buys") else -1
            assert int(row["label"]) == (int(first) * int(inner) if places else int(first) + sign * int(second)) > 0, text
            assert text not in seen and not any(word in text for word in ("Rosa", "plums"))
            seen.add(text)
    assert len(seen) == words.TRAIN + words.HELD_OUT


def test_shipped_arithmetic_has_problems_of_every_kind() -> None:
    for problems in ARITHMETIC.shipped():
        assert {problem.kind for problem in problems} == set(KINDS) == set(MIX)


@ALL
def test_another_seed_gives_other_problems(task: Task) -> None:
    assert task.make_problems(1, train=20, held_out=5) == task.make_problems(1, train=20, held_out=5)
    assert task.make_problems(1, train=20, held_out=5) != task.make_problems(2, train=20, held_out=5)


def test_more_problems_than_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 5000"):
        ARITHMETIC.make_problems(1, train=5000, held_out=1)
    with pytest.raises(ValueError, match="'riddle' in the mix is unknown"):
        draw(random.Random(0), {"riddle": 1.0})


@ALL
def test_a_stream_never_yields_what_it_must_leave_out(task: Task) -> None:
    first = {problem.prompt for problem in islice(task.stream(3), 50)}
    for later in (task.stream(3, without=frozenset(first)), task.lesson(3, 500, without=frozenset(first))):
        assert not first & {problem.prompt for problem in islice(later, 500)}
    assert not first & {problem.prompt for problem in development_problems(task, 60, seed=9, without=frozenset(first))}


@ALL
def test_every_prompt_and_response_survives_the_tokenizer(directories: dict[str, Path], task: Task) -> None:
    plain = Tokenizer.from_file(str(directories[task.name] / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(directories[task.name])
    assert (auto.eos_token_id, auto.unk_token_id, len(auto)) == (EOS_ID, UNK_ID, len(task.vocabulary))
    for problem in task.shipped()[1]:
        text = problem.prompt + problem.written
        ids = plain.encode(text).ids
        assert ids == auto(text)["input_ids"] == task.encode(text)
        assert "".join(task.vocabulary[token] for token in ids) == text
        shown = text.replace("<eos>", "")
        assert plain.decode([*ids, EOS_ID]) == auto.decode([*ids, EOS_ID], skip_special_tokens=True) == shown
    one, two = task.encode("1"), task.encode("2")
    assert plain.encode("1?é2").ids == [*one, UNK_ID, UNK_ID, *two]


@ALL
def test_the_directory_loads_in_transformers_and_generates(directories: dict[str, Path], task: Task) -> None:
    model = AutoModelForCausalLM.from_pretrained(directories[task.name])
    assert model.config.model_type == "qwen3" and model.config.vocab_size == len(task.vocabulary)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.generation_config.eos_token_id == model.config.eos_token_id == EOS_ID
    prompt = torch.tensor([task.encode(task.shipped()[1][0].prompt)])
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=3)
    assert answer.shape[1] > prompt.shape[1]


def test_equal_seeds_give_equal_weights_and_leave_the_callers_randomness_alone(tmp_path: Path, model_directory: Path) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    make_model(tmp_path / "same", short(ARITHMETIC), seed=5)
    make_model(tmp_path / "other", short(ARITHMETIC), seed=6)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
    weights = (model_directory / "model.safetensors").read_bytes()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "same"]


def test_a_made_directory_is_kept_and_a_foreign_one_is_refused(tmp_path: Path, model_directory: Path) -> None:
    before = (model_directory / "model.safetensors").stat().st_mtime_ns
    make_model(model_directory, short(ARITHMETIC), seed=5)
    assert (model_directory / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ModelDirectoryTaken, match=r"something else.*arithmetic.*seed 6.*Remove it or name another"):
        make_model(model_directory, short(ARITHMETIC), seed=6)
    (tmp_path / "note.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ModelDirectoryTaken, match=r"this model of columns \(seed 5"):
        make_model(model_directory, short(TASKS["columns"]), seed=5)
    with pytest.raises(ModelDirectoryTaken, match="something else"):
        make_model(tmp_path, short(ARITHMETIC), seed=5)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


LAUNCHER = """
import sys
from pathlib import Path
import miles_async.launcher.run
from miles_async.launcher.prepare import model_dir
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
settings = settings_from(hf_checkpoint="builtin:arithmetic", prompt_data="x.jsonl", num_rollout=3, rm_type="math", seed=4)
try:
    print(model_dir(settings, Path(sys.argv[1]) / "runs" / "r"))
except SettingsError as error:
    print(error)
print("torch" in sys.modules)
"""


def test_the_launcher_holds_no_torch_for_a_builtin_model_says_that_it_is_made_and_why_one_cannot_be(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / ".models" / "arithmetic-seed4"
    directory.mkdir(parents=True)

    def told() -> list[str]:
        command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()

    (directory / "note.txt").write_text("mine", encoding="utf-8")
    [making, why, torch_is_here] = told()
    assert making.startswith("making the model builtin:arithmetic, once")
    assert why.startswith("hf_checkpoint = 'builtin:arithmetic': model directory") and "Remove it or name another" in why
    assert torch_is_here == "False"
    (directory / "model.safetensors").touch()
    assert told() == [str(directory), "False"]


def test_a_recipe_that_misses_its_range_leaves_nothing_behind(tmp_path: Path) -> None:
    impossible = WarmStart(learn_steps=1, careless_steps=1, batch_size=2, development=5, accepted=(0.9, 1.0))
    with pytest.raises(WarmStartFailed, match="Nothing was saved"):
        make_model(tmp_path / "model", short(ARITHMETIC, impossible), seed=0)
    assert not list(tmp_path.iterdir())


def test_accuracy_is_the_share_of_exact_greedy_answers(model_directory: Path) -> None:
    """Against token-by-token greedy decoding, on labels of which some are the model's own answers."""
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    with torch.no_grad():
        model.lm_head.weight[EOS_ID] *= 3  # a model of six steps seldom ends by itself
    problems, right = [], 0
    for index, problem in enumerate(islice(ARITHMETIC.stream(4), 40)):
        prompt = ARITHMETIC.encode(problem.prompt)
        answer: list[int] = []
        while len(answer) < 6 and (not answer or answer[-1] != EOS_ID):
            answer.append(int(model(torch.tensor([prompt + answer])).logits[0, -1].argmax()))
        spelled = [ARITHMETIC.vocabulary[token] for token in answer[:-1]]
        ends = answer[-1] == EOS_ID and all(len(character) == 1 for character in spelled)
        own = ends and index % 3 > 0
        right += own
        written = "".join(spelled) if own else "987654"
        problems.append(Problem(problem.prompt, written, written, problem.kind))
    assert 0 < right < len(problems)
    assert accuracy(model, ARITHMETIC, problems) == pytest.approx(right / len(problems))
