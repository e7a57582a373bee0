"""The web console as a client meets it: who gets in, what it is told, what it may change. The page itself: test_web_page.py."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.recorder.history import History, history_of
from actors.runtime.snapshot import read_snapshot
from bus import Bus
from bus.server import EmbeddedRedis
from bus.topology import POLICY, PROMPTS
from miles_async.cli import app
from miles_async.console.doctor.diagnosis import diagnose
from miles_async.console.scene import read_scene
from miles_async.console.web.curves import Curves
from miles_async.console.web.looks import Looks
from miles_async.console.web.state import DoctorWord, state_of
from miles_async.settings.runs import write_run_file
from tests.miles_async.console_data import Story, config, step_done, task
from tests.miles_async.web_house import console


async def test_only_the_holder_of_the_token_gets_in(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with console(redis_url, run_name, tmp_path) as page, aiohttp.ClientSession() as stranger:
        for path in ("/", "/?token=x", "/?token=%C3%A4", "/events", "/api/knobs", "/static/main.js"):
            async with stranger.get(page.url + path) as answer:
                assert answer.status == 401 and "Set-Cookie" not in answer.headers
                assert "open the address that miles-async console printed" in (await answer.json())["error"]
        async with stranger.get(page.address, allow_redirects=False) as answer:
            assert answer.status == 303 and page.token not in answer.headers["Location"]
            assert {"HttpOnly", "SameSite=Strict"} <= {w.strip() for w in answer.headers["Set-Cookie"].split(";")}
        async with stranger.get(f"{page.url}/api/knobs", headers={"Authorization": f"Bearer {page.token}"}) as answer:
            assert answer.status == 200
        async with page.session.get(page.url) as answer:
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'self';")
            assert "<script>" not in await answer.text()
        file = tmp_path / run_name / "console.token"
        assert file.read_text().strip() == page.token and file.stat().st_mode & 0o077 == 0


async def test_other_names_and_other_pages_are_refused(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with console(redis_url, run_name, tmp_path) as page:
        port, patch = page.url.rpartition(":")[2], {"values": {"max_weight_staleness": "2"}}
        assert (await page.ask("/api/knobs", Host=f"evil.example:{port}"))[0] == 403
        assert (await page.ask("/api/knobs", Host=f"127.0.0.1.evil.example:{port}"))[0] == 403
        assert (await page.ask("/api/knobs", Origin="http://evil.example"))[0] == 403
        assert (await page.ask("/api/knobs", Host=f"localhost:{port}", Cookie=f"miles_async_{port}={page.token}"))[0] == 200
        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{int(port) + 1}"):
            assert (await page.tell("/api/knobs", patch, Origin=origin))[0] == 403
        assert (await page.tell("/api/knobs", patch, **{"Sec-Fetch-Site": "cross-site"}))[0] == 403
        async with page.session.post(f"{page.url}/api/knobs", json=patch) as answer:
            assert answer.status == 403, "no Origin"
        assert (await page.ask("/api/knobs"))[1]["epoch"] == 0, "nothing was changed"


async def test_the_state_is_that_of_the_commands_and_new_steps_follow(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with console(redis_url, run_name, tmp_path) as page:
        await page.until(lambda p: "The trainer " in p.state.get("why", {}).get("text", "") and p.curves.get("step") == [1])
        state = page.state
        assert (state["run"]["step"], state["run"]["total"], state["run"]["evals"]) == (1, 3, {"held_out": 0.625})
        prompts, scored = state["flow"]["streams"]["prompts"], state["flow"]["streams"]["scored"]
        assert (prompts["depth"], prompts["held"], scored["held"]) == (3, 1, 1)
        assert state["flow"]["open_groups"] == 2 and state["engines"]["serving"] == [[1, 2]]
        assert state["drops"]["total"] == [
            ["zero_std_0", 1, "all rewards of the group are equal (0, rounded to one decimal): no advantage to learn from"]
        ]
        assert [a["who"] for a in state["alarms"]][-1] == "reward: retry"
        assert page.curves["columns"]["dropped/zero_std_0"] == [1.0]
        await page.story.say(POLICY, step_done(2, raw_reward=0.75))
        await page.until(lambda p: p.curves["step"] == [1, 2])
        assert page.curves["columns"]["rollout/raw_reward"] == [0.5, 0.75]


async def test_a_run_whose_actors_all_fell_silent_is_an_alarm_and_not_an_end(redis_url: str, run_name: str) -> None:
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.begin()
        seen, said = await read_snapshot(bus), {"total_steps": 3, "settings": {}}
        silent = replace(seen, actors=tuple(replace(a, age_s=60.0) for a in seen.actors))
        word = DoctorWord(tuple(diagnose(replace(await read_scene(bus), snapshot=silent))), {}, seen.wall)
        fell = state_of(silent, History(), Looks(), word, **said)
        assert not fell["run"]["ended"] and "silent for 1:00" in fell["why"]["text"]
        assert sum(a["level"] == "error" and a["now"] for a in fell["alarms"]) > 5
        stopped = replace(seen, actors=tuple(replace(a, vitals=replace(a.vitals, state="stopped")) for a in seen.actors))
        of_a_copy = state_of(silent, History(), Looks(), word, kept=True, **said)
        for ended in (of_a_copy, state_of(stopped, History(), Looks(), word, **said)):
            assert ended["run"]["ended"] and ended["alarms"] == [] and "not running" in ended["why"]["text"]


async def test_a_patch_is_applied_or_refused_with_its_rule(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with console(redis_url, run_name, tmp_path) as page:
        status, refused = await page.tell("/api/knobs", {"values": {"max_weight_staleness": "-3", "lr": "fast"}})
        assert status == 422 and refused["each"][0]["field"] == "max_weight_staleness"
        assert refused["error"].startswith("max_weight_staleness = ") and refused["error"].endswith("Nothing was changed.")
        assert (await page.tell("/api/knobs", {"values": {"no_such": "1"}}))[0] == 422
        assert (await page.tell("/api/knobs", {"value": {}}))[0] == 422
        status, made = await page.tell("/api/knobs", {"values": {"max_weight_staleness": "2"}, "reason": "try"})
        assert (status, made["epoch"]) == (200, 1)
        assert (await page.tell("/api/knobs", {"revert": 0}))[1]["epoch"] == 2
        _, knobs = await page.ask("/api/knobs")
        assert knobs["knobs"]["max_weight_staleness"]["value"] == 1
        assert [(p["epoch"], p["reason"]) for p in knobs["log"]] == [(2, "back to epoch 0"), (1, "try"), (0, "initial")]


async def test_a_read_only_console_changes_nothing(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with console(redis_url, run_name, tmp_path, read_only="this console is read-only") as page:
        await page.story.die("g4/0", PROMPTS, task("g4/0"))
        for path, body in (("/api/knobs", {"values": {"lr": "1"}}), ("/api/dead", {"id": "g4/0", "act": "drop"})):
            assert await page.tell(path, body) == (403, {"error": "this console is read-only: nothing was changed"})
        assert len((await page.ask("/api/dead"))[1]) == 1 and (await page.ask("/api/knobs"))[1]["epoch"] == 0


async def test_letters_samples_traces_and_other_runs(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with console(redis_url, run_name, tmp_path) as page:
        await page.story.die("g4/0", PROMPTS, task("g4/0"), error="no room")
        [letter] = (await page.ask("/api/dead"))[1]
        assert (letter["sample"], letter["error"]) == ("g4/0", "no room")
        assert (await page.tell("/api/dead", {"id": letter["id"], "act": "burn"}))[0] == 422
        assert (await page.tell("/api/dead", {"id": letter["id"], "act": "retry"}))[1]["text"].startswith("g4/0 is back on prompts")
        assert (await page.tell("/api/dead", {"id": letter["id"], "act": "drop"}))[0] == 422, "it is gone"
        _, kept = await page.ask("/api/samples?order=worst")
        assert ([s["sample"] for s in kept["samples"]], kept["steps"]) == (["g1/0", "g1/1"], [4, 1])
        assert [s["step"] for s in (await page.ask("/api/samples?step=1&order=best"))[1]["samples"]] == [1, 1]
        _, life = await page.ask("/api/trace?id=g2/1")
        assert life["state"].startswith("group dropped by the filter: zero_std_0 (all rewards of the group are equal")
        assert (await page.ask("/api/trace?id=nonsense"))[0] == 422
        write_run_file(tmp_path / "other", run="other", bus_url=redis_url)
        (tmp_path / "other" / "metrics.jsonl").write_text('{"kind":"step","wall":1.0,"step":7,"metrics":{"train/loss":0.25}}\n')
        assert (await page.ask("/api/runs"))[1] == ["other"]
        assert (await page.ask("/api/curves?run=other"))[1]["columns"]["train/loss"] == [0.25]
        assert (await page.ask("/api/curves?run=../other"))[0] == 422


@settings(max_examples=40)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_curves_of_any_length_stay_short_and_what_was_given_out_stays_true(pieces: list[int]) -> None:
    """A page that takes only what is new has what a fresh one gets."""
    curves, steps, page = Curves(most=8), [], ([], [])
    edition = -1
    for n in pieces:
        numbers = range(len(steps), len(steps) + n)
        steps += history_of({"kind": "step", "step": i, "metrics": {"train/loss": float(i % 7)}} for i in numbers).steps
        curves.follow(steps)
        news = curves.since(0 if edition != curves.edition else max(0, len(page[0]) - 1))
        page = (page[0][: news["at"]] + news["step"], page[1][: news["at"]] + news["columns"]["train/loss"])
        edition = curves.edition
        fresh = curves.since(0)
        assert page == (fresh["step"], fresh["columns"]["train/loss"])
        assert len(page[0]) == curves.length <= 8 and page[0][-1] == steps[-1].step and page[0] == sorted(set(page[0]))
    if len(steps) <= 8:
        assert page[1] == [s.metrics["train/loss"] for s in steps]
    curves.follow(steps[: len(steps) // 2])  # a restore took the rest back
    assert curves.edition > edition
    assert curves.since(0)["step"][-1:] == [s.step for s in steps[: len(steps) // 2]][-1:]


async def test_a_rate_is_what_was_appended_and_unknown_after_a_pause(redis_url: str, run_name: str) -> None:
    async with Bus(config(redis_url, run_name)) as bus:
        story, looks = Story(bus), Looks()
        await story.begin()
        first = await read_snapshot(bus)
        await story.issue("g1", "g2")
        await story.generate()
        second = await read_snapshot(bus)
        looks.see(first)
        assert looks.rate("prompts") is None
        looks.see(replace(second, wall=first.wall + 2.0))
        assert looks.rate("prompts") == 2.0 and looks.rate("scored") == 0.0, "four prompts in two seconds, all acknowledged since"
        assert looks.split() == {"without work": 1.0}
        looks.see(replace(second, wall=first.wall + 60.0))
        assert looks.rate("prompts") is None


def test_a_port_that_is_taken_or_none_is_refused_in_one_line(
    redis_url: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run_file(tmp_path / run_name, run=run_name, bus_url=redis_url)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for wanted, why in ((port, "another program listens there"), (99999, "ports end at 65535")):
            status = app.main(["console", run_name, "--runs-dir", str(tmp_path), "--port", str(wanted)])
            err = capsys.readouterr().err
            said = f"--port = {wanted}: cannot listen on 127.0.0.1:{wanted}: {why}. Choose another"
            assert status == 2 and err.count("\n") == 1 and said in err


def test_an_ended_run_is_shown_from_a_copy_and_cannot_be_changed(tmp_path: Path) -> None:
    """As a process: what is printed, what it answers, how it ends."""
    server = EmbeddedRedis(tmp_path / "late")
    server.start()
    write_run_file(tmp_path / "late", run="late", bus_url=server.url)

    async def live() -> None:
        async with Bus(config(server.url, "late")) as bus:
            await Story(bus).whole()

    asyncio.run(live())
    server.stop()
    tail = [sys.executable, "-m", "miles_async", "bus", "tail", "policy", "-n", "1", "--run", "late", "--runs-dir", str(tmp_path)]
    told = subprocess.run(tail, capture_output=True, text=True, timeout=60, check=False)  # it follows no copy
    assert told.returncode == 0 and len(told.stdout.splitlines()) == 1, told
    command = [sys.executable, "-m", "miles_async", "console", "late", "--runs-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            line = process.stdout.readline()

            async def look() -> tuple[int, str]:
                url, _, token = line.partition(": ")[2].strip().partition("/?token=")
                headers = {"Authorization": f"Bearer {token}"}
                async with aiohttp.ClientSession(headers=headers) as session:
                    async with session.get(f"{url}/api/trace?id=g1/0") as answer:
                        assert (await answer.json())["state"].startswith("trained in step 1")
                    async with session.post(f"{url}/api/knobs", json={"values": {"lr": "1"}}) as answer:
                        return answer.status, (await answer.json())["error"]

            assert asyncio.run(look()) == (403, "this run has ended: nothing was changed")
        finally:
            process.terminate()
            out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert "copy of what its Redis kept" in err and out.rstrip().endswith("left the console")
