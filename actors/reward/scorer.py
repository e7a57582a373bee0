"""Scorers by name: shipped rules, the remote service, the custom function; one protocol for all.

A custom function replaces the table. Else `rm_type` of the sample, or the default, names a scorer; the prefix `boxed_` hands it
the content of the last \\boxed{} (nothing without one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Protocol, Self

import msgspec

from actors.reward import code, gym, second_look
from actors.reward.blame import Told, harmless, untold
from actors.reward.judge import JudgeScorer
from actors.reward.mathanswer import last_boxed, reference_answer
from actors.reward.pool import NoVerifier, VerifierPool
from actors.reward.remote import RemoteScorer
from actors.reward.rules import BOXED_RULES, DEFAULT_KEYS, MATH_RULES, RULES, MathRule, Rule
from actors.reward.sample import Sample, SampleGroup, ScorerFailed, Value
from actors.runtime.confine import Profile
from actors.runtime.run import Refused
from bus.errors import DeadlineExceeded, Poison

BOXED = "boxed_"
REMOTE, JUDGE, GYM = "remote_rm", "judge", "reasoning_gym"
OTHERS = (code.NAME, GYM, JUDGE, REMOTE)
"""Shipped names that are no rule."""
MATH, FINAL = "math", "math_final"
"""A rule and its other name, which Miles gives to another rule: math_rule says which."""
ANSWER_CHARS = 64
VERIFIER_BYTES = 4 << 30  # address space of a confined verifier; sympy takes about 0.5 GiB of it
SECOND_LOOK_S = 5.0  # of math-verify at one answer; 24 ms are usual
GYM_S = 10.0  # of a verifier of reasoning-gym at one answer; milliseconds are usual


class Scorer(Protocol):
    """Something that scores one sample."""

    @property
    def name(self) -> str:
        """Kept with every score."""
        ...

    @property
    def default_key(self) -> str:
        """Which part of a table is the reward when no reward_key is set; empty = none."""
        ...

    async def score(self, sample: Sample, deadline_s: float) -> Value:
        """A number or a table of numbers. Raises a Transient (try again) or a Poison (never) of bus.errors; ends within
        `deadline_s` of being at work on the sample, waiting for a place not counted."""
        ...


class UnknownScorer(Poison):
    """A sample names a scorer that does not exist."""


class RuleScorer:
    """A shipped rule. Rules are linear in the text and run where they are called."""

    def __init__(self, name: str, rule: Rule) -> None:
        self.name = name
        self.default_key = DEFAULT_KEYS.get(name, "")
        self._rule = rule

    async def score(self, sample: Sample, deadline_s: float) -> Value:
        return self._rule(sample)


class MathScorer(RuleScorer):
    """A shipped math rule, and where its verdict is open a second look by math-verify in a verifier process, if there is one."""

    def __init__(self, name: str, rule: MathRule, pool: VerifierPool | None, count: Callable[[str], None]) -> None:
        super().__init__(name, rule)
        self._math = rule
        self._pool = pool
        self._count = count

    def answer(self, sample: Sample) -> str:
        """What the rule takes for the answer; empty without one."""
        return self._math.answer(sample) or ""

    async def score(self, sample: Sample, deadline_s: float) -> Value:
        found = self._math.verdict(sample)
        if self._pool is None or found is not None:
            return self._math.value(found is True)
        given, wanted = self.answer(sample), reference_answer(sample.label)
        asked = Sample(sample_id=sample.sample_id, prompt="", response=given, label=wanted)
        try:
            right = await self._pool.score(asked, min(deadline_s, SECOND_LOOK_S)) == 1.0
        except NoVerifier:  # says nothing about the answer
            raise
        except (ScorerFailed, DeadlineExceeded):  # what it chokes on is not shown to be right
            self._count("second_look/failed")
            return self._math.value(False)
        self._count(f"second_look/{'right' if right else 'wrong'}")
        return self._math.value(right)


class GymScorer:
    """The verifiers of reasoning-gym, some of which evaluate what they are given: an answer that one fails at twice, and at no
    harmless one in between, earns nothing."""

    name = GYM
    default_key = ""

    def __init__(self, pool: VerifierPool, told: Told) -> None:
        self._pool = pool
        self._told = told

    async def score(self, sample: Sample, deadline_s: float) -> Value:
        failure: ScorerFailed | DeadlineExceeded | None = None
        for _ in range(2):
            try:
                return await self._pool.score(sample, min(deadline_s, GYM_S))
            except NoVerifier:
                raise
            except (ScorerFailed, DeadlineExceeded) as error:
                failure = error
            try:
                await self._pool.score(harmless(sample), deadline_s)
            except (ScorerFailed, DeadlineExceeded):
                raise failure from None
        await self._told(f"{GYM}/answer", f"an answer earns nothing, for a harmless one is scored: {failure}")
        return 0.0


class BoxedScorer:
    """Another scorer on the content of the last box."""

    def __init__(self, inner: Scorer) -> None:
        self.name = f"{BOXED}{inner.name}"
        self.default_key = inner.default_key
        self._inner = inner

    async def score(self, sample: Sample, deadline_s: float) -> Value:
        inside = msgspec.structs.replace(sample, response=last_boxed(sample.response) or "")
        return await self._inner.score(inside, deadline_s)


def answer_of(scorer: Scorer, sample: Sample) -> str:
    """What a sample answers, in at most ANSWER_CHARS, for counting votes: what a math rule takes for it, else the last line."""
    if isinstance(scorer, MathScorer):
        said = scorer.answer(sample)
    else:
        said = last_boxed(sample.response) or (sample.response.strip().splitlines() or [""])[-1]
    return said.strip()[:ANSWER_CHARS]


class Scorers:
    """What one reward process can score with. Use as `async with`; Refused when the default cannot work."""

    def __init__(
        self,
        *,
        rm_type: str,
        custom_rm_path: str = "",
        math_rule: str = FINAL,
        rm_url: Sequence[str] = (),
        rm_batch_size: int = 1,
        judge: JudgeScorer | None = None,
        n_workers: int = 1,
        boot_deadline_s: float = 60.0,
        count: Callable[[str], None] = lambda name: None,
        told: Told = untold,
        custom_rm_sandbox: bool = False,
        sandbox_reads: Sequence[str] = (),
        pass_env: Sequence[str] = (),
        allow_weak_sandbox: bool = False,
    ) -> None:
        self._default = rm_type
        pool = partial(VerifierPool, n_workers=n_workers, boot_deadline_s=boot_deadline_s)
        limits = Profile(tuple(sandbox_reads), VERIFIER_BYTES, allow_weak_sandbox)
        own = limits if custom_rm_sandbox else None
        self._custom = pool(custom_rm_path, profile=own, pass_env=pass_env) if custom_rm_path else None
        self._remote = RemoteScorer(rm_url, batch=rm_batch_size) if rm_url else None
        self._judge = judge
        self._code = code.CodeScorer(weak=allow_weak_sandbox, told=told)
        # Its library does not belong into this process, and evaluates some answers as Python.
        self._gym = pool(gym.HOOK, name=GYM, eager=False, profile=limits)
        self._stack = AsyncExitStack()
        self._second_look: VerifierPool | None = None
        if self._custom is None and second_look.installed():
            eager = rm_type.removeprefix(BOXED) in MATH_RULES
            setting = "math-verify (the extra `math`)"
            # It only reads answers: where the kernel cannot hold it, it goes on all the same.
            self._second_look = pool(second_look.HOOK, setting=setting, eager=eager, profile=limits._replace(weak=True))

        def scorer(name: str, rule: Rule) -> Scorer:
            return MathScorer(name, rule, self._second_look, count) if isinstance(rule, MathRule) else RuleScorer(name, rule)

        self._table: dict[str, Scorer] = {name: scorer(name, rule) for name, rule in RULES.items()}
        self._table |= {BOXED + name: BoxedScorer(scorer(name, rule)) for name, rule in BOXED_RULES.items()}
        if math_rule != FINAL:
            self._table |= {prefix + MATH: self._table[prefix + math_rule] for prefix in ("", BOXED)}
        others: list[Scorer] = [self._code, GymScorer(self._gym, told)]
        others += [one for one in (self._remote, self._judge) if one is not None]
        self._table |= {one.name: one for one in others} | {BOXED + one.name: BoxedScorer(one) for one in others}

    async def __aenter__(self) -> Self:
        if self._default and self._custom is None:
            try:
                self.named(self._default)
            except UnknownScorer as error:
                raise Refused(str(error)) from error
        async with AsyncExitStack() as stack:
            for part in (self._custom, self._remote, self._judge, self._code, self._gym, self._second_look):
                if part is not None:
                    await stack.enter_async_context(part)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def reload(self) -> None:
        """Load the custom function anew."""
        if self._custom is not None:
            await self._custom.reload()

    @property
    def lacks_second_look(self) -> bool:
        """Whether the default is a math rule that has our own reading of an answer alone."""
        return self._custom is None and self._second_look is None and self._default.removeprefix(BOXED) in MATH_RULES

    @property
    def capacity(self) -> int | None:
        """Samples that can be at work at once; None = no bound of its own."""
        return self._custom.capacity if self._custom is not None else None

    @property
    def of_groups(self) -> VerifierPool | RemoteScorer:
        """What scores all samples of a prompt at once. Raises UnknownScorer."""
        found = self._custom or (self._remote if self._default == REMOTE else None)
        if found is None:
            raise UnknownScorer("--group-rm scores by a function of your own or a service; set --custom-rm-path or --rm-url.")
        return found

    async def score_group(self, samples: Sequence[Sample], deadline_s: float) -> list[Value]:
        """Values of all samples of a prompt, scored at once. Raises as `Scorer.score`, and UnknownScorer."""
        found = await self.of_groups.score(SampleGroup(tuple(samples)), deadline_s)
        values = found if isinstance(found, list) else [found]
        if len(values) != len(samples):
            text = f"scorer {self.of_groups.name} gave {len(values)} values for {len(samples)} samples of a group"
            raise ScorerFailed(f"{text}; return a list with one for each.")
        return values

    def harmless(self, sample: Sample, rm_type: str) -> Sample:
        """The same with an answer that asks nothing special of the scorer that `rm_type` names."""
        name = "" if self._custom is not None else (rm_type or self._default).strip()
        if name.removeprefix(BOXED) == code.NAME:  # an empty program would be scored without the sandbox
            sample = harmless(sample, f"```\n{code.HARMLESS}\n```")
        else:
            sample = harmless(sample)
        boxed = f"\\boxed{{{sample.response}}}" if name.startswith(BOXED) else sample.response
        return msgspec.structs.replace(sample, response=boxed)

    def named(self, rm_type: str) -> Scorer:
        """The scorer of a sample that asks for `rm_type` (empty = the default). Raises UnknownScorer."""
        if self._custom is not None:
            return self._custom
        name = (rm_type or self._default).strip()
        if not name:
            raise UnknownScorer("the sample names no rm_type and there is no default; set --rm-type or metadata rm_type.")
        if name in self._table:
            return self._table[name]
        if name.removeprefix(BOXED) == JUDGE:
            raise UnknownScorer(f"rm_type {name} asks a model and none is given; set --judge-url http://HOST:PORT/v1.")
        if name.removeprefix(BOXED) == REMOTE:
            raise UnknownScorer(f"rm_type {name} asks a service and none is given; set --rm-url http://HOST:PORT/PATH.")
        raise UnknownScorer(f"no rm_type {name[:60]!r}; known are {', '.join(sorted((*RULES, *OTHERS)))}, and {BOXED}NAME.")
