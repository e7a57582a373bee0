"""What runs in the sandbox for a recipe in Python: the recipe itself, between stand-ins for what it would launch with.

Reads  the order, JSON on stdin: sources, arguments, variables    Writes  JSON behind MARK on stdout: what it would have launched
Standard library only; it is handed to the sandbox as text. Stand-ins are ours: typer's commands, the launch helpers of Miles,
subprocess, and files that are written. A package that is not there is an `Absent`: it may be called and named, and where its value
decides something the recipe ends with its name. Always true: nothing is started, and nothing but the answer leaves.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import io
import json
import linecache
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import types
import typing
import urllib.request

from miles_async.cli.recipe_absent import CLOSE, LAUNCHES, OPEN, RECIPE, Absent, NotThere, line_of_recipe
from miles_async.cli.recipe_typer import BadParameter, Option, Typer, Usage, call, dataclass_cli

MARK = "\x1emiles-async recipe "


# -- Miles' launch helpers ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class ExecuteTrainConfig:
    cuda_core_dump: bool = False
    num_nodes: int = dataclasses.field(default_factory=lambda: int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    extra_env_vars: str = ""
    output_dir: str = "/root/shared_data"


def given_variables(text: str) -> dict[str, str]:
    """`A=1 B=2`, or JSON."""
    try:
        return {str(key): str(value) for key, value in json.loads(text).items()}
    except (ValueError, AttributeError):
        return dict(item.split("=", 1) for item in text.split() if "=" in item)


def resolve_extra_env_vars(extra_env_vars: dict[str, str], config: typing.Any) -> dict[str, str]:
    return {**extra_env_vars, **given_variables(getattr(config, "extra_env_vars", "") or "")}


def execute_train(
    train_args: str, num_gpus_per_node: object = None, megatron_model_type: object = None, train_script: str = "train.py",
    before_ray_job_submit: typing.Callable[[], object] | None = None, extra_env_vars: dict[str, str] | None = None,
    config: object = None, megatron_path: str = "", **_: object,
) -> None:  # fmt: skip
    if before_ray_job_submit is not None:
        before_ray_job_submit()
    fsdp = "--train-backend fsdp" in train_args
    own = {name: os.environ[name] for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG") if name in os.environ}
    environment = own | ({} if fsdp else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    environment |= resolve_extra_env_vars(extra_env_vars or {}, config)
    LAUNCHES.trains.append({
        "words": str(train_args), "program": os.path.basename(str(train_script)), "line": line_of_recipe(),
        "set": {name: value for name, value in os.environ.items() if GIVEN.get(name) != value},
        "model": None if megatron_model_type is None else str(megatron_model_type),
        "environment": {str(name): str(value) for name, value in environment.items()},
    })  # fmt: skip


def exec_command(cmd: object = "", capture_output: bool = False, *_: object, **__: object) -> object:
    return LAUNCHES.skip(cmd, Absent(f"the output of `{str(cmd)[:80]}`") if capture_output else None)


def create_run_id() -> str:
    return time.strftime("%y%m%d-%H%M%S")


def get_bool_env_var(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("true", "1")


def get_default_wandb_args(test_file: str, run_name_prefix: str | None = None, run_id: str | None = None) -> str:
    key = os.environ.get("WANDB_API_KEY")
    if not key:
        return ""
    path = pathlib.Path(test_file)
    name = path.stem if len(path.stem) >= 6 else f"{path.parent.name}_{path.stem}"
    group = "_".join(filter(None, [run_name_prefix, run_id or create_run_id(), os.environ.get("GITHUB_COMMIT_NAME")]))
    return f"--use-wandb --wandb-project miles-{name} --wandb-group {group} --wandb-key '{key}' --disable-wandb-random-suffix "


def store_args(*_: object, **__: object) -> str:
    return f"--object-store-backend mooncake --mooncake-store-init-kwargs {OPEN}a store that the recipe starts{CLOSE} "


def helpers(root: str) -> dict[str, object]:
    """The names of Miles' `command_utils` that recipes use; another is told by its name and does nothing."""
    return {
        "ExecuteTrainConfig": ExecuteTrainConfig, "execute_train": execute_train, "dataclass_cli": dataclass_cli,
        "exec_command": exec_command, "exec_command_cpu": exec_command, "exec_command_gpu": exec_command,
        "exec_command_multi_node": exec_command, "create_run_id": create_run_id, "get_bool_env_var": get_bool_env_var,
        "get_default_wandb_args": get_default_wandb_args, "resolve_extra_env_vars": resolve_extra_env_vars,
        "encode_pseudo_file": lambda text: f"{OPEN}a file of the recipe's own{CLOSE}",
        "get_env_enable_infinite_run": lambda: get_bool_env_var("MILES_TEST_ENABLE_INFINITE_RUN"),
        "repo_base_dir": pathlib.Path(root), "check_has_nvlink": lambda: Absent("the output of `nvidia-smi`"),
        "get_mooncake_object_store_args": store_args,
        "NUM_GPUS_OF_HARDWARE": {
            "H100": 8, "H200": 8, "B200": 8, "B300": 8, "GB200": 4, "GB300": 4, "MI350X": 8, "MI355X": 8,
        },
        "GENERATION_HARDWARE": {"H100": "Hopper", "GB200": "Blackwell", "GB300": "Blackwell"},
    }  # fmt: skip


class Helpers(types.ModuleType):
    def __getattr__(self, name: str) -> typing.Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **_: LAUNCHES.skip([name, *given])


SOURCES: dict[str, list[str]] = {}
GIVEN: dict[str, str] = {}  # variables, as the recipe was given them


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds our stand-ins, then the sources of the order, then the standard library; anything else is absent."""

    def __init__(self, ours: dict[str, types.ModuleType]) -> None:
        self._ours = ours

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in sys.stdlib_module_names and name not in self._ours:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        if spec.name in self._ours:
            return self._ours[spec.name]
        return types.ModuleType(spec.name) if spec.name in SOURCES else Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        if name in SOURCES and name not in self._ours:
            path, text = SOURCES[name]
            module.__file__ = path
            run(path, text, module.__dict__)


def run(path: str, text: str, space: dict[str, typing.Any]) -> None:
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    exec(compile(text, path, "exec"), space)


# -- what would leave this process ----------------------------------------------------------------------------------------


class Started(Absent):
    """A process that is taken to have run and ended well."""

    returncode, status = 0, 200

    def poll(self, *_: object) -> None:
        return None

    def wait(self, *_: object) -> int:
        return 0

    def communicate(self, *_: object) -> tuple[Absent, Absent]:
        return self.stdout, self.stderr


def close_doors() -> None:
    """Stand-ins for what starts processes and writes files: told, and done as if."""

    def started(what: object, *_: object, **__: object) -> object:
        return LAUNCHES.skip(what, Started("a process"))

    for name in ("run", "call", "check_call", "Popen"):
        setattr(subprocess, name, started)
    subprocess.check_output = lambda what, *_, **__: LAUNCHES.skip(what, Absent(f"the output of `{what}`"))  # type: ignore[assignment]
    os.system = lambda what: LAUNCHES.skip(what, 0)  # type: ignore[assignment, return-value]
    for where, names in (
        (
            os,
            (
                "makedirs",
                "mkdir",
                "remove",
                "unlink",
                "rename",
                "replace",
                "chmod",
                "symlink",
                "rmdir",
                "kill",
                "killpg",
            ),
        ),
        (shutil, ("rmtree", "copy", "copyfile", "copytree", "move", "copy2")),
        (pathlib.Path, ("mkdir", "unlink", "touch", "symlink_to", "rename", "rmdir", "chmod")),
    ):
        for name in names:
            setattr(where, name, lambda *given, name=name, **_: LAUNCHES.skip([name, *given[:1]]))
    opened = builtins.open

    def open_or_tell(file: typing.Any, mode: str = "r", *given: typing.Any, **more: typing.Any) -> typing.Any:
        if set(mode) & set("wax+"):
            LAUNCHES.skip(["write", file])
            return io.BytesIO() if "b" in mode else io.StringIO()
        return opened(file, mode, *given, **more)

    builtins.open = open_or_tell
    pathlib.Path.write_text = lambda self, *_, **__: LAUNCHES.skip(["write", self], 0)  # type: ignore[assignment, method-assign]
    urllib.request.urlopen = started  # type: ignore[assignment]
    time.sleep = lambda _: None
    tempfile.mkdtemp = lambda *_, **__: LAUNCHES.skip("mkdtemp", "/tmp/of-the-recipe")  # type: ignore[assignment]
    tempfile.gettempdir = lambda: "/tmp"
    tempfile.NamedTemporaryFile = temporary  # type: ignore[assignment]
    tempfile.TemporaryDirectory = lambda *_, **__: contextlib.nullcontext("/tmp/of-the-recipe")  # type: ignore[assignment, misc]


def temporary(mode: str = "w+b", *_: object, suffix: str = "", **__: object) -> typing.Any:
    """A file that keeps nothing."""
    name = f"/tmp/of-the-recipe{suffix or ''}"
    LAUNCHES.skip(["write", name])

    class Kept(io.BytesIO if "b" in mode else io.StringIO):  # type: ignore[misc]
        pass

    kept = Kept()
    kept.name = name
    return kept


def answer_questions(files: dict[str, str], folder: str) -> None:
    """Whether a file is there is answered as it is outside: `files` has what is known, what is not is noted, and taken for no."""

    def kind(path: typing.Any, real: typing.Callable[[typing.Any], bool]) -> str:
        if isinstance(path, int):
            return ""
        where = os.path.normpath(os.path.join(folder, str(path)))
        if OPEN in where:
            raise NotThere(f"{where.strip(OPEN + CLOSE)} decides, and is not there")
        if real(path):
            return "file" if isfile(path) else "folder"
        if where not in files:
            LAUNCHES.asked[where] = None
        return files.get(where, "")

    exists, isfile, isdir = os.path.exists, os.path.isfile, os.path.isdir
    tests: tuple[tuple[str, str, typing.Callable[[typing.Any], bool], tuple[str, ...]], ...] = (
        ("exists", "exists", exists, ("file", "folder")), ("isfile", "is_file", isfile, ("file",)),
        ("isdir", "is_dir", isdir, ("folder",)),
    )  # fmt: skip
    for name, method, real, wanted in tests:
        test = functools.partial(lambda path, *_, real, wanted, **__: kind(path, real) in wanted, real=real, wanted=wanted)
        setattr(os.path, name, test)
        setattr(pathlib.Path, method, lambda self, test=test, **_: test(str(self)))
    os.getcwd = lambda: folder


def main(order: dict[str, typing.Any]) -> None:
    """Run the recipe of an order, and print what it would have launched."""
    out = sys.stdout
    sys.stdout = sys.stderr = io.StringIO()
    path, root = order["path"], order["root"]
    RECIPE[0] = path
    SOURCES.update(order["sources"])
    os.environ.clear()
    os.environ.update(order["environ"])
    GIVEN.update(order["environ"])
    sys.argv = [path, *order["arguments"]]
    utils = Helpers("command_utils")
    utils.__dict__.update(helpers(root))
    commands = types.ModuleType("typer")
    commands.__dict__.update(
        Typer=Typer, run=lambda function: call(function, sys.argv[1:]), Option=Option, Argument=Option,
        BadParameter=BadParameter, Exit=SystemExit, Context=type("Context", (), {}), echo=print, secho=print,
    )  # fmt: skip
    ours: dict[str, types.ModuleType] = {"typer": commands}
    for name in ("command_utils", "exec_command"):
        ours[f"miles.utils.external_utils.{name}"] = utils
    typed = types.ModuleType("typer_utils")
    typed.dataclass_cli = dataclass_cli  # type: ignore[attr-defined]
    ours["miles.utils.typer_utils"] = typed
    sys.meta_path.insert(0, Finder(ours))
    close_doors()
    answer_questions(order["files"], order["folder"])
    said = ""
    try:
        space = types.ModuleType("__main__")
        sys.modules["__main__"] = space
        space.__file__ = path
        run(path, order["text"], space.__dict__)
    except (NotThere, Usage, BadParameter) as error:
        said = str(error)
    except SystemExit as end:
        said = "" if not end.code else f"it ends with {end.code}"
    except BaseException as error:  # noqa: BLE001 - it is the answer
        trace, line = error.__traceback__, 0
        while trace is not None:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == path else line
            trace = trace.tb_next
        said = f"line {line}: {type(error).__name__}: {error}"
    answer = {"trains": LAUNCHES.trains, "not_run": LAUNCHES.not_run, "asked": list(LAUNCHES.asked), "said": said[:500]}
    sys.stdout = out
    print(MARK + json.dumps(answer))
