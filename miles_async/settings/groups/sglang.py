"""SGLANG: the inference engines and the generation workers that drive them."""

from typing import Annotated, Literal

import msgspec

from miles_async.settings.doc import Group, doc


class SglangSettings(Group, frozen=True, kw_only=True):
    """Engines and their workers."""

    engine: Annotated[
        Literal["embedded", "sglang", "external"],
        doc(
            "embedded: the small server of this package; sglang: SGLang servers started by us; external: running ones."
        ),
    ] = "embedded"
    rollout_external_engine_addrs: Annotated[
        tuple[str, ...], doc("Addresses of running engines, host:port, space separated; for engine external.")
    ] = ()
    num_generation_workers: Annotated[
        int,
        doc(
            "Generation workers, one engine each, started with the run; more may join at any time.",
            unit="processes",
            derived="one per external engine, else 2",
            ge=0,
        ),
    ]
    sglang_server_concurrency: Annotated[
        int, doc("Most samples in generation on one engine.", unit="samples", live=True, ge=1)
    ] = 512
    pause_generation_mode: Annotated[
        Literal["retract", "in_place", "abort"],
        doc(
            "Running samples during a weight update: retract recomputes their cache, in_place keeps it, abort parks "
            "them.",
            live=True,
        ),
    ] = "retract"
    sglang_request_deadline_s: Annotated[
        float, doc("Longest time for one sample on one engine.", unit="seconds", gt=0)
    ] = 3600.0
    engine_token_deadline_s: Annotated[
        float, doc("An engine without a new token for so long counts as stalled.", unit="seconds", gt=0)
    ] = 60.0
    engine_boot_deadline_s: Annotated[
        float, doc("Longest time for an engine to become ready.", unit="seconds", gt=0)
    ] = 600.0
    sglang_router_ip: Annotated[str | None, doc("Host of a running sglang-router; engines register there.")] = None
    sglang_router_port: Annotated[Annotated[int, msgspec.Meta(ge=1, le=65535)] | None, doc("Port of that router.")] = (
        None
    )
