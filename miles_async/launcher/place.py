"""Where a run lies on this host, and how its actors reach the bus from there (pure)."""

from __future__ import annotations

import hashlib

import msgspec

from bus import BusConfig
from miles_async.settings.run import RunSettings


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run lies on this host: resolved directories, and facts read from the model directory."""

    run_dir: str
    model_dir: str
    weights_dir: str
    blob_dir: str
    stop_token_ids: tuple[int, ...]
    num_rollout: int
    fingerprint: str
    reference_dir: str = ""
    start_dir: str = ""  # of another run's weights, with --finetune
    critic_dir: str = ""  # empty: the critic starts from the policy's model
    teacher_dir: str = ""
    router_url: str = ""  # empty: no router
    router_port: int = 0  # of a router of ours; 0 when it is somebody else's
    engine_token: str = ""  # what engines and router ask of their callers

    @property
    def weights_token(self) -> str:
        """What hosts ask of each other for weights: another one, as it crosses the network."""
        return hashlib.blake2b(b"weights", key=self.engine_token.encode()[:64], digest_size=16).hexdigest()


def bus_config(settings: RunSettings, url: str, place: Place) -> BusConfig:
    """How this run's actors reach the bus. Large bodies go to files only where all actors share the directory."""
    return BusConfig(
        url=url,
        run=settings.launch.name,
        blob_dir=place.blob_dir if settings.bus.bus_url is None else "",
        lease_s=settings.bus.lease_s,
        deadline_s=settings.bus.bus_deadline_s,
        max_deliveries=settings.bus.max_deliveries,
        inline_limit_bytes=settings.bus.inline_limit_bytes,
        stream_max_bytes=settings.bus.stream_max_bytes,
    )
