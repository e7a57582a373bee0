"""Whether the model's chat template can do what the run asks of it, by really rendering calls, dialogues and the first rows; and
the tokens that end a turn in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.generation.endpoint.rehearsal import rehearse_dialogue, rehearse_tools
from actors.runtime.chat import BadChat, BadTokenizer, Chat
from actors.runtime.parts import parts_of
from actors.runtime.prompts import Tokenizer
from actors.runtime.rows import PlacedRow, value_at
from actors.runtime.run import Refused
from actors.runtime.tools import SHIPPED
from miles_async.launcher.plan import training_data
from miles_async.settings.checks import GENERATION, table_in
from miles_async.settings.errors import SettingsError
from miles_async.settings.run import RunSettings

RENDERED_ROWS = 256  # of dialogues to be learned; each takes some milliseconds
OTHER_TEMPLATE = "Give a template that can (--chat-template-path FILE)"


def chat_of(settings: RunSettings, directory: Path) -> Chat:
    """The run's chat template. Raises BadChat."""
    r = settings.rollout
    kwargs = json.loads(r.apply_chat_template_kwargs or "{}")
    return Chat(str(directory.resolve()), template_path=r.chat_template_path or "", kwargs=kwargs)


def check_template(settings: RunSettings, rows: Sequence[PlacedRow]) -> tuple[str, ...]:
    """Refuse what the template cannot do, under the setting that asks for it; `rows` are the first of the training data. Returns
    what is worth knowing. A builtin model is not made yet, and its template is ours."""
    r, flat = settings.rollout, settings.flat
    agent = r.custom_agent_function_path is not None
    if settings.model.builtin_name is not None:
        return ()
    if not (r.apply_chat_template or agent):
        return tuple(_template_left_out(settings, rows))
    directory, notes = Path(settings.model.hf_checkpoint), list[str]()
    try:
        chat = chat_of(settings, directory)
    except BadTokenizer as error:
        raise flat.refusal("hf_checkpoint", str(error), "Give a directory with a tokenizer that transformers loads.") from None
    except BadChat as error:
        field = "apply_chat_template" if r.apply_chat_template else "custom_agent_function_path"
        raise flat.refusal(field, str(error), f"{OTHER_TEMPLATE}.") from None
    try:
        if r.tools:
            notes += rehearse_tools(chat, r.generate_tool_call_parser, [SHIPPED[name].spec for name in r.tools])
        elif agent:
            notes += rehearse_dialogue(chat)
    except BadChat as error:
        field = "tools" if r.tools else "custom_agent_function_path"
        raise flat.refusal(field, str(error), f"{OTHER_TEMPLATE}, or leave this out.") from None
    if flat.supervised and r.apply_chat_template:
        _check_dialogues(settings, directory, rows)
    if not flat.supervised or flat.evaluates:
        notes += _ends_told(settings, directory, template_ends(settings, chat))
    return tuple(notes)


def _template_left_out(settings: RunSettings, rows: Sequence[PlacedRow]) -> Iterator[str]:
    """One note where an instruct model gets plain texts as they stand: it answers best behind its template. Not of a base model,
    whose end of sequence is not the template's end of a turn, of texts that were rendered before, and where a program or the data's
    own responses say what stands behind a prompt."""
    r, directory = settings.rollout, Path(settings.model.hf_checkpoint)
    texts = [text for text in (_text_at(placed.row, r.input_key) for placed in rows[:RENDERED_ROWS]) if text is not None]
    if settings.flat.supervised or r.custom_generate_function_path or settings.flat.own_rollout_function or not texts:
        return
    if not _has_template(directory):
        return
    try:
        chat = chat_of(settings, directory)
        ends = set(template_ends(settings, chat))
    except BadChat:  # without the flag the template is nobody's business
        return
    rendered = any(mark and mark in text for mark in chat.traits.marks.values() for text in texts[:1])
    if ends & set(model_ends(directory)) and not rendered:
        yield (
            f"{directory} is tuned to dialogues (it has a chat template and ends at its end of a turn), and prompts are given to "
            "it as plain texts: add --apply-chat-template, which makes a user's message of each"
        )


def _text_at(row: Mapping[str, Any], key: str) -> str | None:
    try:
        found = value_at(row, key)
    except KeyError:
        return None
    return found if isinstance(found, str) else None


def _has_template(directory: Path) -> bool:
    """By the files alone: most models that have none are told without loading transformers."""
    if (directory / "chat_template.jinja").exists() or (directory / "chat_template.json").exists():
        return True
    config = directory / "tokenizer_config.json"
    return config.exists() and bool(table_in(config, "hf_checkpoint").get("chat_template"))


def _check_dialogues(settings: RunSettings, directory: Path, rows: Sequence[PlacedRow]) -> None:
    """SettingsError names the first row that could not be learned."""
    r, spec = settings.rollout, training_data(settings, str(directory.resolve()))
    tokenizer = Tokenizer.of(spec)
    keys = {name: getattr(r, name) for name in ("input_key", "label_key", "tool_key")}
    for at, number, given, padded in rows[:RENDERED_ROWS]:
        try:
            tokenizer.supervised(parts_of(given, keys, chat=True, supervised=True, padded=padded), spec)
        except Refused as error:
            why, remedy = f"{at}, row {number}: {error}", f"{OTHER_TEMPLATE}, or mend the row."
            raise SettingsError(why, field="prompt_data", value=r.prompt_data, remedy=remedy) from None


def model_ends(directory: Path) -> Iterator[int]:
    """End-of-sequence ids of the model, by its own files."""
    for name in (GENERATION, "config.json"):
        if (directory / name).exists():
            eos = table_in(directory / name, "hf_checkpoint").get("eos_token_id")
            yield from (one for one in (eos if isinstance(eos, list) else [eos]) if isinstance(one, int))


def template_ends(settings: RunSettings, chat: Chat) -> dict[int, str]:
    """Tokens with which an answer, or a call, ends in the run's chat template, and their text. None where it ends a turn in plain
    words."""
    traits, calls = chat.traits, bool(settings.rollout.tools or settings.rollout.custom_agent_function_path)
    try:
        ends = [traits.ending("text").stop, *([traits.ending("calls").stop] if calls and traits.calls_shown else [])]
    except BadChat:  # refused where it is needed
        return {}
    return {id: traits.marks[id] for id in ends if id in traits.marks}


def stop_tokens(settings: RunSettings, directory: Path) -> tuple[int, ...]:
    """Stop ids of the settings, the end-of-sequence ids of the model, and what ends a turn in the chat template: base models often
    name another token than the one that their template, and what they are tuned on, ends turns with."""
    r = settings.rollout
    ids = [*(r.rollout_stop_token_ids or ()), *model_ends(directory)]
    if r.apply_chat_template or r.custom_agent_function_path:
        try:
            ids += template_ends(settings, chat_of(settings, directory))
        except BadChat as error:
            raise settings.flat.refusal("hf_checkpoint", str(error), f"{OTHER_TEMPLATE}.") from None
    return tuple(dict.fromkeys(ids))


def _ends_told(settings: RunSettings, directory: Path, ends: Mapping[int, str]) -> Iterator[str]:
    r = settings.rollout
    known = {*(r.rollout_stop_token_ids or ()), *model_ends(directory)}
    for id, text in ends.items():
        if id not in known:
            yield (
                f"the chat template ends a turn with {text!r} ({id}), which {directory} does not name as an end of sequence "
                "(eos_token_id): it is a stop token of this run"
            )
    if not ends and not r.rollout_stop:
        yield (
            "the chat template ends a turn with no token of its own, so there is none to stop at: an answer ends with the model's "
            "end of sequence (eos_token_id) or at its length. Name a text that ends it with --rollout-stop"
        )
