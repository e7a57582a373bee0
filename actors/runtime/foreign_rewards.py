"""Reward functions with the signatures of TRL and verl, called as those libraries call them (pure).

TRL's takes lists, by keyword: `f(completions, prompts, **columns) -> list of numbers`. verl's takes one answer:
`f(data_source, solution_str, ground_truth, extra_info=None) -> number or table with "score"`. They are told by the names of their
parameters, as Miles' are by `args`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

Row = Mapping[str, Any]


def foreign(hook: Any, values: Mapping[str, Any]) -> Any:
    """The hook in our signature, for one sample's table or a list of them; None where it is of neither library. `values`: the run's
    settings by name."""
    try:
        parameters = inspect.signature(hook).parameters
    except (TypeError, ValueError):
        return None
    call = _trl if "completions" in parameters else _verl if {"solution_str", "ground_truth"} <= parameters.keys() else None
    if call is None:
        return None
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]

    def fitting(given: Mapping[str, Any]) -> dict[str, Any]:
        if missing := [name for name in needed if name not in given]:
            known = ", ".join(sorted(given))
            raise TypeError(f"it asks for {', '.join(missing)}, and is given {known} (--label-key, --metadata-key name columns)")
        return {name: value for name, value in given.items() if takes_all or name in parameters}

    def one_or_all(sample: Any) -> tuple[list[Row], bool]:
        return (list(sample), True) if isinstance(sample, list) else ([sample], False)

    def plain(sample: Any) -> Any:
        rows, several = one_or_all(sample)
        rewards = call.called(hook, rows, values, fitting)
        return rewards if several else rewards[0]

    async def waited(sample: Any) -> Any:
        rows, several = one_or_all(sample)
        rewards = [call.read(found, values) for found in [await one for one in call.asked(hook, rows, values, fitting)]]
        rewards = call.joined(rewards, len(rows))
        return rewards if several else rewards[0]

    return waited if inspect.iscoroutinefunction(hook) else plain


class _Trl:
    """One call for all rows."""

    def asked(self, hook: Any, rows: Sequence[Row], values: Mapping[str, Any], fitting: Any) -> list[Any]:
        chat = bool(values.get("apply_chat_template"))
        texts = [row["response"] for row in rows]
        columns = [_columns(row, values) for row in rows]
        named = {name: [one.get(name) for one in columns] for name in dict.fromkeys(key for one in columns for key in one)}
        own = {
            "prompts": [row["prompt"] for row in rows],
            "completions": [[{"role": "assistant", "content": text}] for text in texts] if chat else texts,
        }
        return [hook(**fitting(named | own))]

    def read(self, found: Any, values: Mapping[str, Any]) -> list[Any]:
        rewards = found.tolist() if hasattr(found, "tolist") else found
        if not isinstance(rewards, list | tuple):
            raise TypeError(f"it gave {type(found).__name__}, where a list of numbers is expected, one for each completion")
        return [nan if one is None else one for one in rewards]  # None: TRL's word for no reward

    def joined(self, found: list[list[Any]], n: int) -> list[Any]:
        if len(found[0]) != n:
            raise ValueError(f"it gave {len(found[0])} rewards for {n} completions")
        return found[0]

    def called(self, hook: Any, rows: Sequence[Row], values: Mapping[str, Any], fitting: Any) -> list[Any]:
        return self.joined([self.read(one, values) for one in self.asked(hook, rows, values, fitting)], len(rows))


class _Verl:
    """A call for each row."""

    def asked(self, hook: Any, rows: Sequence[Row], values: Mapping[str, Any], fitting: Any) -> list[Any]:
        return [
            hook(
                **fitting(
                    {
                        "data_source": row["metadata"].get("data_source", values.get("prompt_data")),
                        "solution_str": row["response"],
                        "ground_truth": row["label"],
                        "extra_info": dict(row["metadata"]),
                    }
                )
            )
            for row in rows
        ]

    def read(self, found: Any, values: Mapping[str, Any]) -> Any:
        return found["score"] if isinstance(found, dict) and "score" in found and not values.get("reward_key") else found

    def joined(self, found: list[Any], n: int) -> list[Any]:
        return found

    def called(self, hook: Any, rows: Sequence[Row], values: Mapping[str, Any], fitting: Any) -> list[Any]:
        return [self.read(one, values) for one in self.asked(hook, rows, values, fitting)]


_trl, _verl = _Trl(), _Verl()


def _columns(row: Row, values: Mapping[str, Any]) -> dict[str, Any]:
    """The row's columns that a reward is shown: those of its metadata, and the label under its column's name."""
    key = values.get("label_key")
    label = {key: row["label"], str(key).rpartition(".")[2]: row["label"]} if key else {}
    return dict(row["metadata"]) | label
