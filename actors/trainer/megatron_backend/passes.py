"""Forward and backward over micro-batches through megatron-core's schedules: the verbs of a step that move numbers.

The vocabulary head takes the place of the output layer's `forward`, so that hooks of that layer run and its weight (or the tied
embedding) is handed over by the model. Losses are called where the last stage is; the other stages get its log-probs afterwards and
call them without gradient, so that all ranks of a data-parallel rank hold the same sums. Gradients are sums over all ranks:
nothing is averaged that the loss would have to undo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor, nn

from actors.trainer.megatron_backend.balance import Balance
from actors.trainer.megatron_backend.head import vocab_parallel_head
from actors.trainer.megatron_backend.packing import PackedStream
from actors.trainer.megatron_backend.parallel import Groups
from actors.trainer.megatron_backend.replay import RoutingReplay
from actors.trainer.torch_backend.head import token_head
from actors.trainer.training.verbs import PolicyLoss, Work


class _SumOver(torch.autograd.Function):
    """Sum over ranks that go on with equal losses: each keeps the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class HeadOf:
    """Stands in for the `forward` of a model's output layer: hidden states in, [K, 2] log-probs and entropies out. `micro` and
    `entropy_gradient` are set before each call of the model."""

    def __init__(self, layer: nn.Module, tp: dist.ProcessGroup, *, vocab: int, cap: float) -> None:
        self._layer, self._tp, self._vocab, self._cap = layer, tp, vocab, cap
        self.micro: PackedStream | None = None
        self.entropy_gradient = False

    def __call__(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """hidden [s, 1, D] of this tensor-parallel rank"""
        micro, layer = self.micro, self._layer
        assert micro is not None
        if getattr(layer, "sequence_parallel", False):
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self._tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self._tp)
        rows = hidden[:, 0].index_select(0, micro.rows)
        whole: Any = layer.weight if weight is None else weight
        if self._tp.size() == 1 and not self._cap:  # the torch backend's, with its kernels
            real = whole if whole.shape[0] == self._vocab else whole[: self._vocab]
            logp, entropy = token_head(rows, real, micro.targets, micro.temperature, entropy_gradient=self.entropy_gradient)
        else:
            logp, entropy = vocab_parallel_head(
                rows, whole, micro.targets, micro.temperature, self._tp, vocab=self._vocab, cap=self._cap,
                entropy_gradient=self.entropy_gradient,
            )  # fmt: skip
        # [R, 1, 2]: the model turns it to [1, R, 2], as it would logits.
        return torch.stack((logp, entropy), -1)[:, None], None


class Schedule:
    """The pipeline of this rank's model chunks."""

    def __init__(self, chunks: list[Any], groups: Groups, *, vocab: int, cap: float = 0.0) -> None:
        self.chunks, self.groups = chunks, groups
        self.config: Any = get_model_config(chunks[0])
        self.config.calculate_per_token_loss = True  # sums, not means: the loss brings its own divisor
        self.config.finalize_model_grads_func = _finalize
        self.replay: RoutingReplay | None = None
        self.balance: Balance | None = None
        self._head: HeadOf | None = None
        for chunk in chunks:
            if get_attr_wrapped_model(chunk, "post_process"):
                layer = get_attr_wrapped_model(chunk, "output_layer")
                self._head = layer.forward = HeadOf(layer, groups.tp, vocab=vocab, cap=cap)

    def forward_only(self, work: Work) -> list[Tensor]:
        """Log-probs of each micro-batch, float32 [R] on the device, on every rank."""

        def rows(ids: tuple[int, ...], micro: PackedStream, out: Tensor, non_loss_data: bool) -> Tensor:
            return self._whole(out, micro)

        with torch.no_grad():
            made = self._run(work, rows, forward_only=True, collect_non_loss_data=True)
            return [both[0] for both in self._everywhere(work, made)]

    def forward_backward(self, work: Work, policy: PolicyLoss, *, entropy_gradient: bool) -> None:
        """Gradients of all micro-batches into the chunks' gradient buffers, summed over all ranks."""
        if self._head is not None:
            self._head.entropy_gradient = entropy_gradient
        made: list[Tensor] = []

        def loss(ids: tuple[int, ...], micro: PackedStream, out: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            both = self._whole(out, micro)
            made.append(both.detach())
            return policy(ids, both[0], both[1]), torch.ones([], dtype=torch.int), {}

        if self.balance is not None:
            self.balance.begin(work)
        self._run(work, loss, forward_only=False)
        seen = self._everywhere(work, made)
        if not made:
            with torch.no_grad():
                for (ids, _), both in zip(work, seen, strict=True):
                    policy(ids, both[0], both[1])

    def _run(self, work: Work, last: Callable[..., Any], **options: Any) -> list[Any]:
        def step(feed: Iterator[Any], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            ids, micro = next(feed)
            if self._head is not None:
                self._head.micro = micro
            if self.replay is not None:
                self.replay.enter(micro.routing)
            # Without such losses routers need not know padding.
            known = {} if self.balance is None else {"padding_mask": self.balance.mask(micro, chunk)}
            out = chunk(
                input_ids=micro.input_ids, position_ids=micro.position_ids, attention_mask=None, packed_seq_params=micro.packed,
                **known,
            )  # fmt: skip
            return out, partial(last, ids, micro)

        run = get_forward_backward_func()
        tokens = max(micro.tokens for _, micro in work)
        alike = work if self.groups.stages == 1 else [(ids, micro.stretched(tokens)) for ids, micro in work]
        made: list[Any] = run(
            forward_step_func=step,
            data_iterator=[iter(alike) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(work),
            seq_length=tokens,
            micro_batch_size=1,
            **options,
        )
        return made

    def _whole(self, out: Tensor, micro: PackedStream) -> Tensor:
        """[1, K, 2] of this context-parallel rank -> [2, R] of all"""
        both = out[0].T
        if micro.held is None:
            return both
        return _SumOver.apply(both.new_zeros(2, micro.n_rows).index_copy(1, micro.held, both), self.groups.cp)

    def _everywhere(self, work: Work, made: Sequence[Tensor]) -> list[Tensor]:
        """The last stage's [2, R] of each micro-batch on all stages."""
        sizes = [micro.n_rows for _, micro in work]
        device = work[0][1].input_ids.device
        flat = torch.cat(list(made), 1) if made else torch.empty(2, sum(sizes), device=device)
        return list(self.groups.from_last_stage(flat.contiguous()).split(sizes, 1))


def _finalize(model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """What megatron-core does after the last backward, without a division by tokens."""
    finalize_model_grads(model, None, **groups)
