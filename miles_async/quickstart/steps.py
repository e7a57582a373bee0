"""The task of tools: a calculation in steps, each done by a call of the calculator, over two to four turns. Pure.

    prompt     47*3;-58;+219=            what comes behind a `;` is done with the result so far
    response   <call>47*3</call><eos>    the environment answers with 141, and so on; then the answer
               <call>141-58</call><eos>
               <call>83+219</call><eos>
               302<eos>

The answer alone is rewarded. A call is what Qwen writes, its fixed words one token each; see CALL. The numbers are too large for
the model to calculate with: what it must learn is to ask, and to copy.
"""

from __future__ import annotations

import random
import re

from miles_async.quickstart.task import EOS, SPECIAL, Problem, Shape, Task, WarmStart

CALL, CALLED = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
TOLD = ("<tool_response>", "</tool_response>")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}" + TOLD[0] + "{{ m.content }}" + TOLD[1] + "{% else %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}" + CALL + "{{ c.function.arguments.expression }}" + CALLED + "{% endfor %}"
    "{% if m.role == 'assistant' %}" + EOS + "{% endif %}{% endif %}{% endfor %}"
)  # fmt: skip
EARLY_SHARE, FIGURE_SHARE = 0.75, 0.1
"""Lesson 2: shares of the responses that answer before the last step is done, and that copy one figure wrongly."""
MOST_STEPS = 3


def draw(rng: random.Random) -> Problem:
    """One calculation. `kind` is its number of steps, in decimal."""
    steps = rng.randint(1, MOST_STEPS)
    first = f"{rng.randint(11, 99)}{rng.choice('+-*')}{rng.randint(2, 9)}"
    return problem([first, *(f"{rng.choice('+-')}{rng.randint(11, 999)}" for _ in range(steps - 1))])


def problem(steps: list[str]) -> Problem:
    """The problem of these steps: the first a whole expression, the others what is behind the result so far."""
    results = results_of(steps)
    return Problem(f"{';'.join(steps)}=", results[-1], write(steps), str(len(steps)))


def results_of(steps: list[str]) -> list[str]:
    """After each step."""
    found: list[int] = []
    for step in steps:
        at = next(i for i, c in enumerate(step) if c in "+-*" and (i or found))
        left, right = found[-1] if found else int(step[:at]), int(step[at + 1 :])
        found.append({"+": left + right, "-": left - right, "*": left * right}[step[at]])
    return [str(value) for value in found]


def write(steps: list[str], done: int | None = None) -> str:
    """The response, with what the environment says in it. `done`: it answers after so many steps."""
    turns: list[str] = []
    before = re.split(r"[+*-]", steps[0])[0]
    for step, result in list(zip(steps, results_of(steps), strict=True))[:done]:
        expression = f"{before}{step}" if turns else step
        turns.append(f"{CALL}{expression}{CALLED}{EOS}{TOLD[0]}{result}{TOLD[1]}")
        before = result
    return "".join((*turns, before))


def careless(rng: random.Random, asked: Problem) -> str:
    """The response, more often than not with a slip."""
    steps, slip = asked.prompt[:-1].split(";"), rng.random()
    if slip < EARLY_SHARE:
        return write(steps, len(steps) - 1)
    if slip < EARLY_SHARE + FIGURE_SHARE:
        at = rng.randrange(len(steps))
        steps[at] = f"{steps[at][:-1]}{rng.randint(0, 9)}"
    return write(steps)


STEPS = Task(
    name="steps",
    draw=draw,
    careless=careless,
    vocabulary=(*SPECIAL, *"0123456789+-*;=", CALL, CALLED, *TOLD),
    max_tokens=256,
    data_seed=20261123,
    most=20_000,
    told=TOLD,
    template=TEMPLATE,
    shape=Shape(layers=3, heads=4, kv_heads=2),
    lessons=WarmStart(learn_steps=400, careless_steps=60, careless_lr=1e-3, batch_size=48, parts=2),
)
