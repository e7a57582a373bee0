"""Why an engine did not boot, and what to try next (pure).

Always true: a start that failed for a deterministic reason is never repeated unchanged; every answer either changes
exactly one thing (a degradation, kept for later starts) or waits for something outside to change, or gives up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from actors.generation.engines.sglang.args import GATHER
from actors.runtime.child import ArgValue

Kind = Literal["config", "port", "memory", "custom_all_reduce_ipc", "missing_kernel", "timeout", "model", "unknown"]

PORT_TRIES = 5
NOTCH = 0.05  # of --mem-fraction-static
LOWEST_FRACTION, HIGHEST_FRACTION = 0.3, 0.92
USUAL_FRACTION = 0.85  # where SGLang's own choice lies when none is given
SMALL_GRAPH_BS = 16
BUSY_WAIT_S = 15.0
TAIL_LINES = 200  # what a library merely mentioned while it was loading must not decide
_CAUSE_CHARS = 300
_OF_A_PART = "scheduler died during initialization"
_HARMLESS = re.compile(r"^.*Failed to load generation config for .*$", re.MULTILINE)  # SGLang goes on with its defaults

# In order: the first kind with a match is the answer. What names a subsystem comes before what could be anything.
_SIGNS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (
        "custom_all_reduce_ipc",
        re.compile(
            r"(?:share_graph_inputs|register_graph_buffers|cudaIpcGetMemHandle|get_graph_buffer_ipc_meta|"
            r"custom_all_reduce\w*\.py\", line)[\s\S]{0,2000}?(?:invalid argument|cudaErrorInvalid\w+|IpcGetMemHandle)"
        ),
    ),
    (
        "port",
        re.compile(r"[Aa]ddress already in use|EADDRINUSE|Errno 98\b|[Pp]ort is already in use|port \d+ .{0,30}in use"),
    ),
    (
        "memory",
        re.compile(
            r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|cudaErrorMemoryAllocation|"
            r"Not enough memory\. Please try"
        ),
    ),
    (
        "model",
        re.compile(
            r"does not appear to have a file named|Can't load the configuration|is not a local folder|HFValidationError|"
            r"Cannot find any model weights|Unrecognized model in|Model architectures? .{0,200}not supported|SafetensorError|"
            r"No such file or directory: .{0,200}(?:config\.json|safetensors)|size mismatch for|"
            r"checkpoint you are trying to load has model type"
        ),
    ),
    (
        "missing_kernel",
        re.compile(
            r"no kernel image is available|undefined symbol|No module named '?(?:sgl_kernel|flash_attn|flashinfer|flash_mla|"
            r"deep_gemm|sgl_deep_gemm|fa3|triton)|Could not find nvcc|Ninja (?:is required|build failed)|"
            r"cannot open shared object file|"
            r"requires? SM\s?>=|is not supported on this (?:GPU|device|hardware)|ImportError: .*(?:kernel|flash|attention)"
        ),
    ),
    (
        "config",
        re.compile(
            r"error: unrecognized arguments|error: argument |error: the following arguments|error: ambiguous option|"
            r"No module named '?sglang\b|server_args\.py\", line \d+, in (?:__post_init__|_handle_\w+|check_server_args)|"
            r"No CUDA GPUs are available|invalid device ordinal"
        ),
    ),
)
_REMEDIES: dict[Kind, str] = {
    "config": "Correct or leave out the flag.",
    "port": "Free the ports, or start fewer engines on this host.",
    "memory": "Lower --sglang-mem-fraction-static, or free the GPU.",
    "custom_all_reduce_ipc": "Set --sglang-disable-custom-all-reduce and look at the boot folder.",
    "missing_kernel": "Choose --sglang-attention-backend triton, or install the kernels for this GPU.",
    "timeout": "Raise --engine-boot-deadline-s, or look at what the log waits for.",
    "model": "Give --hf-checkpoint a directory with config.json and safetensors of a served architecture.",
    "unknown": "Look at the log, or run reproduce.sh in the boot folder.",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed start. `cause`: the log line that tells; `starved`: the memory share was too small, not too large."""

    kind: Kind
    cause: str
    exit_code: int | None = None
    starved: bool = False

    @property
    def remedy(self) -> str:
        return _REMEDIES[self.kind]

    @property
    def signature(self) -> str:
        """Equal for the same failure again: numbers (pids, ports, addresses, times) do not count."""
        return f"{self.kind}:{re.sub(r'0x[0-9a-f]+|[0-9]+', '#', self.cause)}"

    def __str__(self) -> str:
        how = "" if self.exit_code is None else f" ({_exit(self.exit_code)})"
        return f"{self.kind}{how}: {self.cause}"


@dataclass(frozen=True, slots=True)
class Launch:
    """What a start passes on: server flags without dashes -> value, variables set for the child, what was degraded."""

    args: dict[str, ArgValue]
    env: dict[str, str]
    degraded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """`launch` None: give up. `wait_s`: before the next start. `why`: for the event."""

    launch: Launch | None
    wait_s: float = 0.0
    why: str = ""


def classify(log: str, *, exit_code: int | None, timed_out: bool = False) -> Failure:
    """The failure that a log and an exit status show. `exit_code` None: the server still ran (or was ended by us)."""
    text = _HARMLESS.sub("", "\n".join(log.splitlines()[-TAIL_LINES:]))
    for kind, pattern in _SIGNS:
        found = _last(pattern, text)
        if found is None:
            continue
        starved = kind == "memory" and "Not enough memory" in found.group()
        line = _line_at(text, found.end() - 1)
        if "server_args.py" in line:  # a frame of a traceback: its exception tells more
            line = _error_line(text[found.start() :])
        return Failure(kind, _cut(line), exit_code, starved)
    if timed_out:
        return Failure("timeout", _cut(f"not ready in time; last log line: {_last_line(text)}"), exit_code)
    if exit_code == 2:
        return Failure("config", _cut(_last_line(text)), exit_code)
    return Failure("unknown", _cut(_error_line(text)), exit_code)


def next_step(launch: Launch, history: Sequence[Failure], *, given: frozenset[str]) -> Answer:
    """What to do after the failures of this boot, newest last. `given`: flags the user chose, which are not overruled
    where they are a wish about numerics (the attention backend)."""
    last = history[-1]
    extra = [name for name in GATHER if name in launch.args and name not in given]
    if extra and re.search(r"prefill.?(?:delayer|max.requests)", last.cause, re.IGNORECASE):
        without = replace(launch, args={name: value for name, value in launch.args.items() if name not in extra})
        return _with(without, "prefill at once", {})  # an SGLang that cannot gather prompts so
    again = sum(f.signature == last.signature for f in history)
    match last.kind:
        case "config" | "model":
            return Answer(None, why="the same start would fail again")
        case "port":
            if sum(f.kind == "port" for f in history) <= PORT_TRIES:
                return Answer(launch, 0.2 * len(history), "another port")
            return Answer(None, why=f"{PORT_TRIES} ports were taken")
        case "memory":
            return _memory(launch, history)
        case "custom_all_reduce_ipc":
            return _custom_all_reduce(launch)
        case "missing_kernel":
            return _kernels(launch, given)
        case "timeout" | "unknown":
            if again >= 2:
                return Answer(None, why="it failed twice in the same way")
            return Answer(launch, 1.0, "once more")


def _memory(launch: Launch, history: Sequence[Failure]) -> Answer:
    """Too small a share may be the fault of another engine booting beside us, so it is tried unchanged once. Then, as
    after a real shortage, the share moves by one notch at a time."""
    starved = history[-1].starved
    if starved and sum(f.starved for f in history) == 1:
        return Answer(launch, BUSY_WAIT_S, "another process may have been using the GPU for a moment")
    now = launch.args.get("mem-fraction-static", USUAL_FRACTION)
    fraction = float(now) if isinstance(now, int | float | str) and not isinstance(now, bool) else USUAL_FRACTION
    new = round(fraction + (NOTCH if starved else -NOTCH), 3)
    tried = sum("mem-fraction-static" in name for name in launch.degraded)
    if not LOWEST_FRACTION <= new <= HIGHEST_FRACTION or tried >= 3:
        return Answer(None, why=f"no share of memory worked (last: {fraction:g})")
    return _with(launch, f"mem-fraction-static={new:g}", {"mem-fraction-static": new})


def _custom_all_reduce(launch: Launch) -> Answer:
    """CUDA IPC cannot export memory of a virtual-memory allocator (a memory saver). One rung a time."""
    variable = "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"
    if launch.env.get(variable) != "0" and "disable-custom-all-reduce" not in launch.args:
        return _with(launch, f"{variable}=0", {}, {variable: "0"})
    if launch.args.get("disable-custom-all-reduce") is not True:
        return _with(launch, "disable-custom-all-reduce", {"disable-custom-all-reduce": True})
    if launch.args.get("disable-cuda-graph") is True:
        return Answer(None, why="it fails without custom all-reduce and without CUDA graphs too")
    size = launch.args.get("cuda-graph-max-bs")
    if not isinstance(size, int | str) or int(size) > SMALL_GRAPH_BS:
        return _with(launch, f"cuda-graph-max-bs={SMALL_GRAPH_BS}", {"cuda-graph-max-bs": SMALL_GRAPH_BS})
    return _with(launch, "disable-cuda-graph", {"disable-cuda-graph": True})


def _kernels(launch: Launch, given: frozenset[str]) -> Answer:
    plain: dict[str, ArgValue] = {"attention-backend": "triton", "sampling-backend": "pytorch"}
    changed = {name: value for name, value in plain.items() if name not in given and launch.args.get(name) != value}
    if not changed:
        return Answer(None, why="no other kernels to fall back to")
    return _with(launch, " ".join(f"{name}={value}" for name, value in changed.items()), changed)


def _with(launch: Launch, name: str, args: dict[str, ArgValue], env: dict[str, str] | None = None) -> Answer:
    changed = replace(launch, args={**launch.args, **args}, env={**launch.env, **(env or {})}, degraded=(*launch.degraded, name))
    return Answer(changed, 0.5, f"degraded: {name}")


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    every = list(pattern.finditer(text))
    return every[-1] if every else None


def _line_at(text: str, at: int) -> str:
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    return text[start : end if end >= 0 else len(text)]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "(empty log)"


def _error_line(text: str) -> str:
    """The last line that names an exception, else the last line. SGLang's first process only tells that a part of it ended: what
    that part told before counts."""
    told = [m.group() for m in re.finditer(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*$", text, re.MULTILINE)]
    own = [line for line in told if _OF_A_PART not in line]
    return (own or told or [_last_line(text)])[-1]


def _cut(line: str) -> str:
    text = " ".join(line.split())
    return text if len(text) <= _CAUSE_CHARS else text[: _CAUSE_CHARS - 3] + "..."


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
