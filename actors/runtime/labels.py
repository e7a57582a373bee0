"""(pure) Labels that are objects: on their way they are JSON, and functions of the user's get them back as the row has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

LABEL_IS_JSON = "label_is_json"
"""In the metadata of a sample whose label is an object."""


def label_of(text: Any, metadata: Mapping[str, Any]) -> Any:
    """A sample's label as its row has it: an object travels as JSON, and its metadata says so. What is an object already stays."""
    if not isinstance(text, str) or metadata.get(LABEL_IS_JSON) is not True:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # metadata of the data's own that says so
        return text
