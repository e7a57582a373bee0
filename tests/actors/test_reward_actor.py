"""The reward room on a real bus: every rollout leaves it once, scored or lost, whatever the scorer does."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from actors.reward.actor import dead, run
from actors.reward.spec import RewardSpec
from actors.runtime.context import Context
from actors.runtime.run import EXIT_DRAINED, Refused
from bus import Bus, Entry, Out
from bus.messages.base import pack_ints, unpack_floats, unpack_ints
from bus.messages.samples import Episode, Response, RolloutDone, RolloutLost, Scored
from bus.messages.versions import VersionSpan
from bus.topology import DEAD, EVAL_ROLLOUTS, EVAL_SCORED, ROLLOUTS, SCORED
from tests.actors.house import messages, open_bus, put, rollout, running, task, until
from tests.declared import actor_of, room_of
from tests.engine.conftest import engine_process
from tests.engine.models import Oracle, make_model

HOOK = """
import os, pathlib, time

def hook(sample):
    what = sample["metadata"].get("whatever is said", sample["response"])
    if what == "raise":
        with open(sample["metadata"]["log"], "a") as log:
            log.write("x")
        raise ValueError("broken verifier")
    if what == "once":
        if not os.path.exists(sample["metadata"]["log"]):
            pathlib.Path(sample["metadata"]["log"]).write_text("x")
            raise ValueError("only once")
        return 1.0
    if what == "hang":
        pathlib.Path(sample["metadata"]["log"]).write_text(str(os.getpid()))
        while True:
            time.sleep(0.05)
    if what == "slow":
        pathlib.Path(sample["metadata"]["log"]).write_text(str(os.getpid()))
        while not os.path.exists(sample["metadata"]["go"]):
            time.sleep(0.02)
        return 2.0
    if what == "crash":
        os.abort()
    if what == "none":
        return None
    if what == "nan":
        return {"score": float("nan"), "acc": 0}
    return {"score": 0.5, "acc": 1, "note": "text"}
"""

OPEN = ("g1", "g2", "g3", "g4")
CHARS = ["</s>", *(chr(code) for code in range(32, 127))]


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> str:
    """One token a printable character, "</s>" as a special token with id 0."""
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(CHARS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


@pytest.fixture
def hook(tmp_path: Path) -> str:
    (tmp_path / "reward_hook.py").write_text(HOOK)
    return f"{tmp_path / 'reward_hook.py'}:hook"


def done(group: int, index: int, text: str, **fields: Any) -> RolloutDone:
    """A finished rollout whose response is `text` and an end token."""
    ids = [*(CHARS.index(char) for char in text), 0]
    response = Response(
        tokens=pack_ints(ids),
        logprobs=memoryview(bytes(4 * len(ids))),
        loss_mask=memoryview(b"\x01" * len(ids)),
        spans=(VersionSpan(1, 0, len(ids)),),
    )
    made = msgspec.structs.replace(rollout(group, index), response=response)
    return msgspec.structs.replace(made, task=msgspec.structs.replace(task(group, index), **fields))


async def scored_and_lost(bus: Bus, count: int) -> dict[str, Scored | RolloutLost]:
    """Wait for so many messages on scored; by sample id."""

    async def enough() -> list[Any]:
        found = await messages(bus, SCORED)
        return found if len(found) >= count else []

    found = await until(enough, deadline_s=40.0)
    by_id = {m.sample_id if isinstance(m, RolloutLost) else m.rollout.task.sample_id: m for m in found}
    assert len(found) == len(by_id) == count
    assert await bus.length(ROLLOUTS) == 0
    return by_id


def retries(context: Context) -> int:
    return int(context.counters.get("retries", 0))


async def test_rollouts_are_scored_and_lost_ones_pass_through(redis_url: str, run_name: str, tokenizer_dir: str) -> None:
    lost = RolloutLost(sample_id="g2/0", group_id="g2", n_samples=2, reason="evicted", tokens_made=9)
    right, wrong = done(1, 0, "7"), done(1, 1, "8")
    own = done(2, 1, r"so \boxed{Seven}", rm_type="boxed_exact_match", label="Seven")
    async with open_bus(redis_url, run_name, groups=OPEN) as bus:
        async with running(bus, "reward", run, room_of(RewardSpec, tokenizer_dir=tokenizer_dir, rm_type="math")) as context:
            await put(bus, ROLLOUTS, right, wrong, lost, own)
            out = await scored_and_lost(bus, 4)
        assert [out[i].reward for i in ("g1/0", "g1/1", "g2/1")] == [1.0, 0.0, 1.0]
        assert out["g1/0"].rollout == right and out["g1/0"].scorer == "math"
        assert out["g2/1"].scorer == "boxed_exact_match"
        assert out["g2/0"] == lost
        assert context.counters["scored/math"] == 2


async def test_evaluation_has_its_own_streams_and_key(redis_url: str, run_name: str, tokenizer_dir: str) -> None:
    spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, rm_type="dapo", eval_reward_key="acc")
    lost = RolloutLost(sample_id="e0/1", group_id="e0", n_samples=2, reason="evicted", eval_name="held_out")
    async with open_bus(redis_url, run_name, groups=OPEN) as bus:
        async with running(bus, "reward", run, spec):
            await put(bus, ROLLOUTS, done(1, 0, "Answer: 8"))
            await put(bus, EVAL_ROLLOUTS, done(0, 0, "Answer: 8", sample_id="e0/0", group_id="e0", eval_name="held_out"), lost)
            out = await scored_and_lost(bus, 1)
            await until(lambda: _has(bus, 2))
        evals = await messages(bus, EVAL_SCORED)
        assert out["g1/0"].reward == -1.0 and out["g1/0"].rewards == {"score": -1.0, "acc": 0.0}
        [score] = [m for m in evals if isinstance(m, Scored)]
        assert score.reward == 0.0 and lost in evals


async def test_a_teacher_is_asked_about_training_samples(
    redis_url: str, run_name: str, tokenizer_dir: str, tmp_path: Path, warm: Path | None
) -> None:
    """Its log-probs travel with the score; evaluation has none; a teacher that is away costs attempts, then the sample."""
    make_model("qwen3", tmp_path / "teacher", seed=1)
    with engine_process(tmp_path / "teacher", warm=warm) as (url, _):
        spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, rm_type="math", teacher_urls=(url,))
        async with open_bus(redis_url, run_name, groups=OPEN) as bus:
            async with running(bus, "reward", run, spec):
                taught = done(1, 0, "78")
                await put(bus, ROLLOUTS, taught)
                await put(bus, EVAL_ROLLOUTS, done(0, 0, "7", sample_id="e0/0", group_id="e0", eval_name="held_out"))
                out = await scored_and_lost(bus, 1)
                await until(lambda: _has(bus, 1))
            [seen] = await messages(bus, EVAL_SCORED)
    assert isinstance(seen, Scored) and seen.teacher_logprobs is msgspec.UNSET
    found = out["g1/0"].teacher_logprobs
    tokens = unpack_ints(taught.response.tokens)
    want = Oracle(tmp_path / "teacher").logprobs(unpack_ints(taught.task.prompt_tokens), tokens)
    assert unpack_floats(found) == pytest.approx(want, abs=1e-4)
    async with open_bus(redis_url, f"{run_name}-away", groups=OPEN) as bus:
        away = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, rm_type="math", teacher_urls=(url,), max_retries=0)
        async with running(bus, "reward", run, away):
            await put(bus, ROLLOUTS, done(1, 0, "7"))
            lost = (await scored_and_lost(bus, 1))["g1/0"]
    assert isinstance(lost, RolloutLost) and "teacher" in lost.error


async def _has(bus: Bus, count: int) -> bool:
    return await bus.length(EVAL_SCORED) == count


async def test_a_table_gives_reward_and_parts_and_nan_stays_nan(
    redis_url: str, run_name: str, tokenizer_dir: str, hook: str
) -> None:
    spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, custom_rm_path=hook, reward_key="score", n_workers=1)
    async with open_bus(redis_url, run_name, groups=OPEN) as bus:
        async with running(bus, "reward", run, spec):
            await put(bus, ROLLOUTS, done(1, 0, "fine", rm_type="math"), done(1, 1, "nan"))
            out = await scored_and_lost(bus, 2)
        assert out["g1/0"].reward == 0.5 and out["g1/0"].rewards == {"score": 0.5, "acc": 1.0}
        assert out["g1/0"].scorer == "custom"  # the custom function replaces rm_type, also a sample's own
        assert math.isnan(out["g1/1"].reward) and await bus.length(DEAD) == 0


async def test_a_function_that_raises_is_retried_then_dead_lettered_and_its_group_closes(
    redis_url: str, run_name: str, tokenizer_dir: str, hook: str, tmp_path: Path
) -> None:
    spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, custom_rm_path=hook, reward_key="score", n_workers=1, max_retries=2)
    log, once = tmp_path / "log", tmp_path / "once"
    async with open_bus(redis_url, run_name, groups=OPEN) as bus:
        async with running(bus, "reward", run, spec) as context:
            await put(
                bus,
                ROLLOUTS,
                done(1, 0, "raise", metadata={"log": str(log)}),
                done(1, 1, "fine"),
                done(2, 0, "once", metadata={"log": str(once)}),
            )
            out = await scored_and_lost(bus, 3)
            [letter] = await messages(bus, DEAD)
        assert log.read_text() == "xxx"  # the first attempt and two more
        lost = out["g1/0"]
        assert isinstance(lost, RolloutLost)
        assert (lost.reason, lost.n_samples, lost.tokens_made, lost.prompt_id) == ("poison", 2, 6, "p1")
        assert "broken verifier" in lost.error
        assert (letter.stream, letter.sample_id, letter.deliveries) == ("rollouts", "g1/0", 3)
        assert "attempt 3 was the last" in letter.error and "reward_hook.py" in letter.traceback
        assert out["g1/1"].reward == 0.5 and out["g2/0"].reward == 1.0
        assert retries(context) == 3


async def test_a_function_that_raises_on_every_sample_ends_the_run_and_keeps_the_samples(
    redis_url: str, run_name: str, tokenizer_dir: str, hook: str, tmp_path: Path
) -> None:
    ended, always = asyncio.Event(), {"log": str(tmp_path / "log"), "whatever is said": "raise"}

    async def body(context: Context, spec: RewardSpec) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await run(context, spec)
        told = "".join(traceback.format_exception(caught.value))
        assert "RunEnds: scoring failed 16 times" in told and "broken verifier" in told and "reward_hook.py" in told
        ended.set()

    scorer: dict[str, Any] = {"custom_rm_path": hook, "reward_key": "score", "max_retries": 0, "patience_s": 0.0, "n_workers": 1}
    spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, **scorer)
    async with open_bus(redis_url, run_name) as bus:
        async with running(bus, "reward", body, spec):
            await put(bus, ROLLOUTS, *(done(n, 0, "fine", metadata=always) for n in range(20)))
            await asyncio.wait_for(ended.wait(), 60)
        assert await bus.length(ROLLOUTS) >= 16 and await bus.length(DEAD) < 4


async def test_a_function_that_hangs_or_crashes_costs_its_own_sample_only(
    redis_url: str, run_name: str, tokenizer_dir: str, hook: str, tmp_path: Path
) -> None:
    spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, custom_rm_path=hook, reward_key="score", n_workers=2, max_retries=1)
    async with open_bus(redis_url, run_name, groups=OPEN, knobs={"reward_timeout_s": 1.5}) as bus:
        async with running(bus, "reward", run, spec):
            hanging = done(1, 0, "hang", metadata={"log": str(tmp_path / "pid")})
            await put(bus, ROLLOUTS, hanging, done(1, 1, "crash"), *(done(n, i, "fine") for n in (2, 3, 4) for i in (0, 1)))
            out = await scored_and_lost(bus, 8)
            letters = {m.sample_id: m.error for m in await messages(bus, DEAD)}
        assert {i for i, m in out.items() if isinstance(m, RolloutLost)} == {"g1/0", "g1/1"} == set(letters)
        assert "took longer than 1.5 s" in letters["g1/0"] and "SIGABRT" in letters["g1/1"]
        assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


async def test_what_is_no_reward_or_no_scorer_is_said_clearly(redis_url: str, run_name: str, tokenizer_dir: str, hook: str) -> None:
    spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, custom_rm_path=hook, reward_key="score", n_workers=1, max_retries=0)
    async with open_bus(redis_url, run_name, groups=OPEN) as bus:
        async with running(bus, "reward", run, spec) as first:
            await put(bus, ROLLOUTS, done(1, 0, "none"))
            none = (await scored_and_lost(bus, 1))["g1/0"]
        assert "scorer custom gave None" in none.error
        async with running(bus, "reward", run, room_of(RewardSpec, tokenizer_dir=tokenizer_dir)) as second:
            await put(
                bus,
                ROLLOUTS,
                done(2, 0, "x"),
                done(2, 1, "x", rm_type="maths"),
                done(3, 0, "x", rm_type="length", label="q"),
            )
            out = await scored_and_lost(bus, 4)
        assert "no default" in out["g2/0"].error and "no rm_type 'maths'" in out["g2/1"].error
        assert "no number of tokens" in out["g3/0"].error
        assert retries(first) == retries(second) == 0


async def test_a_malformed_entry_is_buried_and_its_group_told_if_it_has_one(
    redis_url: str, run_name: str, tokenizer_dir: str
) -> None:
    async with open_bus(redis_url, run_name, groups=OPEN) as bus:
        key = bus.keys.stream("rollouts")
        async with running(bus, "reward", run, room_of(RewardSpec, tokenizer_dir=tokenizer_dir, rm_type="math")):
            await bus.link.run("XADD", key, "*", "id", "g1/0", "group", "g1", "tokens", "12", "body", b"\xc1broken")
            await bus.link.run("XADD", key, "*", "id", "g1/1", "group", "g1", "tokens", "many", "body", b"")
            await bus.link.run("XADD", key, "*", "body", b"\x93\x01\x02\x03")
            odd = done(2, 0, "x")
            odd = msgspec.structs.replace(odd, response=msgspec.structs.replace(odd.response, tokens=memoryview(b"12345")))
            await put(bus, ROLLOUTS, odd, done(2, 1, "7"))
            out = await scored_and_lost(bus, 4)
        assert await bus.length(DEAD) == 4
        assert [(out[i].reason, out[i].n_samples, out[i].tokens_made) for i in ("g1/0", "g1/1")] == [
            ("malformed", 0, 12),
            ("malformed", 0, 0),
        ]
        assert out["g2/0"].reason == "poison" and out["g2/1"].reward == 1.0


def test_a_lost_rollout_that_dies_here_is_still_passed_on() -> None:
    lost = RolloutLost(sample_id="g1/0", group_id="g1", n_samples=2, reason="evicted")
    entry = Entry(id="1-0", stream=EVAL_ROLLOUTS, readers="reward", fields={}, body=b"", size=0)
    assert dead(entry, lost).append == (Out(EVAL_SCORED, lost),)


async def test_what_is_not_scored_within_the_drain_stays_for_a_successor(
    redis_url: str, run_name: str, tokenizer_dir: str, hook: str, tmp_path: Path
) -> None:
    spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, custom_rm_path=hook, reward_key="score", n_workers=1)
    log, go = tmp_path / "pid", tmp_path / "go"
    slow = done(1, 0, "slow", metadata={"log": str(log), "go": str(go)})
    async with open_bus(redis_url, run_name, groups=OPEN, lease_s=1.0, knobs={"reward_timeout_s": 600.0}) as bus:
        async with running(bus, "reward", run, spec) as context:
            context.spec = msgspec.structs.replace(context.spec, drain_timeout_s=1.0)
            await put(bus, ROLLOUTS, slow)
            await until(lambda: _exists(log))
        assert await bus.length(ROLLOUTS) == 1 and await bus.length(SCORED) == await bus.length(DEAD) == 0
        go.touch()
        async with running(bus, "successor", run, spec):
            assert (await scored_and_lost(bus, 1))["g1/0"].reward == 2.0


async def _exists(path: Path) -> bool:
    return path.exists() and bool(path.read_text())


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rm_type": "maths"}, "no rm_type 'maths'"),
        ({"rm_type": "remote_rm"}, "--rm-url"),
        ({"custom_rm_path": "no_such_module.hook"}, "does not load"),
        ({"rm_type": "math", "tokenizer_dir": "/nowhere"}, "has no tokenizer.json"),
    ],
)
async def test_what_can_never_work_is_refused_at_start(
    redis_url: str, run_name: str, tokenizer_dir: str, fields: dict[str, str], why: str
) -> None:
    async with open_bus(redis_url, run_name, groups=OPEN) as bus:
        with pytest.raises(Refused, match=why):
            async with running(bus, "reward", run, room_of(RewardSpec, **{"tokenizer_dir": tokenizer_dir, **fields})):
                await asyncio.sleep(0)


@pytest.mark.crash
async def test_a_killed_reward_process_leaves_no_verifier_and_loses_no_sample(
    redis_url: str, run_name: str, tokenizer_dir: str, hook: str, tmp_path: Path
) -> None:
    log, go = tmp_path / "pid", tmp_path / "go"
    room = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, custom_rm_path=hook, reward_key="score", n_workers=1)
    async with open_bus(redis_url, run_name, groups=OPEN, lease_s=1.0, knobs={"reward_timeout_s": 30.0}) as bus:
        spec = actor_of(name="reward-0", role="reward", bus=bus.config, room=msgspec.to_builtins(room))
        (tmp_path / "spec.json").write_bytes(msgspec.json.encode(spec))
        await put(bus, ROLLOUTS, done(1, 0, "slow", metadata={"log": str(log), "go": str(go)}), done(1, 1, "fine"))

        async def start() -> asyncio.subprocess.Process:
            return await asyncio.create_subprocess_exec(sys.executable, "-m", "actors.reward", str(tmp_path / "spec.json"))

        first = await start()
        await until(lambda: _exists(log), deadline_s=30.0)
        first.kill()
        await first.wait()
        verifier = int(log.read_text())
        await until(lambda: _gone(verifier))
        go.touch()
        second = await start()
        try:
            out = await scored_and_lost(bus, 2)
            assert out["g1/0"].reward == 2.0 and out["g1/1"].reward == 0.5
            second.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(second.wait(), 20.0) == EXIT_DRAINED
        finally:
            if second.returncode is None:
                second.kill()
                await second.wait()


async def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_a_rollout_program_gives_the_reward_or_what_is_scored(redis_url: str, run_name: str, tokenizer_dir: str) -> None:
    def told(index: int, text: str, **fields: Any) -> RolloutDone:
        return msgspec.structs.replace(done(1, index, text, label="7"), episode=Episode(**fields))

    spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, rm_type="math", reward_key="score")
    async with open_bus(redis_url, run_name, groups=OPEN) as bus, running(bus, "reward", run, spec):
        await put(bus, ROLLOUTS, told(0, "no", reward={"score": 0.25, "turns": 3.0}), told(1, "no", answer="\\boxed{7}"))
        found = await scored_and_lost(bus, 2)
    given, judged = found["g1/0"], found["g1/1"]
    assert isinstance(given, Scored) and isinstance(judged, Scored)
    assert (given.reward, given.rewards["turns"], given.scorer) == (0.25, 3.0, "program")
    assert judged.reward == 1.0 and judged.scorer != "program"
