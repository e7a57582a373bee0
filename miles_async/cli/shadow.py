"""Run another reward, filter or loss beside a run's own, on the same samples, and compare. The run does not notice.

CONFIG is a TOML file with one table:

  [shadow]
  what = "reward"                    # reward, filter or loss
  custom_rm_path = "my_hooks.strict" # the settings that differ, by the names of train's flags; "none" unsets one
  share = 0.25                       # of the groups (default 1.0)
  groups = 200                       # enough (default 500, 0 = until the run ends)
  label = "strict"                   # of runs/NAME/shadow-LABEL.jsonl (default: the file's name)

Of a run that has ended, or with --offline, it compares on recorded batches (--save-debug-rollout-data), or else on samples.jsonl.
"""

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from miles_async.cli.options import add_json_option, add_run_options, chosen_run, print_json
from miles_async.settings.errors import SettingsError
from miles_async.settings.run import RunSettings
from miles_async.settings.runs import RunRef, finished_run

if TYPE_CHECKING:
    from miles_async.console.shadow.compare import Comparer
    from miles_async.console.shadow.plan import ShadowPlan
    from miles_async.console.shadow.units import UnitSource

JUDGE_S = 300.0  # for one group; the run itself gives its filter no deadline
PATIENCE = 10.0  # times the run's own deadlines: on a busy machine what stands behind the run gets a small part of a core


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, and the shared options."""
    parser.add_argument("config", metavar="CONFIG", type=Path)
    parser.add_argument("--offline", action="store_true", help="from the run's files, also while it runs")
    add_run_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """0 done, 1 when the shadow's own function does not work, 2 refused."""
    from actors.reward.verifier import NICE as HOOK_NICE
    from miles_async.console.shadow.plan import read_plan, shadow_settings
    from miles_async.console.shadow.units import NICE
    from miles_async.launcher.prepare import model_dir

    os.environ[HOOK_NICE] = str(NICE)
    plan, ref = read_plan(args.config), chosen_run(args)
    if ref.run is None:
        raise SettingsError("a shadow needs the run's folder and the settings in it", remedy="Give --run and --runs-dir.")
    run_dir = ref.run_dir or args.runs_dir / ref.run
    before, settings = shadow_settings(plan, run_dir)
    model = model_dir(settings, run_dir)
    offline = args.offline or finished_run(run_dir) is not None
    return asyncio.run(_go(plan, ref, run_dir, (before, settings), model, offline=offline, as_json=args.as_json))


async def _go(
    plan: "ShadowPlan",
    ref: RunRef,
    run_dir: Path,
    settings: tuple[RunSettings, RunSettings],
    model: Path,
    *,
    offline: bool,
    as_json: bool,
) -> int:
    from bus.errors import BusUnreachable
    from miles_async.console.attach import attached
    from miles_async.console.shadow.results import Results, as_text
    from miles_async.console.shadow.session import follow
    from miles_async.console.shadow.tap import Tap

    last: list[dict[str, Any]] = []

    def say(summary: dict[str, Any]) -> None:
        last[:] = [summary]
        if not as_json:
            print("\n".join(as_text(summary)), flush=True)

    comparer = _comparer(plan, settings, model)
    live = not offline and plan.what != "loss"
    if live:
        try:
            async with attached(ref) as bus:
                with Results(run_dir, plan.label) as results:
                    status = await follow(plan, Tap(bus, share=plan.share), comparer, results, say)
        except BusUnreachable:
            if last:
                raise
            live = False
    if not live:
        source = _recorded(plan, run_dir, settings[0], model)
        with Results(run_dir, plan.label) as results:
            status = await follow(plan, source, comparer, results, say)
    if as_json:
        print_json(last[0])
    return status


def _recorded(plan: "ShadowPlan", run_dir: Path, before: RunSettings, model: Path) -> "UnitSource":
    from miles_async.console.shadow.recorded import RecordedFiles, special_words

    kind: type[RecordedFiles] = RecordedFiles
    if plan.what == "loss":
        from miles_async.console.shadow.losses import RecordedBatches as kind
    unseen = special_words(model) if before.rollout.rollout_skip_special_tokens else ()
    return kind(run_dir, before.ckpt.save_debug_rollout_data, share=plan.share, tokens=plan.what != "reward", unseen=unseen)


def _comparer(plan: "ShadowPlan", settings: tuple[RunSettings, RunSettings], model: Path) -> "Comparer":
    from actors.reward.verifier import tell_args
    from miles_async.console.shadow.compare import Rewards, ShadowFilter
    from miles_async.launcher.plan import backend_config, reward_spec
    from miles_async.launcher.prepare import place_of
    from miles_async.settings.custom_config import custom_config

    before, after = settings
    values = {**after.flat.values, **custom_config(after.rollout.custom_config_path)}
    if plan.what == "reward":
        tell_args(values)
        spec = reward_spec(after, str(model))
        spec = msgspec.structs.replace(spec, boot_deadline_s=PATIENCE * spec.boot_deadline_s)
        return Rewards(spec, PATIENCE * after.flat.reward_timeout_s)
    if plan.what == "filter":
        return ShadowFilter(after.flat.dynamic_sampling_filter_path, JUDGE_S, values, str(model))
    from miles_async.console.shadow.losses import Losses

    run, shadow = (backend_config(one, place_of(before)) for one in settings)
    flat, saves = before.flat, Path(before.ckpt.save)
    return Losses(run, shadow, ranks=flat.train_ranks, library=flat.train_backend, saves=saves, own=frozenset(plan.own))
