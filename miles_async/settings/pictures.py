"""(pure) Where prompts with pictures cannot go."""

from typing import Any

from miles_async.settings.errors import refusal
from miles_async.settings.flat import Flat


def pictures_go_where_they_are_carried(s: Flat) -> None:
    if s.multimodal_keys is None:
        return
    without: tuple[tuple[str, Any, bool], ...] = (
        ("train_backend", s.train_backend, s.train_backend == "megatron"),
        ("loss_type", s.loss_type, s.supervised),
        ("custom_agent_function_path", s.custom_agent_function_path, s.custom_agent_function_path is not None),
        ("tools", s.tools, bool(s.tools)),
        ("opd_teacher_urls", s.opd_teacher_urls, s.distills and bool(s.opd_teacher_urls)),
    )
    for name, value, given in without:
        if given:
            raise refusal(name, value, "prompts with pictures (multimodal_keys) are not carried by it", "Leave one of them out.")
