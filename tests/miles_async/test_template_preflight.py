"""What a chat template cannot do is said before anything starts, in one line; its end of a turn is a stop token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.generation.endpoint.rehearsal import format_of
from actors.runtime.chat import BadChat
from actors.runtime.prompts import load_prompts
from miles_async.cli import app
from miles_async.launcher.plan import training_data
from miles_async.launcher.preflight import preflight
from miles_async.launcher.templates import stop_tokens
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from miles_async.settings.run import RunSettings
from scripts.bench.chat_tokenizer import TEMPLATE, make_chat
from tests.actors.test_templates import BODY, DIALOGUE, HABITS, NO_ROLE, TABLE_ONLY, chat_of, turns

WORDS_ONLY = turns("<s>assistant\n{{ m.content }}<e>\n")
SPECIAL = ("<u>", "<a>", "<o>", "<c>", "<r>", "<x>")


def settings(folder: Path, template: str, rows: Any = "1+1", *, eos: Any = 1, **fields: Any) -> RunSettings:
    make_chat(folder, template, special=SPECIAL)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "eos_token_id": eos}))
    lines = rows if isinstance(rows, list) and isinstance(rows[0], list) else [rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"input": row, "label": "2"}) + "\n" for row in lines))
    base = {"num_rollout": 3, "rm_type": "math", "label_key": "label", "apply_chat_template": True}
    return settings_from(hf_checkpoint=str(folder), prompt_data=str(folder / "rows.jsonl"), **(base | fields))


def learned(folder: Path, template: str, rows: Any, **fields: Any) -> RunSettings:
    given = {"loss_type": "sft", "n_samples_per_prompt": 1, "rm_type": None, "label_key": None}
    return settings(folder, template, rows, **(given | fields))


def refused(of: RunSettings) -> str:
    with pytest.raises(SettingsError) as caught:
        preflight(of, dry_run=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def notes(of: RunSettings) -> list[str]:
    return [note for note in preflight(of, dry_run=True).notes if "template" in note]


@pytest.mark.parametrize("template", NO_ROLE)
def test_tools_need_a_tool_role(template: str, tmp_path: Path) -> None:
    said = refused(settings(tmp_path, template, tools=("calculator",)))
    assert said.startswith("tools = ['calculator']: the chat template has no tool role") and "--chat-template-path" in said
    assert not notes(settings(tmp_path, template))
    [note] = notes(settings(tmp_path, template, custom_agent_function_path="json.dumps", rm_type="math"))
    assert "no tool role: an agent's call" in note


def test_calls_that_no_parser_reads_are_refused(tmp_path: Path) -> None:
    said = refused(settings(tmp_path, turns("<s>assistant\n{{ m.content }}" + TABLE_ONLY + "<e>\n"), tools=("calculator",)))
    assert "writes a call as '<tool_call>\\nlook_up\\nwords=two words" in said and "read here in no format (hermes, " in said
    said = refused(settings(tmp_path, TEMPLATE, tools=("calculator",), generate_tool_call_parser="llama3"))
    assert "which --generate-tool-call-parser llama3 does not read" in said
    assert not notes(settings(tmp_path, TEMPLATE, tools=("calculator",)))


def test_what_a_template_leaves_to_the_prompts_is_told(tmp_path: Path) -> None:
    told = notes(settings(tmp_path, WORDS_ONLY, tools=("calculator",)))
    assert [any(words in note for note in told) for words in ("read as hermes", "does not show the model its tools")] == [True] * 2


def test_a_template_that_cannot_be_gone_on_with_is_refused(tmp_path: Path) -> None:
    counts = "{{ messages | length }}" + TEMPLATE
    assert "is not append-only: message 1" in refused(settings(tmp_path, counts, tools=("calculator",)))
    said = refused(settings(tmp_path, counts, custom_agent_function_path="json.dumps"))
    assert said.startswith("custom_agent_function_path = 'json.dumps': the chat template is not append-only")
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(SettingsError, match=r"apply_chat_template.*no chat template.*--chat-template-path"):
        preflight(settings_from(**settings_of(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"^hf_checkpoint = .* the tokenizer in .* cannot be loaded: .* transformers loads\.$"):
        preflight(settings_from(**settings_of(tmp_path)))


def settings_of(folder: Path) -> dict[str, Any]:
    rows = {"prompt_data": str(folder / "rows.jsonl"), "label_key": "label", "rm_type": "math"}
    return {"hf_checkpoint": str(folder), "num_rollout": 3, "apply_chat_template": True, **rows}


@pytest.mark.parametrize("habit", HABITS.values(), ids=list(HABITS))
def test_every_dialogue_is_learned_from_the_preflight_to_the_rows(habit: Any, tmp_path: Path) -> None:
    rows = [DIALOGUE, DIALOGUE[:4], [DIALOGUE[0], DIALOGUE[3], *DIALOGUE[4:]]]
    for last in ("qwen", "last"):
        of = learned(tmp_path, habit.template, rows, loss_mask_type=last)
        assert preflight(of, dry_run=True).prompts.rows == 3
        prompts = load_prompts(training_data(of, str(tmp_path))).prompts
        assert len(prompts) == 3 and all(sum(prompt.mask) > 3 for prompt in prompts)


def test_a_row_that_cannot_be_learned_is_named_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [DIALOGUE[3:] and [DIALOGUE[0], DIALOGUE[3]], DIALOGUE]
    said = refused(learned(tmp_path, WORDS_ONLY, rows))
    assert "prompt_data" in said and "row 2: the chat template does not render the calls of message 2" in said
    said = refused(learned(tmp_path, NO_ROLE[0], rows))
    assert "row 2: the chat template has no tool role" in said
    words = ["--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "rows.jsonl"), "--apply-chat-template"]
    words += ["--loss-type", "sft", "--n-samples-per-prompt", "1", "--num-rollout", "2"]
    assert app.main(["train", *words, "--dry-run"]) == 2
    assert "row 2: the chat template has no tool role" in capsys.readouterr().err


def test_the_template_s_end_of_a_turn_is_a_stop_token(tmp_path: Path) -> None:
    """A base model says that another token ends its sequences."""
    of = settings(tmp_path, TEMPLATE, eos=77)
    [note] = notes(of)
    assert "ends a turn with '<e>' (1)" in note and "eos_token_id" in note
    assert stop_tokens(of, tmp_path) == (77, 1)
    of = settings(tmp_path, TEMPLATE, eos=[77, 1])
    assert notes(of) == [] and stop_tokens(of, tmp_path) == (77, 1)
    assert stop_tokens(settings(tmp_path, TEMPLATE, eos=77, apply_chat_template=False), tmp_path) == (77,)


def test_plain_texts_for_an_instruct_model_get_one_note_with_the_remedy(tmp_path: Path) -> None:
    """A base model, whose end of sequence is another token, and texts that were rendered before get none."""
    [note] = notes(settings(tmp_path, TEMPLATE, apply_chat_template=False))
    assert "tuned to dialogues" in note and "add --apply-chat-template" in note
    assert notes(settings(tmp_path, TEMPLATE)) == []
    assert notes(settings(tmp_path, TEMPLATE, eos=77, apply_chat_template=False)) == []
    assert notes(settings(tmp_path, TEMPLATE, "<u>1+1<e>", apply_chat_template=False)) == []
    own = {"custom_generate_function_path": "json.dumps"}
    assert notes(settings(tmp_path, TEMPLATE, apply_chat_template=False, **own)) == []
    assert notes(learned(tmp_path, TEMPLATE, apply_chat_template=False, label_key="label", rows="1+1")) == []
    of = settings(tmp_path, TEMPLATE, apply_chat_template=False)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    assert notes(of) == []


def test_a_role_and_the_end_of_a_call_are_stop_tokens_too(tmp_path: Path) -> None:
    for name, ends, with_calls in (
        ("the next role ends a turn", "<u>", "<u><o>"),
        ("the last turn, and a call, end in tokens of their own", "<r>", "<r><c>"),
        ("a turn is closed once another follows", "<e>", "<e>"),
        ("a text ends the whole", "<e>", "<e>"),
    ):
        template = HABITS[name].template
        chat = chat_of(tmp_path, template)
        assert stop_tokens(settings(tmp_path, template, eos=None), tmp_path) == tuple(chat.encode(ends))
        of = settings(tmp_path, template, eos=None, tools=("calculator",))
        assert stop_tokens(of, tmp_path) == tuple(chat.encode(with_calls))


def test_a_turn_that_ends_in_plain_words_is_told(tmp_path: Path) -> None:
    template = HABITS["a turn ends in plain words"].template
    [note] = notes(settings(tmp_path, template))
    assert "no token of its own" in note and "--rollout-stop" in note
    assert notes(settings(tmp_path, template, rollout_stop=("### You",))) == []


WRITES = {
    "hermes": BODY,
    "glm": "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>{% endfor %}",
    "llama3": "{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}',
    "deepseek": "{% for c in m.tool_calls or [] %}<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ c.function.name }}"
    "{{ '\\n```json\\n' + c.function.arguments + '\\n```' }}<｜tool▁call▁end｜>{% endfor %}",
    "qwen3_coder": "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>{% for k, v in "
    "c.function.arguments.items() %}<parameter={{ k }}>{{ '\\n' ~ v ~ '\\n' }}</parameter>{% endfor %}</function></tool_call>"
    "{% endfor %}",
    "gpt-oss": "{% for c in m.tool_calls or [] %} to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}",
    "lfm2": "{% for c in m.tool_calls or [] %}<|tool_call_start|>[{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}"
    ")]<|tool_call_end|>{% endfor %}",
}


@pytest.mark.parametrize("kind", WRITES)
def test_the_format_of_calls_is_the_one_that_reads_the_template_s_own(kind: str, tmp_path: Path) -> None:
    said = WRITES[kind] if "m.content" in WRITES[kind] else "{{ m.content }}" + WRITES[kind]
    assert format_of(make_chat(tmp_path, turns(f"<s>assistant\n{said}<e>\n"))) == kind
    assert format_of(make_chat(tmp_path, turns("<s>assistant\n<think>\n\n</think>\n\n" + BODY + "<e>\n"))) == "hermes"


def test_where_no_call_is_rendered_the_template_s_words_tell_the_format(tmp_path: Path) -> None:
    for words, kind in (("<|tool_list_start|>", "lfm2"), ("<|python_tag|>", "llama3"), ("", "hermes")):
        assert format_of(make_chat(tmp_path, words + WORDS_ONLY)) == kind
    assert format_of(make_chat(tmp_path, WORDS_ONLY), "glm") == "glm"
    with pytest.raises(BadChat, match="read here in no format"):
        format_of(make_chat(tmp_path, turns("<s>assistant\n{{ m.content }}" + TABLE_ONLY + "<e>\n")))
