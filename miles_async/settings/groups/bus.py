"""BUS: the Redis that carries every message of the run."""

from typing import Annotated

from miles_async.settings.doc import Group, doc


class BusSettings(Group, frozen=True, kw_only=True):
    """The Redis of the run and its bounds."""

    bus_url: Annotated[
        str | None,
        doc(
            "redis://, rediss:// or unix:// address of your Redis, or redis+sentinel:// with its sentinels (docs/cluster.md); its "
            "password better in the variable "
            "MILES_ASYNC_BUS_PASSWORD, or in the file that MILES_ASYNC_BUS_PASSWORD_FILE names. Unset: the run starts a private "
            "server.",
            secret=True,
            ours=True,
        ),
    ] = None
    weights_address: Annotated[
        str | None,
        doc(
            "HOST or HOST:PORT at which workers on other hosts fetch new weights from this one. Unset: this host's address on "
            "its connection to the bus, at a free port.",
            ours=True,
        ),
    ] = None
    lease_s: Annotated[
        float,
        doc("A reader that does not renew its lease for so long loses the entry to a peer.", unit="seconds", gt=0, ours=True),
    ] = 6.0
    bus_deadline_s: Annotated[
        float,
        doc(
            "A Redis that does not answer, or refuses writes, for so long ends the actor that waits for it.",
            unit="seconds",
            gt=0,
            ours=True,
        ),
    ] = 60.0
    max_deliveries: Annotated[
        int, doc("Deliveries of one entry before it becomes a dead letter.", unit="deliveries", ge=1, ours=True)
    ] = 5
    stream_max_bytes: Annotated[
        int, doc("Most unacknowledged bytes on one stream; then its writers wait. 0: no bound.", unit="bytes", ge=0, ours=True)
    ] = 2 << 30
    inline_limit_bytes: Annotated[
        int,
        doc(
            "Message bodies above this size travel as blobs; those of a commit do above 16 KiB already.",
            unit="bytes",
            ge=256,
            le=16 << 20,
            ours=True,
        ),
    ] = 128 << 10
