"""What hosts and Redis use: one actor of a host looks, the record stays bounded, trackers and the docs have the same names."""

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from actors.recorder.history import History
from actors.recorder.points import Points
from actors.recorder.records import Record, records_of
from actors.runtime.context import Context
from actors.runtime.usage import PERIOD_S, HostUsage, RedisUsage, gpu_usage, tell_usage
from bus import Bus
from bus.knobs.live import LiveKnobs
from bus.topology import EVENTS
from tests.crash.house import REPO
from tests.declared import actor_of
from tests.miles_async.console_data import config
from tests.system.test_metrics_page import pattern, section


async def test_one_actor_of_a_host_looks_and_the_next_one_takes_over(redis_url, run_name, tmp_path):
    async with Bus(config(redis_url, run_name)) as bus, asyncio.timeout(20):
        overs = {name: asyncio.Event() for name in ("trainer", "recorder", "reward")}
        specs = {name: actor_of(name=name, role=name, bus=bus.config, run_dir=str(tmp_path)) for name in overs}

        async def told(n: int, behind: int = 0) -> list[Record]:
            """What was told of this host, once there are `n` looks behind the first `behind`; each as the recorder keeps it, with
            who looked."""
            while True:
                found = [(e, await bus.message(e)) for e in await bus.scan_all(EVENTS)]
                looks = [made | {"by": said.actor} for e, said in found for made in records_of(e, said)]
                if len([look for look in looks if look["source"] == socket.gethostname()][behind:]) >= n:
                    return looks
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as tasks:
            for name, over in overs.items():
                context = Context(specs[name], bus, LiveKnobs(bus))
                tasks.create_task(tell_usage(context, over, first_s=0.03, period_s=0.03))
            looks = await told(3)
            of_host = [look["by"] for look in looks if look["source"] != "Redis"]
            assert len(set(of_host)) == 1, "one of three looks at the host"
            overs[of_host[0]].set()
            looks = await told(3, behind=len(of_host) + 2)
            assert [look["by"] for look in looks if look["source"] != "Redis"][-1] != of_host[0]
            for over in overs.values():
                over.set()
    found = {look["source"]: look["values"] for look in looks}
    host, redis = found[socket.gethostname()], found["Redis"]
    assert 0 <= host["cpu_share"] <= 1 and host["memory_bytes"] > 1e7 and host["disk_free_bytes"] > 0
    assert redis["redis_memory_bytes"] > 1e5 and redis["redis_clients"] >= 1
    names = [pattern(name) for name in section((REPO / "docs" / "metrics.md").read_text(), "What hosts and Redis use")]
    assert [name for name in (*host, *redis) if not any(p.fullmatch(name) for p in names)] == []


def test_processors_in_use_are_seen_from_any_thread(tmp_path):
    usage = HostUsage(str(tmp_path))
    began = time.thread_time()
    while time.thread_time() - began < 0.1:
        pass
    with ThreadPoolExecutor(1) as other:
        assert other.submit(usage.look).result()["cpu_share"] > 0


def test_gpus_are_told_as_far_as_they_tell(tmp_path):
    smi = tmp_path / "smi"
    smi.write_text("#!/bin/sh\necho '37, 1024, 310.5'\necho '100, 2048, [N/A]'\n")
    smi.chmod(0o755)
    assert gpu_usage(str(smi)) == {
        "gpu0_util_share": 0.37, "gpu0_memory_bytes": 2.0**30, "gpu0_power_w": 310.5,
        "gpu1_util_share": 1.0, "gpu1_memory_bytes": 2.0**31,
    }  # fmt: skip
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_usage(str(smi)) == gpu_usage("no-such-program") == {}


def test_rates_of_redis_begin_with_the_second_look_and_outlast_a_restart():
    usage = RedisUsage()
    said = {"used_memory": "1000"}
    when = ((100, 0.0), (300, 10.0), (5, 20.0), (25, 30.0))
    looks = [usage.of(said | {"total_commands_processed": str(n)}, now) for n, now in when]
    assert [look.get("redis_commands_s") for look in looks] == [None, 20.0, None, 2.0]
    assert usage.of({}, 40.0) == {}


def test_of_many_hosts_the_record_holds_fewer_looks():
    def lines(hosts, looks):
        history, kept = History(), 0
        for look in range(looks):
            for host in range(hosts):
                record = {
                    "kind": "system",
                    "wall": 1e9 + PERIOD_S * look + 0.01 * host,
                    "source": f"h{host}",
                    "values": {"cpu_share": 0.5},
                }
                kept += history.wants(record)
                if history.wants(record):
                    history.fold(record)
        return kept

    assert lines(3, 60) == 180
    assert lines(200, 300) < 200 + 4 * 300 * 1.2, "the first of each, then at most about four a period"


def test_a_steps_point_has_what_was_used_since_the_step_before():
    points = Points()
    for value in (0.2, 0.4):
        assert points.of({"kind": "system", "wall": 1.0, "source": "vm", "values": {"cpu_share": value}}) is None
    step = {"kind": "step", "wall": 2.0, "step": 1, "dropped": [], "metrics": {"train/loss": 1.0}}
    assert points.of(step).values["system/vm/cpu_share"] == 0.30000000000000004
    assert "system/vm/cpu_share" not in points.of(step | {"step": 2}).values
    for host in range(1000):
        points.of({"kind": "system", "wall": 1.0, "source": f"h{host}", "values": {"cpu_share": 0.1}})
    assert len(points.of(step | {"step": 3}).values) < 410
