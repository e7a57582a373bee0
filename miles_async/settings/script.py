"""A launch script of bash, read and never run: the words that it gives to train.py, as far as they can be known.

Reads  the script, what it sources and the model file that it names, where these are there    Writes  nothing
Followed are assignments, arrays, functions, loops over known words, tests on known values, `source`, `eval`, `bash -c`,
here-documents, this process's environment, and programs whose output follows from their words (`bash_pure.py`). A test that is not
decided makes unread what its branches set differently; a branch that ends the script is then not taken. Always true: no process is
started, and no file is read but scripts and model files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from miles_async.settings import bash_tree as tree
from miles_async.settings.bash import WordPart
from miles_async.settings.bash_assign import Status
from miles_async.settings.bash_commands import DEEPEST, MOST_FILES, PROGRAMS, Commands, Left, ScriptCommands
from miles_async.settings.bash_pure import Decider, Item, both, either
from miles_async.settings.bash_sums import UnknownNumber
from miles_async.settings.bash_words import Word, joined, merged, place
from miles_async.settings.errors import SettingsError

__all__ = ["ScriptCommands", "Word", "read_script", "read_text"]

MOST_STEPS = 50_000  # commands; a script has some hundred


def read_script(path: Path, environ: Mapping[str, str] | None = None, arguments: tuple[str, ...] = ()) -> ScriptCommands:
    """What the script at `path`, given `arguments`, gives to train.py. SettingsError when it cannot be read, or starts none or
    several."""
    reader = _Reader(path, arguments, os.environ if environ is None else environ)
    ended = ""
    try:
        reader.file(path)
    except Left as left:
        ended = left.where
    except RecursionError:
        raise SettingsError(f"{path} is nested too deeply", remedy="Give a launch script.") from None
    found, script = reader.starts, reader.script
    if not found and ended:
        raise SettingsError(
            f"{path} ends at {ended} and starts no train.py",
            remedy="Give what it asks for: variables in the environment, arguments as --from-miles 'FILE ARGUMENT ...'.",
        )
    if len(found) != 1:
        said = f"starts train.py {len(found)} times ({', '.join(found)})" if found else "starts no train.py"
        raise SettingsError(f"{path} {said}", remedy="Give a script with one `python3 train.py --flags ...`.")
    script.notes += reader.notes
    if reader.not_run:
        script.notes.append("not run: " + ", ".join(f"{name} ({', '.join(at)})" for name, at in reader.not_run.items()))
    return script


def read_text(text: str, where: str, environ: Mapping[str, str]) -> ScriptCommands:
    """What one command line of bash gives to train.py; all its words stand at `where`. SettingsError when it is none."""
    reader = _Reader(Path(where.partition(":")[0]), (), environ)
    reader.body(tree.parse(text, where.partition(":")[0]), where)
    if len(reader.starts) != 1:
        raise SettingsError(f"{where} gives train.py no command line", remedy="Give its flags behind `miles-async train`.")
    reader.script.notes += reader.notes
    return reader.script


class _Reader(Commands):
    """Goes through commands in their order, and follows variables as a shell does."""

    steps = 0

    # -- files and texts ---------------------------------------------------------------------------------------------

    def file(self, path: Path) -> None:
        """Read one file to its end."""
        self.files += 1
        if self.files > MOST_FILES:
            raise SettingsError(f"{self.path} sources more than {MOST_FILES} files", remedy="Look for one that sources itself.")
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise SettingsError(f"cannot read {path}: {why}", remedy="Give a launch script.") from None
        self.sourced.append(str(path))
        body = tree.parse(text, path.name)
        try:
            self.returning(lambda: self.body(body, path.name), f"the file {path.name}")
        finally:
            self.sourced.pop()

    def substituted(self, part: WordPart, where: str) -> Word:
        """What the command in `$(...)` prints, in a shell of its own."""
        unread = Word(part.raw, where, f"{part.raw} is not run")
        if self.depth >= DEEPEST:
            return unread
        before, self.out, self.left = (self.now.copy(), self.out, self.left), [], []
        self.depth += 1
        try:
            self.body(tree.parse(part.text, where.partition(":")[0]), where)
        except (Left, SettingsError) as error:
            if not isinstance(error, Left) or error.kind != "exit":
                self.out = [unread]
        finally:
            found = self.out
            self.now, self.out, self.left = before
            self.depth -= 1
        word = joined(found or [Word("", where)], "")._replace(where=where)
        if word.unread and word.empty is None:
            if len(found or ()) == 1 and not word.text.startswith("`"):
                return word._replace(text=word.text.rstrip("\n"))  # a here-document, of which parts are known
            return unread._replace(unread=word.unread if " is set " in word.unread else unread.unread)
        known = (word.known or "").rstrip("\n")
        return Word(part.raw, where, word.unread, known) if word.unread else Word(known, where)

    def body(self, body: tree.Body, file: str) -> Status:
        status: Status = True
        for node in body:
            status = self.node(node, file)
        return status

    # -- commands that hold commands ---------------------------------------------------------------------------------

    def node(self, node: tree.Node, file: str) -> Status:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise SettingsError(f"{self.path} takes more than {MOST_STEPS} commands", remedy="Look for a loop without an end.")
        match node:
            case tree.Simple():
                return self.simple(node, file)
            case tree.Pipe():
                return self._pipe(node, file)
            case tree.Chain():
                return self._chain(node, file)
            case tree.If():
                return self._if(node.arms, node, file)
            case tree.Case():
                return self._case(node, file)
            case tree.For():
                return self._for(node, file)
            case tree.Count():
                return self._count(node, file)
            case tree.While():
                return self._while(node, file)
            case tree.CommandGroup(body=body, own_shell=own):
                return self.apart(partial(self.body, body, file)) if own else self.body(body, file)
            case tree.Function(name=name, body=inner):
                self.functions[name] = (inner, file)
                return True
            case tree.Test(tokens=tokens):
                return Decider(self.items(tokens, file), double=True).decide()
            case tree.Sum(text=text, line=line):
                try:
                    return self.number(text, place(file, line)) != 0
                except UnknownNumber:
                    return None

    def apart(self, run: Callable[[], Status]) -> Status:
        """Run in a shell of its own: what it sets is lost, and `exit` ends that alone."""
        before, outer, self.left = self.now.copy(), self.left, []
        try:
            return run()
        except Left as left:
            if left.kind != "exit":
                raise
            return None
        finally:
            self.now, self.left = before, outer

    def _pipe(self, node: tree.Pipe, file: str) -> Status:
        status: Status = None
        given, out = self.given, self.out
        try:
            for number, part in enumerate(node.parts):
                last = number == len(node.parts) - 1
                self.out = out if last else []
                if last and not number:
                    status = self.node(part, file)
                else:
                    status = self.apart(partial(self.node, part, file))
                if not last:
                    self.given = joined(self.out or [Word("", file)], "")
        finally:
            self.given, self.out = given, out
        return status if not node.negated else None if status is None else not status

    def _chain(self, node: tree.Chain, file: str) -> Status:
        status = self.node(node.first, file)
        for sign, then in node.rest:
            if status is None:
                other = self._branches([None, partial(self.node, then, file)], f"what `{sign}` joins", file, node.line)
                status = (both if sign == "&&" else either)(None, other)
            elif status == (sign == "&&"):
                status = self.node(then, file)
        return status

    def _branches(self, ways: list[Callable[[], Status] | None], what: str, file: str, line: int) -> Status:
        """Go each of `ways`, of which a shell goes one; None is to go on. Unread is what they leave different."""
        start, ends, statuses, left = self.now, [], [], None
        out, found = self.out, list[list[Word]]()
        for way in ways:
            self.now, self.out = start.copy(), None if out is None else []
            try:
                statuses.append(way() if way else None)
                ends.append(self.now)
            except Left as one:
                left = one
                if one.kind != "exit":  # a loop or function may be left here, with what holds now
                    self.left.append((one.kind, self.now))
            found.append(self.out or [])
        self.now, self.out = start, out
        where = f"{what} at {place(file, line)}"
        if out is not None:
            out += found[0] if all(one == found[0] for one in found) else [Word("$", where, f"it is printed in {where}")]
        if not ends and left is not None:
            if left.kind != "exit":
                self.now = self.left.pop()[1]
            raise left
        self.now, differ = merged(ends, where)
        if differ and what.startswith("the `") and out is None:
            self.notes.append(f"{place(file, line)}: {what[4:]} is not decided, so {', '.join(differ)} may be otherwise")
        return statuses[0] if statuses and all(one == statuses[0] for one in statuses) else None

    def _if(self, arms: tuple[tuple[tree.Body, tree.Body], ...], node: tree.If, file: str) -> Status:
        if not arms:
            return self.body(node.otherwise, file)
        (test, body), rest = arms[0], arms[1:]
        status = self.body(test, file)
        if status is not None:
            return self.body(body, file) if status else self._if(rest, node, file)
        ways: list[Callable[[], Status] | None] = [partial(self.body, body, file), partial(self._if, rest, node, file)]
        return self._branches(ways, "the `if`", file, node.line)

    def _case(self, node: tree.Case, file: str) -> Status:
        word = self.whole(node.word, file)
        ways: list[Callable[[], Status] | None] = []
        for patterns, body in node.arms:
            found: Status = False
            for pattern in patterns:
                item = self.item(pattern, file)
                items: list[Item] = [(word.known, ""), ("", "="), item]
                found = either(found, True if item[0] == "*" and item[1] else Decider(items, double=True).decide())
            if found and not ways:
                return self.body(body, file)
            if found is not False:
                ways.append(partial(self.body, body, file))
            if found:
                return self._branches(ways, "the `case`", file, node.line)
        return self._branches([*ways, None], "the `case`", file, node.line) if ways else True

    # -- loops -------------------------------------------------------------------------------------------------------

    def _pass(self, body: tree.Body, file: str, where: str) -> bool:
        """One pass of a loop; whether another may follow. After a pass that may have been the last, or not, unread is all that
        it set."""
        start, outer, self.left = self.now.copy(), self.left, []
        more: bool = True
        try:
            self.body(body, file)
        except Left as left:
            if left.kind not in ("break", "continue"):
                raise
            more = left.kind == "continue"
        finally:
            mine, self.left = self.left, outer
        outer += [(kind, then) for kind, then in mine if kind == "return"]
        ends = [then for kind, then in mine if kind != "return"]
        if ends:
            self.now, _ = merged([self.now, *ends], where)
        if any(kind != "continue" for kind, _ in mine):
            self.now, _ = merged([start, self.now], where)
            return False
        return more

    def _unsure(self, kind: str, body: tree.Body, file: str, line: int) -> Status:
        """A loop of nobody knows how many passes."""
        what = f"the `{kind}`"

        def once() -> Status:
            self._pass(body, file, f"{what} at {place(file, line)}")
            return None

        return self._branches([None, once], what, file, line)

    def _for(self, node: tree.For, file: str) -> Status:
        words = self.arguments if node.words is None else [word for token in node.words for word in self.fields(token, file)]
        where = place(file, node.line)
        starts = any(program in str(node.body) for program in PROGRAMS)
        if node.kind == "select" or any(word.unread for word in words) or (starts and len(words) > 1):
            why = f"{node.name} is set in the `{node.kind}` at {where}"
            self.put(node.name, [Word(f"${node.name}", where, why)])
            if starts:
                self._pass(node.body, file, f"the `{node.kind}` at {where}")
                return None
            return self._unsure(node.kind, node.body, file, node.line)
        for word in words:
            self.put(node.name, [word])
            if not self._pass(node.body, file, f"the `for` at {where}"):
                break
        return True

    def _count(self, node: tree.Count, file: str) -> Status:
        where = place(file, node.line)
        try:
            self.number(node.begin, where)
            while not node.test.strip() or self.number(node.test, where):
                if not self._pass(node.body, file, f"the `for` at {where}"):
                    break
                self.number(node.step, where)
            return True
        except UnknownNumber:
            return self._unsure("for", node.body, file, node.line)

    def _while(self, node: tree.While, file: str) -> Status:
        where = f"the `{node.kind}` at {place(file, node.line)}"
        while True:
            status = self.body(node.test, file)
            if status is None:
                return self._unsure(node.kind, node.body, file, node.line)
            if status == (node.kind == "until") or not self._pass(node.body, file, where):
                return True
