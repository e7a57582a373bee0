"""Checks of files and of this host that load no library: what is asked first, before anything is printed, made or imported.

Each raises SettingsError, one line. Of weights only the headers are read.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

from actors.runtime.safetensors_header import BadHeader, header_of
from miles_async.settings.errors import Refusals, SettingsError, nearest, refusal
from miles_async.settings.functions import CALLED
from miles_async.settings.load import has_gpu
from miles_async.settings.run import RunSettings


def check_files(settings: RunSettings) -> None:
    """Weights that are cut, a template that is not there, functions that their files do not have."""
    refused = Refusals()
    if settings.model.builtin_name is None and Path(settings.model.hf_checkpoint).is_dir():
        refused.attempt(_check_weights, settings.model.hf_checkpoint)
        refused.attempt(_check_template, settings)
    for field in CALLED:
        if (path := settings.flat.values[field]) and ".py:" in path:
            refused.attempt(_check_function, field, path)
    if settings.rollout.chat_template_path and not Path(settings.rollout.chat_template_path).is_file():
        why = f"no such file (looked in {Path.cwd()})"
        refused.attempt(_raise, settings.flat.refusal("chat_template_path", why, "Give the path of a Jinja template."))
    refused.raise_all()


def check_gpu(settings: RunSettings) -> None:
    """A start that shares a GPU has one. Not asked in a dry run, which may be of another host."""
    local = not settings.flat.launcher_kind.spreads
    if settings.flat.colocate and local and settings.flat.engine_kind.needs_gpu and not has_gpu():
        why = "trainer and engines would take turns on a GPU, and this host has none"
        raise settings.flat.refusal("colocate", why, "Leave it out, or start the run on a host with a GPU.")


def _raise(error: SettingsError) -> None:
    raise error


def _check_weights(directory: str) -> None:
    for file in sorted(Path(directory).glob("*.safetensors")):
        if why := damage_of(file):
            raise refusal("hf_checkpoint", directory, f"{file.name} {why}", "Download it again.")


def damage_of(file: Path) -> str:
    """What is wrong with a safetensors file, by its length and header; empty = nothing."""
    try:
        need, size = header_of(file).need, file.stat().st_size
    except OSError as error:
        return f"cannot be read: {(error.strerror or str(error)).lower()}"
    except BadHeader as error:
        return str(error)
    return f"is cut: it has {size} bytes of {need}" if size < need else ""


def _check_template(settings: RunSettings) -> None:
    """A chat template that is asked for is there; whether it can do what the run asks of it is tried later."""
    r, directory = settings.rollout, Path(settings.model.hf_checkpoint)
    if not r.apply_chat_template or r.chat_template_path or (directory / "chat_template.jinja").is_file():
        return
    try:
        own = json.loads((directory / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # told by who loads it
    if not isinstance(own, dict) or own.get("chat_template") or (directory / "chat_template.json").is_file():
        return
    if (directory / "additional_chat_templates").is_dir():
        return
    why = f"{directory} has no chat template"
    raise settings.flat.refusal("apply_chat_template", why, "Give one with --chat-template-path FILE, or leave the flag out.")


def _check_function(field: str, path: str) -> None:
    name, _, function = path.rpartition(":")
    file = Path(name)
    if not file.is_file():
        raise refusal(field, path, f"no such file {name} (looked in {Path.cwd()})", "Write FILE.py:NAME.")
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        raise refusal(field, path, f"{name}, line {error.lineno}: {error.msg}", "Correct it.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise refusal(field, path, f"{name} cannot be read: {error}", "Give a file with Python's source.") from None
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    dynamic = any(not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Expr) and _makes(node, function)
                  for node in tree.body)  # fmt: skip
    if function not in found and not dynamic:
        remedy = nearest(function, found) or f"It has {', '.join(found) or 'none'}."
        raise refusal(field, path, f"{name} has no function {function}", remedy)


def _makes(node: ast.stmt, name: str) -> bool:
    """Whether a statement may give a module that name: by assignment, import, in a block, or with a star."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.alias) and (inner.asname or inner.name.partition(".")[0]) in (name, "*"):
            return True
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store) and inner.id == name:
            return True
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and inner.name == name:
            return True
    return False
