"""The command table, exit statuses and the one place where errors become a line on stderr.

Status 0: done. 1: the command failed. 2: the user's input was refused. 130: interrupted.
To add a command: write miles_async/cli/<name>.py with `add_arguments(parser)` and `run(args) -> int`
(or `parse(argv)` instead of `add_arguments` when argparse does not fit), and add one row to COMMANDS.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

from miles_async import __version__
from miles_async.cli.secrets import take_passwords
from miles_async.settings.errors import SettingsError, nearest

PROGRAM = "miles-async"


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: its module is imported when it is called, not before."""

    name: str
    module: str
    summary: str
    draws: bool = False


COMMANDS: tuple[Command, ...] = (
    Command("train", "miles_async.cli.train", "Train a policy as a settings file says.", draws=True),
    Command("quickstart", "miles_async.cli.quickstart", "Train a tiny model on arithmetic, from any folder.", draws=True),
    Command("worker", "miles_async.cli.worker", "Add one rollout worker to a running run, from anywhere."),
    Command("status", "miles_async.cli.status", "Show actors and streams of a run."),
    Command("top", "miles_async.cli.top", "Show a run in the terminal, live, and steer it there.", draws=True),
    Command("console", "miles_async.cli.console", "Show a run in the browser, live, and steer it there."),
    Command("doctor", "miles_async.cli.doctor", "Say who waits for what and why, what is wrong, which bound would serve."),
    Command("bus", "miles_async.cli.bus", "Look into the streams: ls, tail, show, export, lag, dead."),
    Command("ledger", "miles_async.cli.ledger", "Account for every sample and token."),
    Command("trace", "miles_async.cli.trace", "Tell one sample's whole life."),
    Command("samples", "miles_async.cli.samples", "Read what the policy writes, with its rewards."),
    Command("report", "miles_async.cli.report", "Write a run's report.html, at any time."),
    Command("whatif", "miles_async.cli.whatif", "Simulate a run under other settings, from its record."),
    Command("tune", "miles_async.cli.tune", "List live settings, change them, undo a change."),
    Command("shadow", "miles_async.cli.shadow", "Try another reward, filter or loss on a run's samples, beside it."),
    Command("replay", "miles_async.cli.replay", "Train recorded batches again and compare bit for bit."),
    Command("qualify", "miles_async.cli.qualify", "Try a running inference server and record what it can do."),
    Command("get", "miles_async.cli.get", "Fetch a small pretrained model once."),
    Command("chat", "miles_async.cli.chat", "Talk to what a run has trained."),
    Command("serve-model", "miles_async.cli.serve_model", "Serve what a run has trained, as OpenAI's clients call it."),
    Command("export", "miles_async.cli.export", "Write what a run has trained as a plain Hugging Face directory."),
    Command("convert", "miles_async.cli.convert", "Convert a model between Hugging Face and Megatron's torch_dist format."),
    Command("ray", "miles_async.cli.ray", "Start a run as a job on a Ray cluster."),
    Command("completion", "miles_async.cli.completion", "Make a shell complete all this: bash, zsh or fish."),
    Command("stop", "miles_async.cli.stop", "Ask a run to stop; the same train command with its name resumes it."),
)


class OneLineParser(argparse.ArgumentParser):
    """argparse whose errors are one line and end in status 2 through SettingsError."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message, remedy=f"See {self.prog} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's arguments) and return the exit status."""
    os.umask(0o077)  # what a run writes is its owner's alone, in this process and in all that it starts
    words = take_passwords(sys.argv[1:] if argv is None else argv)
    _be_found_by_children()
    label = PROGRAM
    try:
        for number, word in enumerate(words, 1):
            if not word.isprintable() and any("\ud800" <= c <= "\udfff" for c in word):  # how Python tells bytes that are no text
                raise SettingsError(f"word {number}, {word!a}, is no UTF-8 text", remedy="Correct it.")
        if not words or words[0] in ("-h", "--help", "help"):
            print(overview())
            return 0 if words else 2
        if words[0] in ("-V", "--version"):
            print(f"{PROGRAM} {__version__}")
            return 0
        command = _find(words[0])
        label = f"{PROGRAM} {command.name}"
        with _printable(draws=command.draws):
            return _call(command, words[1:])
    except SettingsError as error:
        return _fail(label, error, error.exit_status)
    except KeyboardInterrupt:
        return _fail(label, "interrupted", 130)
    except BrokenPipeError:
        # The reader of our output went away (`| head`). Nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as raised:
        cause: Exception = raised
        while isinstance(cause, ExceptionGroup):  # of a task group: the first one ended the others
            cause = cause.exceptions[0]
        if isinstance(cause, SettingsError):
            return _fail(label, cause, cause.exit_status)
        status = _status_of(cause)
        if status is not None:
            return _fail(label, cause, status)
        if full := _full(cause):
            return _fail(label, full, 1)
        raise


def _be_found_by_children() -> None:
    """From a checkout that is not installed: actors do not look into the current folder."""
    root, known = Path(__file__).resolve().parents[2], os.environ.get("PYTHONPATH", "")
    if root.name not in ("site-packages", "dist-packages") and str(root) not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), known)))


class _Printable:
    """A stream to a terminal that obeys nothing of what hooks, engines and models wrote."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if not text.replace("\n", "").replace("\t", "").isprintable():
            from bus.errors import printable  # only now: help and --version load nothing else of the bus

            text = printable(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _printable(*, draws: bool) -> Iterator[None]:
    """What this process prints; a command that `draws` uses a terminal's codes itself, and cleans the texts it shows."""
    out, err = sys.stdout, sys.stderr
    sys.stderr = _Printable(err)
    if not draws:
        sys.stdout = _Printable(out)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


def _find(name: str) -> Command:
    for command in COMMANDS:
        if command.name == name:
            return command
    known = [command.name for command in COMMANDS]
    why = f"no command {name!r}"
    raise SettingsError(why, remedy=nearest(name, known) or f"Commands: {', '.join(known)}. See {PROGRAM} --help.")


def _call(command: Command, words: list[str]) -> int:
    module = import_module(command.module)
    if hasattr(module, "parse"):
        args = module.parse(words)
    else:
        parser = OneLineParser(
            prog=f"{PROGRAM} {command.name}",
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(parser)
        args = parser.parse_args(words)
    status = int(module.run(args))
    sys.stdout.flush()  # a closed pipe shows here, inside the handler of main, not at interpreter exit
    return status


def _status_of(error: Exception) -> int | None:
    """2 for what the outside refused before anything changed, 1 for other named failures, None for defects."""
    from bus import errors

    refused = (errors.BusRefused, errors.BusUnreachable, errors.CheckpointRefused, errors.KnobRejected)
    if isinstance(error, refused):
        return 2
    return 1 if isinstance(error, errors.MilesAsyncError) else None


def _full(error: Exception) -> str:
    """What disk is full, where that is the cause."""
    from actors.runtime.run import disk_text

    return disk_text(error, (str(Path.cwd()), "/dev/shm"))


def _fail(label: str, error: object, status: int) -> int:
    with _printable(draws=True):
        for each in error.each if isinstance(error, SettingsError) else (error,):
            print(f"{label}: {' '.join(str(each).split())}", file=sys.stderr)
    return status


def overview() -> str:
    """Help in one screen."""
    width = max(len(command.name) for command in COMMANDS)
    rows = "\n".join(f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS)
    return (
        f"usage: {PROGRAM} COMMAND ...\n\nFully asynchronous RL post-training on Redis streams.\n\n"
        f"commands:\n{rows}\n\n"
        f"{PROGRAM} COMMAND --help tells more. {PROGRAM} --version prints {__version__}."
    )
