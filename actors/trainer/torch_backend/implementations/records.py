"""The ways to run a model on the torch backend, and which one a directory gets.

own            a family with code of ours: the fast way
transformers   any causal class of the installed transformers, after a proof
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from actors.runtime.run import Refused
from actors.trainer.torch_backend.implementations.generic import TRANSFORMERS
from actors.trainer.torch_backend.implementations.kind import Implementation, first_line
from actors.trainer.torch_backend.implementations.own import OWN, OWN_SIGHTED

_RECORDS = (OWN, OWN_SIGHTED, TRANSFORMERS)
"""In the order of preference."""
AUTO = "auto"


def choose(path: str, config: Any, name: str = AUTO) -> Implementation:
    """The first way of this name that can train the model. Raises Refused, which says why each cannot."""
    why: list[str] = []
    for kind in _RECORDS:
        if name in (AUTO, kind.name):
            if not (lacks := kind.lacks(config)):
                return kind
            why = [*(w for w in why if w != lacks), lacks]
    last = why[-1] if name == AUTO else why[0]
    other = "" if name == AUTO else " Leave --model-implementation out to let it be chosen."
    raise Refused(f"{path}: {last}. Give a causal language model.{other}")


def read_config(path: str, *, trusted: bool) -> Any:
    """transformers' config of a model directory; code that lies in it is run only where it is trusted. Raises Refused."""
    raw = _raw(path)
    known, family = raw.get("model_type") in CONFIG_MAPPING, raw.get("model_type")
    if raw.get("auto_map") and not known and not trusted:
        raise Refused(f"{path}: model_type {family!r} is code in that directory (auto_map), run only with --trust-remote-code.")
    if family is not None and not known and not raw.get("auto_map"):
        near = get_close_matches(str(family), CAUSAL, 1, 0.0)[0]
        raise Refused(
            f"{path}: model_type {family!r} is unknown to transformers {transformers.__version__}; the nearest it has is {near!r} "
            f"({CAUSAL[near]}). Install a release that has it."
        )
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trusted and not known)
    except (OSError, ValueError) as error:
        raise Refused(f"{path} is not a model directory: {first_line(error)} Give hf_checkpoint a local directory.") from error


def _raw(path: str) -> dict[str, Any]:
    try:
        found = json.loads((Path(path) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}  # transformers says what is wrong with it
    return found if isinstance(found, dict) else {}
