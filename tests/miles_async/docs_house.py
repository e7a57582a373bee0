"""Commands that README.md and docs/ show, with the output that follows them, and a folder that has what their reader has."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pyarrow
import pyarrow.parquet

from bus.server.binary import packaged_binary
from miles_async.cli.app import OneLineParser, _find
from tests.crash.house import FOUND
from tests.floors.tree import ROOT

PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```\n(?P<apart>\n?(?=```))?", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
OURS = re.compile(
    r"""(?:^|^\$\ |\bexec\ |\bnohup\ |\ --\ |\$\(|^\S*python\ -m\ )miles[-_]async\ (?P<words>[a-z]+\b(?!:).*)""",
    re.VERBOSE,
)
OTHERS = re.compile(
    r"(?:\./scripts/\w+\.sh|(?:\.venv/bin/)?python3?|pip|redis-cli|redis-server|ray|kubectl|mkdocs|ulimit)(?= )|\./scripts/\w+\.sh$"
)


@dataclass(frozen=True)
class Shown:
    """A command of a page. `words`: ours, without the program's name; none of another program. `output`: what follows there."""

    page: str
    line: str
    words: tuple[str, ...] = ()
    inline: bool = False
    output: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        return self.words[0] if self.words else ""

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def words_of(line: str) -> tuple[str, ...]:
    """Of a command that may stand in a line of the shell: up to what is the shell's."""
    line = re.sub(r"\$\(?\w+\)?", "x", line).replace("<TAB>", "")
    lexer = shlex.shlex(line if line.count('"') % 2 == 0 else line.replace('"', ""), posix=True, punctuation_chars=";()&|")
    lexer.whitespace_split, words = True, []
    for word in lexer:
        if word[0] in ";()&|" or word in (">", "2>&1"):
            break
        words.append(word)
    return tuple(words)


def shown(page: str) -> list[Shown]:
    """All commands of a page: lines of its blocks, and inline code."""
    found: list[Shown] = []
    last: Shown | None = None
    rest = FENCE.sub("", PAGES[page])
    if page != "results.md":  # which tells how it was measured then
        found += [Shown(page, line) for line in re.findall(r"^ {4}(\S.*)$", rest, re.MULTILINE) if OTHERS.match(line)]
    for block in FENCE.finditer(PAGES[page]):
        commands: list[Shown] = []
        if block["kind"] in ("", "bash", "sh", "console"):
            for line in re.sub(r"\\\n\s*", "", block["text"]).splitlines():
                if ours := OURS.search(line.strip()):
                    commands.append(Shown(page, line.strip(), words_of(ours["words"])))
                elif OTHERS.match(line.strip()):
                    commands.append(Shown(page, line.strip()))
            if not commands and last is not None:  # what the last one prints
                found[-1] = Shown(page, last.line, last.words, output=block["text"])
        found += commands
        last = found[-1] if commands and block["apart"] is not None else None
    for code in INLINE.findall(re.sub(r"(?<=\S)\n(?=\S)", " ", rest)):
        if ours := OURS.match(code):
            found.append(Shown(page, code, words_of(ours["words"].replace("[", "").replace("]", "")), inline=True))
        elif OTHERS.match(code):
            found.append(Shown(page, code, inline=True))
    return found


UNHURRIED = "unhurried"  # a file: while it is there a trainer with the function below leaves the processors to who looks at the run
FUNCTIONS = f"""

def lenient(sample):
    return float(len(sample["response"]) < 40)


def in_no_hurry(args, samples):
    import pathlib, time
    if pathlib.Path(__file__).with_name("{UNHURRIED}").exists():
        time.sleep(1.5)
"""
COMMANDS = [command for page in PAGES for command in shown(page)]


def parsed(words: tuple[str, ...]) -> argparse.Namespace:
    """As the command's own parser takes it. Raises SettingsError."""
    module = import_module(_find(words[0]).module)
    if hasattr(module, "parse"):
        return module.parse(list(words[1:]))
    parser = OneLineParser(prog=words[0], allow_abbrev=False)
    module.add_arguments(parser)
    return parser.parse_args(list(words[1:]))


def furnish(here: Path, toy: Path, recipe: str) -> None:
    """What the pages' reader has in the folder where the commands are given: a recipe, configs, a model, prompts, functions."""
    for name in ("configs", "scripts"):
        (here / name).symlink_to(ROOT / name)
    for file in (toy / "model").iterdir():
        for model in ("DIR", "MODELS/Qwen3-0.6B"):
            (here / model).mkdir(parents=True, exist_ok=True)
            (here / model / file.name).write_bytes(file.read_bytes())
            if file.name == "tokenizer_config.json":
                template = "{% for message in messages %}{{ message.content }}{% endfor %}"
                (here / model / file.name).write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
            if file.name == "config.json":  # a dry run looks whether answers fit the model's context
                wide = {"max_position_embeddings": 4096}
                (here / model / file.name).write_text(json.dumps(json.loads(file.read_text()) | wide))
    rows = [
        {"question": f"{i}+1=", "answer": f"{i + 1}", "messages": f"{i}+1=", "label": f"{i + 1}", "extra": {"level": 1}}
        for i in range(256)
    ]
    (here / "data.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (here / "gsm8k").mkdir()
    for name in ("train.parquet", "test.parquet", "gsm8k/train.parquet", "gsm8k/test.parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), here / name)
    for name in ("recipe.toml", "CONFIG", "run.toml"):
        own = 'custom_rm_path = "my_hooks.lenient"' if name == "run.toml" else 'rm_type = "deterministic_random"'
        (here / name).write_text(recipe.replace('rm_type = "deterministic_random"', own))
    for page in ("hooks.md", "rollouts.md"):
        for name, code in re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGES[page], re.M | re.S):
            (here / f"{name}.py").write_text(code)
    with (here / "my_hooks.py").open("a") as hooks:
        hooks.write(FUNCTIONS)
    [table] = re.findall(r"^```toml\n# lenient\.toml\n(.*?)^```", PAGES["command-line.md"], re.M | re.S)
    for name in ("lenient.toml", "other.toml"):
        (here / name).write_text(table)


def labels(text: str) -> set[str]:
    """What does not change from run to run: heads of tables, first words of rows and lines, sentences without numbers."""
    return {label for line in text.splitlines() if (label := _label(line))} - {"..."}


def _label(line: str) -> str:
    if named := re.match(r"\s*(\w+:) \S+$", line):
        return named[1]
    columns = re.split(r"\s{2,}", line.strip())
    if len(columns) > 3 and not re.search(r"\d", line):
        return " ".join(columns)
    for column in columns:
        first, *rest = column.split() or [""]
        words = [re.sub(r"[0-9][0-9a-f]*", "N", first)]
        for word in rest:
            if re.search(r"\d", word):
                break
            words.append(word)
        if found := " ".join(words).strip("N-:./, "):
            return found
    return ""


def reader_env(here: Path) -> dict[str, str]:
    """The environment of a reader's shell: our Python and command first on the path, and programs of Redis where it has none."""
    programs = {"python": sys.executable, "miles-async": f"{sys.executable} -m miles_async"}
    others = {"redis-cli": f"{sys.executable} {Path(__file__).with_name('redis_cli.py')}", "redis-server": str(packaged_binary())}
    programs |= {name: words for name, words in others.items() if not shutil.which(name)}
    (here / "bin").mkdir(exist_ok=True)
    for name, words in programs.items():
        (here / "bin" / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (here / "bin" / name).chmod(0o755)
    return {**os.environ, "PATH": f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": FOUND}
