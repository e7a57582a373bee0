"""The draw in one pass: its random numbers, its distribution, its log-probs, and what it leaves to SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.generation.engines.sglang import draw_torch
from actors.generation.engines.sglang.draw_torch import draw, gumbel, noise
from actors.generation.engines.sglang.sampling import PlainSampler, install

SEED = 20261125


def state(seed: int = SEED) -> torch.Tensor:
    return torch.tensor([seed, 0])


def logits_of(rows: int, vocabulary: int) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(SEED)) * 3


def server(**changes: Any) -> SimpleNamespace:
    """Settings of a server of ours, as SGLang names them."""
    plain: dict[str, Any] = {
        "tp_size": 1, "dp_size": 1, "enable_deterministic_inference": False, "rl_on_policy_target": None,
        "enable_nan_detection": False, "speculative_algorithm": None, "random_seed": SEED,
    }  # fmt: skip
    return SimpleNamespace(**(plain | changes))


def batch(rows: int, **changes: Any) -> SimpleNamespace:
    """What SGLang tells its sampler of a batch that asks for temperature alone."""
    plain: dict[str, Any] = {
        "temperatures": torch.full((rows, 1), 0.8), "is_all_greedy": False, "need_top_p_sampling": False,
        "need_top_k_sampling": False, "need_min_p_sampling": False, "grammars": None, "has_custom_logit_processor": False,
        "sampling_seed": None,
    }  # fmt: skip
    return SimpleNamespace(**(plain | changes))


def test_random_words_are_those_of_philox() -> None:
    # The published answers of Philox4x32 with ten rounds for a counter and a key of zeros, and of ones.
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)
    assert [int(w) for w in draw_torch._philox([zero] * 4, torch.tensor(0))] == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]
    assert [int(w) for w in draw_torch._philox([ones] * 4, torch.tensor(-1))] == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


def test_noise_is_exact_where_rare_tokens_are_decided_and_finite_at_both_ends() -> None:
    word = torch.cat([torch.arange(4096), (1 << torch.arange(32)), 0xFFFFFFFF - torch.arange(4096)])
    v = ((word.double() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    assert torch.isfinite(noise(word)).all()
    tight = v < 0.9  # beyond, noise is below -0.8 and coarser: such a token is hardly ever the best
    torch.testing.assert_close(noise(word[tight]).double(), -torch.log(-torch.log1p(-v[tight])), rtol=0, atol=2e-5)
    torch.testing.assert_close(noise(word[~tight]).double(), -torch.log(-torch.log1p(-v[~tight])), rtol=0, atol=0.05)
    assert float(noise(torch.tensor([0]))) == pytest.approx(22.874, abs=1e-3)  # no token gains more than 33 bits


def test_draws_have_the_distribution_of_the_softmax() -> None:
    rows, temperature = 40_000, 0.7
    row = logits_of(1, 24)
    tokens, _ = draw(row.expand(rows, -1).contiguous(), torch.full((rows, 1), temperature), state())
    expected = torch.softmax(row[0] / temperature, dim=0) * rows
    seen = torch.bincount(tokens.long(), minlength=24)
    common = expected > 5
    off = float(((seen - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    assert off < freedom + 4 * (2 * freedom) ** 0.5, f"seed {SEED}"


def test_logprobs_are_those_of_the_drawn_tokens() -> None:
    logits, temperatures = logits_of(16, 3000), torch.linspace(0.5, 1.5, 16)[:, None]
    before = logits.clone()
    tokens, logprobs = draw(logits, temperatures, state())
    known = torch.log(torch.softmax(logits / temperatures, dim=-1))  # as SGLang computes them
    assert (tokens.dtype, logprobs.dtype) == (torch.int32, torch.float32)
    torch.testing.assert_close(logprobs, known.gather(1, tokens.long()[:, None])[:, 0], rtol=0, atol=5e-6)
    assert torch.equal(logits, before)


def test_a_draw_depends_on_seed_and_number_alone_and_rows_differ() -> None:
    logits, temperatures, here = torch.zeros(8, 5000), torch.ones(8, 1), state()
    first, second = (draw(logits, temperatures, here)[0] for _ in range(2))
    assert here.tolist() == [SEED, 2]
    assert torch.equal(first, draw(logits, temperatures, state())[0])
    assert not torch.equal(first, second)
    assert not torch.equal(first, draw(logits, temperatures, state(SEED + 1))[0])
    assert len(set(first.tolist())) == 8
    assert float(gumbel(8, 5000, state()).mean()) == pytest.approx(0.5772, abs=0.03)  # that of Gumbel's distribution


def test_impossible_tokens_are_not_drawn_and_nan_shows_in_the_logprob() -> None:
    logits = torch.full((3, 700), float("-inf"))
    logits[0, 5] = 1.0
    logits[1, :7] = torch.tensor([0.0, 1, 2, 3, float("nan"), 1, 1])
    logits[2, 600:] = 0.0
    tokens, logprobs = draw(logits, torch.ones(3, 1), state())
    assert (int(tokens[0]), float(logprobs[0])) == (5, 0.0)
    assert torch.isnan(logprobs[1])
    assert int(tokens[2]) >= 600


@pytest.mark.parametrize("seed", [SEED, 1])
def test_a_plain_batch_is_drawn_by_us_from_the_servers_seed(seed: int) -> None:
    runner = SimpleNamespace(sampler=None, server_args=server(random_seed=seed), device="cpu")
    assert install(runner) == install(runner) == ""
    output = SimpleNamespace(next_token_logits=logits_of(4, 600), next_token_logprobs=None)
    tokens = runner.sampler(output, batch(4), True, [0] * 4, [None] * 4, torch.arange(4))
    known = draw(output.next_token_logits, torch.full((4, 1), 0.8), state(seed))
    assert torch.equal(tokens, known[0])
    assert torch.equal(output.next_token_logprobs, known[1])
    assert (runner.sampler.drawn, runner.sampler.passed_on) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        *(({name: True}, {}) for name in ("is_all_greedy", "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling")),
        ({"has_custom_logit_processor": True}, {}),
        ({"grammars": [None, "a"]}, {}),
        ({"sampling_seed": torch.arange(2)}, {}),
        ({}, {"top": [0, 3]}),
        ({}, {"ids": [None, [7]]}),
        ({}, {"dtype": torch.bfloat16}),
    ],
)
def test_any_other_batch_is_sglangs_own(changes: dict[str, Any], asked: dict[str, Any]) -> None:
    calls: list[tuple[Any, ...]] = []

    class Theirs:
        compute_logprobs_only = "theirs"

        def __call__(self, *words: Any) -> torch.Tensor:
            calls.append(words)
            return torch.tensor([1, 2], dtype=torch.int32)

    sampler = PlainSampler(Theirs(), draw, state())
    output = SimpleNamespace(next_token_logits=torch.zeros(2, 9, dtype=asked.get("dtype", torch.float32)))
    words = (
        output,
        batch(2, **changes),
        True,
        asked.get("top", [0, 0]),
        asked.get("ids", [None, None]),
        torch.arange(2),
    )
    assert sampler(*words).tolist() == [1, 2]
    assert calls == [words]
    assert (sampler.drawn, sampler.passed_on, sampler.compute_logprobs_only) == (0, 1, "theirs")


@pytest.mark.parametrize(
    "change",
    [
        {"tp_size": 2}, {"dp_size": 2}, {"enable_deterministic_inference": True}, {"rl_on_policy_target": "fsdp"},
        {"enable_nan_detection": True}, {"speculative_algorithm": "EAGLE"},
    ],
)  # fmt: skip
def test_a_server_that_never_draws_plainly_keeps_its_sampler(change: dict[str, Any]) -> None:
    runner = SimpleNamespace(sampler="theirs", server_args=server(**change), device="cpu")
    assert install(runner) == f"{next(iter(change))} is set"
    assert runner.sampler == "theirs"


def test_a_server_that_returns_logprobs_before_temperature_keeps_its_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")
    runner = SimpleNamespace(sampler="theirs", server_args=server(), device="cpu")
    assert install(runner) == "SGLANG_RETURN_ORIGINAL_LOGPROB is set"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's kernels need a GPU")
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 151_936), (384, 151_936), (7, 513), (512, 50_257)])
def test_the_kernel_draws_what_plain_torch_draws(rows: int, vocabulary: int) -> None:
    from actors.generation.engines.sglang.draw_kernel import draw as by_kernel

    logits = logits_of(rows, vocabulary).cuda()
    logits[:, 3] = float("-inf")
    temperatures, ours, known = (
        torch.linspace(0.5, 1.5, rows).cuda()[:, None].contiguous(),
        state().cuda(),
        state().cuda(),
    )
    tokens, logprobs = by_kernel(logits, temperatures, ours)
    # The first rows alone: the twin takes some hundred bytes a logit.
    expected, _ = draw(logits[:16], temperatures[:16], known)
    assert (tokens[:16] != expected).sum() == 0
    everything = torch.log_softmax(logits / temperatures, dim=-1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs, everything, rtol=0, atol=1e-5)
    assert ours.tolist() == [SEED, 1]
