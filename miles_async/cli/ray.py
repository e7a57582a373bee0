"""Start a run as a job on a Ray cluster, from a host that need not be one of its nodes.

miles-async ray submit CONFIG [--ray-address http://HEAD:8265] [-- FLAGS OF train]

The job is `miles-async train CONFIG --launcher ray FLAGS` on the cluster, in the folder --working-dir, where CONFIG, model and data
are found: a file system that all nodes see. What it prints is shown until it ends; Ctrl-C ends only that.
"""

import argparse
import asyncio
import logging
import os
import shlex
import time
from pathlib import Path
from typing import Any

from miles_async.settings.catalog import catalog
from miles_async.settings.errors import SettingsError

PASSWORD, PASSWORD_FILE = "MILES_ASYNC_BUS_PASSWORD", "MILES_ASYNC_BUS_PASSWORD_FILE"
NO_AGENT, AGENT_S = "No available agent", 180.0  # what a head says until it can take a job, and how long that may take
ENDED = {"SUCCEEDED": 0, "STOPPED": 130}


def parse(words: list[str]) -> argparse.Namespace:
    """What stands behind -- is train's: `flags`."""
    from miles_async.cli.app import OneLineParser

    raw = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="miles-async ray", description=__doc__, allow_abbrev=False, formatter_class=raw)
    parser.add_argument("action", choices=("submit",), help="What to do.")
    parser.add_argument("config", help="Settings file, as the cluster sees it.")
    parser.add_argument(
        "--ray-address", default="auto", help="http://HEAD:8265 (the dashboard), HOST:PORT of the head, or auto (this host's)."
    )
    parser.add_argument("--working-dir", default="", help="Folder of the job on the cluster. Default: this one.")
    parser.add_argument("--python", default="python", help="Python of the job on the cluster (default: %(default)s).")
    parser.add_argument("--no-wait", action="store_true", help="Print the job's id and return.")
    end = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:end], argparse.Namespace(flags=words[end + 1 :]))


def run(args: argparse.Namespace) -> int:
    """The run's own end: 0, or 1 with what it printed last."""
    if os.environ.get(PASSWORD):
        why = f"{PASSWORD} would be readable to all users of the cluster, as part of the job"
        raise SettingsError(why, remedy=f"Put it into a file of yours on all nodes, and its path into {PASSWORD_FILE}.")
    _check_flags(args.flags)
    client = connected(args.ray_address)
    known = {PASSWORD_FILE: os.environ[PASSWORD_FILE]} if os.environ.get(PASSWORD_FILE) else {}
    job = submitted(client, entrypoint(args), known)
    print(f"job {job}; end it with miles-async stop, which drains it, not with ray job stop", flush=True)
    return 0 if args.no_wait else asyncio.run(_follow(client, job))


def submitted(client: Any, words: str, variables: dict[str, str], within_s: float = AGENT_S) -> str:
    """The id of a new job. A head that has just started takes none until its agent is there; SettingsError for other refusals,
    and when that takes longer than `within_s`."""
    end, told = time.monotonic() + within_s, False
    while True:
        try:
            return str(client.submit_job(entrypoint=words, runtime_env={"env_vars": variables}))
        except RuntimeError as error:
            if NO_AGENT not in str(error) or time.monotonic() > end:
                raise SettingsError(f"the cluster refused the job: {' '.join(str(error).split())[:300]}") from None
        if not told:
            print(f"the head takes no jobs yet; trying for {within_s:g} s, Ctrl-C ends it", flush=True)
            told = True
        time.sleep(0.5)


def _check_flags(words: list[str]) -> None:
    """A job's command line is shown to everybody who sees the cluster."""
    secret = {f"--{name.replace('_', '-')}" for name, spec in catalog().items() if spec.secret}
    for flag in (word.partition("=")[0].replace("_", "-") for word in words):
        if flag in secret and flag != "--bus-url":  # its password was taken out already
            why = f"{flag} would be readable to all users of the cluster, as part of the job"
            raise SettingsError(why, remedy="Put it into CONFIG, or into the environment of the head.")


def entrypoint(args: argparse.Namespace) -> str:
    """The job's command line, as the cluster's shell takes it."""
    words = [args.python, "-m", "miles_async", "train", args.config, "--launcher", "ray", "--console", "plain", *args.flags]
    return f"cd {shlex.quote(args.working_dir or str(Path.cwd()))} && exec {shlex.join(words)}"


def connected(address: str) -> Any:
    """A client of the cluster's jobs. SettingsError, one line, when there is none or it is of another Ray."""
    try:
        import ray
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient
    except ModuleNotFoundError:
        raise SettingsError("ray is not installed in this Python", remedy="pip install 'miles-async[ray]'.") from None
    from miles_async.launcher.ray_cluster import check_address, refused, token_refused

    check_address(address)
    try:
        client = JobSubmissionClient(address)
        theirs = str(getattr(client, "_server_ray_version", None) or ray.__version__)
    except AuthenticationError:
        raise token_refused(address) from None
    except (RuntimeError, ConnectionError, ValueError, OSError) as error:
        raise refused(address, f"takes no jobs: {' '.join(str(error).split())[:300]}") from None
    if theirs != ray.__version__:
        raise refused(address, f"runs Ray {theirs}, this host has {ray.__version__}")
    return client


async def _follow(client: Any, job: str) -> int:
    logging.getLogger(type(client).__module__).setLevel(logging.ERROR)  # it tells of its connections
    try:
        async for lines in client.tail_job_logs(job):
            print(lines, end="", flush=True)
        return ENDED.get(str(client.get_job_status(job).value), 1)
    except (RuntimeError, OSError) as error:  # also those of requests
        text = " ".join(str(error).split())[:200]
        raise SettingsError(
            f"the dashboard is lost: {text}", remedy=f"The job goes on if its nodes do: ray job logs {job} --follow."
        ) from None
