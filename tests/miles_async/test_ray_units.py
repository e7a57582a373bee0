"""What of a run goes where on a Ray cluster, and what the other hosts of an actor run."""

from __future__ import annotations

import pytest

from actors.generation.engines.sglang.node import words_of
from actors.generation.spec import GenerationSpec
from miles_async.cli.ray import entrypoint, parse, run, submitted
from miles_async.launcher.ray_units import Unit, no_room, parts_of, units_of
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from miles_async.settings.run import RunSettings

ROOMS = [("recorder", "recorder"), ("trainer", "trainer"), ("publisher", "publisher"), ("sampler", "sampler")]
ROOMS += [("reward-0", "reward"), ("reward-1", "reward"), ("generation-0", "generation"), ("generation-1", "generation")]


def made(**given: object) -> RunSettings:
    base = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "p.jsonl", "num_rollout": 3, "rm_type": "math"}
    return settings_from(**{**base, "launcher": "ray", "rollout_batch_size": 8, **given})


def shape(units: list[Unit]) -> dict[str, list[tuple[tuple[str, ...], dict[str, float]]]]:
    return {unit.name: [(bundle.actors, bundle.resources) for bundle in unit.bundles] for unit in units}


def test_rooms_are_spread_and_the_publisher_is_with_the_trainer() -> None:
    units = units_of(made(), ROOMS, gpus=False)
    assert shape(units) == {
        "trainer": [(("trainer", "publisher"), {"CPU": 1.0})],
        "rooms": [(("recorder", "sampler"), {"CPU": 1.0}), (("reward-0",), {"CPU": 1.0}), (("reward-1",), {"CPU": 1.0})],
        "generation-0": [(("generation-0",), {"CPU": 1.0})],
        "generation-1": [(("generation-1",), {"CPU": 1.0})],
    }
    assert [unit.strategy for unit in units] == ["PACK", "SPREAD", "PACK", "PACK"]
    assert all(unit.needed for unit in units)


def test_gpus_go_with_ranks_and_engines_host_by_host() -> None:
    settings = made(
        engine="sglang", rollout_num_gpus=32, rollout_num_gpus_per_engine=16, sglang_nnodes=2, actor_num_nodes=2,
        actor_num_gpus_per_node=8, min_workers=1, max_workers=2,
    )  # fmt: skip
    units = {unit.name: unit for unit in units_of(settings, ROOMS, gpus=True)}
    assert [bundle.resources["GPU"] for bundle in units["trainer"].bundles] == [8.0, 8.0]
    assert [bundle.resources["GPU"] for bundle in units["generation-1"].bundles] == [8.0, 8.0]
    assert units["trainer"].bundles_of("trainer") == units["generation-0"].bundles_of("generation-0") == (0, 1)
    assert units["trainer"].bundles_of("publisher") == (0,) and units["rooms"].bundles_of("reward-1") == (2,)
    assert units["generation-0"].needed and not units["generation-1"].needed


def test_engines_on_the_trainers_gpus_are_placed_with_it() -> None:
    settings = made(engine="sglang", colocate=True, actor_num_gpus_per_node=2)
    units = shape(units_of(settings, ROOMS, gpus=True))
    assert units["trainer"] == [(("trainer", "publisher", "generation-0", "generation-1"), {"CPU": 2.0, "GPU": 2.0})]
    assert set(units) == {"trainer", "rooms"}


@pytest.mark.parametrize(
    ("each", "names", "on", "spread"),
    [
        (4, 8, [(0, 1), (2, 3), (4, 5), (6, 7)], (0,)),
        (8, 4, [(0,), (1,), (2,), (3,)], (1,)),
        (16, 2, [(0,), (), (1,), ()], (2, 3)),
    ],
)
def test_engines_on_the_trainers_nodes_are_spread_over_them(
    each: int, names: int, on: list[tuple[int, ...]], spread: tuple[int, ...]
) -> None:
    settings = made(engine="sglang", colocate=True, actor_num_nodes=4, actor_num_gpus_per_node=8, rollout_num_gpus_per_engine=each)
    s = settings.sglang
    assert (s.num_generation_workers, s.rollout_num_gpus, s.update_weight_transport) == (names, 32, "disk")
    rooms = [*ROOMS[:6], *((f"generation-{i}", "generation") for i in range(names))]
    [unit, other] = units_of(settings, rooms, gpus=True)
    engines = [tuple(f"generation-{i}" for i in found) for found in on]
    assert [bundle.actors for bundle in unit.bundles] == [("trainer", "publisher", *engines[0]), *engines[1:]]
    assert other.name == "rooms" and {bundle.resources["GPU"] for bundle in unit.bundles} == {8.0}
    assert unit.bundles_of("trainer") == (0, 1, 2, 3) and unit.bundles_of("generation-1") == spread
    _, parts = parts_of(settings, "generation-1", "generation", "h:1", unit.bundles_of("generation-1"))
    assert [part.bundle for part in parts] == list(spread[1:])


def test_without_a_trainer_its_engines_keep_their_gpus() -> None:
    shared = {"engine": "sglang", "colocate": True, "actor_num_nodes": 2, "actor_num_gpus_per_node": 8}
    settings = made(**shared, rollout_num_gpus_per_engine=8, debug_rollout_only=True)
    [unit, _] = units_of(settings, ROOMS, gpus=True)
    assert [bundle.resources["GPU"] for bundle in unit.bundles] == [8.0, 8.0]


def test_ranks_of_other_hosts_are_told_where_they_meet() -> None:
    told, ranks = parts_of(made(actor_num_nodes=2, actor_num_gpus_per_node=2), "trainer", "trainer", "10.0.0.7:12345", (0, 1))
    assert told == {"train_master": "10.0.0.7:12345"}
    found = [(rank.bundle, rank.variables["RANK"], rank.variables["LOCAL_RANK"]) for rank in ranks]
    assert found == [(0, "1", "1"), (1, "2", "0"), (1, "3", "1")]
    assert {(r.variables["MASTER_ADDR"], r.variables["MASTER_PORT"], r.variables["WORLD_SIZE"]) for r in ranks} == {
        ("10.0.0.7", "12345", "4")
    }


def test_the_parts_of_an_engine_have_one_command_but_for_their_number() -> None:
    settings = made(engine="sglang", rollout_num_gpus=16, rollout_num_gpus_per_engine=16, sglang_nnodes=2)
    told, parts = parts_of(settings, "generation-0", "generation", "10.0.0.7:12345", (0, 1))
    assert [(part.bundle, part.module, part.words) for part in parts] == [(1, "actors.generation.engines.sglang.node", ("1",))]
    spec = GenerationSpec(model_path="/m", engine="sglang", nodes=2, tp_size=16, server_command=("server",), **told)
    first, second = (" ".join(words_of(spec, part)) for part in (0, 1))
    assert "--nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.7:12345" in first
    assert second == first.replace("--node-rank 0", "--node-rank 1")


def test_a_refusal_says_what_has_no_place_and_what_there_is() -> None:
    units = units_of(made(trainer_threads=4), ROOMS, gpus=False)
    nodes = [{"NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {"CPU": 2.0, "memory": 1e9}}]
    nodes += [{"NodeManagerAddress": "10.0.0.2", "Alive": False, "Resources": {"CPU": 9.0}}]
    assert no_room(units[:1], nodes, {"CPU": 1.0}) == (
        "no space for trainer (4 CPU): the cluster's 1 node(s) have 10.0.0.1: 2 CPU; free: 1 CPU"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"launcher": "local", "max_workers": 4}, "launcher ray"),
        ({"min_workers": 5, "max_workers": 4}, "above max_workers = 4"),
        ({"launcher": "local", "engine": "sglang", "sglang_nnodes": 2}, "sglang_nnodes"),
        ({"engine": "sglang", "rollout_num_gpus_per_engine": 3, "rollout_num_gpus": 3, "sglang_nnodes": 2}, "divisor"),
        ({"train_master": "h:1"}, "launcher = ray starts all"),
        ({"engine": "sglang", "use_router": True}, "our router"),
        ({"engine": "sglang", "update_weight_transport": "ipc"}, "Ray hides the trainer's GPU"),
        ({"colocate": True, "actor_num_nodes": 2, "update_weight_transport": "ipc"}, "engines of the trainer's first host"),
        ({"colocate": True, "max_workers": 4, "num_generation_workers": 2}, "placed with it, all at once"),
    ],
)
def test_what_ray_cannot_place_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        made(**given)


def test_a_job_is_the_train_command_in_its_folder_with_what_stands_behind_the_dashes() -> None:
    words = ["submit", "my run.toml", "--working-dir", "/shared/me", "--", "--bus-url", "redis://h:1"]
    assert entrypoint(parse(words)) == (
        "cd /shared/me && exec python -m miles_async train 'my run.toml' --launcher ray --console plain --bus-url redis://h:1"
    )


@pytest.mark.parametrize("words", [["--wandb-key", "hush"], ["--wandb_key=hush"]])
def test_a_secret_is_no_part_of_a_job_that_the_whole_cluster_sees(words: list[str]) -> None:
    with pytest.raises(SettingsError, match="--wandb-key would be readable to all users of the cluster") as refused:
        run(parse(["submit", "run.toml", "--", *words]))
    assert "hush" not in str(refused.value)


class Head:
    """A cluster's answers to a job, in turn; the last one stays."""

    def __init__(self, *says: str) -> None:
        self._says, self.asked = list(says), 0

    def submit_job(self, *, entrypoint: str, runtime_env: dict[str, object]) -> str:
        self.asked += 1
        said = self._says.pop(0) if len(self._says) > 1 else self._says[0]
        if said.startswith("Request failed"):
            raise RuntimeError(said)
        return said


NOT_YET = "Request failed with status code 500: No available agent to submit job, please try again later."


@pytest.mark.parametrize(
    ("says", "within_s", "asked"), [(NOT_YET, 0.0, 1), ("Request failed with status code 400: no such package", 60.0, 1)]
)
def test_a_job_that_is_refused_is_one_line(says: str, within_s: float, asked: int) -> None:
    head = Head(says)
    with pytest.raises(SettingsError, match="the cluster refused the job: Request failed"):
        submitted(head, "train", {}, within_s)
    assert head.asked == asked


def test_a_job_waits_for_a_head_that_has_just_started() -> None:
    head = Head(NOT_YET, "raysubmit_1")
    assert (submitted(head, "train", {}), head.asked) == ("raysubmit_1", 2)
