"""The decoder of a model directory: our own for the families that it has, else transformers' class."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from actors.generation.engines.embedded.classes import ClassDecoder
from actors.generation.engines.embedded.config import ModelRefused, read_config
from actors.generation.engines.embedded.model import Decoder
from actors.generation.engines.embedded.pictures import Eyes

Decodes = Decoder | ClassDecoder


def open_decoder(directory: Path, context: int | None, *, repeatable: bool) -> Decodes:
    """Without weights yet. `context`: tokens of a request, at most the model's own. Raises ModelRefused."""
    try:
        config = read_config(directory)
    except ModelRefused as error:
        if not error.unknown:
            raise
        return ClassDecoder(directory, context, repeatable=repeatable)
    if context is not None:
        config = dataclasses.replace(config, context=min(config.context, context))
    return Decoder(config, Eyes(directory) if config.axes else None, repeatable=repeatable)
