"""Before the first step: what is used to train a class of transformers is compared, on this machine, with the class itself.

A few random samples go through the class one at a time, with nothing said but their tokens: log-probs and gradients of that are the
measure. A head or a way of feeding is used only where it gives the same; a class whose rows do not, or in which a later token
changes an earlier log-prob, is refused with the largest difference. Every rank enters, with the same samples.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from actors.runtime.run import Refused
from actors.trainer.backend import BatchSample
from actors.trainer.torch_backend.implementations.kind import HeadRows, SampleFeed, first_line
from actors.trainer.torch_backend.layout import PackedBatch
from actors.trainer.torch_backend.policy import CompilesLayers
from actors.trainer.torch_backend.shards import TorchShards
from actors.trainer.training.ranks import Ranks

log = logging.getLogger(__name__)

LENGTHS = (9, 70, 33, 6)
"""Tokens of the samples: more than windows of convolutions (4) and one more than chunks of linear attention (64) hold."""
PROMPT = 3
TOLERANCES = {torch.float32: (2e-4, 1e-3), torch.bfloat16: (0.2, 0.1)}
"""Of the computing type: the largest difference of a log-prob, and of the gradient by its norm, where rounding is not larger."""
LARGEST = {torch.float32: (0.2, 0.1), torch.bfloat16: (1.0, 0.3)}
"""No rounding makes larger differences allowed."""
OF_ROUNDING = 10
"""So many times what rounding does to the measure itself is allowed: kernels for other shapes round otherwise, in every layer, and
a router that lies between two experts takes the other one."""
SAMPLED = 4096
"""Entries that are compared of each parameter's gradient, evenly over it."""
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    NotImplementedError,
    AssertionError,
    ImportError,
)
"""What a class raises where it cannot compute what it is given."""


@dataclass(frozen=True)
class ProofNumbers:
    """What a way gave: log-probs of all response tokens, and sampled gradients; None where nothing is trained."""

    logp: Tensor
    grads: dict[str, Tensor] | None


@dataclass(frozen=True)
class ProofDiffers:
    """How far it lies from the measure."""

    logp: float
    grads: float

    def __str__(self) -> str:
        return f"log-probs by {self.logp:.1e}, gradients by {self.grads:.1e}"

    def within(self, tolerance: tuple[float, float]) -> bool:
        return self.logp <= tolerance[0] and self.grads <= tolerance[1]


class Proof:
    """Of one `GenericPolicy`, where it computes."""

    def __init__(self, policy: Any, shards: TorchShards, ranks: Ranks, device: torch.device) -> None:
        self.policy, self._shards, self._ranks, self._device = policy, shards, ranks, device
        config = policy.hf.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None) or max(LENGTHS)
        rng = np.random.default_rng(0)
        vocab = int(config.vocab_size)
        self._tokens = [rng.integers(0, vocab, min(n, int(longest))).astype(np.int32) for n in LENGTHS]
        self._trains = any(p.requires_grad for p in policy.parameters())
        self._name = type(policy.hf).__name__
        self._tolerance = (0.0, 0.0)
        self._masters: Mapping[str, nn.Parameter] = {}

    def settle(self) -> None:
        """Set the policy's `head` and `feed`. Raises Refused."""
        policy = self.policy
        policy.feed, policy.head = SampleFeed.SINGLE, HeadRows.ALL
        try:
            measure = self._computed(apart=True)
        except FAILURES as error:
            raise Refused(f"{self._name} of transformers cannot train a sample here: {_named(error)}") from error
        if not bool(torch.isfinite(measure.logp).all()):
            raise Refused(
                f"{self._name} of transformers gives log-probs that are not finite for random tokens. Give other weights."
            )
        if measure.grads is not None and not self._ranks.total(torch.stack([g.abs().sum() for g in measure.grads.values()])).any():
            raise Refused(f"{self._name} of transformers gives no gradient here. Choose another model.")
        self._allow(measure)
        self._measure = measure
        self._check_causal(measure)
        policy.head = self._head(measure)
        self._settle_feed(measure, tuple(feed for feed in SampleFeed if feed is not SampleFeed.SINGLE))

    def settle_narrow(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Once more with parameters in a narrower type, whose kernels are others: the way that was settled, or one that comes after
        it. A class that keeps numbers of a wider type between its layers computes under autocast. Raises Refused."""
        policy, settled, self._masters = self.policy, self.policy.feed, masters
        policy.feed = SampleFeed.SINGLE
        try:
            measure = self._computed(apart=True)
        except FAILURES as first:
            policy.autocast = self._computes
            try:
                measure = self._computed(apart=True)
            except FAILURES as error:
                raise Refused(
                    f"{self._name} of transformers cannot train a sample in {_plain(self._computes)}: {_named(error)} "
                    "Use --model-dtype float32."
                ) from error
            log.info("%s of transformers computes under autocast: %s", self._name, _named(first))
        if not bool(torch.isfinite(measure.logp).all()):
            raise Refused(
                f"{self._name} of transformers gives log-probs in {_plain(self._computes)} that are not finite. "
                "Use --model-dtype float32."
            )
        self._allow(measure)
        self._measure = measure
        ways = list(SampleFeed)
        self._settle_feed(measure, tuple(ways[ways.index(settled) : -1]))

    def settle_compiled(self, compiles: CompilesLayers) -> bool:
        """Whether the layers run compiled: as one graph, where samples come packed and the measure still comes out."""
        policy, why = self.policy, ""
        if policy.feed is not SampleFeed.PACKED:
            why = f"samples are fed as {policy.feed.value}"
        elif len({type(block) for block in policy.blocks}) != 1:
            why = "they are of several classes"
        else:
            made = compiles(policy.blocks, whole=True)
            why = self._against(self._measure)
            if why := self._ranks.first_said(made.failed or why):
                made.give_up(why)
        log.info("%s of transformers: layers %s%s", self._name, "run as written: " if why else "compiled, ", why or self._last)
        return not why

    def _settle_feed(self, measure: ProofNumbers, ways: tuple[SampleFeed, ...]) -> None:
        """The first of these ways that gives the measure. Raises Refused."""
        policy, why = self.policy, []
        for feed in ways:
            if feed is not SampleFeed.ROWS and policy.unpackable:
                why.append(f"packed: not proved for {policy.unpackable}")
                continue
            if not (problem := self._against(measure, feed=feed)):
                break
            why.append(f"{feed.value}: {problem}")
        else:
            raise Refused(
                f"{self._name} of transformers is not trained: several samples together give other numbers than one at a time "
                f"({'; '.join(why)}; allowed {self._allowed})."
            )
        reason = f" ({'; '.join(why)})" if why else ""
        log.info(
            "%s of transformers in %s: %s equal single samples, %s%s",
            self._name, _plain(self._computes), policy.feed.value, self._last, reason,
        )  # fmt: skip

    @property
    def _computes(self) -> torch.dtype:
        found = next((p.dtype for p in self.policy.parameters() if p.is_floating_point()), torch.float32)
        return self._shards.narrow or found

    def _allow(self, measure: ProofNumbers) -> None:
        """Set what may differ: by what rounding inside the layers does to the measure."""
        kind = self._computes if self._computes in TOLERANCES else torch.bfloat16
        self._tolerance = LARGEST[kind]
        logp = grads = 0.0
        for seed in range(2):
            hooks = [
                block.register_forward_pre_hook(_Rounds(self._computes, seed), with_kwargs=True) for block in self.policy.blocks
            ]
            try:
                found = self._computed(apart=True)
            finally:
                for hook in hooks:
                    hook.remove()
            far = self._apart(found, measure)
            logp, grads = max(logp, far.logp), max(grads, far.grads)
        (least, least_grads), (most, most_grads) = TOLERANCES[kind], LARGEST[kind]
        self._tolerance = (
            min(max(least, OF_ROUNDING * logp), most),
            min(max(least_grads, OF_ROUNDING * grads), most_grads),
        )

    def _head(self, measure: ProofNumbers) -> HeadRows:
        """The cheapest that gives the same, with one sample at a time."""
        candidates = [HeadRows.ROWS] if self.policy.output is not None else []
        if self._ends_in_product():
            candidates.insert(0, HeadRows.LINEAR)
        for head in candidates:
            self.policy.head = head
            if not self._against(measure, apart=True):
                return head
        return HeadRows.ALL

    def _ends_in_product(self) -> bool:
        """Whether logits are what the head makes and nothing else: numbers put into their place must come out."""
        output: Any = self.policy.output
        if type(output) is not nn.Linear or output.bias is not None:
            return False
        told: list[Tensor] = []

        def replace(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            told.append(torch.linspace(-1e3, 1e3, out.numel(), device=out.device, dtype=out.dtype).view_as(out))
            return told[-1]

        hook = output.register_forward_hook(replace)
        whole, self.policy.logits = self.policy.logits, _Caught(self.policy.logits)
        caught: Any = self.policy.logits
        try:
            with self._shards.gathered(self.policy), torch.no_grad():
                self.policy(self._batch([0]))
        except FAILURES:
            return False
        finally:
            hook.remove()
            self.policy.logits = whole
        return len(told) == 1 and caught.last is not None and torch.equal(caught.last, told[0])

    def _check_causal(self, measure: ProofNumbers) -> None:
        """Cut samples must have the log-probs of the whole ones."""
        whole = list(measure.logp.split([len(t) - PROMPT for t in self._tokens]))
        cut = [len(t) - len(t) // 3 for t in self._tokens]
        with self._shards.gathered(self.policy), torch.no_grad():
            found = [self.policy(self._batch([i], cut[i]))[0].float().cpu() for i in range(len(cut))]
        far = max(float((f - w[: f.numel()]).abs().max()) for f, w in zip(found, whole, strict=True) if f.numel())
        if self._ranks_max(far) > self._tolerance[0]:
            raise Refused(
                f"{self._name} of transformers is not causal: tokens that follow change a log-prob by {far:.1e} (allowed "
                f"{self._tolerance[0]:.0e}). Set is_decoder in config.json if it can be one, or choose a causal model."
            )

    def _against(self, measure: ProofNumbers, *, apart: bool = False, feed: SampleFeed | None = None) -> str:
        """Why the policy as it is set, or fed so from now on, does not give the measure; empty = it does."""
        try:
            self.policy.feed = feed or self.policy.feed
            found, failed = self._computed(apart=apart), ""
        except FAILURES as error:
            found, failed = None, _named(error)
        if self._ranks.first_said(failed):
            return failed or "another rank cannot compute them"
        assert found is not None
        self._last = self._apart(found, measure)
        return "" if self._last.within(self._tolerance) else f"differ from single samples, {self._last}"

    def _apart(self, found: ProofNumbers, measure: ProofNumbers) -> ProofDiffers:
        logp = self._ranks_max(float((found.logp - measure.logp).abs().nan_to_num(torch.inf).max()))
        return ProofDiffers(logp, self._grads_apart(found, measure))

    def _grads_apart(self, found: ProofNumbers, measure: ProofNumbers) -> float:
        if found.grads is None or measure.grads is None:
            return 0.0
        sums = torch.zeros(2, dtype=torch.float64)
        for name, want in measure.grads.items():
            got = found.grads[name]
            sums += torch.stack([(got - want).square().sum(), want.square().sum()])
        far, size = self._ranks.total(sums).tolist()
        return float("inf") if far != far else float((far / max(size, 1e-30)) ** 0.5)

    def _computed(self, *, apart: bool) -> ProofNumbers:
        """By one call for all samples, or one for each."""
        policy, found = self.policy, []
        parts = [[i] for i in range(len(self._tokens))] if apart else [list(range(len(self._tokens)))]
        responses = [len(t) - PROMPT for t in self._tokens]
        weights = torch.randn(sum(responses), generator=torch.Generator().manual_seed(0)).split(responses)
        try:
            with self._shards.gathered(policy), torch.set_grad_enabled(self._trains):
                for part in parts:
                    logp, _ = policy(self._batch(part))
                    if self._trains:
                        weigh = torch.cat([weights[i] for i in part]).to(self._device)
                        (logp.float() * weigh).sum().backward()
                    found.append(logp.detach().float().cpu())
            trained = self._masters or policy.named_weights()
            grads = {n: _sampled(p) for n, p in trained.items()} if self._trains else None
        finally:
            for p in (*policy.parameters(), *self._masters.values()):
                p.grad = None
        return ProofNumbers(torch.cat(found), grads)

    def _batch(self, which: list[int], tokens: int | None = None) -> Any:
        nothing: Any = None
        cut = [self._tokens[i][:tokens] for i in which]
        samples = [BatchSample(t[:PROMPT], t[PROMPT:], 1.0, nothing) for t in cut]
        return PackedBatch(samples).micro_batch(range(len(samples)), self._device)

    def _ranks_max(self, x: float) -> float:
        return float(self._ranks.largest(torch.tensor([x], dtype=torch.float64))[0])

    @property
    def _allowed(self) -> str:
        return f"{self._tolerance[0]:.0e} and {self._tolerance[1]:.0e}"


class _Rounds:
    """A pre-hook of a layer: what enters it is rounded otherwise, each number by at most two steps of `dtype`."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self._step, self._seed = torch.finfo(dtype).eps, seed

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        x = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return args, kwargs
        random = torch.Generator(x.device).manual_seed(self._seed)
        wide = torch.rand(x.shape, generator=random, device=x.device) * 4 - 2
        x = x + (x.detach().float() * wide * self._step).to(x.dtype)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Caught:
    """A function that keeps its last result."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.last: Tensor | None = None

    def __call__(self, *args: Any) -> Tensor:
        self.last = self._function(*args)
        return self.last


def _sampled(p: nn.Parameter) -> Tensor:
    grad: Tensor | None = p.grad
    if grad is None:
        return torch.zeros(1, dtype=torch.float64)
    flat = (grad.to_local() if isinstance(grad, DTensor) else grad).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)].to("cpu", torch.float64)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:200]
