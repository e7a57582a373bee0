"""An actor's name on the bus: one process has it at a time, and no other commits under it.

Writes  names (take.lua, beat.lua)    Owns  what this process says of itself there
Always true: of two processes with one name the server knows which one has it. Each commit looks (commit.lua), each beat renews,
each read asks. A name that was not renewed for `lapse_s` may be taken; until somebody does, it stays its holder's, who goes on
under a new generation. Generations grow, and none is given twice.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import msgspec

from bus.errors import UNREADABLE, Garbage, NameTaken
from bus.streams.hop import text_of
from bus.streams.keys import Keys
from bus.streams.link import Link, Script

TAKE, BEAT = Script("take.lua"), Script("beat.lua")


class Who(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process says of itself: to people, and to processes of its own host, which can see whether it lives."""

    pid: int = 0
    host: str = ""
    processes: str = ""  # of one name: they see each other's process ids
    began: str = ""  # tells it from another process that got its id later
    folder: str = ""  # of a launcher: its run's

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}" if self.pid else "a process that did not say who it is"


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """This process's hold on a name. `lapse_s`: of silence, after which others may take it."""

    name: str
    token: str
    who: Who
    lapse_s: float
    generation: int = 0


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Another's. `word` and `heard` are as they stand on the bus; `silent_s`: since it was heard, by the server's clock."""

    word: bytes
    heard: str = ""
    silent_s: float = 0.0
    generation: int
    token: str  # empty: nobody has it any more
    who: Who

    @staticmethod
    def of(key: str, name: str, word: bytes, heard: Any = b"", silent_ms: int = 0) -> Held:
        """Of the word under a name; Garbage for what is none."""
        try:
            generation, token, who = word.split(b":", 2)
            said = msgspec.json.decode(who, type=Who) if who else Who()
            number, owner = int(generation), token.decode("ascii")
        except (*UNREADABLE, ValueError) as error:
            raise Garbage.of_hash(key, name, error) from error
        return Held(word=word, heard=text_of(heard), silent_s=silent_ms / 1000, generation=number, token=owner, who=said)


_token = (0, "")  # process, and what it is known by


def own_token() -> str:
    """Of this process: one that was forked has another."""
    global _token
    if _token[0] != os.getpid():
        _token = (os.getpid(), secrets.token_hex(8))
    return _token[1]


class Names:
    """One process's view of the names of a run, and its hold on its own, if it has one: tools have none."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link, self._keys = link, keys
        self.token = own_token()
        self.hold: Hold | None = None

    async def take(self, name: str, who: Who, *, lapse_s: float, instead_of: Held | None = None) -> Held | None:
        """Have a name from now on; what is known of its holder where another process has it. `instead_of`: a holder that is gone;
        with the time when it was heard last, if that must not have changed."""
        keys = [self._keys.names, self._keys.heard, self._keys.state]
        former = (instead_of.word, instead_of.heard) if instead_of is not None else ("", "")
        args = [name, self.token, msgspec.json.encode(who), *former, self._link.life[2]]
        reply = await self._link.run_script(TAKE, keys, args)
        if reply[0] == 0:
            return Held.of(self._keys.names, name, *reply[1:])
        self._have(Hold(name=name, token=self.token, who=who, lapse_s=lapse_s, generation=self._given(reply[0])))
        return None

    async def holder_of(self, name: str) -> Held | None:
        """Who has a name; None where nobody has."""
        word = await self._link.run("HGET", self._keys.names, name)
        found = Held.of(self._keys.names, name, word) if word else None
        return found if found is not None and found.token else None

    async def beat(self, actor: str, vitals: bytes, *, leaves: bool = False) -> bool:
        """Replace an actor's last vitals, and renew its name where it is this process's; `leaves`: give that back. Whether it had
        lapsed meanwhile, and is a new generation's now. NameTaken when another process has it."""
        hold = self.hold
        own: list[Any] = [""] * 5
        keys = [self._keys.vitals, self._keys.heard, self._keys.names, self._keys.state]
        if hold is not None and hold.name == actor:
            lapse_ms, life = int(1000 * hold.lapse_s), self._link.life[2]
            own = [hold.token, msgspec.json.encode(hold.who), lapse_ms, life, "1" if leaves else ""]
        reply = await self._link.run_script(BEAT, keys, [actor, vitals, *own])
        if not reply or hold is None:
            return False
        if reply[0] == 0:
            raise self._taken(reply[1])
        generation = self._given(reply[0])
        self._have(None if leaves else msgspec.structs.replace(hold, generation=generation))
        return generation != hold.generation

    async def again(self, word: bytes) -> None:
        """What was written under our name was refused: that is another's, or the server lost it, and we take it again."""
        hold = self.hold
        if hold is None:  # given back, or gone with the run, while that was under way
            return
        if word or await self.take(hold.name, hold.who, lapse_s=hold.lapse_s) is not None:
            raise self._taken(word or b"0::")

    async def check(self, word: bytes | None) -> None:
        """Of the word that stood under our name when something was read: the same."""
        hold = self.hold
        if hold is not None and (not word or word.split(b":", 2)[1:2] != [hold.token.encode()]):
            await self.again(word or b"")

    def drop(self) -> None:
        """All names were forgotten with the run."""
        self._have(None)

    def _have(self, hold: Hold | None) -> None:
        self.hold = hold
        self._link.name = (hold.name, hold.token) if hold is not None else ("", "")

    def _given(self, generation: int) -> int:
        if generation < 0:
            raise self._link.went_back()
        return generation

    def _taken(self, word: bytes) -> NameTaken:
        name = self._link.name[0]
        now = Held.of(self._keys.names, name, word)
        who = f"by {now.who}" if now.token else "by a process that has ended since"
        return NameTaken(
            f"the name {name!r} of run {self._keys.run} was taken {who} (generation {now.generation}) while this process was not "
            "heard. This one ends; what it held goes on there."
        )
