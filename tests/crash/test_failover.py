"""A run on a Redis with a replica and sentinels: who the primary is changes, and the ledger closes."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from bus.client import PASSWORD, SENTINEL_PASSWORD
from tests.bus.test_rights import SECRET, rights
from tests.crash.conftest import Launch
from tests.crash.house import merged
from tests.crash.judge import judge
from tests.crash.mischief import join
from tests.crash.test_workers import HELD_UP, TWO, check_the_letter, is_buried, until_it_works
from tests.failover import SENTINEL_SECRET, Failover, failover

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def house() -> Iterator[Failover]:
    with failover() as made:
        yield made


@pytest.mark.parametrize("how", ["killed", "moved", "killed when its replica was two steps behind"])
@pytest.mark.takes(40)
def test_another_server_becomes_the_primary(how: str, run_of: Launch, house: Failover) -> None:
    """What the successor had not heard is done again: by the rooms, or, of steps, by the trainer from its checkpoint. A move by
    SENTINEL FAILOVER loses too: the old primary takes writes for seconds after its successor was chosen."""
    # The change takes seconds, in which the toy does a hundred steps and more.
    settings = {"num_rollout": 10_000}
    run = run_of({"rollout": settings, "ckpt": {"keep_last": 10_000, "save_interval": 20}, "bus": {"bus_url": house.url}})
    run.start()
    run.until_step(3)
    if "behind" in how:
        house.sever()
        run.until_step(run.step() + 2)
    (house.move if how == "moved" else house.promote)()
    run.until_step(run.step() + 40)
    run.drain()
    loses = how != "killed"
    judge(run, whole_policy=not loses, steps=run.step())
    assert ("it lost its last moments" in (run.dir / "metrics.jsonl").read_text()) == loses


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failover]:
    """By TLS alone, for the user whose rights docs/security.md names."""
    monkeypatch.setenv(PASSWORD, SECRET)
    monkeypatch.setenv(SENTINEL_PASSWORD, SENTINEL_SECRET)
    with failover(rights=rights(), tls=True) as made:
        yield made


@pytest.mark.takes(150)
@pytest.mark.timeout(900)
def test_by_tls_and_with_the_rights_of_the_page_whatever_dies_a_run_goes_on(run_of: Launch, guarded: Failover) -> None:
    """A sample that holds up two workers, a worker that joined, one that dies, the trainer, the primary; then the tools."""
    own = {"ckpt": {"keep_last": 10_000, "save_interval": 20}, "bus": {"bus_url": guarded.url}}
    run = run_of(merged(merged(TWO, HELD_UP), own))
    run.start()
    run.until_it_listens()
    run.until("the sample's burial", lambda: is_buried(run))
    check_the_letter(run, [*(run.dir / "logs").glob("generation-*.log")])
    given = ("--custom-generate-function-path", HELD_UP["rollout"]["custom_generate_function_path"])
    guest = join(run, "guest", *given)
    try:
        until_it_works(run, "guest")
        for name in ("generation-0", "trainer"):
            run.kill(name)
            run.until_step(run.step() + 2)
        guarded.promote()
        run.until_step(run.step() + 8)
        guest.send_signal(signal.SIGTERM)
        assert guest.wait(60) == 0, (run.home / "guest.log").read_text()[-2000:]
    finally:
        guest.kill()
        guest.wait()
    for words in (("status",), ("doctor",), ("ledger",), ("stop",)):
        done = run.command(*words)
        assert SECRET not in done.stdout + done.stderr and "Traceback" not in done.stderr, done.stderr
        assert "no permissions" not in (done.stdout + done.stderr).lower(), done.stdout + done.stderr
    run.finish()
    judge(run, steps=run.step())
    said = "".join(file.read_text() for file in (run.dir / "logs").glob("*.log"))
    assert "no permissions" not in said.lower() and SECRET not in said and "Fatal error on SSL" not in said
