"""What a soak keeps between its pieces, and how it reads growth from measurements."""

import math
import random

import pytest

from bus import Bus, Out, Tail
from bus.messages.groups import GroupVerdict
from bus.topology import POLICY, VERDICTS
from scripts.growth import kind_of, slope_of, slopes
from scripts.soak_home import Home
from tests.actors.garbage import garbage
from tests.miles_async.console_data import config, step_done


async def test_a_home_goes_on_after_a_torn_line_keeps_each_entry_once_and_no_garbage(redis_url, run_name, tmp_path):
    verdicts = [GroupVerdict(group_id=f"g{n}", prompt_id="p", kept=n != 2) for n in (1, 2, 3)]
    async with Bus(config(redis_url, run_name)) as bus:
        home = Home(tmp_path)
        await bus.append([Out(POLICY, step_done(1)), Out(VERDICTS, verdicts[0]), Out(VERDICTS, verdicts[1])])
        for fields in garbage(POLICY, random.Random(1)):
            await bus.link.run("XADD", bus.keys.stream(POLICY.name), "*", *fields)
        tail = Tail(bus, [POLICY, VERDICTS])
        await tail.open()
        for entry in await tail.read(0.0):
            await home.keep(bus, entry)
        await tail.close()
        home.put("began", wall=1.0)
        home.close()
        with home.seen.path.open("ab") as file:
            file.write(b'{"kind":"measu')
        await bus.link.run("XTRIM", bus.keys.stream(POLICY.name), "MAXLEN", 0)  # what a run does behind its checkpoints
        await bus.append([Out(POLICY, step_done(2)), Out(VERDICTS, verdicts[2])])
        again = Home(tmp_path)
        assert (again.piece, again.done) == (2, 1)
        for _ in range(2):
            await again.settle(bus)
    assert [m.step for m in again.policy()] == [1, 2]
    assert [(v.group, v.kept) for v in again.verdicts()] == [("g1", True), ("g2", False), ("g3", True)]
    assert [line["piece"] for line in again.lines("began")] == [1]
    again.close()


def test_growth_is_that_within_lives_not_what_restarts_make_of_it():
    leaking = [(f"life{n}", 100.0 * n + x, 50.0 + 0.02 * x + (x % 3)) for n in range(8) for x in range(0, 90, 3)]
    slope, error = slope_of(leaking, apart=True)
    assert slope == pytest.approx(0.02, abs=1e-3) and error < 1e-3
    together, _ = slope_of(leaking, apart=False)
    assert abs(together) < 0.005, "the restarts hide it"
    assert all(map(math.isnan, slope_of([("a", 1.0, 2.0)] * 3, apart=True)))
    waves = [("one", float(x), 50.0 + 3 * math.sin(x / 40)) for x in range(600)]
    slope, error = slope_of(waves, apart=True)
    assert abs(slope) < 3 * error < 0.1, "of one life, its tenths tell how sure that is"


def test_one_step_up_is_told_apart_from_what_grows_all_the_time():
    """A table that doubles once in a life, and a leak of the same size in the end."""

    def line(done, own):
        row = {"what": "trainer", "life": "1", "age_s": 200.0, "own": own}
        return {"piece": 1, "done": done, "processes": [row]}

    [once] = slopes([line(n, (300 << 20) + (4 << 20) * (n >= 60)) for n in range(100)])
    assert once.slope > 50 and once.rise == 4.0 and once.rest == pytest.approx(0.0, abs=1e-6)
    [always] = slopes([line(n, (300 << 20) + n * (4 << 20) // 100) for n in range(100)])
    assert always.slope == pytest.approx(40.0, rel=0.01) and always.rest == pytest.approx(always.slope, rel=0.05)
    [two] = slopes([line(n, (300 << 20) + (4 << 20) * (n // 30)) for n in range(100)])
    assert two.rise == 4.0 and two.rest > 50, "two steps up are growth"
    [falls] = slopes([line(n, (300 << 20) - n) for n in range(100)])
    assert falls.rise == 0.0 and falls.rest == falls.slope


def test_the_server_of_a_run_is_known_by_either_name(tmp_path):
    assert {kind_of([f"/bin/{name}", "unixsocket:x"], tmp_path) for name in ("redis-server", "valkey-server")} == {"Redis server"}


def test_young_lives_are_left_out_and_kinds_are_told_apart():
    def line(done, *told):
        used = {"memory": 1 << 20, "resident": 1 << 20, "keys": 5}
        files = {"files": 3, "bytes": done << 20}
        rows = [{"what": w, "life": life, "age_s": age, "rss": rss << 20, "fds": 4, "threads": 2} for w, life, age, rss in told]
        return {"piece": done // 50, "done": done, "processes": rows, "Redis": used, "run folder": files, "shared memory": files}

    lines = [line(n, ("filter", "1", 10.0 * n, 40), ("trainer", "2", 10.0, n)) for n in range(100)]
    found = {row.what: row for row in slopes(lines)}
    assert found["filter rss"].slope == 0.0 and found["filter rss"].n == 87 and "trainer rss" not in found
    assert found["run folder bytes"].slope == pytest.approx(1000.0) and found["run folder bytes"].unit == "MB"
