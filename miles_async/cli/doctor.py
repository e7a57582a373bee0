"""Say who waits for what, since when and why, what is wrong, and which staleness bound would serve; before a run, what this host
lacks of what its settings need (--preflight CONFIG [FLAGS]). Exit status 1 when something is wrong."""

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_async.cli.options import add_json_option, add_run_options, on_bus, print_json
from miles_async.settings.runs import RunRef

if TYPE_CHECKING:
    from bus import Bus
    from miles_async.console.scene import Scene
    from miles_async.console.whatif.advice import Advice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Shared options, and the settings of a run that is still to be started."""
    add_run_options(parser, positional=True)
    parser.add_argument(
        "--preflight", nargs=argparse.REMAINDER, metavar="CONFIG [FLAGS]",
        help="what this host has of what these settings need, as `train` takes them; last on the line",
    )  # fmt: skip
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """0 when nothing is wrong, else 1."""
    if args.preflight is not None:
        return preflight(args.preflight, as_json=args.as_json)

    async def body(bus: "Bus", ref: RunRef) -> int:
        if args.as_json:
            found = await document(bus, ref.run_dir)
            print_json(found)
            return 0 if found["well"] else 1
        from miles_async.console.doctor.diagnosis import diagnose

        scene, advice = await _looked(bus, ref.run_dir)
        print(as_text(scene, advice))
        return 1 if any(finding.level != "info" for finding in diagnose(scene)) else 0

    return on_bus(args, body)


async def document(bus: "Bus", run_dir: Path | None) -> dict[str, Any]:
    """What `--json` prints."""
    from miles_async.console.doctor.diagnosis import diagnose
    from miles_async.console.explain import explain

    scene, advice = await _looked(bus, run_dir)
    findings = diagnose(scene)
    well = all(finding.level == "info" for finding in findings)
    waits = [{"actor": actor, "text": text} for actor, text in explain(scene)]
    said = {"lines": advice.lines, "now": advice.now, "choices": advice.choices} if advice is not None else None
    return {"run": scene.snapshot.run, "well": well, "findings": findings, "actors": waits, "advice": said}


async def _looked(bus: "Bus", run_dir: Path | None) -> "tuple[Scene, Advice | None]":
    from miles_async.console.scene import read_scene
    from miles_async.console.whatif.advice import advise

    scene = await read_scene(bus, run_dir)
    slots = sum(a.vitals.slots for a in scene.snapshot.living("generation"))
    return scene, await asyncio.to_thread(advise, scene.record, slots=slots) if scene.record is not None else None


def preflight(words: list[str], *, as_json: bool) -> int:
    """Findings by line; what is refused of the settings themselves is one of them."""
    from miles_async.cli.flags import parse_flags
    from miles_async.launcher.readiness import look
    from miles_async.settings.errors import SettingsError
    from miles_async.settings.load import config_path, load

    parsed = parse_flags(words, frozenset())
    if len(parsed.positional) > 1:
        raise SettingsError(f"one settings file expected, got {' '.join(parsed.positional)}", remedy="Put CONFIG before the flags.")
    config = config_path(parsed.positional[0]) if parsed.positional else None
    findings = look(load(config, parsed.values).settings)
    wrong = sum(one.level == "wrong" for one in findings)
    if as_json:
        print_json({"well": not wrong, "findings": [one._asdict() for one in findings]})
        return 1 if wrong else 0
    width = max(len(one.what) for one in findings)
    for one in findings:
        print(f"{one.level:<5}  {one.what:<{width}}  {one.text}")
    print(_verdict(wrong))
    return 1 if wrong else 0


def _verdict(wrong: int) -> str:
    return f"{wrong} things are wrong" if wrong > 1 else "1 thing is wrong" if wrong else "nothing is wrong"


def as_text(scene: "Scene", advice: "Advice | None" = None) -> str:
    """Findings by gravity, then one sentence per actor, then what bounds would do, then the verdict."""
    from miles_async.console.doctor.diagnosis import diagnose
    from miles_async.console.explain import explain
    from miles_async.console.text import human_bytes

    findings = diagnose(scene)
    lines = [f"{finding.level:<7}  {finding.text} [{finding.rule}]" for finding in findings]
    said = explain(scene)
    width = max((len(actor) for actor, _ in said), default=0)
    if said:
        lines += ["", *(f"{actor:<{width}}  {text}" for actor, text in said)]
    if advice is not None:
        lines += ["", *advice.lines]
    server = scene.server
    limit = f" of {human_bytes(server.max_memory)}" if server.max_memory else ""
    persistence = "append-only file on" if server.aof else "no append-only file"
    memory = f"{human_bytes(server.used_memory)}{limit} in memory"
    lines += ["", f"{server.software} {server.version}: {memory}, {persistence}"]
    lines.append(_verdict(sum(finding.level != "info" for finding in findings)))
    return "\n".join(lines).lstrip("\n")
