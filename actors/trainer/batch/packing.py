"""Packing sequences under a token cap and dealing the bins to ranks. Pure; `batching` makes the plan of it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

COMPLETION_BUDGET = 50_000_000
"""Machine words bin completion may touch (about 0.1 s); beyond it first-fit decreasing stands."""


class BatchingError(ValueError):
    """No legal plan exists for these numbers; the message says which to change."""


def lower_bound(lengths: Sequence[int], cap: int, align: int = 1) -> int:
    """Micro-batches no packing can beat: token sum, samples above cap / 2, over-cap samples; rounded up to align."""
    fitting = [n for n in lengths if n <= cap]
    alone = len(lengths) - len(fitting)
    need = alone + max(-(-sum(fitting) // cap), sum(1 for n in fitting if 2 * n > cap))
    return max(-(-need // align) * align, align)


def first_fit_decreasing(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Positions packed into bins of at most cap tokens; a longer sample gets a bin of its own.

    Longest first (ties by position), each into the first bin with room, found in a tournament tree of free space:
    O(n log n).
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    size = 1
    while size < max(len(lengths), 1):
        size *= 2
    free = [cap] * (2 * size)
    bins: list[list[int]] = []
    alone: list[list[int]] = []
    for i in order:
        need = lengths[i]
        if need > cap:
            alone.append([i])
            continue
        node = 1
        while node < size:
            node = 2 * node if free[2 * node] >= need else 2 * node + 1
        slot = node - size
        if slot == len(bins):
            bins.append([])
        bins[slot].append(i)
        free[node] -= need
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return alone + bins


def bin_completion(lengths: Sequence[int], cap: int, limit: int) -> list[list[int]] | None:
    """Bins filled one after the other: the longest sample left, then the subset that fills the gap best.

    The subset comes from subset sums kept as bits of one integer, longest samples first, so an exact fill uses
    long ones. Closes the last percents first-fit leaves open; None as soon as more than `limit` bins are needed.
    No sample may exceed the cap.
    """
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    while left:
        if len(bins) == limit:
            return None
        gap = cap - lengths[left[0]]
        full = (1 << (gap + 1)) - 1
        reach, history = 1, []
        for i in left[1:]:
            if lengths[i] > gap:
                continue
            history.append((i, reach))
            reach |= (reach << lengths[i]) & full
            if reach >> gap:
                break
        best = reach.bit_length() - 1
        taken = {left[0]}
        for i, before in reversed(history):
            if not before >> best & 1:
                taken.add(i)
                best -= lengths[i]
        bins.append([i for i in left if i in taken])
        left = [i for i in left if i not in taken]
    return bins


def pack(lengths: Sequence[int], cap: int, align: int = 1) -> list[list[int]]:
    """First-fit decreasing; where its count, rounded up to `align`, misses the lower bound, bin completion tries."""
    bins = first_fit_decreasing(lengths, cap)
    bound = lower_bound(lengths, cap, align)
    aligned = -(-len(bins) // align) * align
    if aligned <= bound or len(lengths) * len(bins) * (cap // 64 + 8) > COMPLETION_BUDGET:
        return bins
    alone = [[i] for i, n in enumerate(lengths) if n > cap]
    fitting = [i for i, n in enumerate(lengths) if n <= cap]
    better = bin_completion([lengths[i] for i in fitting], cap, aligned - align - len(alone))
    return bins if better is None else alone + [[fitting[i] for i in b] for b in better]


def split_to_multiple(bins: list[list[int]], lengths: Sequence[int], align: int) -> list[list[int]]:
    """Splits the heaviest bins of several samples into lighter halves until the count is a multiple of align."""
    target = max(-(-len(bins) // align) * align, align)
    heap = [(-sum(lengths[i] for i in b), k, b) for k, b in enumerate(bins) if len(b) > 1]
    rest = [b for b in bins if len(b) <= 1]
    heapq.heapify(heap)
    serial = len(bins)
    while len(heap) + len(rest) < target:
        if not heap:
            raise BatchingError(
                f"{len(rest)} samples cannot fill {target} micro-batches (data-parallel ranks times the pipeline's "
                "micro-batch group). Use a larger batch or fewer ranks."
            )
        _, _, heavy = heapq.heappop(heap)
        halves: tuple[list[int], list[int]] = ([], [])
        weight = [0, 0]
        for i in sorted(heavy, key=lambda i: (-lengths[i], i)):
            side = 0 if weight[0] <= weight[1] else 1
            halves[side].append(i)
            weight[side] += lengths[i]
        for half, tokens in zip(halves, weight, strict=True):
            if len(half) > 1:
                heapq.heappush(heap, (-tokens, serial, half))
                serial += 1
            else:
                rest.append(half)
    return rest + [b for _, _, b in heap]


def spread(lengths: Sequence[int], count: int, cap: int, costs: Sequence[float]) -> list[list[int]] | None:
    """Samples over exactly `count` bins with even cost and the cap kept; None when the greedy order cannot.

    Longest first, each into the cheapest bin with room. Over-cap samples take a bin each and share it with
    nobody.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if len(order) < count:
        return None
    heap: list[tuple[float, int]] = [(0.0, k) for k in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for i in order:
        tried = []
        while heap:
            entry = heapq.heappop(heap)
            spent, k = entry
            if not bins[k] or tokens[k] + lengths[i] <= cap:
                bins[k].append(i)
                tokens[k] += lengths[i]
                heapq.heappush(heap, (spent + costs[i], k))
                break
            tried.append(entry)
        else:
            return None
        for entry in tried:
            heapq.heappush(heap, entry)
    return bins if all(bins) else None


def deal(bins: Sequence[Sequence[int]], weights: Sequence[float], dp_size: int, *, even: bool) -> list[list[int]]:
    """Bin numbers per rank, the same count for each. even: by weight, heaviest bin first to the lightest rank with
    room, then swaps while the widest gap shrinks; otherwise round-robin. Heaviest first within a rank, so that the
    k-th micro-batches of all ranks are alike and memory peaks come first."""
    per_rank = len(bins) // dp_size
    order = sorted(range(len(bins)), key=lambda b: (-weights[b], b))
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    if not even:
        for n, b in enumerate(order):
            ranks[n % dp_size].append(b)
        return ranks
    load = [0.0] * dp_size
    for b in order:
        r = min((r for r in range(dp_size) if len(ranks[r]) < per_rank), key=lambda r: (load[r], r))
        ranks[r].append(b)
        load[r] += weights[b]
    for _ in range(8 * len(bins)):
        top, low = max(range(dp_size), key=load.__getitem__), min(range(dp_size), key=load.__getitem__)
        gap = load[top] - load[low]
        swaps = [(abs(gap - 2 * (weights[a] - weights[b])), a, b) for a in ranks[top] for b in ranks[low]]
        best = min(swaps, default=None)
        if best is None or best[0] >= gap:
            break
        _, a, b = best
        ranks[top][ranks[top].index(a)], ranks[low][ranks[low].index(b)] = b, a
        load[top] -= weights[a] - weights[b]
        load[low] += weights[a] - weights[b]
    return [sorted(r, key=lambda b: (-weights[b], b)) for r in ranks]
