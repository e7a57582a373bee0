"""What is public is used: a name that only its own tests know is dead, and goes together with them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.floors.tree import PACKAGES, each, parse, sources

FILES = sources(*PACKAGES)
# Used by nobody of ours, and why it stays. Names that libraries call on our classes are below.
STAYS = {
    "actors/generation/endpoint/verifiers.py Played": "for users of verifiers: docs/agents.md",
    "actors/environments/guess.py Guess": "the environment that ships, named by --environment-path",
    "actors/trainer/transports/ipc.py open_ipc": "its record names it: actors/runtime/transports/ipc.py",
    "actors/trainer/transports/nccl.py open_nccl": "its record names it: actors/runtime/transports/nccl.py",
    "actors/trainer/megatron_backend/core.py MegatronCore": "training/ranked.py finds it by name, for --train-backend megatron",
    "actors/trainer/torch_backend/matched.py FORMULAS": "the kernels without a GPU, for tests and scripts/bench/gpu_judge.py",
    "miles_async/cli/recipe_typer.py callback": "typer has it; recipes use it",
}
IN_PYTHON = ("Knobs", "Run", "RunEnded", "SettingsError", "StartedRun", "open_run", "run", "runs")
STAYS |= {f"miles_async/__init__.py {name}": "the library in Python: docs/python.md" for name in IN_PYTHON}
STAYS |= {f"miles_async/api/opened.py {name}": "as well" for name in ("doctor", "open_run")}
CALLED_BY_LIBRARIES = {"forward", "backward", "connection_made", "connection_lost", "data_received", "find_class"}
CALLED_BY_LIBRARIES |= {"get_buffer", "buffer_updated", "throw", "eof_received", "pause_writing", "resume_writing"}  # asyncio
CALLED_BY_LIBRARIES |= {"filter"}  # logging
CALLED_BY_LIBRARIES |= {"do_GET", "log_message", "handle_error", "process_request", "process_request_thread"}  # http.server
CALLED_BY_LIBRARIES |= {"service_actions"}  # socketserver
CALLED_BY_LIBRARIES |= {"load_common", "get_states", "set_states", "get_replay_topk"}  # megatron-core
CALLED_BY_LIBRARIES |= {"add_samples", "get_buffer_length", "get_reward_value"}  # functions written for Miles
CALLED_BY_LIBRARIES |= {"compose", "key_enter"}  # textual, beside on_ and action_ below
CALLED_BY_LIBRARIES |= {"create_module"}  # importlib
TEXTUAL = "miles_async/console/top/"
Use = tuple[str, str]


def mentions(node: ast.AST, but: ast.AST | None = None) -> Iterator[Use]:
    """(how, name) of all that is mentioned below a node, one part of it and `__all__` left out."""
    for child in ast.iter_child_nodes(node):
        if child is but or (isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == "__all__"):
            continue
        match child:
            case ast.Name(id=name, ctx=ast.Load()):
                yield "name", name
            case ast.Attribute(attr=name):
                yield "attribute", name
            case ast.Constant(value=str(text)):
                yield "text", text  # tables name functions of a module
            case ast.ImportFrom(names=names):
                yield from (("import", alias.name) for alias in names)
            case ast.MatchClass(kwd_attrs=names):
                yield from (("attribute", name) for name in names)
        yield from mentions(child, but)


@cache
def mentioned() -> dict[Use, set[Path]]:
    """Where the product mentions each name. Packages that hand it on do not count."""
    found: dict[Use, set[Path]] = {}
    for path in FILES:
        for use in mentions(parse(path)) if path.name != "__init__.py" else ():
            found.setdefault(use, set()).add(path)
    return found


def is_used(path: Path, name: str, node: ast.AST, *, member: bool) -> bool:
    """Whether another module of the product mentions it, or its own outside of it."""
    uses = {("attribute", name)} if member else {("attribute", name), ("import", name), ("text", name)}
    elsewhere = any(mentioned().get(use, set()) - {path} for use in uses)
    return elsewhere or not {*uses, ("name", name)}.isdisjoint(mentions(parse(path), but=node))


def targets(node: ast.AST) -> list[str]:
    """Names that a statement of a module or class makes."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=found):
            return [target.id for target in found if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def called_by_textual(path: Path, method: str) -> bool:
    """A handler of an event, or an action that a key of the same file names."""
    kind, _, name = method.partition("_")
    texts = {child.value for child in ast.walk(parse(path)) if isinstance(child, ast.Constant) and isinstance(child.value, str)}
    return kind == "on" or (kind == "action" and any(text.partition("(")[0] == name for text in texts))


def dead_names(path: Path) -> list[str]:
    """Functions, classes, constants and methods of a module without an underscore that the product does not use."""
    found = [
        name
        for node in parse(path).body
        for name in targets(node)
        if not name.startswith("_") and not is_used(path, name, node, member=False)
    ]
    methods = [
        node
        for struct in parse(path).body
        if isinstance(struct, ast.ClassDef)
        for node in struct.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and node.name not in CALLED_BY_LIBRARIES
        and not (path.as_posix().startswith(TEXTUAL) and called_by_textual(path, node.name))
    ]
    return found + [node.name for node in methods if not is_used(path, node.name, node, member=True)]


@cache
def asked_of_packages() -> dict[str, set[str]]:
    """Module to the names that the product and the scripts import from it."""
    asked: dict[str, set[str]] = {}
    for path in sources(*PACKAGES, "scripts"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom):
                asked.setdefault(node.module or "", set()).update(alias.name for alias in node.names)
    return asked


def handed_on_to_nobody(path: Path) -> list[str]:
    """Names in the `__all__` of a package that nobody asks that package for."""
    package = ".".join(path.parts[:-1])
    asked = asked_of_packages().get(package, set())
    declared = next((n.value for n in parse(path).body if isinstance(n, ast.Assign) and targets(n) == ["__all__"]), None)
    return [name for name in (ast.literal_eval(declared) if declared else ()) if name not in asked]


@each(lambda: FILES)
def test_no_public_name_is_dead(path: Path) -> None:
    found = handed_on_to_nobody(path) if path.name == "__init__.py" else dead_names(path)
    told = {place.rpartition(" ")[2] for place in STAYS if place.startswith(f"{path} ")}
    assert {name for name in found if f"{path} {name}" not in STAYS} == set(), f"{path}: delete them, and what tests them alone"
    assert told <= set(found), f"{path}: in STAYS, but used"


@each(lambda: sources(*PACKAGES))
def test_what_cannot_be_decoded_is_caught_as_one_class(path: Path) -> None:
    """msgspec raises UnicodeDecodeError and RecursionError too, for bytes that are no UTF-8 and for deep nesting."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ExceptHandler) and node.type is not None and "msgspec.DecodeError" in ast.unparse(node.type):
            whole = all(name in ast.unparse(node.type) for name in ("UnicodeDecodeError", "RecursionError"))
            assert whole, f"{path}:{node.lineno}: catch UNREADABLE of bus/errors.py instead"
