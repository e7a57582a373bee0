"""Say who waits for what, since when and why, and what is wrong. Exit status 1 when something is wrong."""

import argparse
from typing import TYPE_CHECKING

from miles_async.cli.inspection import on_bus, print_json
from miles_async.cli.options import add_json_option, add_run_options
from miles_async.settings.runs import RunRef

if TYPE_CHECKING:
    from bus import Bus
    from miles_async.console.scene import Scene


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Shared options only."""
    add_run_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """0 when nothing is wrong, else 1."""

    async def body(bus: "Bus", ref: RunRef) -> int:
        from miles_async.console.doctor import diagnose
        from miles_async.console.explain import explain
        from miles_async.console.scene import read_scene

        scene = await read_scene(bus, ref.run_dir)
        findings = diagnose(scene)
        wrong = [finding for finding in findings if finding.level != "info"]
        if args.as_json:
            waits = [{"actor": actor, "text": text} for actor, text in explain(scene)]
            print_json({"run": scene.snapshot.run, "well": not wrong, "findings": findings, "actors": waits})
        else:
            print(as_text(scene))
        return 1 if wrong else 0

    return on_bus(args, body)


def as_text(scene: "Scene") -> str:
    """Findings by gravity, then one sentence per actor, then the verdict."""
    from miles_async.console.doctor import diagnose
    from miles_async.console.explain import explain
    from miles_async.console.text import human_bytes

    findings = diagnose(scene)
    lines = [f"{finding.level:<7}  {finding.text}" for finding in findings]
    said = explain(scene)
    width = max((len(actor) for actor, _ in said), default=0)
    if said:
        lines += ["", *(f"{actor:<{width}}  {text}" for actor, text in said)]
    server = scene.server
    limit = f" of {human_bytes(server.max_memory)}" if server.max_memory else ""
    persistence = "append-only file on" if server.aof else "no append-only file"
    memory = f"{human_bytes(server.used_memory)}{limit} in memory"
    lines += ["", f"{server.software} {server.version}: {memory}, {persistence}"]
    wrong = sum(finding.level != "info" for finding in findings)
    lines.append(f"{wrong} things are wrong" if wrong > 1 else "1 thing is wrong" if wrong else "nothing is wrong")
    return "\n".join(lines).lstrip("\n")
