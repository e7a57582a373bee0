"""Faults put into the code on purpose: a test that can fail finds them.

    .venv/bin/python scripts/mutants.py                    all entries of tests/mutants.toml
    .venv/bin/python scripts/mutants.py --only cut-youngest-first tracker-in-place
    .venv/bin/python scripts/mutants.py --jobs 4
    .venv/bin/python scripts/mutants.py --list

Each entry names a file, a text in it (`old`, there exactly once), what stands there instead (`new`), and the tests that must notice
(arguments of pytest). They are run in a copy of the repository, first on the code as it is: tests that fail anyway notice nothing.

    caught     a test failed, or the tests did not end in time
    SURVIVED   all tests passed; with `survives`, the entry's reason why that must be so, it is no failure
    STALE      `old` is not there exactly once: write the entry anew
    BROKEN     the tests cannot be run, or fail without the fault

Exit status 0 when every entry was caught or survived for its reason, otherwise 1.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

REPO = Path(__file__).resolve().parents[1]
LIST = REPO / "tests" / "mutants.toml"
SOUND_S = 900.0  # deadline of the tests of one entry without the fault; the slowest take 40 s on a busy machine
CLEAN_S = 60.0  # for what tests that did not end have started
SLOWER = 5.0  # with the fault they may take so many times as long as without, and a minute
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutants", "--no-header", "--tb=line")


@dataclass(frozen=True)
class Mutant:
    """One entry of the list. `tests`: arguments of pytest; `survives`: why no test can notice, empty when one must."""

    id: str
    file: str
    old: str
    new: str
    tests: str
    survives: str = ""

    def applied(self, text: str) -> str:
        """The file's text with the fault; ValueError when `old` is not there exactly once."""
        if (n := text.count(self.old)) != 1:
            raise ValueError(f"{self.id}: its old text is {n} times in {self.file}, not once; write the entry anew")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """What became of one entry."""

    mutant: Mutant
    verdict: str  # caught, SURVIVED, STALE, BROKEN
    seconds: float
    note: str = ""

    @property
    def good(self) -> bool:
        return self.verdict == "caught" or (self.verdict == "SURVIVED" and bool(self.mutant.survives))


def load(path: Path = LIST) -> list[Mutant]:
    """All entries in the list's order; ValueError or TypeError when one is malformed."""
    found = [Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"]]
    if twice := {m.id for m in found if sum(o.id == m.id for o in found) > 1}:
        raise ValueError(f"{path}: ids used twice: {', '.join(sorted(twice))}")
    return found


class Copy:
    """A copy of the repository in which one entry at a time is applied."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sound: dict[str, tuple[str, float]] = {}  # tests -> why they cannot be used, empty when they pass; their seconds
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (REPO / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPO / name, root / name)

    def judge(self, mutant: Mutant) -> Result:
        """Apply one entry, run its tests, take it back."""
        path = self._root / mutant.file
        try:
            before = path.read_text()
            after = mutant.applied(before)
        except (OSError, ValueError) as error:
            return Result(mutant, "STALE", 0.0, str(error))
        if mutant.tests not in self._sound:
            began = time.monotonic()
            code, said = self._run(mutant.tests, SOUND_S)
            why = "" if code == 0 else f"without the fault its tests end with {code}: {said}"
            self._sound[mutant.tests] = why, time.monotonic() - began
        why, usual_s = self._sound[mutant.tests]
        if why:
            return Result(mutant, "BROKEN", 0.0, why)
        began = time.monotonic()
        write(path, after)
        try:
            code, said = self._run(mutant.tests, SLOWER * usual_s + 60.0)
        finally:
            write(path, before)
        verdict = {0: "SURVIVED", 1: "caught", None: "caught"}.get(code, "BROKEN")
        return Result(mutant, verdict, time.monotonic() - began, mutant.survives if verdict == "SURVIVED" else said)

    def _run(self, tests: str, deadline_s: float) -> tuple[int | None, str]:
        """pytest's exit status, None at the deadline, and the test that failed or the last line."""
        environment = {**os.environ, "PYTHONPATH": str(self._root), "MILES_ASYNC_CRASH": "all"}  # every case can be named
        command = [sys.executable, "-m", "pytest", "--all", *PYTEST, *shlex.split(tests)]
        process = subprocess.Popen(
            command, cwd=self._root, env=environment, text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # whole runs are ended by their fixtures
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=CLEAN_S)
            return None, f"not over after {deadline_s:.0f} s"
        finally:  # and what they started, as far as it stayed in their process group
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = out.strip().splitlines() or [""]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return process.returncode, (failed or lines)[-1][:160]


def write(path: Path, text: str) -> None:
    """A file and no compiled form of what was there before: that is known by its second and size only."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def judge_all(mutants: Sequence[Mutant], jobs: int) -> Iterator[Result]:
    """Results in the order of the list."""
    free: SimpleQueue[Copy] = SimpleQueue()

    def judge(mutant: Mutant) -> Result:
        copy = free.get()
        try:
            return copy.judge(mutant)
        finally:
            free.put(copy)

    with TemporaryDirectory(prefix="mutants-") as directory, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            free.put(Copy(Path(directory) / str(number)))
        yield from pool.map(judge, mutants)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ID", help="entries whose ids begin so")
    parser.add_argument("--jobs", type=int, default=1, help="copies at work at once (default 1)")
    parser.add_argument("--list", action="store_true", help="name the entries and run nothing")
    given = parser.parse_args()
    mutants = [m for m in load() if not given.only or m.id.startswith(tuple(given.only))]
    if not mutants:
        parser.error("no entry of that name; see --list")
    width = max(len(m.id) for m in mutants)
    if given.list:
        for m in mutants:
            print(f"{m.id:{width}}  {m.file}" + (f"  survives: {m.survives}" if m.survives else ""))
        return 0
    results: list[Result] = []
    for result in judge_all(mutants, max(1, given.jobs)):
        results.append(result)
        print(f"{result.mutant.id:{width}}  {result.verdict:8}  {result.seconds:5.1f} s  {result.note}", flush=True)
    bad = [r.mutant.id for r in results if not r.good]
    caught = sum(r.verdict == "caught" for r in results)
    survive = len(results) - caught - len(bad)
    print(f"{caught} of {len(results)} caught, {survive} survive for a reason, {len(bad)} to mend", *bad)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
