"""Train recorded batches again from a checkpoint and compare: on the CPU backend loss, gradient norm and weights must be
equal bit for bit. Records are written by `train --save-debug-rollout-data PATH_{rollout_id}`."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `replay`."""
    parser.add_argument("--run", required=True, help="Name of the run whose steps are trained again.")
    parser.add_argument("--runs-dir", default="runs", help="Folder that holds the runs. Default: runs.")
    parser.add_argument("--from", dest="first", type=int, required=True, help="First step, counted from 1.")
    parser.add_argument("--to", dest="last", type=int, required=True, help="Last step, inclusive.")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when every step is equal, 1 when one differs."""
    from miles_async.settings.errors import SettingsError, refusal
    from miles_async.settings.load import load

    config = Path(args.runs_dir) / args.run / "settings.toml"
    if not config.exists():
        raise SettingsError("no such run", field="run", value=args.run, remedy=f"{config} is missing; see --runs-dir.")
    settings = load(config, ()).settings
    pattern = settings.ckpt.save_debug_rollout_data
    if not pattern:
        raise refusal("run", args.run, "this run recorded no batches", "Train with --save-debug-rollout-data.")
    if settings.perf.actor_num_gpus_per_node > 1:
        why = "replay trains in one process, whose sums round otherwise than those of several ranks"
        remedy = "Record a run with one rank."
        raise refusal("actor_num_gpus_per_node", settings.perf.actor_num_gpus_per_node, why, remedy)
    if not 1 <= args.first <= args.last:
        raise SettingsError("steps out of order", field="from", value=args.first, remedy="Give 1 <= --from <= --to.")

    from actors.trainer.backends import open_backend
    from actors.trainer.replay import replay
    from miles_async.launcher.plan import backend_config
    from miles_async.launcher.prepare import place_of

    backend = backend_config(settings, place_of(settings))
    different = 0
    print(f"{'step':>6}  {'loss':>24}  {'grad norm':>24}  weights")
    steps = replay(
        lambda: open_backend(settings.flat.train_backend),
        backend,
        save=Path(settings.ckpt.save),
        pattern=pattern,
        first=args.first,
        last=args.last,
    )
    for step in steps:
        different += not step.equal
        verdict = "equal" if step.equal else f"DIFFERENT: {step.weights_hash[0][:12]} then, {step.weights_hash[1][:12]} now"
        print(f"{step.step:>6}  {step.loss[1]:>24.17g}  {step.grad_norm[1]:>24.17g}  {verdict}")
    print("all steps equal bit for bit" if not different else f"{different} steps differ")
    return 1 if different else 0
