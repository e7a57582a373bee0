"""Files that can be read: short, open about what they promise, and only the writing room writes a stream."""

from __future__ import annotations

import ast
from pathlib import Path

from bus.topology import BY_NAME, STREAMS, describe
from tests.floors.tree import PACKAGES, ROOMS, ROOT, each, parse, sources

MAX_LINES = 400
FILES = sources(*PACKAGES)
SCRIPTS = sorted(
    p.relative_to(ROOT) for folder in (*PACKAGES, "scripts") for p in (ROOT / folder).rglob("*") if p.suffix in (".lua", ".sh")
)  # fmt: skip
STREAM_OF = {
    name: BY_NAME[str(node.value.args[0].value)]
    for node in parse(Path("bus/topology.py")).body
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.args[0], ast.Constant)
    for name in [target.id for target in node.targets if isinstance(target, ast.Name)]
}  # fmt: skip
# Who writes a stream beside its room, and why that is right.
ALSO_WRITES = {
    ("filter", "scored"): "an entry that cannot be read closes its group as lost through the filter's own input",
    ("filter", "rollouts"): "what an earlier version of the reward scored goes back to be scored anew",
    ("evaluator", "eval.scored"): "the same for evaluation",
}


@each(lambda: [*FILES, *sources("tests", "scripts"), *SCRIPTS])
def test_no_file_is_longer_than_can_be_read(path: Path) -> None:
    lines = len((ROOT / path).read_text().splitlines())
    assert lines <= MAX_LINES, f"{path} has {lines} lines; cut it in two"


@each(lambda: FILES)
def test_a_module_opens_with_its_promise(path: Path) -> None:
    tree = parse(path)
    assert not tree.body or ast.get_docstring(tree), f"{path} has no docstring"


# Its reader of pickles knows the classes of a checkpoint's table of contents and no other.
VETTED = Path("actors/trainer/megatron_backend/torch_dist.py")


@each(lambda: FILES)
def test_nothing_received_can_be_run(path: Path) -> None:
    """But in the sandbox, which is there to run what nobody vouches for."""
    if path in (Path("actors/runtime/zygote.py"), Path("miles_async/cli/recipe_child.py")):
        return
    vetted = {"pickle"} if path == VETTED else set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"} - vetted, f"{path}:{node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno} calls {node.func.id}"


def test_every_stream_has_one_writing_room() -> None:
    assert len(BY_NAME) == len(STREAMS)
    for stream in STREAMS:
        assert stream.writer in (*ROOMS, "console", "all"), stream.name
        assert bool(stream.readers) != bool(stream.tailed_by), f"{stream.name} is data or a log"
        assert not (stream.readers and stream.cap), f"{stream.name}: a cap would drop unread entries"
        # Trimmed behind checkpoints; as many as a human or the governor made; until a human has dealt with them.
        unbounded = stream.name in ("policy", "knobs", "dead")
        assert stream.readers or stream.cap or unbounded, f"{stream.name}: a log without a cap grows with the run"
        assert stream.name in describe()
        assert len(stream.readers) <= 1, "an entry is deleted when one group of readers has acknowledged it"


@each(lambda: [path for path in sources("actors") if path.parts[1] in ROOMS])
def test_a_log_lists_every_room_that_follows_it(path: Path) -> None:
    """What `bus ls` shows as readers. The recorder follows all that the console does, and is named with it."""
    room = "console" if path.parts[1] == "recorder" else path.parts[1]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.module == "bus.topology":
            for stream in (STREAM_OF[alias.name] for alias in node.names if alias.name in STREAM_OF):
                known = (stream.writer, *stream.tailed_by)
                assert stream.readers or "all" in known or room in known, f"{stream.name} does not list {room}"


def streams_written(path: Path) -> set[str]:
    """Names of streams in `Out(STREAM, ...)`, also where the choice is an expression or a variable of the function."""
    used: set[str] = set()
    for scope in ast.walk(parse(path)):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        chosen = {
            target.id: node.value
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(scope):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Out" and node.args:
                first = node.args[0]
                source = chosen.get(first.id, first) if isinstance(first, ast.Name) else first
                branches = [source]
                while branches:
                    branch = branches.pop()
                    if isinstance(branch, ast.IfExp):
                        branches += [branch.body, branch.orelse]
                    elif isinstance(branch, ast.Name) and branch.id in STREAM_OF:
                        used.add(STREAM_OF[branch.id].name)
    return used


@each(lambda: [p for p in FILES if p.parts[0] == "actors" and p.parts[1] in ROOMS])
def test_a_room_writes_only_its_own_streams(path: Path) -> None:
    room = path.parts[1]
    for name in streams_written(path):
        if (room, name) not in ALSO_WRITES:
            assert BY_NAME[name].writer in (room, "all"), f"{path} writes {name}, which belongs to {BY_NAME[name].writer}"


def test_every_stream_of_a_room_is_written_in_that_room() -> None:
    """Guards the test above: it would pass, too, if it found nothing."""
    written: dict[str, set[str]] = {}
    for path in FILES:
        if path.parts[0] == "actors" and path.parts[1] in ROOMS:
            written.setdefault(path.parts[1], set()).update(streams_written(path))
    for stream in STREAMS:
        if stream.writer in ROOMS:
            assert stream.name in written[stream.writer], f"{stream.writer} does not write {stream.name}"
