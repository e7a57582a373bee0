"""Convert a model on the host, without a GPU: between Hugging Face safetensors and Megatron's torch_dist format, bit by bit, or an
adapter of LoRA and its base into one.

miles-async convert hf-to-megatron MODEL MODEL_torch_dist
miles-async convert megatron-to-hf CHECKPOINTS MODEL [--ckpt-step N] [--hf-checkpoint DIR]
miles-async convert merge BASE ADAPTER MODEL
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `convert`."""
    parser.add_argument("direction", choices=("hf-to-megatron", "megatron-to-hf", "merge"), help="From what to what.")
    parser.add_argument("source", type=Path, help="Model directory, or parent directory of checkpoints; merge: the base.")
    parser.add_argument("adapter", type=Path, nargs="?", help="merge: PEFT directory, such as a checkpoint of a run with LoRA.")
    parser.add_argument("target", type=Path, help="Directory to write; new or empty.")
    parser.add_argument("--ckpt-step", type=int, help="Which checkpoint of SOURCE. Default: the one its tracker file names.")
    parser.add_argument(
        "--hf-checkpoint",
        type=Path,
        help="megatron-to-hf: directory with config.json and tokenizer of the model. Default: those in SOURCE.",
    )


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when TARGET is complete."""
    from actors.runtime.run import Refused
    from miles_async.settings.errors import SettingsError

    if (args.direction == "merge") != (args.adapter is not None):
        raise SettingsError("merge takes BASE ADAPTER MODEL, the others SOURCE TARGET", remedy="Nothing was converted.")
    if args.direction == "merge":
        return _merge(args)
    if not args.source.is_dir():  # before Megatron is loaded, which takes long
        why = f"{args.source}: no such directory (looked in {Path.cwd()})"
        raise SettingsError(why, remedy="Give a model's directory, or the parent of checkpoints. Nothing was converted.")
    try:
        from actors.trainer.megatron_backend import convert
    except ModuleNotFoundError as error:
        raise SettingsError(f"{error.name} is not installed", remedy="pip install 'miles-async[megatron]'.") from None
    try:
        if args.direction == "hf-to-megatron":
            if args.ckpt_step is not None or args.hf_checkpoint is not None:
                raise Refused("--ckpt-step and --hf-checkpoint are of megatron-to-hf; leave them out")
            convert.hf_to_megatron(args.source, args.target, print)
        else:
            convert.megatron_to_hf(args.source, args.target, print, hf=args.hf_checkpoint, step=args.ckpt_step)
    except Refused as error:
        raise SettingsError(str(error), remedy="Nothing was converted.") from error
    print(f"complete: {args.target}")
    return 0


def _merge(args: argparse.Namespace) -> int:
    from actors.runtime.run import Refused
    from actors.trainer.lora.merge import merge
    from miles_async.settings.errors import SettingsError

    if args.ckpt_step is not None or args.hf_checkpoint is not None:
        raise SettingsError("--ckpt-step and --hf-checkpoint are of megatron-to-hf; leave them out", remedy="Nothing was merged.")
    try:
        merge(args.source, args.adapter, args.target)
    except Refused as error:
        raise SettingsError(str(error)) from error
    print(f"complete: {args.target}")
    return 0
