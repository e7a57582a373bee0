"""Imports only go down, rooms do not know each other, pure files stay pure. Whole files are walked."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.floors.tree import FLOOR, PACKAGES, ROOMS, ROOT, Import, each, imports, is_pure, package, parse, sources

FILES = sources(*PACKAGES)
IMPURE = {
    *("asyncio", "concurrent", "threading", "multiprocessing", "subprocess", "signal", "socket", "ssl", "select"),
    *("time", "random", "secrets", "uuid", "logging", "os", "pathlib", "shutil", "tempfile", "io", "sys"),
    *("http", "urllib", "aiohttp", "httpx", "requests", "redis", "uvloop", "datetime"),
}
RECORDS = (  # lists of what rooms know, which settings offer; they need msgspec alone
    "actors.kinds",
    "actors.generation.engines.kind",
    "actors.generation.engines.records",
    "actors.runtime.transports.kind",
    "actors.runtime.transports.records",
    "actors.trainer.objective_estimators",
)
# Libraries that are heavy or optional: imported at module level only in files named after them, and such a file is
# imported at module level only by its like. Everybody else asks for it inside a function, when it is wanted.
HEAVY = ("sglang", "megatron", "transformer_engine", "ray", "vllm")
REDIS_USERS = ("bus/client.py", "bus/streams/", "bus/blobs/redis.py", "bus/server/")
RAW = ("run", "run_many", "run_job", "run_script", "bulk", "retry")
COMMANDS = {
    *("EVAL", "EVALSHA", "XADD", "XDEL", "XREAD", "XRANGE", "XREVRANGE", "XPENDING", "XCLAIM", "XAUTOCLAIM", "XINFO", "XTRIM"),
    *("XREADGROUP", "XACK", "XGROUP", "XLEN", "HGET", "HSET", "HGETALL", "HINCRBY", "HDEL", "RPUSH", "LRANGE", "EXPIRE", "UNLINK"),
}


def module_of(path: Path) -> str:
    """Its name as imports say it."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for the type checker count: they only hide a circle. Not counted is what the first file of a
    package hands out from below itself when it is asked for (`_HOMES`), and names for the checker."""
    files = {module_of(path): path for path in (*FILES, *sources("scripts"))}
    open_ends: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for i in imports(path):
            below = any(j.target.startswith(f"{i.target}.") and j.line == i.line for j in imports(path))
            handed_out = i.checking and path.name == "__init__.py" and i.target.startswith(f"{name}.")
            if i.target in files and i.target != name and not below and not handed_out:
                open_ends[name].add(i.target)
    while ends := {name for name, targets in open_ends.items() if not targets}:
        open_ends = {name: targets - ends for name, targets in open_ends.items() if name not in ends}
    assert not open_ends, "in a circle, or importing one: " + "; ".join(f"{n} -> {sorted(t)}" for n, t in open_ends.items())


def where(path: Path, found: Import) -> str:
    return f"{path}:{found.line} imports {found.target}"


@each(lambda: FILES)
def test_imports_only_go_down(path: Path) -> None:
    here = FLOOR[path.parts[0]]
    for found in imports(path):
        assert not found.relative, f"{where(path, found)} by a relative path"
        assert FLOOR.get(package(found.target), 0) <= here, f"{where(path, found)}, a floor above"
        assert package(found.target) not in ("tests", "scripts"), where(path, found)


@each(lambda: [p for p in FILES if p.parts[0] == "actors" and len(p.parts) > 2])
def test_a_room_reaches_only_the_bus_the_runtime_and_itself(path: Path) -> None:
    room = path.parts[1]
    allowed = {room, "runtime", "kinds"} if room in ROOMS else {room, "kinds"}
    for found in imports(path):
        parts = found.target.split(".")
        if parts[0] == "actors" and len(parts) > 1:
            assert parts[1] in allowed, f"{where(path, found)}, another room"


def test_every_folder_of_the_first_floor_is_a_room_or_the_runtime() -> None:
    folders = {p.parts[1] for p in FILES if p.parts[0] == "actors" and len(p.parts) > 2}
    assert folders == {*ROOMS, "runtime"}


@each(lambda: [p for p in FILES if p.parts[0] == "bus"])
def test_the_bus_stands_on_the_standard_library_msgspec_and_redis(path: Path) -> None:
    for found in imports(path):
        top = package(found.target)
        assert top in ("bus", "msgspec", "redis", "hiredis") or top in sys.stdlib_module_names, where(path, found)
        if top in ("redis", "hiredis"):  # the second is the first one's parser, installed with it
            assert str(path).startswith(REDIS_USERS), f"{where(path, found)}; only the bus's own adapters do"


@each(lambda: [p for p in FILES if p.parts[0] != "bus"])
def test_above_the_ground_floor_nobody_speaks_redis(path: Path) -> None:
    """No Lua, no command by hand, no connection: what is missing becomes a function of the bus."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node).rpartition("link.")[2] not in RAW, f"{path}:{node.lineno} {ast.unparse(node)}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            spoken = "redis.call" in node.value or node.value in COMMANDS
            assert not spoken, f"{path}:{node.lineno} {node.value[:40]!r} belongs into bus/"


@each(lambda: [p for p in FILES if p.parts[:2] == ("bus", "messages")])
def test_messages_touch_no_clock_no_chance_and_no_machine(path: Path) -> None:
    for found in imports(path):
        assert package(found.target) not in IMPURE - {"sys"}, where(path, found)
        assert found.target.startswith(("bus.messages", "bus.errors")) or package(found.target) != "bus", where(path, found)


@each(lambda: [p for p in FILES if is_pure(p)])
def test_a_file_that_says_pure_is_pure(path: Path) -> None:
    chance = {"random"} if path.name == "seeds.py" else set()  # where all chance comes from, seeded
    for found in imports(path):
        assert package(found.target) not in IMPURE - chance, where(path, found)


@pytest.mark.parametrize(
    "name",
    [
        *("actors/sampler/admission.py", "actors/sampler/order.py", "actors/sampler/progress.py"),
        *("actors/filter/groups.py", "actors/filter/judges.py", "actors/partial/decide.py"),
        *("actors/publisher/plan.py", "actors/trainer/cut.py", "actors/runtime/retry.py", "actors/runtime/seeds.py"),
        *("bus/knobs/kinds.py", "bus/messages/versions.py", "miles_async/settings/rules.py", "miles_async/settings/live.py"),
    ],
)
def test_decisions_lie_in_pure_files(name: str) -> None:
    assert is_pure(Path(name)), f"{name} decides something and must say (pure) on its first lines"


@each(lambda: [p for p in FILES if "objective" in p.parts])
def test_the_objective_knows_tensors_and_nothing_of_the_house(path: Path) -> None:
    for found in imports(path):
        assert package(found.target) not in IMPURE - {"sys"}, where(path, found)
        assert package(found.target) != "bus" or found.target.startswith("bus.messages"), where(path, found)
        assert not found.target.startswith("actors.") or found.target.startswith("actors.trainer.objective"), where(path, found)


@each(lambda: [p for p in FILES if p.parts[:2] == ("actors", "trainer")])
def test_what_training_libraries_share_knows_none_of_them(path: Path) -> None:
    """batch: plain numbers; training: tensors; the backends above both."""
    folder = path.parts[2]
    for found in imports(path):
        if folder in ("batch", "objective", "training"):
            assert not found.target.startswith("actors.trainer.torch_backend"), where(path, found)
        assert folder != "batch" or package(found.target) not in ("torch", "numpy", "transformers"), where(path, found)
        assert folder != "training" or package(found.target) != "transformers", where(path, found)


@each(lambda: [p for p in FILES if p.name == "actor.py"])
def test_the_loop_of_a_room_does_not_know_its_libraries(path: Path) -> None:
    for found in imports(path):
        assert package(found.target) not in ("torch", "transformers", "aiohttp", "httpx", "safetensors", *HEAVY), where(path, found)


@each(lambda: FILES)
def test_heavy_libraries_are_imported_only_where_asked_for(path: Path) -> None:
    for found in imports(path):
        if not found.top:
            continue
        last = found.target.rpartition(".")[2]
        for library in HEAVY:
            named_after = any(part.removesuffix(".py").split("_")[0] == library for part in path.parts)
            if package(found.target) == library:
                assert named_after, f"{where(path, found)} at module level"
            if package(found.target) in PACKAGES and last.split("_")[0] == library:
                adapter = (ROOT / f"{found.target.replace('.', '/')}.py").is_file()
                needs = adapter and any(
                    package(i.target) == library and i.top for i in imports(Path(f"{found.target.replace('.', '/')}.py"))
                )
                assert named_after or not needs, f"{where(path, found)} at module level"


@each(lambda: [p for p in FILES if p.parts[:2] == ("miles_async", "settings")])
def test_settings_need_nothing_heavy(path: Path) -> None:
    for found in imports(path):
        top = package(found.target)
        assert top not in ("torch", "transformers", "redis", "bus"), where(path, found)
        assert top != "actors" or found.target in RECORDS, where(path, found)
        light = top in ("msgspec", *sys.stdlib_module_names) or found.target.startswith(("miles_async.settings", *RECORDS))
        assert light or not found.top, f"{where(path, found)} at module level"


def imported_with_hidden(statement: str, *hidden: str) -> subprocess.CompletedProcess[str]:
    """Run an import in a fresh interpreter in which some packages do not exist."""
    code = f"import sys\nfor name in {hidden!r}: sys.modules[name] = None\n{statement}"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(
    ("statement", "hidden"),
    [
        (
            "import bus, bus.ledger, bus.knobs, bus.server",
            ("torch", "numpy", "transformers", "aiohttp", "pytest", "hypothesis", "actors", "miles_async"),
        ),
        (
            "import miles_async.settings.load",
            *(("torch", "numpy", "redis", "aiohttp", "transformers", "bus", "actors.runtime.context", "actors.runtime.hooks"),),
        ),
        (  # what is asked about a run that has ended is answered at once
            "import bus, miles_async.cli.app, miles_async.cli.trace, miles_async.console.trace, miles_async.console.show",
            ("torch", "numpy", "redis", "hiredis", "asyncio", "rich", "aiohttp", "miles_async.settings.rules"),
        ),
        (  # what is asked of a living one waits for redis alone
            "import miles_async.cli.app, miles_async.cli.status, miles_async.console.attach, miles_async.console.lines, "
            "miles_async.governor.standing, actors.runtime.snapshot, miles_async.console.trace_live",
            ("torch", "numpy", "aiohttp", "miles_async.settings.run", "miles_async.settings.rules"),
        ),
        (  # each function of the user's has processes of its own, started again after each death
            "import actors.reward.verifier, actors.environments.child, actors.generation.rollouts.function_child",
            ("torch", "numpy", "redis", "hiredis", "aiohttp", "transformers"),
        ),
    ],
    ids=["bus", "settings", "trace", "status", "functions"],
)
def test_a_floor_stands_alone(statement: str, hidden: tuple[str, ...]) -> None:
    done = imported_with_hidden(statement, *hidden)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_launcher_loads_no_torch() -> None:
    """It would wait for it at every start, and the processes that need torch load it meanwhile."""
    code = "import miles_async.launcher.run, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0
