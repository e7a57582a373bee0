"""What of a run goes where on a Ray cluster (pure): actors that need the same host, and what each host must have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from miles_async.settings.run import RunSettings

Resources = dict[str, float]
WITH_TRAINER = ("trainer", "publisher")  # it serves the files that the trainer writes into its host's memory


class Bundle(msgspec.Struct, frozen=True):
    """Actors of one host, and what they take of it."""

    actors: tuple[str, ...]
    resources: Resources


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One placement group. `needed`: the run does not start without it, and what is not needed makes room for it."""

    name: str
    bundles: tuple[Bundle, ...]
    strategy: str
    needed: bool = True
    spread: Mapping[str, tuple[int, ...]] = {}
    """Actors over several bundles, their own first: one ends with any of its parts."""

    def bundles_of(self, actor: str) -> tuple[int, ...]:
        """Where it is, all of it."""
        own = (at for at, bundle in enumerate(self.bundles) if actor in bundle.actors)
        return self.spread.get(actor) or tuple(own)


def units_of(settings: RunSettings, actors: Iterable[tuple[str, str]], *, gpus: bool) -> list[Unit]:
    """The trainer's ranks close together, light rooms and reward workers apart, each engine by itself or on the trainer's nodes.
    `actors`: (name, role); `gpus`: whether the cluster has any."""
    names = list(actors)
    engines = [name for name, role in names if role == "generation"]
    close = [name for name, role in names if role in WITH_TRAINER]
    shares = engines if settings.sglang.colocate else []
    rewards = [name for name, role in names if role == "reward"]
    light = [name for name, _ in names if name not in (*close, *engines, *rewards)]
    apart = [*([tuple(light)] if light else []), *((name,) for name in rewards)]
    units = [_trainer(settings, close, shares, gpus)]
    if apart:
        units.append(Unit(name="rooms", bundles=tuple(Bundle(one, {"CPU": 1.0}) for one in apart), strategy="SPREAD"))
    least = settings.launch.min_workers
    for i, name in enumerate(engines if not shares else []):
        needed = i < (settings.sglang.num_generation_workers if least is None else least)
        bundles, hosts = _engine(settings, name), range(settings.sglang.sglang_nnodes)
        units.append(Unit(name=name, bundles=bundles, strategy="PACK", needed=needed, spread=_spread(name, hosts)))
    return units


def _trainer(settings: RunSettings, first: list[str], engines: list[str], gpus: bool) -> Unit:
    """`first`: with rank 0; `engines`: in equal parts over its nodes, each on as many as it has hosts."""
    s = settings.flat
    idle = s.debug_rollout_only and not engines
    each, nodes = (1, 1) if idle else (s.actor_num_gpus_per_node, s.actor_num_nodes)
    resources: Resources = {"CPU": float(s.trainer_threads * each)}
    if gpus and not idle:
        resources["GPU"] = float(each)
    on = [first, *([] for _ in range(1, nodes))]
    spread = _spread("trainer", range(nodes))
    for i, name in enumerate(engines):
        at = i * nodes // len(engines)
        on[at] = [*on[at], name]
        spread |= _spread(name, range(at, at + s.sglang_nnodes))
    return Unit(name="trainer", bundles=tuple(Bundle(tuple(one), resources) for one in on), strategy="PACK", spread=spread)


def _spread(actor: str, bundles: range) -> dict[str, tuple[int, ...]]:
    return {actor: tuple(bundles)} if len(bundles) > 1 else {}


def _engine(settings: RunSettings, name: str) -> tuple[Bundle, ...]:
    s = settings.sglang
    kind = settings.flat.engine_kind
    cpus = kind.cpus(settings.perf.engine_threads)
    if not kind.needs_gpu:
        return (Bundle((name,), {"CPU": cpus}),)
    resources = {"CPU": cpus, "GPU": s.rollout_num_gpus_per_engine / s.sglang_nnodes}
    return (Bundle((name,), resources), *(Bundle((), resources) for _ in range(1, s.sglang_nnodes)))


def no_room(units: Sequence[Unit], nodes: Iterable[Mapping[str, object]], free: Mapping[str, float]) -> str:
    """One line: what of the run has no place, and what the cluster has. `nodes`: as ray.nodes() tells."""
    wanted = "; ".join(f"{unit.name} ({', '.join(shown(b.resources) for b in unit.bundles)})" for unit in units)
    has = [f"{node['NodeManagerAddress']}: {shown(node['Resources'])}" for node in nodes if node["Alive"]]  # type: ignore[arg-type]
    return f"no space for {wanted}: the cluster's {len(has)} node(s) have {'; '.join(has)}; free: {shown(free)}"


def shown(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs in words."""
    return " and ".join(f"{resources[kind]:g} {kind}" for kind in ("CPU", "GPU") if resources.get(kind)) or "no CPU"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A further process of an actor that is spread over hosts: a module of ours, given the actor's spec file and `words`."""

    bundle: int
    name: str
    module: str
    words: tuple[str, ...] = ()
    variables: dict[str, str] = {}


def parts_of(
    settings: RunSettings, name: str, role: str, meeting: str, bundles: Sequence[int]
) -> tuple[dict[str, str], list[Part]]:
    """What the room of such an actor is told beside its spec, and its other processes. `meeting`: HOST:PORT on the first's host;
    `bundles`: where it is."""
    host, _, port = meeting.rpartition(":")
    if role != "trainer":
        module = settings.flat.engine_kind.node
        others = list(enumerate(bundles))[1:]
        parts = [Part(bundle=at, name=f"{name}-node-{n}", module=module, words=(str(n),)) for n, at in others]
        return {"meeting": meeting}, parts
    each, size = settings.flat.actor_num_gpus_per_node, settings.flat.train_ranks
    same = {"WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": port}
    ranks = [
        Part(
            bundle=bundles[rank // each],
            name=f"trainer-rank-{rank}",
            module="actors.trainer.follower",
            variables=same | {"RANK": str(rank), "LOCAL_RANK": str(rank % each)},
        )
        for rank in range(1, size)
    ]
    return {"train_master": meeting}, ranks
