"""LoRA's settings against the model directory and the adapter to start from, by their headers, before anything loads."""

from pathlib import Path

from actors.runtime.run import Refused
from actors.trainer.lora.peft import Lora, check_adapter, chosen, model_shapes, shapes_of
from miles_async.settings.errors import SettingsError
from miles_async.settings.flat import Flat
from miles_async.settings.run import RunSettings


def adapted(s: Flat, directory: Path) -> int:
    """Elements of the adapters of the model in `directory`. Refused where they do not fit it."""
    lora, shapes = Lora.of(s), model_shapes(directory)
    wanted = shapes_of({name: shapes[f"{name}.weight"] for name in chosen(shapes, lora)}, lora.rank)
    if lora.path:
        check_adapter(Path(lora.path), lora, wanted)
    return sum(rows * columns for rows, columns in wanted.values())


def check_lora(settings: RunSettings) -> None:
    """SettingsError where targets match nothing of the model, or the adapter to start from is another's. Of a model that is made or
    fetched at the start, the trainer says so."""
    s = settings.flat
    if not s.lora_rank or settings.model.builtin_name is not None:
        return
    try:
        adapted(s, Path(settings.model.hf_checkpoint))
    except Refused as error:
        raise SettingsError(str(error)) from None
