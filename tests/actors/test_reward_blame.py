"""What a model writes neither holds a run nor ends it: it is told from a broken scorer by a trial with a harmless answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from actors.reward.actor import run
from actors.reward.blame import Probe
from actors.reward.code import CodeScorer
from actors.reward.pool import NoVerifier, VerifierPool
from actors.reward.rules import RULES, MathRule
from actors.reward.sample import ScorerFailed
from actors.reward.scorer import GymScorer, MathScorer, Scorers
from actors.reward.spec import RewardSpec
from actors.runtime.context import Context
from actors.runtime.sandbox import PROGRAM, Sandbox
from bus.messages.base import unpack_ints
from bus.messages.samples import RolloutDone, RolloutLost, Scored
from bus.topology import DEAD, ROLLOUTS
from tests.actors.house import open_bus, put, running
from tests.actors.test_reward_actor import done, hook, scored_and_lost, tokenizer_dir  # noqa: F401 - fixtures
from tests.actors.test_reward_hub import sample
from tests.declared import room_of

GROUPS = 20  # more than end a run when all fail
OPEN = [f"g{number}" for number in range(GROUPS + 1)]
LOOP = "while True: pass"


async def left(
    redis_url: str, run_name: str, spec: RewardSpec, rollouts: list[RolloutDone], **more: Any
) -> tuple[dict[str, Any], Context, int]:
    """What the room made of these, in a run that goes on; and its dead letters."""
    async with open_bus(redis_url, run_name, groups=OPEN, **more) as bus:
        async with running(bus, "reward", run, spec) as context:
            await put(bus, ROLLOUTS, *rollouts)
            return await scored_and_lost(bus, len(rollouts)), context, await bus.length(DEAD)


async def test_programs_that_use_up_their_time_have_failed_and_the_run_goes_on(
    redis_url: str,
    run_name: str,
    tokenizer_dir: str,  # noqa: F811
) -> None:
    spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, rm_type="unit_tests", patience_s=0.0)
    loops = [done(n, 0, LOOP, label="assert f() == 1") for n in range(GROUPS)]
    out, context, dead = await left(redis_url, run_name, spec, loops, knobs={"reward_timeout_s": 0.4})
    assert dead == 0 and all(isinstance(one, Scored) and one.reward == 0.0 for one in out.values())
    assert context.counters["refused/unit_tests/out_of_time"] == GROUPS


ENDS = "end of the sandbox"
FRAGILE = PROGRAM.replace(
    "main()",
    f"import os; from actors.runtime import sandbox_child as it; Job = it.SandboxJob; "
    f"it.SandboxJob = lambda order, line: os._exit(1) if {ENDS!r} in order['code'] else Job(order, line); main()",
)


async def test_a_program_that_ends_each_sandbox_has_failed_where_harmless_code_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.runtime.sandbox.PROGRAM", FRAGILE)
    told: list[tuple[str, str]] = []

    async def tell(kind: str, text: str) -> None:
        told.append((kind, text))

    async with CodeScorer(told=tell) as scorer:
        found = await scorer.score(sample(f"x = {ENDS!r}", "assert x"), 30.0)
        assert found == {"score": 0.0, "passed": 0.0}
        assert [kind for kind, _ in told] == ["unit_tests/killed_sandbox"] and "died 2 times" in told[0][1]
        assert await scorer.score(sample("x = 1", "assert x == 1"), 30.0) == {"score": 1.0, "passed": 1.0}


async def test_a_sandbox_in_which_harmless_code_ends_too_says_nothing_about_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.runtime.sandbox.PROGRAM", FRAGILE.replace(repr(ENDS), "''"))
    async with Sandbox() as box:
        assert (await box.run("print(2)")).cause == "lost"
    async with CodeScorer() as scorer:
        with pytest.raises(ScorerFailed, match="was not tested: the sandbox died"):
            await scorer.score(sample("x = 1", "assert x == 1"), 30.0)


@pytest.mark.parametrize("what", ["raise", "crash", "none"])
async def test_answers_that_a_function_fails_at_end_no_run(
    redis_url: str,
    run_name: str,
    tokenizer_dir: str,  # noqa: F811
    hook: str,  # noqa: F811
    tmp_path: Path,
    what: str,
) -> None:
    scorer: dict[str, Any] = {"custom_rm_path": hook, "reward_key": "score", "max_retries": 0, "patience_s": 0.0, "n_workers": 1}
    spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, **scorer)
    bad = [done(n, 0, what, metadata={"log": str(tmp_path / "log")}) for n in range(GROUPS)]
    out, context, dead = await left(redis_url, run_name, spec, [*bad, done(GROUPS, 0, "fine")], knobs={"reward_timeout_s": 20.0})
    assert dead == GROUPS == sum(isinstance(one, RolloutLost) for one in out.values())
    assert out[f"g{GROUPS}/0"].reward == 0.5 and context.counters["answers_blamed"] >= GROUPS // 4 - 1


@asynccontextmanager
async def served(handle: Handler) -> AsyncIterator[str]:
    """The address of a teacher that answers so."""
    app = web.Application()
    app.router.add_post("/generate", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_answers_that_a_teacher_does_not_take_end_no_run(redis_url: str, run_name: str, tokenizer_dir: str) -> None:  # noqa: F811
    async def teach(http: web.Request) -> web.StreamResponse:
        ids = (await http.json())["input_ids"]
        if len(ids) > 60:
            return web.json_response({"error": "longer than the context"}, status=400)
        return web.json_response({"meta_info": {"input_token_logprobs": [[-0.5, token, None] for token in ids]}})

    async with served(teach) as url:
        spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, rm_type="math", teacher_urls=(url,), max_retries=0, patience_s=0.0)
        long = [done(n, 0, "1" * 90) for n in range(GROUPS)]
        assert len(unpack_ints(long[0].prompt_tokens)) < 50
        out, _, dead = await left(redis_url, run_name, spec, [*long, done(GROUPS, 0, "1")], knobs={"reward_timeout_s": 20.0})
    assert dead == GROUPS and isinstance(out[f"g{GROUPS}/0"], Scored)


async def test_a_harmless_answer_fits_its_scorer() -> None:
    """A program that says nothing would be scored without the sandbox; a box is looked for in the last one."""
    asked = sample("while True: pass", "7", metadata={"tests": ["assert f() == 1"]})
    async with Scorers(rm_type="") as scorers:
        assert scorers.harmless(asked, "math").response == "7"
        assert scorers.harmless(sample("x"), "f1").response.strip()
        assert scorers.harmless(asked, "boxed_exact_match").response == "\\boxed{7}"
        for name in ("unit_tests", "boxed_unit_tests"):
            plain = scorers.harmless(asked, name)
            assert await scorers.named(name).score(plain, 30.0) == {"score": 0.0, "passed": 0.0}
            assert scorers._code._sandbox._server is not None, "it ran"


GYM = """
import os, time

def hook(sample):
    what = sample["response"]
    if what == "crash" or sample["label"] == "always":
        os.abort()
    if what == "once" and not os.path.exists(sample["metadata"]["was"]):
        open(sample["metadata"]["was"], "w").close()
        os.abort()
    return 0.5
"""


async def test_an_answer_that_ends_its_verifier_earns_nothing_unless_all_do(tmp_path: Path) -> None:
    (tmp_path / "gym_hook.py").write_text(GYM)
    told: Counter[str] = Counter()

    async def tell(kind: str, text: str) -> None:
        told.update([kind])

    async with VerifierPool(f"{tmp_path}/gym_hook.py:hook", n_workers=1, boot_deadline_s=60.0) as pool:
        scorer = GymScorer(pool, tell)
        assert await scorer.score(sample("crash", "7"), 30.0) == 0.0
        assert told == {"reasoning_gym/answer": 1}
        with pytest.raises(ScorerFailed, match="SIGABRT"):
            await scorer.score(sample("fine", "always"), 30.0)
        once = sample("once", "7", metadata={"was": str(tmp_path / "was")})
        assert await scorer.score(once, 30.0) == 0.5, "an end from outside is no fault of the answer"
        assert told.total() == 1


async def test_a_verifier_that_does_not_start_makes_no_answer_wrong() -> None:
    rule = RULES["math_whole"]
    assert isinstance(rule, MathRule)
    async with VerifierPool("no_such_module.hook", n_workers=1, boot_deadline_s=60.0, eager=False) as pool:
        scorer = MathScorer("math_whole", rule, pool, lambda name: None)
        with pytest.raises(NoVerifier, match="does not start"):
            await scorer.score(sample(r"\int_0^1 f(x)\,dx", r"\int_0^1 f(t)\,dt"), 30.0)


async def test_a_trial_that_failed_speaks_for_all_who_wait_and_one_that_worked_for_nobody_else() -> None:
    now, trials, works = [0.0], [0], False

    async def trial() -> None:
        trials[0] += 1
        now[0] += 1.0
        await asyncio.sleep(0.01)
        if not works:
            raise ScorerFailed("away")

    probe = Probe(lambda: now[0])
    assert await asyncio.gather(*(probe.blames_the_answer(trial) for _ in range(8))) == [False] * 8
    assert trials[0] <= 2
    works = True
    assert await asyncio.gather(*(probe.blames_the_answer(trial) for _ in range(4))) == [True] * 4
    assert trials[0] >= 5
