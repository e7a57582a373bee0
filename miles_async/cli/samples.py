"""Read what the policy writes: prompts, turns, answers and rewards of samples that were kept, the newest step's by default.

The recorder keeps whole groups at intervals, in samples.jsonl; an evaluation keeps all of its samples (--eval SET).
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from miles_async.cli.options import add_json_option, add_run_options, chosen_run, print_json
from miles_async.settings.errors import SettingsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which samples, and the shared options."""
    parser.add_argument("--step", type=int, metavar="N", help="those kept at step N, or at the last look before it")
    parser.add_argument("--group", metavar="G", help="those of one prompt group")
    parser.add_argument("--eval", metavar="SET", dest="eval_set", help="those of an evaluation of this held-out set")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", action="store_true", help="lowest reward first")
    order.add_argument("--best", action="store_true", help="highest reward first")
    parser.add_argument("--count", type=int, default=5, metavar="N", help="at most so many (default: %(default)s)")
    add_run_options(parser, positional=True)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """0 when something is kept, 2 when nothing is."""
    ref = chosen_run(args)
    if ref.run_dir is None:
        raise SettingsError("kept samples lie in the run's folder", remedy="Run this on its host, with --runs-dir.")
    run_dir = ref.run_dir
    found = choose(kept(run_dir, args.eval_set), step=args.step, group=args.group)
    if args.worst or args.best:
        found.sort(key=lambda sample: sample["reward"], reverse=args.best)
    if not found:
        why = f"no such sample is kept in {run_dir}"
        remedy = "The first are kept at the first trained step; without --step, --group and --eval the newest are shown."
        raise SettingsError(why, remedy=remedy)
    if args.as_json:
        print_json(found[: args.count])
    else:
        print("\n\n".join(as_text(sample) for sample in found[: args.count]))
        if len(found) > args.count:
            print(f"\n{len(found) - args.count} more; --count {len(found)} shows all")
    return 0


def kept(run_dir: Path, eval_set: str | None) -> Iterable[dict[str, Any]]:
    """All samples that the run's folder has as text, in order; of training, or of one held-out set."""
    from actors.evaluator.kept import kept_files
    from actors.recorder.samples import FILE, OLDER, read_samples

    if eval_set is None:
        return read_samples((run_dir / OLDER, run_dir / FILE))
    return read_samples(kept_files(run_dir).get(eval_set, ()))


def choose(samples: Iterable[dict[str, Any]], *, step: int | None, group: str | None) -> list[dict[str, Any]]:
    """Samples of a group; else those of the newest step that is at most `step`."""
    if group is not None:
        return [sample for sample in samples if sample.get("group") == group and (step is None or sample["step"] <= step)]
    newest: list[dict[str, Any]] = []
    for sample in samples:
        if step is not None and sample["step"] > step:
            continue
        if newest and newest[-1]["step"] != sample["step"]:
            newest = []
        newest.append(sample)
    return newest


def as_text(sample: dict[str, Any]) -> str:
    """One sample: a line of facts, then its prompt and its turns."""
    from bus.errors import printable

    shown = "".join(f", {name} {value:.4g}" for name, value in (sample.get("rewards") or {}).items())
    label = f", label {sample['label']!r}" if sample.get("label") else ""
    head = (
        f"{sample['sample']} at step {sample['step']}, version {sample.get('version', -1)}: reward {sample['reward']:.4g}{shown}"
        f"{label}, {sample.get('tokens', 0)} tokens, {sample.get('finish', '')}"
    )
    turns = sample.get("turns") or [{"by": "model", "text": sample.get("response", "")}]
    lines = [head, *_block("prompt", sample.get("prompt", ""))]
    for turn in turns:
        lines += _block(turn["by"], turn["text"])
    return "\n".join(printable(line) for line in lines)


def _block(by: str, text: str) -> list[str]:
    return [f"  {by + ':':12} {line}" if i == 0 else f"  {'':12} {line}" for i, line in enumerate(text.splitlines() or [""])]
