"""Start-up settings of the Megatron backend alone; importable without torch and megatron."""

from __future__ import annotations

import msgspec


class MegatronConfig(msgspec.Struct, frozen=True, kw_only=True, tag="megatron"):
    """`BackendConfig.own` of it. What has the name of a setting is that setting, filled in by the launcher."""
