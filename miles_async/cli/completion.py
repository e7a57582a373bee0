"""Print what makes a shell complete commands, flags, values, live settings, streams and names of runs:

  eval "$(miles-async completion bash)"        in ~/.bashrc; for zsh likewise in ~/.zshrc
  miles-async completion fish | source         in ~/.config/fish/config.fish

The shell asks the program at each press of the key (`miles-async completion words -- WORD ...`), so what it offers is what this
version knows. Where nothing is offered, files are.
"""

import argparse
import os
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

from miles_async.cli.options import DEFAULT_RUNS_DIR
from miles_async.settings.errors import SettingsError

BASH = """\
_miles_async() {
    local IFS=$'\\n'
    COMPREPLY=($("${COMP_WORDS[0]/#\\~/$HOME}" completion words -- "${COMP_WORDS[@]:1:$COMP_CWORD}" 2>/dev/null))
    [[ "${COMPREPLY[*]}" != *= ]] || compopt -o nospace 2>/dev/null
}
complete -o default -F _miles_async miles-async"""
FISH = """\
function __miles_async
    set -l words (commandline -opc)
    set -l program $words[1]
    set -e words[1]
    set -l now (commandline -ct)
    set -l found ($program completion words -- $words "$now" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path "$now"
    end
end
complete -c miles-async -f -a '(__miles_async)'"""
SCRIPTS = {
    "bash": BASH,
    "zsh": f"autoload -U +X compinit bashcompinit && compinit && bashcompinit\n{BASH}",
    "fish": FISH,
}
ALL_SETTINGS = ("train", "quickstart", "whatif", "ray")  # commands whose flags are settings


def parse(words: list[str]) -> argparse.Namespace:
    """Namespace(help, shell, words)."""
    if words[:1] == ["words"]:
        return argparse.Namespace(help=False, shell="", words=words[1 + (words[1:2] == ["--"]) :])
    wanted = [word for word in words if word not in ("-h", "--help")]
    if len(wanted) == len(words) and (len(words) != 1 or words[0] not in SCRIPTS):
        why = f"one shell expected, got {' '.join(words) or 'none'}"
        raise SettingsError(why, remedy=f"Give one of {', '.join(SCRIPTS)}.")
    return argparse.Namespace(help=len(wanted) < len(words), shell=words[0], words=[])


def run(args: argparse.Namespace) -> int:
    """Print the shell's script, or what fits the last of the words."""
    if args.help:
        print(f"usage: miles-async completion {'|'.join(SCRIPTS)}\n\n{__doc__}")
    elif args.shell:
        print(SCRIPTS[args.shell])
    else:
        print(*sorted({word for word in candidates(args.words) if word.startswith(args.words[-1])}), sep="\n")
    return 0


def candidates(words: list[str]) -> Iterable[str]:
    """What may stand in place of the last word, whether or not it fits what is typed of it already."""
    from miles_async.cli.app import COMMANDS

    if len(words) < 2:
        return [*(command.name for command in COMMANDS), "--help", "--version"]
    command = next((command for command in COMMANDS if command.name == words[0]), None)
    if command is None:
        return []
    given, now = words[1:-1], words[-1]
    last = given[-1] if given else ""
    if last == "--run" or (last == "--name" and command.name in ALL_SETTINGS):
        return _runs(given)
    if command.name == "completion":
        return SCRIPTS
    if command.name in ALL_SETTINGS or "--preflight" in given:
        return _settings(command.name, given, last, now)
    return _options(import_module(command.module).add_arguments, given, last, now)


def _runs(given: list[str]) -> list[str]:
    from miles_async.settings.runs import list_runs

    at = given.index("--runs-dir") + 1 if "--runs-dir" in given[:-1] else 0
    return list_runs(Path(os.path.expanduser(given[at])) if at else Path(DEFAULT_RUNS_DIR))


def _settings(command: str, given: list[str], last: str, now: str) -> Iterable[str]:
    """Where flags are settings."""
    from miles_async.cli.flags import known_flags
    from miles_async.cli.from_miles import FLAG
    from miles_async.cli.train import DRY_RUN, EXPLAIN, HELP
    from miles_async.settings.catalog import catalog, groups
    from miles_async.settings.load import shipped

    if last in HELP:
        return [*groups(), "all", "miles"]
    if last == EXPLAIN:
        return [name.replace("_", "-") for name in catalog()]
    spec = known_flags().get(last)
    if spec is not None and spec.kind != "bool" and not now.startswith("-"):
        return [*spec.choices, *spec.shipped, *(["auto"] if spec.auto is not None else [])]
    if now.startswith("-"):
        return [*known_flags(), DRY_RUN, EXPLAIN, FLAG, *HELP, "--run", "--runs-dir"]
    if last.startswith("-") and spec is None:
        return []
    return {"whatif": lambda: _runs(given), "ray": lambda: ["submit"]}.get(command, shipped)()


def _options(declare: Callable[[argparse.ArgumentParser], None], given: list[str], last: str, now: str) -> Iterable[str]:
    """Where a parser knows what may stand."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    declare(parser)
    for word in given:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                parser = action.choices[word]
    option = parser._option_string_actions.get(last)
    if option is not None and option.nargs != 0:
        return option.choices or []
    if now.startswith("-"):
        return parser._option_string_actions
    found: list[str] = []
    for action in parser._actions:
        if not action.option_strings:
            found += action.choices or _positional(str(action.metavar), given)
    return found


def _positional(what: str, given: list[str]) -> Iterable[str]:
    """Words for a positional argument, by its name in the help."""
    if what == "RUN":
        return _runs(given)
    if what == "STREAM":
        from bus.topology import BY_NAME

        return BY_NAME
    if what == "name=value":
        from miles_async.settings.catalog import live_fields

        return [f"{name}=" for name in live_fields()]
    return []
