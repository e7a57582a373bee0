"""(pure) Rules between settings that say what prompts are: chat templates, pictures."""

import json
from typing import Any

from miles_async.settings.errors import parsed, refusal
from miles_async.settings.flat import Flat


def the_template_has_what_it_takes(s: Flat) -> None:
    for name in ("apply_chat_template_kwargs", "chat_template_path", "tool_key", "multimodal_keys"):
        if s.values[name] is not None and not s.apply_chat_template:
            raise s.refusal(name, "has no effect while apply_chat_template is off", "Add --apply-chat-template.")
    try:
        found = parsed(json.loads, s.apply_chat_template_kwargs or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise s.refusal("apply_chat_template_kwargs", "not a JSON object", """Write '{"enable_thinking": false}'.""")


def pictures_go_where_they_are_carried(s: Flat) -> None:
    if s.multimodal_keys is None:
        return
    without: tuple[tuple[str, Any, bool], ...] = (
        ("train_backend", s.train_backend, s.on_megatron),
        ("loss_type", s.loss_type, s.supervised),
        ("custom_agent_function_path", s.custom_agent_function_path, s.custom_agent_function_path is not None),
        ("tools", s.tools, bool(s.tools)),
        ("opd_teacher_urls", s.opd_teacher_urls, s.distills and bool(s.opd_teacher_urls)),
    )
    for name, value, given in without:
        if given:
            raise refusal(name, value, "prompts with pictures (multimodal_keys) are not carried by it", "Leave one of them out.")


RULES = (the_template_has_what_it_takes, pictures_go_where_they_are_carried)
