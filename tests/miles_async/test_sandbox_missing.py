"""A run with code in a sandbox, on a kernel that lacks a part of it: refused in one line, or told where it is said to go on."""

from __future__ import annotations

from typing import Any

import pytest

from actors.runtime.confine import NO_LANDLOCK
from miles_async.launcher import preflight
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from

NO_FILTER = "a filter of system calls for all threads (seccomp)"
BASE = {"hf_checkpoint": "m", "prompt_data": "p.jsonl", "num_rollout": 1}


def settings(**own: Any) -> Any:
    return settings_from(**BASE, **own)


@pytest.mark.parametrize(
    ("own", "missing", "refused"),
    [
        ({"rm_type": "math"}, (NO_FILTER, NO_LANDLOCK), False),
        ({"rm_type": "unit_tests"}, (NO_FILTER,), True),
        ({"rm_type": "boxed_unit_tests"}, (NO_FILTER,), True),
        ({"rm_type": "unit_tests"}, (NO_LANDLOCK,), False),  # its namespaces may do in place of it; it says so itself
        ({"custom_rm_path": "a.b", "custom_rm_sandbox": True}, (NO_LANDLOCK,), True),
        ({"custom_rm_path": "a.b", "custom_rm_sandbox": True}, (), False),
    ],
)
def test_what_the_kernel_lacks_is_refused_where_code_needs_it(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], missing: tuple[str, ...], refused: bool
) -> None:
    monkeypatch.setattr(preflight, "lacking", lambda: missing)
    if not refused:
        assert preflight.sandbox_missing(settings(**own)) == []
        return
    with pytest.raises(SettingsError, match="--allow-weak-sandbox") as told:
        preflight.sandbox_missing(settings(**own))
    assert missing[0] in str(told.value) and "\n" not in str(told.value).strip()
    [note] = preflight.sandbox_missing(settings(**own, allow_weak_sandbox=True))
    assert missing[0] in note and "weak" in note
