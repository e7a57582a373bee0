"""Chat messages to token ids: what the model made stays as it is, and a template that would change it is named with its message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.runtime.chat import BadChat, Chat, NotAppendOnly
from scripts.bench.chat_tokenizer import make_chat

CHATML = (
    "{% if tools %}<t>{{ tools | length }}</t>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{{ opening or '' }}{% endif %}"
)
FORGETS = CHATML.replace(  # like those that leave the thinking of earlier turns out
    "{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('#')[-1] }}"
)
LATEST = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' or messages | length < 3 %}")
CHARS = "abcdefghijklmnopqrstuvwxyz0123456789+=# \n"


def make(folder: Path, template: str, **more: Any) -> Chat:
    ids = {c: i for i, c in enumerate(("?", "<s>", "<e>", "<t>", "</t>", *CHARS))}
    words = Tokenizer(models.WordLevel(ids, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    words.add_special_tokens([AddedToken(t) for t in ("<s>", "<e>", "<t>", "</t>")])
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="<e>")
    made.chat_template = template
    made.save_pretrained(str(folder))
    return Chat(str(folder), **more)


def said(*turns: str) -> list[dict[str, str]]:
    roles = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def test_a_dialogue_grows_behind_the_tokens_that_the_model_made(tmp_path: Path) -> None:
    chat = make(tmp_path, CHATML)
    old, new = said("u 1+1", "a 2"), said("u 1+1", "a 2", "t ok", "u 2+2")
    prompt = chat.render(old[:1])
    whole = chat.render(new)
    ended, cut = chat.encode("2<e>"), chat.encode("2")
    for made in (ended, cut):  # ended by itself, and cut by the limit of tokens: the closing is the environment's
        assert prompt + made + chat.follow(old, new, made) == whole
    other = chat.encode("a 2 tokenised another way<e>")  # never made anew from the message
    assert chat.follow(old, new, other) == whole[len(prompt) + len(ended) :]


def test_a_template_that_changes_the_prompt_is_named_with_the_message(tmp_path: Path) -> None:
    chat = make(tmp_path, LATEST)
    dialogue = said("s help", "u 1+1", "a 2", "u 2+2")
    says = r"message 1, system 'help', is rendered as 'system.*once user '2[+]2' follows"
    with pytest.raises(NotAppendOnly, match=says) as caught:
        chat.follow(dialogue[:3], dialogue, chat.encode("2<e>"))
    assert caught.value.index == 0 and "\n" not in str(caught.value)
    assert chat.follow(dialogue[1:3], dialogue[1:], chat.encode("2<e>")) == chat.encode("\n<s>user\n2+2<e>\n<s>assistant\n")


def test_a_template_that_writes_earlier_answers_otherwise_is_gone_on_with(tmp_path: Path) -> None:
    """They are not rendered again: what the model thought stays in its own tokens."""
    chat = make(tmp_path, FORGETS)
    dialogue = said("u 1+1", "a think#2", "u 2+2")
    heard = chat.follow(dialogue[:2], dialogue, chat.encode("think#2<e>"))
    assert heard == chat.encode("\n<s>user\n2+2<e>\n<s>assistant\n")
    nothing = make(tmp_path, CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' }}"))
    with pytest.raises(BadChat, match=r"does not render what message 2, assistant 'think#2', says"):
        nothing.follow(dialogue[:2], dialogue, ())


@pytest.mark.parametrize(
    ("new", "says"), [(said("u 1+1", "a 3", "u x"), "message 2 was rewritten"), (said("u 1"), "message 1 was")]
)
def test_rewritten_history_is_told_apart_from_the_template(tmp_path: Path, new: list[Any], says: str) -> None:
    with pytest.raises(NotAppendOnly, match=says):
        make(tmp_path, CHATML).follow(said("u 1+1", "a 2"), new, ())


def test_pieces_of_chosen_roles_make_up_the_whole(tmp_path: Path) -> None:
    chat = make(tmp_path, CHATML)
    dialogue = said("s s", "u 1+1", "a 2", "u 2+2", "a 4")
    pieces = chat.pieces(dialogue, roles=("assistant",))
    assert [i for piece in pieces for i in piece.ids] == chat.render(dialogue, opened=False)
    assert [chat.decode(piece.ids).replace(" ", "") for piece in pieces if piece.made] == ["2<e>", "4<e>"]
    [only] = [piece for piece in chat.pieces(dialogue, roles=("assistant",), last=True) if piece.made]
    assert chat.decode(only.ids).replace(" ", "") == "4<e>"
    both = chat.pieces(dialogue, roles=("assistant", "user"))
    assert sum(piece.made for piece in both) == 4


def test_template_file_keywords_and_tools_reach_the_rendering(tmp_path: Path) -> None:
    chat = make(tmp_path, CHATML, kwargs={"opening": "#"})
    assert chat.text(said("u 1"), [{"type": "function"}]) == "<t>1</t><s>user\n1<e>\n<s>assistant\n#"
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}")
    assert make(tmp_path, CHATML, template_path=str(own)).text(said("u 1")) == "1"
    with pytest.raises(BadChat, match=r"chat-template-path '.*gone.jinja'"):
        make(tmp_path, CHATML, template_path=str(tmp_path / "gone.jinja"))
    for wrong in ("{}", "[]", '{"added_tokens": 1, "model": {}}', "no JSON"):
        (tmp_path / "tokenizer.json").write_text(wrong)
        with pytest.raises(BadChat, match=r"the tokenizer in .* cannot be loaded: ") as caught:
            Chat(str(tmp_path))
        assert "\n" not in str(caught.value)
    with pytest.raises(BadChat, match="UndefinedError"):
        make(tmp_path, "{{ messages[9].content.x }}").render(said("u 1"))


def test_half_a_character_becomes_text(tmp_path: Path) -> None:
    """JSON in a call's arguments can say it, and no tokenizer takes it."""
    chat = make_chat(tmp_path)
    said = [{"role": "user", "content": "a \ud800 b"}]
    assert chat.decode(chat.render(said)).count("a \\ud800 b") == 1
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"k": "\\udfff"}'}}
    assert chat.render([*said, {"role": "assistant", "content": "", "tool_calls": [call]}])
