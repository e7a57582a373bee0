"""Checks of files and of this host that load no library: what is asked first, before anything is printed, made or imported.

Each raises SettingsError, one line. Of weights only the headers are read.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from actors.runtime.safetensors_header import BadHeader, header_of
from miles_async.settings.catalog import catalog
from miles_async.settings.errors import Refusals, SettingsError, nearest, refusal
from miles_async.settings.flat import MILES_OWN, is_own
from miles_async.settings.functions import CALLED
from miles_async.settings.load import has_gpu
from miles_async.settings.run import RunSettings

ENDS = 64  # bytes of a file's ends that are looked at


def check_files(settings: RunSettings) -> None:
    """Weights that are cut, a template that is not there, functions that their files do not have."""
    refused = Refusals()
    if settings.model.builtin_name is None and Path(settings.model.hf_checkpoint).is_dir():
        refused.attempt(_check_weights, settings.model.hf_checkpoint)
        refused.attempt(_check_tokenizer, settings.model.hf_checkpoint)
        refused.attempt(_check_template, settings)
    for field in CALLED:
        path = settings.flat.values[field]
        if path and ".py:" in path:
            refused.attempt(_check_function, field, path)
        elif path and path not in catalog()[field].shipped and not is_own(path, MILES_OWN):
            refused.attempt(_check_module, field, path)
    if settings.rollout.chat_template_path and not Path(settings.rollout.chat_template_path).is_file():
        why = f"no such file (looked in {Path.cwd()})"
        refused.attempt(_raise, settings.flat.refusal("chat_template_path", why, "Give the path of a Jinja template."))
    refused.raise_all()


def check_goes_on(settings: RunSettings) -> None:
    """A start under a name that has begun, or from another run's checkpoints, is the same run, and these are there."""
    from miles_async.launcher.resume import load_dir  # loads the bus's client: asked last

    load = load_dir(settings)
    if not settings.run_dir.exists() and settings.ckpt.ckpt_step is None and not (load and Path(load).exists()):
        return
    from miles_async.launcher.began import check_began
    from miles_async.launcher.resume import check_resume

    check_began(settings)
    check_resume(settings)


def check_weights_there(settings: RunSettings) -> None:
    """A directory to train has weights that can be read without running code. Not asked in a dry run, nor of one of Megatron's,
    which may start from a checkpoint in its own format."""
    s, directory = settings.flat, Path(settings.model.hf_checkpoint)
    if s.on_megatron or s.debug_rollout_only or any(directory.glob("*.safetensors")):
        return
    other = next((file.name for kind in ("bin", "pt", "pth", "gguf") for file in sorted(directory.glob(f"*.{kind}"))), "")
    why = f"no *.safetensors in it{f', and {other} is not read' if other else ''}"
    remedy = "Download the model whole, or save it as safetensors: from_pretrained(...).save_pretrained(DIR)."
    raise s.refusal("hf_checkpoint", why, remedy)


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


def _check_tokenizer(directory: str) -> None:
    """The file is whole: what is cut, or a pointer of Git LFS, is told here, and not by the library that loads it."""
    file = Path(directory) / "tokenizer.json"
    try:
        with file.open("rb") as opened:
            head, size = opened.read(ENDS), os.fstat(opened.fileno()).st_size
            opened.seek(max(0, size - ENDS))
            tail = opened.read()
    except OSError:
        return  # refused by its own name
    what = "is a pointer of Git LFS" if head.startswith(b"version https://git-lfs") else "is empty" if not size else ""
    if not what and not (head.lstrip().startswith(b"{") and tail.rstrip().endswith(b"}")):
        what = "is cut or no JSON"
    if what:
        raise refusal("hf_checkpoint", directory, f"tokenizer.json {what}", "Download it again.")


def _check_module(field: str, path: str) -> None:
    """package.module.function, without importing anything: the package is there."""
    top = path.partition(".")[0]
    if path.endswith(".py"):
        found = _functions(Path(path)) if Path(path).is_file() else []
        raise refusal(field, path, "it names no function", f"Write {path}:{found[0] if found else 'NAME'}.")
    if not _is_there(top, Path()):
        why = f"no package {top} (looked in {Path.cwd()} and among the installed ones)"
        raise refusal(field, path, why, "Write FILE.py:NAME or PACKAGE.MODULE.NAME, or install it.")


def _functions(file: Path) -> list[str]:
    try:
        return [node.name for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.FunctionDef)]
    except (OSError, ValueError, SyntaxError, RecursionError):
        return []


def _is_there(package: str, *folders: Path) -> bool:
    """Whether an import of a package would find it, here or in one of these folders."""
    if any((folder / package).is_dir() or (folder / f"{package}.py").is_file() for folder in folders):
        return True
    try:
        return package in sys.modules or find_spec(package) is not None
    except (ImportError, ValueError):
        return True  # the import will tell


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
    for node in tree.body:
        named = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        named += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for top in (one.partition(".")[0] for one in named):
            if not _is_there(top, Path(), file.parent):
                why = f"{name}, line {node.lineno} imports {top}, which is not installed here"
                raise refusal(field, path, why, f"Install it (pip install {top}), or correct the name.")
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
