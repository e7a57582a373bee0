"""Whether SGLang and the router are installed, and know the flags that are passed on: their own parsers are asked, nothing is
started."""

import difflib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache

from actors.generation.engines.records import DEFAULT
from miles_async.settings.catalog import PREFIXES
from miles_async.settings.doc import PassedOn
from miles_async.settings.errors import SettingsError
from miles_async.settings.flat import Flat

NAMES_DEADLINE_S = 180.0  # SGLang's parser imports torch and much more
# What a program's own parser says of words of a command line: its flags, and why it refuses those words.
_PARSER = """
import argparse, json, sys
{load}
parser = argparse.ArgumentParser()
{fill}
refused = []
def error(text):
    refused.append(text)
    raise SystemExit(2)
parser.error = error
try:
    parser.parse_args(sys.argv[1:])
except SystemExit:
    pass
names = [name[2:] for action in parser._actions for name in action.option_strings if name[:2] == "--"]
print("\\n" + json.dumps([names, "".join(refused)]))
"""
_ROUTER = _PARSER.format(
    load="from sglang_router.router_args import RouterArgs",
    fill="RouterArgs.add_cli_args(parser, use_router_prefix=False)",
)


def check_programs(s: Flat, *, dry_run: bool = False) -> list[str]:
    """SGLang and the router are installed where we start them, and know the flags that are passed on. Returns what could not be
    told here; a dry run may be made where they are not installed."""
    unchecked: list[str] = []
    kind, flags = s.engine_kind, f"{PREFIXES['server_args'][0]}*"
    if kind.module and not s.sglang_server_command:
        if dry_run and importlib.util.find_spec(kind.module) is None:
            missing = f"{kind.module} is not installed in this Python"
            unchecked.append(f"{missing}: {flags} flags are not verified, and a start is refused")
            return unchecked
        package = f"miles-async[{kind.extra}]" if kind.extra else kind.module
        _installed(kind.module, "engine", s.engine, f"Install {package}, or choose --engine {DEFAULT.name}.")
        load, fill = kind.parser
        if s.server_args and not _accepted("server_args", kind.command, s.server_args, _PARSER.format(load=load, fill=fill)):
            unchecked.append(f"{flags} flags are not verified: {kind.title}'s own parser did not answer")
    if s.use_router and s.sglang_router_ip is None:
        _installed("sglang_router", "use_router", True, "Install sglang-router, or set --no-use-router.")
        if s.router_args and not _accepted("router_args", "sglang_router.launch_router", s.router_args, _ROUTER):
            unchecked.append("--router-* flags are not verified: the router's own parser did not answer")
    return unchecked


def _installed(module: str, field: str, value: object, remedy: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise SettingsError(f"{module} is not installed in this Python", field=field, value=value, remedy=remedy)


def _accepted(table: str, program: str, values: Mapping[str, PassedOn], script: str) -> bool:
    """False where it cannot be told."""
    known, refused = _verdict(script, tuple(_words(values)))
    for name in values if known else ():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"Did you mean {PREFIXES[table][0]}{close[0]}?" if close else "Look at the program's --help."
            raise SettingsError(f"{program} has no such flag", field=f"{PREFIXES[table][0]}{name}", remedy=hint)
    if refused:
        why = " ".join(refused.split())[:300]
        raise SettingsError(f"{program} refuses these flags: {why}", field=table, remedy="Correct or leave out that flag.")
    return bool(known)


def _words(values: Mapping[str, PassedOn]) -> Iterator[str]:
    """As the server gets them: true is a bare flag, false none, a list follows its flag word by word."""
    for name, value in values.items():
        if value is False:
            continue
        yield f"--{name}"
        if value is not True:
            yield from map(str, value if isinstance(value, list | tuple) else (value,))


@cache
def _verdict(script: str, words: tuple[str, ...]) -> tuple[frozenset[str], str]:
    """Flags that a program knows and why it refuses `words`, by its own parser in a process of its own. Nothing where that
    cannot tell: the program itself will refuse what it does not like, with its own words."""
    import subprocess

    try:
        done = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=NAMES_DEADLINE_S, check=True
        )
        known, refused = json.loads(done.stdout.strip().splitlines()[-1])
        return frozenset(known), str(refused)
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return frozenset(), ""
