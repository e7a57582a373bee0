"""Write what a run has trained as a plain Hugging Face directory, which transformers, SGLang, vLLM and the Hub take as it is.

miles-async export RUN MODEL [--step N]
miles-async export RUN MODEL --base DIR      # a run with LoRA whose base lies elsewhere by now
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `export`."""
    parser.add_argument("run", metavar="RUN", help="name of a run, or a directory with a model or adapters")
    parser.add_argument("target", metavar="MODEL", type=Path, help="directory to write; new or empty")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of step N (default: the last)")
    parser.add_argument("--base", default="", metavar="DIR", help="of LoRA: the base (default: as the adapters name it)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs lie (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """0 when MODEL is complete."""
    from miles_async.serving.chosen import choose
    from miles_async.serving.export import export

    chosen = choose(args.run, args.runs_dir, args.step, adapters=True)
    export(chosen.directory, args.target, base=args.base)
    print(f"complete: {args.target}, from {chosen.directory}")
    return 0
