"""Start-up settings of the ways that weights take."""

from __future__ import annotations

import msgspec


class CourierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How versions travel. `transport`: disk, ipc or nccl. `deadline_s`: longest wait for engines, and for a broadcast."""

    transport: str = "disk"
    buffer_bytes: int = 512 << 20
    deadline_s: float = 60.0
    check_equal: bool = False


__all__ = ("CourierSpec",)
