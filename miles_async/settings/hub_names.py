"""Names of models and data sets on the Hugging Face Hub, as settings hold them."""

import os
import re
from typing import NamedTuple

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_MODEL = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[\w./-]+))?")
_DATA = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(?::(?:(?P<config>[\w.-]+)/)?(?P<split>[\w.-]+))?")
_AROUND = re.compile(r"^\d+(\.\d+)?\*|@\[-?\d*:-?\d*\]$")  # a weight, a slice
_FILES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".safetensors", ".toml", ".gguf", ".txt")
_SNAPSHOT = re.compile(r"(models|datasets)--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})(?=/|$|\W)")
"""A place in the Hub's cache, as huggingface_hub lays it out."""


class HubName(NamedTuple):
    """OWNER/NAME of a model, `@REVISION`; or of a data set, `:SPLIT` or `:CONFIG/SPLIT`. Empty: not said."""

    kind: str  # "model" or "dataset", huggingface_hub's words
    repo: str
    revision: str = ""
    config: str = ""
    split: str = ""

    @property
    def key(self) -> str:
        """By which its revision is kept with the run."""
        return f"{self.kind}s/{self.repo}"

    @property
    def download(self) -> str:
        """The command that brings it into the cache."""
        kind = "" if self.kind == "model" else " --repo-type dataset"
        return f"hf download {self.repo}{kind}{f' --revision {self.revision}' if self.revision else ''}"


def model_name(text: str) -> HubName | None:
    """The model on the Hub that a text names; None: a path. What lies here under that name wins."""
    found = _MODEL.fullmatch(text)
    if found is None or os.path.exists(text) or text.endswith(_FILES):
        return None
    return HubName("model", found["repo"], found["revision"] or "")


def data_name(text: str) -> HubName | None:
    """The data set on the Hub that a source names; None: a path, or a source of another kind."""
    found = _DATA.fullmatch(text)
    if found is None or os.path.exists(text) or os.path.exists(found["repo"]) or found["repo"].endswith(_FILES):
        return None
    return HubName("dataset", found["repo"], "", found["config"] or "", found["split"] or "")


def names_data(text: str) -> bool:
    """Whether one of the sources of a --prompt-data is a data set on the Hub."""
    parts = [] if os.path.exists(text) else text.split(",")
    return any(data_name(_AROUND.sub("", part.strip())) for part in parts)


def revisions_in(*texts: str | None) -> dict[str, str]:
    """Repositories whose snapshots these paths lie in, each with its revision."""
    found = (match for text in texts if text for match in _SNAPSHOT.finditer(text))
    return {f"{kind}/{owner}/{name}": revision for kind, owner, name, revision in (m.groups() for m in found)}
