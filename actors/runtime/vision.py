"""Pictures of prompts: read from a data set, checked, laid out among a prompt's tokens, made into what a vision tower reads.

Families: qwen2_vl, qwen2_5_vl. Always true: launcher, sampler, embedded engine and trainer make the same numbers of the same bytes:
transformers' PIL processor with the model's own preprocessor_config.json, as far as SGLang goes by that.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from actors.runtime.refusals import Refused
from actors.runtime.rows import BadData
from bus.messages.samples import Picture

if TYPE_CHECKING:  # the launcher reads prompts, and loads no numpy
    import numpy as np

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
MARK = "<image>"
MOST_BYTES, MOST_PIXELS = 20 << 20, 64 << 20
MOST_PICTURES = 64  # of one prompt
SHORTEST = 64  # characters of a picture in base64
PROCESSOR = "preprocessor_config.json"
SGLANG_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
"""Points of a picture that SGLang (0.5.12) shows a qwen2_vl, at least and at most, whatever its own file says; so all do."""


class BadImage(BadData):
    """A row's picture that cannot be shown; the row is left out."""


class Shown(msgspec.Struct, frozen=True):
    """A picture of a data set: what the row has (path, data URL, base64, bytes, or a table with one of these), the folder of its
    file, and where it lies in the prompt (its blob comes later)."""

    source: Any
    folder: str
    place: Picture


def place(messages: Sequence[Mapping[str, Any]], column: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """Chat messages with a part of type image wherever a text says <image> or a part is a picture, and the pictures in their order:
    a part's own, else the column's next (a list, or one). Raises BadImage where these are not as many as the places."""
    given = list(column) if isinstance(column, list | tuple) else [] if column is None else [column]
    waiting, found, rendered, places = iter(given), [], [], 0
    missing = object()
    for message in messages:
        parts: list[dict[str, Any]] = []
        for part in _parts(message.get("content")):
            own: Any = part
            if part.get("type") == "image":
                places += 1
                own = next((part[k] for k in ("image", "url", "path", "image_url") if part.get(k)), None) or next(waiting, missing)
                found.append(own)
            parts.append({"type": "image"} if own is not part else part)
        pictured = any(part["type"] == "image" for part in parts)
        rendered.append({**message, "content": parts} if pictured else dict(message))
    left = sum(1 for _ in waiting)
    if left or missing in found:
        given_n = places + left - found.count(missing)
        raise BadImage(f"{places} places for pictures ({MARK}, or a part of type image) and {given_n} pictures")
    if len(found) > MOST_PICTURES:
        raise BadImage(f"{len(found)} pictures, and a prompt has at most {MOST_PICTURES}")
    return rendered, found


def _parts(content: Any) -> Iterator[dict[str, Any]]:
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or ():
        if not isinstance(part, dict) or part.get("type") not in ("text", "image", "image_url"):
            raise BadImage(f"a message holds {str(part)[:60]!r}: parts are of type text or image")
        if part["type"] != "text":
            yield {**part, "type": "image"}
            continue
        for at, text in enumerate(str(part.get("text", "")).split(MARK)):
            if at:
                yield {"type": "image"}
            if text:
                yield {"type": "text", "text": text}


def read(source: Any, folder: str = "") -> bytes:
    """A picture's bytes, as they are in the data. Raises BadImage."""
    with _opened(source, folder) as stream:
        return stream.read(MOST_BYTES + 1)


def _opened(source: Any, folder: str) -> BinaryIO:
    if isinstance(source, Mapping):  # as `datasets` saves one, or as the OpenAI interface has it
        source = source.get("bytes") or source.get("path") or source.get("url")
    if isinstance(source, str):
        text = source.strip()
        if text.startswith(("http://", "https://")):
            raise BadImage(f"a picture is the address {text[:60]!r}", "Download it: runs read no network.")
        inline = text.startswith("data:")
        try:
            if not inline:
                return _file(text.removeprefix("file://"), folder)
        except OSError as error:
            if len(text) < SHORTEST or "." in text:  # no base64 of a picture
                raise BadImage(f"picture {text[:80]!r} cannot be read: {error.strerror}") from error
        try:
            source = base64.b64decode(text.partition(",")[2] if inline else text, validate=True)
        except ValueError as error:
            raise BadImage(f"picture {text[:40]!r} is not base64: {error}") from error
    if not isinstance(source, bytes | bytearray | memoryview):
        raise BadImage(f"a picture is a {type(source).__name__}, not a path, data URL, base64 text or bytes")
    if len(source) > MOST_BYTES:
        raise BadImage(f"a picture has {len(source):,} bytes, at most {MOST_BYTES:,} are taken")
    return io.BytesIO(source)


def _file(name: str, folder: str) -> BinaryIO:
    beside = Path(folder) / name
    path = beside if beside.exists() else Path(name)
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise BadImage(f"picture {name[:80]!r} is no file")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise BadImage(f"picture {name[:80]!r} has {size:,} bytes, at most {MOST_BYTES:,} are taken")
    return path.open("rb")


class Vision:
    """What the model in a directory does with pictures. Raises Refused where Pillow or the processor's file is missing."""

    def __init__(self, directory: str) -> None:
        config = config_of(directory)
        try:
            import PIL.Image  # noqa: F401
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            own: dict[str, Any] = {"size": SGLANG_SIZE} if config["model_type"] == "qwen2_vl" else {}
            self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(directory, **own)
        except ImportError as error:
            raise Refused(f"pictures need Pillow: {error}. pip install 'miles-async[vision]'.") from error
        except (OSError, ValueError) as error:
            raise Refused(f"{directory} has no usable {PROCESSOR}: {str(error).splitlines()[0]}") from error
        self.token = int(config["image_token_id"])
        self.merge = int(self._processor.merge_size)

    @property
    def patch(self) -> int:
        """Numbers of one patch."""
        p = self._processor
        return int(3 * p.temporal_patch_size * p.patch_size**2)

    def grid(self, source: Any, folder: str = "") -> tuple[int, int, int]:
        """(time, height, width) of a picture in patches, by its size alone. Raises BadImage."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        p = self._processor
        with _opened(source, folder) as stream:
            width, height = _image(stream).size
        try:
            size = {"min_pixels": p.size["shortest_edge"], "max_pixels": p.size["longest_edge"]}
            tall, wide = smart_resize(height, width, p.patch_size * p.merge_size, **size)
        except ValueError as error:
            raise BadImage(f"a picture of {width} x {height} points: {error}") from error
        return 1, tall // p.patch_size, wide // p.patch_size

    def pixels(self, data: bytes) -> tuple[np.ndarray, tuple[int, int, int]]:
        """(patches float32 [P, patch], grid in patches) of a picture's bytes. Raises BadImage."""
        import numpy as np

        image = _image(io.BytesIO(data))
        try:
            made = self._processor([image.convert("RGB")], return_tensors="np")
        except Exception as error:  # decoders raise what they like
            raise BadImage(f"a picture cannot be decoded: {type(error).__name__}: {error}") from error
        t, h, w = made["image_grid_thw"][0].tolist()
        return np.ascontiguousarray(made["pixel_values"], dtype=np.float32), (t, h, w)

    def laid_out(self, ids: Sequence[int], grids: Sequence[tuple[int, int, int]]) -> tuple[list[int], list[Picture]]:
        """Token ids with as many placeholders for each picture as it has tokens, and where these lie. Raises BadImage where the ids
        have another number of placeholders than pictures."""
        if (places := list(ids).count(self.token)) != len(grids):
            raise BadImage(f"the rendered prompt has {places} places for {len(grids)} pictures: check the chat template")
        found: list[int] = []
        pictures: list[Picture] = []
        waiting = iter(grids)
        for one in ids:
            if one == self.token:
                grid = next(waiting)
                n = grid[0] * grid[1] * grid[2] // self.merge**2
                pictures.append(Picture(at=len(found), n=n, grid=grid))
                found += [one] * n
            else:
                found.append(one)
        return found, pictures


def _image(stream: BinaryIO) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(stream)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadImage(f"not a picture: {' '.join(str(error).split())[:120]}") from error
    if image.width * image.height > MOST_PIXELS:
        raise BadImage(f"a picture of {image.width} x {image.height} points, at most {MOST_PIXELS:,} are taken")
    return image


def positions(n: int, pictures: Sequence[Picture], merge: int) -> np.ndarray:
    """Rotary positions of a sequence of `n` tokens, int64 [3, n] (time, height, width): text counts on, a picture's tokens have
    those of its grid (merge x merge patches each), and what follows goes on behind the largest."""
    import numpy as np

    found = np.empty((3, n), dtype=np.int64)
    at = now = 0
    for picture in pictures:
        found[:, at : picture.at] = now + np.arange(picture.at - at)
        now += picture.at - at
        t, h, w = picture.grid[0], picture.grid[1] // merge, picture.grid[2] // merge
        at = picture.at + picture.n
        found[:, picture.at : at] = now + np.indices((t, h, w)).reshape(3, -1)
        now += max(t, h, w)
    found[:, at:] = now + np.arange(n - at)
    return found


def vision_of(directory: str) -> Vision | None:
    """None where the model in the directory has no eyes."""
    return Vision(directory) if family_of(directory) else None


def family_of(directory: str) -> str:
    """The model's family where it reads pictures; else empty."""
    found = str(config_of(directory).get("model_type", ""))
    return found if found in FAMILIES else ""


def config_of(directory: str) -> dict[str, Any]:
    """config.json of a model's directory; empty where there is none that can be read."""
    try:
        found = json.loads((Path(directory) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
