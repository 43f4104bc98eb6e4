"""Attention over paged keys and values, on torch operators (CPU; also the oracle for device kernels).

Rows of a step are put into *groups* once per step: choices with the same number of new tokens and similar context
lengths share one gather and one scaled-dot-product call per layer. All single-token (decode) rows usually form one
group; a prefill chunk is a group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.engine.batch import Span
from lamina.engine.pool import BlockPool
from lamina.models.interface import Rotation

__all__ = ["AttentionGroup", "AttentionPlan", "PagedAttention", "plan_attention"]

# A group may read this share of padding: beyond it a second call per layer (~0.1 ms on CPU for 30 layers at
# batch 1) is cheaper than the wasted reads. Not tuned further.
_MAX_PADDING = 0.25


@dataclass(slots=True)
class AttentionGroup:
    """n spans of equal `count` q and contexts up to S."""

    rows: slice | Tensor  # of the batch, n * q of them, span-major
    n: int
    q: int
    context: int  # S
    pages: Tensor  # [2 * n * blocks] int64: layer 0's key pages, then value pages, span-major
    blocks: int  # per span
    positions: Tensor  # [n, q] int64 of the queries
    causal: bool  # every span starts at 0: plain causal masking, no mask tensor
    full: bool  # q == 1 and every span's context is exactly S: nothing to mask
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window, [n, 1, q, S] float

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask, built once per step and window; None where `causal` or `full` says it all."""
        if window is not None and window >= self.context:
            window = None
        if window is None and (self.causal or self.full):
            return None
        if window not in self.masks:
            keys = torch.arange(self.context, device=self.positions.device)
            distance = self.positions[:, None, :, None] - keys
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            mask = torch.zeros(distance.shape, dtype=dtype, device=keys.device)
            self.masks[window] = mask.masked_fill_(hidden, float("-inf"))
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    write_rows: Tensor  # [T] int64: layer 0's key row of each token in BlockPool.rows
    groups: tuple[AttentionGroup, ...]


def plan_attention(spans: Sequence[Span], pool: BlockPool) -> AttentionPlan:
    """Where each new token is written and how the spans are grouped. Spans come in row order."""
    device = pool.data.device
    block_rows = 2 * pool.layers * pool.block_size
    written = []
    for span in spans:
        positions = np.arange(span.start, span.context)
        written.append(span.table[positions // pool.block_size] * block_rows + positions % pool.block_size)
    rows = torch.from_numpy(np.concatenate(written)).to(device)
    groups = tuple(_group(members, pool, device) for members in _partition(spans))
    return AttentionPlan(rows, groups)


def _partition(spans: Sequence[Span]) -> list[list[Span]]:
    """Equal counts, contexts within the padding bound; each group keeps row order."""
    groups: list[list[Span]] = []
    total = 0
    for span in sorted(spans, key=lambda span: (span.count, -span.context)):
        group = groups[-1] if groups else []
        fits = bool(group) and group[0].count == span.count
        if fits:
            padded = group[0].context * (len(group) + 1)
            fits = padded * (1 - _MAX_PADDING) <= total + span.context
        if fits:
            group.append(span)
            total += span.context
        else:
            groups.append([span])
            total = span.context
    for group in groups:
        group.sort(key=lambda span: span.row)
    return groups


def _group(spans: Sequence[Span], pool: BlockPool, device: torch.device) -> AttentionGroup:
    n, q = len(spans), spans[0].count
    context = max(span.context for span in spans)
    blocks = -(-context // pool.block_size)
    tables = np.empty((n, blocks), dtype=np.int64)
    for i, span in enumerate(spans):
        held = span.table[: -(-span.context // pool.block_size)]
        tables[i, : len(held)] = held
        tables[i, len(held) :] = span.table[0]  # padding, behind the mask: never another tenant's numbers
    keys = tables.reshape(-1) * (2 * pool.layers)
    starts = np.array([span.start for span in spans])
    return AttentionGroup(
        rows=_rows(spans, device),
        n=n,
        q=q,
        context=context,
        pages=torch.from_numpy(np.concatenate([keys, keys + pool.layers])).to(device),
        blocks=blocks,
        positions=torch.from_numpy(starts[:, None] + np.arange(q)).to(device),
        causal=q > 1 and not starts.any(),
        full=q == 1 and all(span.context == context for span in spans),
    )


def _rows(spans: Sequence[Span], device: torch.device) -> slice | Tensor:
    q = spans[0].count
    first = spans[0].row
    if all(span.row == first + i * q for i, span in enumerate(spans)):
        return slice(first, first + len(spans) * q)
    rows = np.array([span.row for span in spans])[:, None] + np.arange(q)
    return torch.from_numpy(rows.reshape(-1)).to(device)


class PagedAttention:
    """`Attend` of `lamina.models.interface` for one step: writes the new keys and values, then attends.

    Not shared between threads: the gather buffer is reused from call to call.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._buffer = pool.data.new_empty(0)
        self._plan: AttentionPlan | None = None

    def begin(self, plan: AttentionPlan) -> None:
        self._plan = plan

    def __call__(
        self,
        layer: int,
        qk: Tensor,
        v: Tensor,
        rotate: Rotation,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """qk [T, heads + kv_heads, dim], v [T, kv_heads, dim] -> [T, heads * dim]. RuntimeError before `begin`."""
        if self._plan is None:
            raise RuntimeError("begin() must set the step's plan first")
        rotate(qk)
        q, k = qk.split_with_sizes((qk.shape[1] - v.shape[1], v.shape[1]), 1)
        self._write(layer, k, v, self._plan.write_rows)
        tokens, heads, dim = q.shape
        groups = self._plan.groups
        if len(groups) == 1 and isinstance(groups[0].rows, slice):
            return self._attend(layer, q, groups[0], scale, window, softcap)
        out = q.new_empty((tokens, heads * dim))
        for group in groups:
            out[group.rows] = self._attend(layer, q[group.rows], group, scale, window, softcap)
        return out

    def _write(self, layer: int, k: Tensor, v: Tensor, rows: Tensor) -> None:
        pool = self._pool
        width = pool.kv_heads * pool.head_dim
        first = rows + layer * pool.block_size
        pool.rows.index_copy_(0, first, k.reshape(-1, width))
        pool.rows.index_copy_(0, first + pool.layers * pool.block_size, v.reshape(-1, width))

    def _gather(self, layer: int, group: AttentionGroup) -> tuple[Tensor, Tensor]:
        """Keys and values of the group's spans, [n, kv_heads, S, dim] each, views of the buffer."""
        pool = self._pool
        needed = group.pages.numel() * pool.pages.shape[1]
        if self._buffer.numel() < needed:
            self._buffer = pool.data.new_empty(needed)
        out = self._buffer[:needed].view(group.pages.numel(), -1)
        torch.index_select(pool.pages, 0, group.pages + layer, out=out)
        both = out.view(2, group.n, group.blocks * pool.block_size, pool.kv_heads, pool.head_dim)
        both = both[:, :, : group.context].transpose(2, 3)
        return both[0], both[1]

    def _attend(
        self,
        layer: int,
        q: Tensor,
        group: AttentionGroup,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """q [n * q, heads, dim] -> [n * q, heads * dim]."""
        heads, dim = q.shape[1:]
        keys, values = self._gather(layer, group)
        mask = group.mask(window, q.dtype)
        if softcap is not None:
            out = _capped(q.view(group.n, group.q, heads, dim), keys, values, group, window, scale, softcap)
        elif group.q == 1:
            # The query heads of one KV head become its query rows: grouped queries without repeating keys.
            folded = q.view(group.n, keys.shape[1], -1, dim)
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
            return out.reshape(group.n, heads * dim)
        else:
            out = F.scaled_dot_product_attention(
                q.view(group.n, group.q, heads, dim).transpose(1, 2),
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=keys.shape[1] != heads,
            )
        return out.transpose(1, 2).reshape(group.n * group.q, heads * dim)


def _capped(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: AttentionGroup,
    window: int | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """Attention with logit soft capping (Gemma 2): softmax(cap * tanh(q k / cap)). q [n, q, heads, dim]."""
    n, count, heads, dim = q.shape
    kv_heads, context = keys.shape[1], keys.shape[2]
    folded = q.view(n, count, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4).float()
    scores = torch.matmul(folded, keys.float().unsqueeze(2).transpose(-1, -2)).mul_(scale)
    scores.div_(softcap).tanh_().mul_(softcap)
    distance = group.positions[:, None, None, :, None] - torch.arange(context, device=q.device)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    out = torch.matmul(weights, values.float().unsqueeze(2))
    return out.view(n, heads, count, dim).to(q.dtype)
