"""A public class name has one owner, so that it says which class it is; what is doubled is listed with its reason."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.floors.tree import PACKAGES, parse, sources

ENGINES = "one of them is an engine's, and engines become folders of their own"
DOUBLED = {
    "Answer": "of SGLang's next start, and of what runs inside SGLang: " + ENGINES,
    "BadRequest": "two servers refuse a call, the engine's and the endpoint's: " + ENGINES,
    "Batch": "the engine's forward pass, and the trainer's step: " + ENGINES,
    "Core": "a library's own share of a training has the name of what it is one of; torch's is found by it",
    "Decoder": "the engine's model, and a stream's: " + ENGINES,
    "Episode": "what a message says of one, and the endpoint that serves it",
    "Event": "an operator's, and a server-sent one of SGLang's: " + ENGINES,
    "Finding": "the doctor's, and those before a start",
    "Group": "of the settings, and of Ray's placement: launchers become records of their own",
    "Part": "of a group, and of an actor over several hosts: launchers become records of their own",
    "Seat": "a worker's among those that are sent to, and an actor's of Ray's",
    "Task": "the rollout program's is what users import; the quickstart's is data of a task",
    "Trainer": "the room, and its share of the memory estimate",
}


def owners() -> dict[str, list[str]]:
    """Public class name -> files that have one at their top."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources(*PACKAGES):
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.as_posix())
    return found


def test_a_public_class_name_has_one_owner() -> None:
    """Name yours after what it is of (`GovernorStanding`), or say here why both must be called so."""
    several = {name: files for name, files in owners().items() if len(files) > 1}
    assert {name: files for name, files in several.items() if name not in DOUBLED} == {}
    assert sorted(DOUBLED.keys() - several.keys()) == [], "no more doubled: take it off the list"
