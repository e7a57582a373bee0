"""A lean float32 forward of the Llama and Qwen decoders, for decode batches of many short sequences on one CPU thread.

Three liberties against the textbook layout, all exact up to float rounding (transformers is the oracle in the tests):
query, key and value projections are one matrix, gate and up are another; and the rows of each query and key head are
stored interleaved (i, i + head_dim/2 side by side), so that the rotary embedding is one complex multiplication. Dot
products of queries with keys do not change under a permutation both share. `slots` says where each checkpoint tensor
lies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.generation.engines.embedded.adapters import Adapters
from actors.generation.engines.embedded.cache import KvCache
from actors.generation.engines.embedded.config import ModelConfig
from actors.generation.engines.embedded.pictures import Eyes, View

BLOCK_ROWS = 64
"""Decode attention runs in blocks of rows, each as long as its longest row, so that one long row does not pad all
others."""

SCORE_ROWS = 256
"""Rows of logits that `score` makes at once."""

WINDOW_STEP = 8

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, head_dim], k and v [T, kv_heads, head_dim]) -> [T, heads * head_dim]."""


class Slot(NamedTuple):
    """Where one checkpoint tensor lies in our storage; `view` may have more dimensions, and a leading one that
    repeats."""

    shape: tuple[int, ...]
    view: Tensor

    def fill(self, source: Tensor) -> None:
        self.view.copy_(source.reshape(-1, *self.view.shape[1:]))


@dataclass(slots=True)
class _Layer:
    norm_in: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_gain: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    norm_mid: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    router: Tensor | None = None
    """With it `gate_up` and `down` have the experts' dimension before their own."""


class Decoder:
    """Weights and forward. Not thread-safe: the scheduler's thread owns it."""

    def __init__(self, config: ModelConfig, eyes: Eyes | None = None, *, repeatable: bool = False) -> None:
        self.config = c = config
        self.eyes = eyes
        self.repeatable = repeatable
        """Each row is computed alone: a product's last bits depend on how many rows it has."""
        self.slots: dict[str, Slot] = {}
        """Checkpoint name -> its place."""
        self.fp8_parts: dict[str, dict[str, Tensor]] = {}
        """Weight that came as FP8 -> its tensor and its scales, by their checkpoint names."""
        self.chosen: Tensor | None = None
        """int32 [T, layers, top_k]: experts of the tokens computed last, zeros in layers without; None: there are none."""
        self._embed = self._new("model.embed_tokens.weight", c.vocab, c.hidden)
        self._layers = [self._new_layer(i, f"model.layers.{i}.") for i in range(c.layers)]
        self._norm = self._new("model.norm.weight", c.hidden)
        self._head = self._embed if c.tied else self._new("lm_head.weight", c.vocab, c.hidden)
        self._rotations = c.rotations()
        self._scale = c.head_dim**-0.5
        self._group = c.heads // c.kv_heads
        self._steps = torch.arange(c.context + WINDOW_STEP)
        for name, p in eyes.tower.named_parameters() if eyes else ():
            self._put(f"visual.{name}", tuple(p.shape), p.data)

    adapters: Adapters | None = None
    """Of an engine whose versions are adapters; None = whole weights."""
    ignored: frozenset[str] = frozenset()
    """Names in its directory that have no place in it."""

    def cache(self, max_rows: int, max_total_tokens: int) -> KvCache:
        """Room for running rows."""
        return KvCache(self.config, max_rows, max_total_tokens)

    def settled(self) -> None:
        """Called once the first weights are there."""

    def prefill(
        self,
        prompts: Tensor,
        lengths: Tensor,
        source: Tensor,
        cache: KvCache,
        first_row: int,
        views: Sequence[View | None] = (),
    ) -> Tensor:
        """Run prompts from scratch and store their keys and values.

        prompts: int64 [u, P], right-padded, distinct. lengths: int64 [u]. source: int64 [b], row `first_row + j` of the
        cache takes prompt source[j]. views: what each prompt shows; empty = none does. Returns logits float32 [b, vocab] after the
        last token of each prompt.
        """
        c, (u, width) = self.config, prompts.shape
        rows = slice(first_row, first_row + source.numel())
        same = source.numel() == u

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Padding lies to the right of every real token, so the causal mask alone hides it.
            q = q.view(u, width, c.heads, c.head_dim).transpose(1, 2)
            k = k.view(u, width, c.kv_heads, c.head_dim).transpose(1, 2)
            v = v.view(u, width, c.kv_heads, c.head_dim).transpose(1, 2)
            cache.data[i, 0, rows, :, :width] = k if same else k[source]
            cache.data[i, 1, rows, :, :width] = v if same else v[source]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=self._group > 1)
            return out.transpose(1, 2).reshape(u * width, c.heads * c.head_dim)

        rotations = self._rotations[:width].repeat(u, 1)
        x = F.embedding(prompts.view(-1), self._embed)
        for i, view in enumerate(views):
            if view is not None:
                self._show(view, x[i * width : (i + 1) * width], rotations[i * width : (i + 1) * width])
        x = self._run(x, rotations.unsqueeze(1), attend)
        last = x.view(u, width, c.hidden)[torch.arange(u), lengths - 1]
        logits = self._logits(last)
        return logits if same else logits[source]

    def _show(self, view: View, x: Tensor, rotations: Tensor) -> None:
        """Put a view into embeddings [P, hidden] and rotations [P, head_dim / 2] of its prompt."""
        assert self.eyes is not None
        x.index_copy_(0, view.at, self.eyes.features(view))
        turns = view.rotary(len(x))[list(self.config.axes)].T
        rotations.copy_(self._rotations.gather(0, turns))

    def score(self, tokens: Tensor) -> Tensor:
        """Log-probabilities, untempered, of tokens 1..P-1 after those before them. tokens int64 [P] -> float32 [P - 1].
        Touches no cache; logits are made in chunks."""
        c, width = self.config, tokens.numel()

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(1, width, -1, c.head_dim).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=self._group > 1)
            return out.transpose(1, 2).reshape(width, c.heads * c.head_dim)

        x = self._run(F.embedding(tokens, self._embed), self._rotations[:width].unsqueeze(1), attend)
        found = []
        for a in range(0, width - 1, SCORE_ROWS):
            rows = slice(a, min(a + SCORE_ROWS, width - 1))
            logp = torch.log_softmax(self._logits(x[rows]), -1)
            found.append(logp.gather(1, tokens[rows.start + 1 : rows.stop + 1, None]).squeeze(1))
        return torch.cat(found) if found else x.new_zeros(0)

    def decode(self, tokens: Tensor, positions: Tensor, windows: list[int], cache: KvCache, back: Tensor | None = None) -> Tensor:
        """One token for each of rows 0..B-1.

        tokens, positions: int64 [B]; positions[b] is the index of tokens[b] in its sequence. windows: longest row
        (tokens, this one included) of each block of BLOCK_ROWS rows. back: int64 [B], how far the rotary
        position lies before that index (a picture's tokens share some); None = nowhere. Returns logits float32 [B, vocab].
        """
        c, n = self.config, tokens.numel()
        if self.repeatable and n > 1:
            return self._decode_alone(tokens, positions, cache, back)
        heads = torch.arange(n * c.kv_heads).view(n, c.kv_heads) * cache.length
        lines = (heads + positions.unsqueeze(1)).view(-1)
        blocks = []
        for j, longest in enumerate(windows):
            a, b = j * BLOCK_ROWS, min((j + 1) * BLOCK_ROWS, n)
            width = min(-(-longest // WINDOW_STEP) * WINDOW_STEP, cache.length)
            hidden = self._steps[:width] > positions[a:b, None]
            mask = torch.zeros(b - a, width).masked_fill_(hidden, float("-inf")).repeat_interleave(c.kv_heads, 0)
            blocks.append((a * c.kv_heads, b * c.kv_heads, width, mask.unsqueeze(1)))

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.key_lines[i].index_copy_(0, lines, k.reshape(-1, c.head_dim))
            cache.value_lines[i].index_copy_(0, lines, v.reshape(-1, c.head_dim))
            q = q.reshape(n * c.kv_heads, self._group, c.head_dim)
            keys, values = cache.keys[i], cache.values[i]
            outs = []
            for a, b, width, mask in blocks:
                scores = torch.baddbmm(mask, q[a:b], keys[a:b, :width].transpose(1, 2), alpha=self._scale)
                outs.append(torch.bmm(torch.softmax(scores, -1), values[a:b, :width]))
            out = outs[0] if len(outs) == 1 else torch.cat(outs)
            return out.view(n, c.heads * c.head_dim)

        rotations = self._rotations.index_select(0, positions if back is None else positions - back).unsqueeze(1)
        return self._logits(self._run(F.embedding(tokens, self._embed), rotations, attend))

    def _decode_alone(self, tokens: Tensor, positions: Tensor, cache: KvCache, back: Tensor | None) -> Tensor:
        logits: list[Tensor] = []
        chosen: list[Tensor | None] = []
        for i, at in enumerate(positions.tolist()):
            one = slice(i, i + 1)
            logits.append(self.decode(tokens[one], positions[one], [at + 1], cache.row(i), None if back is None else back[one]))
            chosen.append(self.chosen)
        self.chosen = torch.cat([c for c in chosen if c is not None]) if self.config.experts else None
        return torch.cat(logits)

    def _run(self, x: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """Hidden states float32 [T, hidden] through all layers, before the last norm."""
        c, n = self.config, x.shape[0]
        turned = c.heads + c.kv_heads
        split, half = turned * c.head_dim, c.head_dim // 2
        self.chosen = x.new_zeros(n, c.layers, c.top_k, dtype=torch.int32) if c.experts else None
        for i, layer in enumerate(self._layers):
            h = F.rms_norm(x, (c.hidden,), layer.norm_in, c.norm_eps)
            qkv = F.linear(h, layer.qkv, layer.qkv_bias)
            qk = qkv[:, :split].view(n, turned, c.head_dim)
            if layer.qk_gain is not None:
                qk = F.rms_norm(qk, (c.head_dim,), None, c.norm_eps).mul_(layer.qk_gain)
            qk = torch.view_as_complex(qk.view(n, turned, half, 2)) * rotations
            qk = torch.view_as_real(qk).view(n, turned, c.head_dim)
            out = attend(i, qk[:, : c.heads], qk[:, c.heads :], qkv[:, split:].view(n, c.kv_heads, c.head_dim))
            x = torch.addmm(x, out, layer.o)
            if layer.o_bias is not None:
                x += layer.o_bias
            h = F.rms_norm(x, (c.hidden,), layer.norm_mid, c.norm_eps)
            if layer.router is not None:
                x = x + self._mixed(i, layer, layer.router, h)
                continue
            both = F.linear(h, layer.gate_up, layer.gate_up_bias)
            x = torch.addmm(x, F.silu(both[:, : c.inner]).mul_(both[:, c.inner :]), layer.down)
            if layer.down_bias is not None:
                x += layer.down_bias
        return x

    def _mixed(self, i: int, layer: _Layer, router: Tensor, h: Tensor) -> Tensor:
        """What the chosen experts make of h [T, hidden], weighted."""
        weights, index = torch.topk(torch.softmax(F.linear(h, router), -1), self.config.top_k)
        if self.config.norm_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        assert self.chosen is not None
        self.chosen[:, i] = index
        out = torch.zeros_like(h)
        for e in index.unique().tolist():
            rows, place = (index == e).nonzero(as_tuple=True)
            gate, up = F.linear(h[rows], layer.gate_up[e]).chunk(2, 1)
            out.index_add_(0, rows, F.linear(F.silu(gate).mul_(up), layer.down[e]) * weights[rows, place, None])
        return out

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (self.config.hidden,), self._norm, self.config.norm_eps), self._head)

    def _new(self, name: str, *shape: int) -> Tensor:
        return self._put(name, shape, torch.zeros(*shape))

    def _put(self, name: str, shape: tuple[int, ...], view: Tensor) -> Tensor:
        self.slots[name] = Slot(shape, view)
        return view

    def _new_layer(self, i: int, at: str) -> _Layer:
        c = self.config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        qkv = torch.zeros(q + 2 * kv, c.hidden)
        qkv_bias = torch.zeros(q + 2 * kv) if c.qkv_bias else None
        for kind, a, b in (("q", 0, q), ("k", q, q + kv), ("v", q + kv, q + 2 * kv)):
            for suffix, whole in (("weight", qkv), ("bias", qkv_bias)):
                if whole is not None:
                    part = whole[a:b]
                    name = f"{at}self_attn.{kind}_proj.{suffix}"
                    self._put(name, tuple(part.shape), part if kind == "v" else _halves(part, c))
        gain = torch.zeros(c.heads + c.kv_heads, c.head_dim) if c.qk_norm else None
        if gain is not None:
            self._put(f"{at}self_attn.q_norm.weight", (c.head_dim,), _halves(gain[: c.heads].view(-1), c))
            self._put(f"{at}self_attn.k_norm.weight", (c.head_dim,), _halves(gain[c.heads :].view(-1), c))
        return _Layer(
            norm_in=self._new(f"{at}input_layernorm.weight", c.hidden),
            qkv=qkv,
            qkv_bias=qkv_bias,
            qk_gain=gain,
            o=self._new(f"{at}self_attn.o_proj.weight", c.hidden, q).t(),
            o_bias=self._new(f"{at}self_attn.o_proj.bias", c.hidden) if c.o_bias else None,
            norm_mid=self._new(f"{at}post_attention_layernorm.weight", c.hidden),
            **(self._new_experts(f"{at}mlp.") if c.experts and i not in c.dense else self._new_block(f"{at}mlp.")),
        )

    def _new_block(self, at: str) -> dict[str, Any]:
        c = self.config
        gate_up = torch.zeros(2 * c.inner, c.hidden)
        gate_up_bias = torch.zeros(2 * c.inner) if c.mlp_bias else None
        for kind, a, b in (("gate", 0, c.inner), ("up", c.inner, 2 * c.inner)):
            for suffix, whole in (("weight", gate_up), ("bias", gate_up_bias)):
                if whole is not None:
                    self._put(f"{at}{kind}_proj.{suffix}", tuple(whole[a:b].shape), whole[a:b])
        down = self._new(f"{at}down_proj.weight", c.hidden, c.inner).t()
        down_bias = self._new(f"{at}down_proj.bias", c.hidden) if c.mlp_bias else None
        return {"gate_up": gate_up, "gate_up_bias": gate_up_bias, "down": down, "down_bias": down_bias}

    def _new_experts(self, at: str) -> dict[str, Tensor | None]:
        c, n = self.config, self.config.expert_inner
        gate_up, down = torch.zeros(c.experts, 2 * n, c.hidden), torch.zeros(c.experts, c.hidden, n)
        for e in range(c.experts):
            for kind, view in (("gate", gate_up[e, :n]), ("up", gate_up[e, n:]), ("down", down[e])):
                self._put(f"{at}experts.{e}.{kind}_proj.weight", tuple(view.shape), view)
        router = self._new(f"{at}gate.weight", c.experts, c.hidden)
        return {"gate_up": gate_up, "gate_up_bias": None, "down": down, "down_bias": None, "router": router}


def _halves(rows: Tensor, config: ModelConfig) -> Tensor:
    """Interleaved storage [heads * head_dim, ...] seen in checkpoint order: [heads, 2, head_dim / 2, ...]."""
    return rows.view(-1, config.head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2)
