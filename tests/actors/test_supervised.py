"""Supervised training: what of a dialogue is learned, and that it travels as every sample does without an engine's work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.generation.given import given_response
from actors.runtime.content import fault_of
from actors.runtime.prompts import Prompt, load_prompts
from actors.runtime.run import Refused
from actors.trainer.objective.loss import policy_loss
from actors.trainer.objective.prepare import prepare_batch
from actors.trainer.objective.samples import TrainSample
from bus.messages.base import pack_ints
from bus.messages.samples import RolloutDone, SampleTask
from bus.messages.versions import PolicyVersion
from miles_async.launcher.plan import objective_config
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from tests.actors.test_chat import CHATML, make
from tests.declared import data_of

DIALOGUE = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]


def load(folder: Path, row: Any, **spec: Any) -> Prompt:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    given = {"path": str(folder / "rows.jsonl"), "tokenizer_dir": str(folder), "supervised": True, "end_token": 2}
    [prompt] = load_prompts(data_of(**(given | spec))).prompts
    return prompt


def trained(prompt: Prompt, chat: Any) -> list[str]:
    return chat.decode([i for i, m in zip(prompt.response, prompt.mask, strict=True) if m]).replace(" ", "").split("<e>")[:-1]


def test_a_dialogue_is_learned_by_role(tmp_path: Path) -> None:
    chat = make(tmp_path, CHATML)
    of_chat = {"apply_chat_template": True}
    both = load(tmp_path, {"prompt": DIALOGUE}, **of_chat)
    assert both.token_ids == chat.render(DIALOGUE[:1]) and trained(both, chat) == ["2", "4"]
    assert both.token_ids + both.response == chat.render(DIALOGUE, opened=False)
    last = load(tmp_path, {"prompt": DIALOGUE}, loss_mask_type="distill_qwen", **of_chat)
    assert last.token_ids == chat.render(DIALOGUE[:3]) and trained(last, chat) == ["4"]
    pair = load(tmp_path, {"prompt": "1+1", "label": "2"}, **of_chat)
    assert trained(pair, chat) == ["2"]
    with pytest.raises(Refused, match=r"row 1: no message is of tool, .*--sft-loss-roles"):
        load(tmp_path, {"prompt": DIALOGUE}, sft_loss_roles=("tool",), **of_chat)
    plain = load(tmp_path, {"prompt": "1+1", "label": "2"})
    assert plain.response == [*chat.encode("2"), 2] and plain.mask == [1, 1]
    with pytest.raises(Refused, match="needs a response"):
        load(tmp_path, {"prompt": "1+1"})


def test_a_given_response_is_of_the_version_served_and_its_context_of_nobody() -> None:
    task = SampleTask(
        sample_id="g/0", group_id="g", index=0, n_samples=1, prompt_id="p", prompt_tokens=pack_ints([1]),
        given_tokens=pack_ints([5, 6, 7, 8]), given_mask=memoryview(b"\x01\x01\x00\x01"),
    )  # fmt: skip
    response = given_response(task, PolicyVersion(3, 2))
    assert response is not None and not fault_of(RolloutDone(task=task, response=response, finish="stop"))
    assert [(s.version, s.n) for s in response.spans] == [(3, 2), (-1, 1), (3, 1)] and sum(s.n for s in response.made) == 3
    broken = {"given_mask": memoryview(b"\x01")}, {"given_mask": memoryview(b"\x01\x01\x02\x01")}
    for fields in broken:
        assert "given response" in fault_of(SampleTask(**{f: getattr(task, f) for f in task.__struct_fields__} | fields))


def supervised(**more: Any) -> Any:
    base = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "x.jsonl", "num_rollout": 3, "n_samples_per_prompt": 1}
    return settings_from(**(base | {"loss_type": "sft"} | more))


def test_the_loss_is_the_mean_negative_log_probability_of_what_is_learned() -> None:
    cfg = objective_config(supervised())
    rows = [TrainSample("a", "a", 3, 0.0, loss_mask=[1, 0, 1]), TrainSample("b", "b", 1, 0.0)]
    prepared = prepare_batch(cfg, rows, current_step=0)
    logp = torch.tensor([-1.0, -9.0, -3.0, -5.0], requires_grad=True)
    loss, _ = policy_loss(cfg, prepared.micro_batch((0, 1), logp), prepared.norm())
    assert loss.item() == pytest.approx(((1 + 3) / 2 + 5) / 2)
    loss.backward()
    assert logp.grad is not None and logp.grad.tolist() == [-0.25, 0.0, -0.25, -0.5]
    per_token = objective_config(supervised(loss_agg_mode="token-mean"))
    prepared = prepare_batch(per_token, rows, current_step=0)
    loss, _ = policy_loss(per_token, prepared.micro_batch((0, 1), logp), prepared.norm())
    assert loss.item() == pytest.approx((1 + 3 + 5) / 3)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n_samples_per_prompt": 4}, "one response to a prompt"),
        ({"use_tis": True}, "has no meaning with loss_type sft"),
        ({"policy_loss": "ppo"}, "loss_type is 'sft'"),
        ({"loss_type": "policy_loss", "policy_loss": "nll", "rm_type": "math"}, "loss_type is 'policy_loss'"),
        ({"eval_interval": 2, "eval_prompt_data": ["a", "b"]}, "nothing scores the samples"),
    ],
)
def test_what_has_no_meaning_in_supervised_training_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        supervised(**fields)
    supervised(max_weight_staleness=3)  # nothing is off-policy
