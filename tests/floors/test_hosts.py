"""What one actor writes, another host reads: no message names a file, a process or an address that only its writer knows,
unless it is said here why that is right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.floors.tree import each, parse, sources

LOCAL = re.compile(r"(^|_)(path|paths|dir|file|folder|whole|checkpoint|handles|quick|host|pid|address|url|port|socket)($|_)")
WHY = {
    "WeightManifest.path": "read by who sees the memory of the trainer's host; others get a parcel instead",
    "WeightManifest.host": "names the memory that ipc needs to share; compared, never opened",
    "Seat.host": "as above",
    "FileHandle.path": "ipc on a host without GPUs, among processes of one memory",
    "Bucket.handles": "ipc: opaque, for engines of one memory",
    "Bucket.quick": "as above",
    "WeightPlan.whole": "check_weight_update_equal, for who sees the memory of the trainer's host",
    "WeightPlan.address": "what others dial: the trainer's address on the bus",
    "WeightPlan.port": "as above",
    "Checkpointed.path": "for people, and for the launcher of this run folder",
    "Restored.checkpoint": "for people",
    "Vitals.host": "for people",
    "Vitals.pid": "as above",
}


def local_fields(path: Path) -> set[str]:
    """`Struct.field` of all fields whose names tell of files, processes or addresses."""
    return {
        f"{node.name}.{line.target.id}"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and LOCAL.search(line.target.id)
    }


@each(lambda: [p for p in sources("bus") if p.parts[:2] == ("bus", "messages")])
def test_no_message_tells_another_host_what_only_its_writer_can_use(path: Path) -> None:
    assert local_fields(path) - WHY.keys() == set(), f"{path}: say what any host can use (a blob, an address), or why here"


def test_the_list_holds_nothing_that_is_gone() -> None:
    assert set().union(*map(local_fields, sources("bus"))) >= WHY.keys()
