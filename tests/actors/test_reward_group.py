"""--group-rm: all samples of a prompt are scored at once, whatever happens to one of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.reward.actor import run
from actors.reward.spec import RewardSpec
from bus import Bus, Commit, Entry
from bus.messages.groups import OpenGroup
from bus.messages.samples import Episode, RolloutLost, Scored
from bus.topology import DEAD, ROLLOUTS, SCORED
from tests.actors.house import messages, open_bus, put, running, until
from tests.actors.test_reward_actor import OPEN, done, scored_and_lost
from tests.actors.test_reward_actor import tokenizer_dir as tokenizer_dir
from tests.declared import room_of

GROUP_HOOK = """
async def hook(args, samples):
    if any(s.response == "raise" for s in samples):
        raise ValueError("broken for a group")
    best = max(len(s.response) for s in samples)
    n = len(samples) + args.more * (args.n_samples_per_prompt - 2)
    return [{"score": float(len(s.response) == best), "n": n} for s in samples]
"""  # with Miles' signature


async def test_with_group_rm_a_prompt_is_scored_when_all_its_samples_are_here(
    redis_url: str, run_name: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    """g1 whole over a restart, g2 with a lost member, g3 that the function cannot take, g4 of which one is malformed, g5 whose
    rewards its program gave."""
    (tmp_path / "hook.py").write_text(GROUP_HOOK)
    spec = room_of(
        RewardSpec, tokenizer_dir=tokenizer_dir, custom_rm_path=f"{tmp_path / 'hook.py'}:hook", group_rm=True, reward_key="score",
        max_retries=0, n_workers=1, hook_values={"more": 1},
    )  # fmt: skip
    async with open_bus(redis_url, run_name, groups=OPEN) as bus:
        await put(bus, ROLLOUTS, done(1, 0, "a"), done(2, 0, "b"))
        async with running(bus, "reward-0", run, spec) as context:
            await until(lambda: asyncio.sleep(0, context.note.startswith("2 groups")))
            assert await bus.length(SCORED) == 0
        async with running(bus, "reward-0", run, spec):
            lost = RolloutLost(sample_id="g2/1", group_id="g2", n_samples=2, reason="evicted")
            broken = done(4, 1, "d")
            broken = msgspec.structs.replace(broken, response=msgspec.structs.replace(broken.response, spans=()))
            await put(bus, ROLLOUTS, done(1, 1, "bb"), lost, done(3, 0, "raise"), done(3, 1, "c"), broken)
            await scored_and_lost(bus, 7)
            await put(bus, ROLLOUTS, done(4, 0, "c"))  # its sibling has passed
            given = [msgspec.structs.replace(done(5, i, "e"), episode=Episode(reward=(i + 1) / 4)) for i in range(2)]
            await put(bus, ROLLOUTS, *given)
            found = await scored_and_lost(bus, 10)
        assert [(found[i].reward, found[i].rewards["n"]) for i in ("g1/0", "g1/1")] == [(0.0, 2.0), (1.0, 2.0)]
        assert [(found[i].reward, found[i].scorer) for i in ("g5/0", "g5/1")] == [(0.25, "program"), (0.5, "program")]
        assert isinstance(found["g2/1"], RolloutLost) and found["g2/0"].scorer == "none"
        for group in ("g3", "g4"):
            members = [found[f"{group}/{i}"] for i in range(2)]
            assert sorted(type(m).__name__ for m in members) == ["RolloutLost", "Scored"], group
        letters = await messages(bus, DEAD)
        assert "broken for a group" in " ".join(letter.error for letter in letters)


async def test_a_member_whose_siblings_were_scored_alone_before_waits_for_none(
    redis_url: str, run_name: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    """The run was started again with --group-rm: a sibling of g1 is at the filter, one of g2 has left it in a part."""
    (tmp_path / "hook.py").write_text("def hook(samples):\n    return [len(samples) / 4 for _ in samples]\n")
    told = {"custom_rm_path": f"{tmp_path / 'hook.py'}:hook", "group_rm": True, "max_retries": 0, "n_workers": 1}
    spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, **told)
    alone = Scored(rollout=done(1, 0, "a"), reward=1.0, rewards={}, scorer="exact_match")
    left = OpenGroup(group_id="g2", prompt_id="p2", n_samples=2, members=(1,), rewards={0: 1.0})
    async with open_bus(redis_url, run_name, groups=OPEN) as bus:
        await bus.commit(Commit(open_groups={"g2": msgspec.msgpack.encode(left)}))
        await put(bus, SCORED, alone)
        async with running(bus, "reward-0", run, spec):
            await put(bus, ROLLOUTS, done(1, 1, "b"), done(2, 1, "c"), done(3, 0, "d"), done(3, 1, "e"))
            found = await scored_and_lost(bus, 5)
    rewards = {name: scored.reward for name, scored in found.items() if isinstance(scored, Scored)}
    assert rewards == {"g1/0": 1.0, "g1/1": 0.25, "g2/1": 0.25, "g3/0": 0.5, "g3/1": 0.5}


async def test_a_member_that_looked_for_its_siblings_before_one_was_lost_does_not_wait_for_it(
    redis_url: str, run_name: str, tokenizer_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its look at the stream is answered before the loss of its sibling is there, and the answer arrives after."""
    (tmp_path / "hook.py").write_text(GROUP_HOOK)
    told = {"custom_rm_path": f"{tmp_path / 'hook.py'}:hook", "group_rm": True, "max_retries": 0, "n_workers": 1}
    spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, **told)
    seen = asyncio.Event()
    scan = Bus.scan_all

    async with open_bus(redis_url, run_name, groups=OPEN) as bus:

        async def late(self: Bus, *args: Any) -> list[Entry]:
            found = await scan(self, *args)
            if not seen.is_set():
                seen.set()
                await until(lambda: _long(bus))
            return found

        monkeypatch.setattr(Bus, "scan_all", late)
        async with running(bus, "reward-0", run, spec):
            await put(bus, ROLLOUTS, done(1, 0, "a"))
            await asyncio.wait_for(seen.wait(), 20)
            await put(bus, ROLLOUTS, RolloutLost(sample_id="g1/1", group_id="g1", n_samples=2, reason="evicted"))
            found = await scored_and_lost(bus, 2)
    assert isinstance(found["g1/1"], RolloutLost) and isinstance(one := found["g1/0"], Scored) and one.scorer == "none"


async def _long(bus: Bus) -> bool:
    return await bus.length(SCORED) > 0
