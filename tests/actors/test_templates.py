"""Chat templates with the habits of those that models come with: a dialogue goes on behind what the model made, each end of a
turn is there once and is learned, and arguments of calls are written as the template wants them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from actors.generation.endpoint.toolloop import ToolLoop
from actors.runtime.chat import BadChat, Chat
from actors.runtime.tools import Toolbox
from scripts.bench.chat_tokenizer import make_chat
from tests.actors.agent_house import ScriptedSession, task


class Habit(NamedTuple):
    """A template; how the model ends a call and an answer; what is put behind each; how two answers are learned."""

    template: str
    call_ends: str
    heard: str  # behind a call that the tool answers with 12
    answer_ends: str
    asked: str  # behind an answer that the user goes on from with "more"
    learned: tuple[str, str, str]  # a call, the answer behind it, the answer to "more"


OTHERS = "<s>{{ m.role }}\n{{ m.content }}<e>\n"


def turns(assistant: str, *, user: str = OTHERS, tool: str = OTHERS, end: str = "", opening: str = "<s>assistant\n") -> str:
    """A template by what it writes for each role."""
    return (
        f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{assistant}{{% elif m.role == 'tool' %}}{tool}"
        f"{{% else %}}{user}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{opening}{{% else %}}{end}{{% endif %}}"
    )


CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
TEXT_ONLY = (  # joins the arguments to a text
    """{% for c in m.tool_calls or [] %}{{ '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' """
    """+ c.function.arguments + '}\n</tool_call>' }}{% endfor %}"""
)
TABLE_ONLY = (  # goes through the arguments
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "{{ '\n' ~ k ~ '=' ~ v }}{% endfor %}{{ '\n' }}</tool_call>{% endfor %}"
)
BODY = "{{ m.content }}" + CALLS
WROTE = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>'
HEARD, MORE = "<s>tool\n12<e>\n<s>assistant\n", "<s>user\nmore<e>\n<s>assistant\n"
PLAIN = (WROTE + "<e>", "It is 12.<e>", "Yes.<e>")
ME = "### Me\n"
LAST_USER = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
)
ROLES = {"user": "<u>\n{{ m.content }}", "tool": "<o>\n{{ m.content }}", "opening": "<a>"}

HABITS = {
    "an empty thought in the last message only": Habit(
        turns("<s>assistant\n{% if loop.last %}<think>\n\n</think>\n\n{% endif %}" + BODY + "<e>\n"),
        *("<e>", "\n" + HEARD, "<e>", "\n" + MORE),
        (WROTE + "<e>", "It is 12.<e>", "<think>\n\n</think>\n\nYes.<e>"),
    ),
    "the opening begins a thought that history leaves out": Habit(
        turns("<s>assistant\n" + BODY + "<e>\n", opening="<s>assistant\n<think>\n"),
        *("<e>", "\n" + HEARD + "<think>\n", "<e>", "\n" + MORE + "<think>\n", PLAIN),
    ),
    "the opening begins a thought that history closes": Habit(
        turns("<s>assistant\n<think></think>" + BODY + "<e>\n", opening="<s>assistant\n<think>\n"),
        *("<e>", "\n" + HEARD + "<think>\n", "<e>", "\n" + MORE + "<think>\n"),
        ("</think>" + WROTE + "<e>", "</think>It is 12.<e>", "</think>Yes.<e>"),
    ),
    "the opening begins a thought that history keeps since the last question": Habit(
        LAST_USER
        + turns(
            "<s>assistant\n{% if loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}" + BODY + "<e>\n",
            opening="<s>assistant\n<think>\n",
        ),
        *("<e>", "\n" + HEARD + "<think>\n", "<e>", "\n" + MORE + "<think>\n"),
        (WROTE + "<e>", "It is 12.<e>", "\n</think>\n\nYes.<e>"),
    ),
    "a turn is closed once another follows": Habit(
        turns("<s>assistant\n" + BODY + "{% if not loop.last or add_generation_prompt %}<e>\n{% endif %}"),
        *("<e>", "\n" + HEARD, "<e>", "\n" + MORE, PLAIN),
    ),
    "the next role ends a turn": Habit(
        turns("<a>\n" + BODY, **ROLES),
        *("<o>", "\n12<a>", "<u>", "\nmore<a>", (f"\n{WROTE}<o>", "\nIt is 12.<u>", "\nYes.<u>")),
    ),
    "the last turn, and a call, end in tokens of their own": Habit(
        turns(
            "<s>assistant\n"
            + BODY
            + "{% if m.tool_calls %}<c>{% elif loop.last and not add_generation_prompt %}<r>{% else %}<e>{% endif %}"
        ),
        *("<c>", HEARD, "<r>", MORE, (WROTE + "<c>", "It is 12.<e>", "Yes.<r>")),
    ),
    "a text ends the whole": Habit(
        turns("<s>assistant\n" + BODY + "<e>\n", end="<r>"), *("<e>", "\n" + HEARD, "<e>", "\n" + MORE, PLAIN)
    ),
    "nothing opens a turn behind a tool": Habit(
        turns(
            "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<a>{% endif %}" + BODY + "<e>",
            **{**ROLES, "tool": "<o>{{ m.content }}", "opening": "{% if messages[-1].role != 'tool' %}<a>{% endif %}"},
        ),
        *("<e>", "<o>12", "<e>", "<u>\nmore<a>", PLAIN),
    ),
    "arguments are joined to a text": Habit(
        turns("<s>assistant\n{{ m.content }}" + TEXT_ONLY + "<e>\n"), *("<e>", "\n" + HEARD, "<e>", "\n" + MORE, PLAIN)
    ),
    "arguments are a table": Habit(
        turns("<s>assistant\n{{ m.content }}" + TABLE_ONLY + "<e>\n"),
        *("<e>", "\n" + HEARD, "<e>", "\n" + MORE),
        ("<tool_call>\ncalculator\nexpression=3*4\n</tool_call><e>", "It is 12.<e>", "Yes.<e>"),
    ),
    "one call at a time": Habit(
        turns("<s>assistant\n{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}" + BODY + "<e>\n"),
        *("<e>", "\n" + HEARD, "<e>", "\n" + MORE, PLAIN),
    ),
    "a turn ends in plain words": Habit(
        turns("### Me\n" + BODY + "\n\n", user="### You\n{{ m.content }}\n\n", tool="### It\n{{ m.content }}\n\n", opening=ME),
        *("\n\n", "### It\n12\n\n### Me\n", "\n\n", "### You\nmore\n\n### Me\n", (WROTE + "\n", "It is 12.\n", "Yes.\n")),
    ),
}
each = pytest.mark.parametrize("habit", HABITS.values(), ids=list(HABITS))


def chat_of(folder: Path, template: str) -> Chat:
    return make_chat(folder, template, special=("<u>", "<a>", "<o>", "<c>", "<r>", "<x>"))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(arguments: Any, content: str | None = "") -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TABLE = {"expression": "3*4"}
TOLD = {"role": "tool", "name": "calculator", "tool_call_id": "1", "content": "12"}
DIALOGUE = [user("3*4?"), called(TABLE), TOLD, said("It is 12."), user("more"), said("Yes.")]


@each
def test_what_follows_stands_behind_what_the_model_made(habit: Habit, tmp_path: Path) -> None:
    chat = chat_of(tmp_path, habit.template)
    stops = {chat.encode(habit.call_ends)[-1], chat.encode(habit.answer_ends)[-1]}
    made = chat.encode("anything at all" + habit.call_ends)
    assert chat.decode(chat.follow(DIALOGUE[:2], DIALOGUE[:3], made, stops=stops)) == habit.heard
    made = chat.encode("never what the message says" + habit.answer_ends)
    assert chat.decode(chat.follow(DIALOGUE[:4], DIALOGUE[:5], made, stops=stops)) == habit.asked


@each
async def test_the_tool_loop_plays_two_calls(habit: Habit, tmp_path: Path) -> None:
    chat = chat_of(tmp_path, habit.template)
    stops = [chat.encode(end)[-1] for end in ("<e>", habit.call_ends, habit.answer_ends) if end.startswith("<")]
    answers = iter([WROTE + habit.call_ends, WROTE * 2 + habit.call_ends, "It is 12." + habit.answer_ends])
    of = task(chat.render([user("3*4?")]), stops=stops)
    session = ScriptedSession(chat, of, lambda _: next(answers))
    async with Toolbox(["calculator"]) as toolbox:
        [found] = await ToolLoop(chat, "hermes", toolbox, max_turns=4, count=lambda *_: None)(of, session)
    assert [s.kind for s in found.segments] == ["model", "env", "model", "env", "model"]
    heard = [chat.decode(s.tokens) for s in found.segments if s.kind == "env"]
    if habit.call_ends.startswith("<"):
        assert heard[0] == habit.heard
    assert heard[1].count("12") == 2 and found.segments[0] is session.made[0]
    assert session.seen[2] == [*found.prompt, *(token for s in found.segments[:4] for token in s.tokens)]


@each
def test_every_answer_is_learned_with_its_end(habit: Habit, tmp_path: Path) -> None:
    chat = chat_of(tmp_path, habit.template)
    pieces = chat.pieces(DIALOGUE, roles=("assistant",))
    assert tuple(chat.decode(piece.ids) for piece in pieces if piece.made) == habit.learned
    whole = chat.text(DIALOGUE, opened=False)
    assert "".join(chat.decode(piece.ids) for piece in pieces).removeprefix(whole) in ("", "<u>", "<e>")
    only = chat.pieces(DIALOGUE, roles=("assistant",), last=True)
    assert [chat.decode(piece.ids) for piece in only if piece.made] == [habit.learned[-1]]
    asked = chat.pieces(DIALOGUE, roles=("user",))
    assert [chat.decode(piece.ids)[:4] for piece in asked if piece.made] == ["3*4?", "more"]


@each
def test_arguments_are_the_same_as_text_and_as_table(habit: Habit, tmp_path: Path) -> None:
    chat = chat_of(tmp_path, habit.template)
    forms = [called(form, content) for form in (TABLE, '{"expression":"3*4"}') for content in ("", None)]
    told = [chat.render([user("3*4?"), form, TOLD]) for form in forms]
    assert told[1:] == told[:1] * 3 and '\\"' not in chat.decode(told[0])
    pieces = chat.pieces([DIALOGUE[0], called(json.dumps(TABLE), None), *DIALOGUE[2:]], roles=("assistant",))
    assert next(chat.decode(piece.ids) for piece in pieces if piece.made) == habit.learned[0]
    padded = [said("hm", tool_calls=None), said("hm", tool_calls=[]), said("hm")]
    assert len({tuple(chat.render([user("1"), one, user("2")])) for one in padded}) == 1


def test_arguments_that_are_no_table_are_refused_in_one_line(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, HABITS["arguments are a table"].template)
    with pytest.raises(BadChat, match="cannot take the messages") as caught:
        chat.render([user("1"), called("not JSON"), TOLD])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("made", "heard"),
    [
        ("It is", "<e>\n" + MORE),  # cut by the limit
        ("It is<e>", "\n" + MORE),
        ("It is<e>\n", MORE),
        ("It is<x>", "\n" + MORE),  # another stop token of the model stands for the template's
        ("It is<r>", "<e>\n" + MORE),  # one that ends no turn
    ],
)
def test_an_end_of_a_turn_is_there_once(made: str, heard: str, tmp_path: Path) -> None:
    chat = chat_of(tmp_path, HABITS["an empty thought in the last message only"].template)
    old = [user("?"), said("It is")]
    stops = chat.encode("<e><x>")
    assert chat.decode(chat.follow(old, [*old, user("more")], chat.encode(made), stops=stops)) == heard


def test_a_role_is_not_taken_for_the_end_of_another_turn(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, HABITS["the next role ends a turn"].template)
    old = [user("?"), said("It is")]
    for made in ("It is<o>", "It is<x>", "It is"):
        behind = chat.follow(old, [*old, user("more")], chat.encode(made), stops=chat.encode("<u><o><x>"))
        assert chat.decode(behind) == "<u>\nmore<a>"
    call = [user("?"), called(TABLE)]
    assert chat.decode(chat.follow(call, [*call, TOLD], chat.encode(WROTE))) == "<o>\n12<a>"  # stopped by a text


NO_ROLE = (
    turns("<s>assistant\n" + BODY + "<e>\n", tool="{{ raise_exception('roles must alternate') }}"),
    turns("<s>assistant\n" + BODY + "<e>\n", tool="<s>tool\n<e>\n"),
)


@pytest.mark.parametrize("template", NO_ROLE)
def test_what_a_tool_says_is_never_lost_in_silence(template: str, tmp_path: Path) -> None:
    chat = chat_of(tmp_path, template)
    for rendered in (
        lambda: chat.render(DIALOGUE[:3]),
        lambda: chat.follow(DIALOGUE[:2], DIALOGUE[:3], ()),
        lambda: chat.pieces(DIALOGUE, roles=("assistant",)),
    ):
        with pytest.raises(BadChat, match="has no tool role") as caught:
            rendered()
        assert "\n" not in str(caught.value)
    assert chat.follow(DIALOGUE[3:4], DIALOGUE[3:5], ())


def test_calls_that_are_not_rendered_are_not_learned(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, turns("<s>assistant\n{{ m.content }}<e>\n"))
    with pytest.raises(BadChat, match="does not render the calls of message 2, assistant ''"):
        chat.pieces(DIALOGUE, roles=("assistant",))
    with pytest.raises(BadChat, match="does not render the calls of message 2"):
        chat.render(DIALOGUE[:3])
    assert chat.decode(chat.follow(DIALOGUE[:2], DIALOGUE[:3], chat.encode("call<e>"))) == "\n" + HEARD  # what it made is there


def test_a_text_that_quotes_the_template_moves_no_border(tmp_path: Path) -> None:
    for habit in HABITS.values():
        chat = chat_of(tmp_path, habit.template)
        quote = f"{chat.text([user('?')])}more{chat.text([user('?'), said('2')], opened=False)}"
        dialogue = [user(quote), said("one"), user(quote), said("two")]
        found = [chat.decode(p.ids) for p in chat.pieces(dialogue, roles=("assistant",)) if p.made]
        assert [text.count("one") + text.count("two") for text in found] == [1, 1] and not any("more" in text for text in found)
        old, quoted = dialogue[:2], [*dialogue[:2], user(quote)]
        assert quote in chat.decode(chat.follow(old, quoted, ()))
