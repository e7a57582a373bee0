"""What runs in the sandbox for a recipe in Python: the recipe itself, between stand-ins for what it would launch with.

Reads  the order, JSON on stdin: sources, arguments, variables    Writes  JSON behind MARK on stdout: what it would have launched
Standard library only; it is handed to the sandbox as text. Stand-ins are ours: typer's commands, the launch helpers of Miles,
subprocess, and files that are written. A package that is not there is an `Absent`: it may be called and named, and where its value
decides something the recipe ends with its name. Always true: nothing is started, and nothing but the answer leaves.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import importlib.abc
import importlib.machinery
import inspect
import io
import json
import linecache
import os
import pathlib
import shutil
import subprocess
import sys
import time
import types
import typing

MARK = "\x1emiles-async recipe "
OPEN, CLOSE = "\ue000", "\ue001"  # around the name of what is absent, in a text that it has become part of


class NotThere(Exception):
    """The recipe needs something that is not there."""


class Absent(types.ModuleType):
    """Stands for a package or its value that is not there."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["__path__"] = []

    def __getattr__(self, name: str) -> typing.Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *given: typing.Any, **keywords: typing.Any) -> typing.Any:
        if len(given) == 1 and not keywords and inspect.isfunction(given[0]):
            return given[0]  # a decorator
        return Absent(self.__name__ if self.__name__.endswith("()") else f"{self.__name__}()")

    def __getitem__(self, key: object) -> Absent:
        return Absent(f"{self.__name__}[{key!r}]")

    def __str__(self) -> str:
        return f"{OPEN}{self.__name__}{CLOSE}"

    __repr__ = __str__

    def __format__(self, how: str) -> str:
        return str(self)

    def __enter__(self) -> Absent:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def __or__(self, other: object) -> typing.Any:
        return typing.Any  # in an annotation

    __ror__ = __or__

    def _decides(self, *_: object) -> typing.Any:
        raise NotThere(f"{self.__name__} decides, and is not there")

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = _decides
    __lt__ = __gt__ = __le__ = __ge__ = __add__ = __radd__ = __mul__ = __sub__ = _decides

    def strip(self, *_: object) -> Absent:
        return self


class Launches:
    """What the recipe would have started, as it goes."""

    def __init__(self) -> None:
        self.trains: list[dict[str, typing.Any]] = []
        self.not_run: list[list[object]] = []
        self.commands: list[str] = []

    def skip(self, what: object, answer: object = None) -> object:
        text = " ".join(map(str, what)) if isinstance(what, list | tuple) else str(what)
        self.not_run.append([text[:200], line_of_recipe()])
        return answer


LAUNCHES = Launches()
SOURCES: dict[str, list[str]] = {}
RECIPE = [""]


def line_of_recipe() -> int:
    """The line of the recipe that is at work: the outermost one below its module, if there is one."""
    frame = sys._getframe()
    found = 0
    while frame is not None:
        if frame.f_code.co_filename == RECIPE[0]:
            found = frame.f_lineno
            break
        frame = frame.f_back  # type: ignore[assignment]
    return found


# -- typer ----------------------------------------------------------------------------------------------------------------


class Usage(Exception):
    """The recipe does not take these arguments."""


class Option:
    def __init__(self, default: object = ..., *names: object, **more: object) -> None:
        self.default, self.more = default, more
        self.names = [str(name) for name in names]
        if isinstance(default, str) and default.startswith("-"):
            self.default, self.names = ..., [default, *self.names]


@dataclasses.dataclass
class Parameter:
    name: str
    kind: object
    default: object
    names: list[str]
    variable: str = ""


def plain(kind: object) -> tuple[object, list[object]]:
    """An annotation without Annotated, and what was annotated."""
    if typing.get_origin(kind) is typing.Annotated:
        first, *rest = typing.get_args(kind)
        return first, rest
    return kind, []


def converted(text: str, kind: object, name: str) -> object:
    """The text of an argument as its annotation has it."""
    kind, _ = plain(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        for one in inner:
            if str(one) == text:
                return one
        raise Usage(f"{name} is one of {', '.join(map(str, inner))}, not {text!r}")
    if origin is typing.Union or origin is types.UnionType:
        return converted(text, next(one for one in inner if one is not type(None)), name)
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise Usage(f"{name} is true or false, not {text!r}")
        return text.lower() in ("true", "1", "yes")
    try:
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return kind(text)
        return kind(text) if kind in (int, float, pathlib.Path) else text  # type: ignore[operator]
    except ValueError:
        raise Usage(f"{name} does not take {text!r}") from None


def parameters(function: typing.Callable[..., object]) -> list[Parameter]:
    """What a command takes."""
    ready = getattr(function, "of_a_dataclass", None)
    if ready is not None:
        return list(ready)
    hints = typing.get_type_hints(function, include_extras=True)
    found = []
    for name, one in inspect.signature(function).parameters.items():
        kind, extra = plain(hints.get(name, str))
        option = next((item for item in [one.default, *extra] if isinstance(item, Option)), Option())
        default = option.default if isinstance(one.default, Option) else one.default
        default = ... if default is inspect.Parameter.empty else default
        found.append(Parameter(name, kind, default, option.names))
    return found


def call(function: typing.Callable[..., object], words: list[str]) -> object:
    """Run a command with the words of its command line."""
    taken, rest = {one.name: one for one in parameters(function)}, list(words)
    given: dict[str, object] = {}
    by_name: dict[str, tuple[Parameter, bool]] = {}
    for one in taken.values():
        name = one.name.replace("_", "-")
        for said in one.names or [f"--{name}", f"--no-{name}"]:
            for half, value in zip(said.split("/"), (True, False), strict=False):
                by_name[half.strip()] = (
                    one,
                    value and not (not one.names and said.startswith("--no-") and one.kind is bool),
                )
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if name not in by_name:
            free = [one for one in taken.values() if one.default is ... and one.name not in given]
            if word.startswith("-") or not free:
                raise Usage(
                    f"it takes no {word}; it takes {', '.join(said for said in by_name if not said.startswith('--no-'))}"
                )
            given[free[0].name] = converted(word, free[0].kind, free[0].name)
            continue
        one, value = by_name[name]
        if plain(one.kind)[0] is bool and not equals:
            given[one.name] = value
            continue
        if not equals and not rest:
            raise Usage(f"{name} needs a value")
        given[one.name] = converted(text if equals else rest.pop(0), one.kind, name)
    for one in taken.values():
        if one.name in given:
            continue
        if one.variable and (text_of := os.environ.get(one.variable)) is not None:
            given[one.name] = converted(text_of, one.kind, one.variable)
        elif one.default is ...:
            if getattr(one.kind, "__name__", "") != "Context":
                raise Usage(f"it needs --{one.name.replace('_', '-')}")
            given[one.name] = types.SimpleNamespace(invoked_subcommand=None)
        else:
            given[one.name] = one.default
    return function(**given)


def dataclass_cli(function: typing.Any = None, *, env_var_prefix: str = "MILES_SCRIPT_") -> typing.Any:
    """A command whose one parameter is a dataclass takes that one's fields."""
    if function is None:
        return functools.partial(dataclass_cli, env_var_prefix=env_var_prefix)
    made = typing.get_type_hints(function)[next(iter(inspect.signature(function).parameters))]
    kinds = typing.get_type_hints(made, include_extras=True)
    found = []
    for one in dataclasses.fields(made):
        if not one.init:
            continue
        default: object = one.default if one.default is not dataclasses.MISSING else ...
        if one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        variable = f"{env_var_prefix}{one.name.upper()}" if env_var_prefix else ""
        found.append(Parameter(one.name, kinds[one.name], default, [], variable))

    @functools.wraps(function)
    def wrapped(**fields: object) -> object:
        return function(made(**fields))

    wrapped.of_a_dataclass = found  # type: ignore[attr-defined]
    return wrapped


class Typer:
    def __init__(self, **_: object) -> None:
        self.commands: dict[str, typing.Callable[..., object]] = {}
        self.before: typing.Callable[..., object] | None = None
        self.alone = False

    def command(self, name: str | None = None, **_: object) -> typing.Callable[..., object]:
        def keep(function: typing.Callable[..., object]) -> object:
            self.commands[name or function.__name__.replace("_", "-")] = function
            return function

        return keep

    def callback(self, invoke_without_command: bool = False, **_: object) -> typing.Callable[..., object]:
        def keep(function: typing.Callable[..., object]) -> object:
            self.before, self.alone = function, invoke_without_command
            return function

        return keep

    def __call__(self, *_: object, **__: object) -> None:
        words = sys.argv[1:]
        if words and words[0] in self.commands:
            call(self.commands[words[0]], words[1:])
        elif len(self.commands) == 1:
            call(next(iter(self.commands.values())), words)
        elif self.alone and self.before is not None:
            call(self.before, words)
        else:
            LAUNCHES.commands = list(self.commands)
            raise Usage(f"it has the commands {', '.join(self.commands)}: name one")


class BadParameter(Exception):
    pass


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
        return dict(item.split("=", 1) for item in text.split() if "=" in item)  # type: ignore[arg-type]


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
    own = {
        name: os.environ[name]
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG")
        if name in os.environ
    }
    environment = own | ({} if fsdp else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    environment |= resolve_extra_env_vars(extra_env_vars or {}, config)
    LAUNCHES.trains.append({
        "words": str(train_args), "program": os.path.basename(str(train_script)), "line": line_of_recipe(),
        "model": None if megatron_model_type is None else str(megatron_model_type),
        "environment": {str(name): str(value) for name, value in environment.items()},
    })  # fmt: skip


def exec_command(cmd: object = "", capture_output: bool = False, *_: object, **__: object) -> object:
    return LAUNCHES.skip(cmd, Absent("the output of a command") if capture_output else None)


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


def helpers(root: str) -> dict[str, object]:
    """The names of Miles' `command_utils` that recipes use; another is told by its name and does nothing."""
    return {
        "ExecuteTrainConfig": ExecuteTrainConfig, "execute_train": execute_train, "dataclass_cli": dataclass_cli,
        "exec_command": exec_command, "exec_command_cpu": exec_command, "exec_command_gpu": exec_command,
        "exec_command_multi_node": exec_command, "create_run_id": create_run_id, "get_bool_env_var": get_bool_env_var,
        "get_default_wandb_args": get_default_wandb_args, "resolve_extra_env_vars": resolve_extra_env_vars,
        "encode_pseudo_file": lambda text: f"{OPEN}a file of the recipe's own{CLOSE}",
        "get_env_enable_infinite_run": lambda: get_bool_env_var("MILES_TEST_ENABLE_INFINITE_RUN"),
        "repo_base_dir": pathlib.Path(root), "check_has_nvlink": lambda: Absent("the output of a command"),
        "get_mooncake_object_store_args": lambda *_, **__: f"{OPEN}a store that the recipe starts{CLOSE} ",
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


def close_doors() -> None:
    """Stand-ins for what starts processes and writes files: told, and done as if."""
    done = subprocess.CompletedProcess

    def started(what: object, *_: object, **__: object) -> object:
        LAUNCHES.skip(what)
        return done(what, 0, stdout=Absent("the output of a command"), stderr="")  # type: ignore[call-overload]

    for name in ("run", "call", "check_call", "Popen"):
        setattr(subprocess, name, started)
    subprocess.check_output = lambda what, *_, **__: LAUNCHES.skip(what, Absent("the output of a command"))  # type: ignore[assignment]
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

    builtins.open = open_or_tell  # type: ignore[assignment]
    pathlib.Path.write_text = lambda self, *_, **__: LAUNCHES.skip(["write", self], 0)  # type: ignore[assignment, method-assign, return-value]
    time.sleep = lambda _: None


def main() -> None:
    order = json.loads(sys.stdin.read())
    out = sys.stdout
    sys.stdout = sys.stderr = io.StringIO()
    path, root = order["path"], order["root"]
    RECIPE[0] = path
    SOURCES.update(order["sources"])
    os.environ.clear()
    os.environ.update(order["environ"])
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
    answer = {"trains": LAUNCHES.trains, "not_run": LAUNCHES.not_run, "commands": LAUNCHES.commands, "said": said[:500]}
    sys.stdout = out
    print(MARK + json.dumps(answer))


if __name__ == "__main__":
    main()
