"""Paged attention against dense float64 attention, span by span."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lamina.engine.attention import PagedAttention, plan_attention
from lamina.engine.batch import Span
from lamina.engine.pool import BlockPool
from lamina.models.rope import Rotation

BLOCK, LAYERS = 4, 3
SHAPES = {"gqa": (6, 2, 8), "mha": (3, 3, 16), "mqa": (4, 1, 8)}
# (start, count) of each span: decode rows, fresh prefill, prefill behind a prefix, odd lengths
STEPS = {
    "one-decode": [(9, 1)],
    "decode-equal": [(7, 1)] * 4,
    "decode-ragged": [(0, 1), (3, 1), (4, 1), (30, 1), (31, 1)],
    "prefill": [(0, 13)],
    "prefill-twins": [(0, 6), (0, 6)],
    "prefill-behind-prefix": [(8, 5)],
    "same-count-other-prefix": [(4, 5), (12, 5), (0, 5)],
    "mixed": [(0, 7), (20, 1), (5, 3), (2, 1), (0, 1), (16, 16)],
}


class Still(Rotation):
    """A rotation by nothing."""

    def __init__(self) -> None:
        super().__init__(torch.ones(1, 1, 2), torch.zeros(1, 1, 2))

    def __call__(self, heads: torch.Tensor) -> None:
        pass


def build(seed: int, spans: list[tuple[int, int]], heads: int, kv_heads: int, dim: int):  # type: ignore[no-untyped-def]
    """A pool with random history, tables without order, and the step's q, k, v."""
    random = torch.Generator().manual_seed(seed)
    pool = BlockPool(
        64,
        layers=LAYERS,
        block_size=BLOCK,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool.data.copy_(torch.randn(pool.data.shape, generator=random))
    blocks = iter(torch.randperm(64, generator=random).tolist())
    built, row = [], 0
    for start, count in spans:
        table = np.array([next(blocks) for _ in range(-(-(start + count) // BLOCK))], dtype=np.int64)
        built.append(Span(row, start, count, table))
        row += count
    q = torch.randn(row, heads, dim, generator=random)
    k, v = (torch.randn(row, kv_heads, dim, generator=random) for _ in range(2))
    return pool, built, q, k, v


def dense(
    pool: BlockPool, span: Span, layer: int, q: torch.Tensor, *, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Float64 attention of one span over its blocks, new tokens included. q [count, heads, dim]."""
    pages = pool.data[torch.from_numpy(span.table), :, layer].double()  # [blocks, 2, BLOCK, kv, dim]
    keys, values = (pages[:, i].flatten(0, 1)[: span.context] for i in range(2))
    heads, dim = q.shape[1:]
    repeat = heads // keys.shape[1]
    keys, values = (x.repeat_interleave(repeat, 1).transpose(0, 1) for x in (keys, values))
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(dim)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(span.start, span.context)[:, None] - torch.arange(span.context)
    hidden = at < 0
    if window:
        hidden |= at >= window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1).reshape(span.count, heads * dim)


@pytest.mark.parametrize("spans", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 3.0), (6, 3.0)])
def test_equals_dense_attention(
    spans: list[tuple[int, int]], shape: tuple[int, int, int], window: int | None, softcap: float | None
) -> None:
    """New keys and values are written where the table says, and every span attends to exactly its own context."""
    pool, built, q, k, v = build(1, spans, *shape)
    attend = PagedAttention(pool)
    attend.begin(plan_attention(built, pool))
    scale = 1 / math.sqrt(shape[2])
    for layer in range(LAYERS):
        out = attend(layer, torch.cat((q, k), 1), v, Still(), scale=scale, window=window, softcap=softcap)
        for span in built:
            rows = slice(span.row, span.row + span.count)
            for position in range(span.count):
                block, offset = divmod(span.start + position, BLOCK)
                stored = pool.data[int(span.table[block]), :, layer, offset]
                torch.testing.assert_close(stored, torch.stack([k[rows][position], v[rows][position]]))
            expected = dense(pool, span, layer, q[rows], window=window, softcap=softcap)
            torch.testing.assert_close(out[rows].double(), expected, atol=1e-5, rtol=1e-5)


def test_blocks_of_others_are_not_read() -> None:
    """Poisoning every block outside a span's table changes nothing: padding never reaches the result."""
    pool, built, q, k, v = build(2, STEPS["decode-ragged"], 6, 2, 8)
    plan = plan_attention(built, pool)
    attend = PagedAttention(pool)
    attend.begin(plan)
    before = attend(1, torch.cat((q, k), 1), v, Still(), scale=0.3)
    owned = {int(block) for span in built for block in span.table}
    others = [block for block in range(pool.num_blocks) if block not in owned]
    pool.data[others] = 1e6
    attend.begin(plan)
    torch.testing.assert_close(attend(1, torch.cat((q, k), 1), v, Still(), scale=0.3), before)


def test_ragged_decode_rows_are_grouped() -> None:
    """Similar contexts share a call; a context far shorter than the rest does not pay for the longest."""
    pool, built, *_ = build(3, [(30, 1), (31, 1), (29, 1), (1, 1)], 6, 2, 8)
    plan = plan_attention(built, pool)
    assert sorted(group.n for group in plan.groups) == [1, 3]


def test_without_a_plan_it_refuses() -> None:
    pool, _, q, k, v = build(4, [(0, 1)], 6, 2, 8)
    with pytest.raises(RuntimeError, match="begin"):
        PagedAttention(pool)(0, torch.cat((q, k), 1), v, Still(), scale=1.0)
