"""Shapes and lists that nobody thought of, for the small kernels of a step and the mover of blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from lamina_kernels.gpu import blocks, norm, rotate_write
from lamina_kernels.gpu.block_mover import BlockMover, HostBlocks, MoverCosts, WayCosts
from lamina_kernels.gpu.mover_costs import Curve
from lamina_kernels.oracles import blocks as blocks_oracle
from lamina_kernels.oracles import norm as norm_oracle
from lamina_kernels.oracles import rotate_write as rotate_oracle
from support.kernel_numbers import DEVICE, assert_rounded, noise

few = settings(max_examples=12, deadline=None, derandomize=True)


@few
@given(tokens=st.integers(1, 4), heads=st.integers(1, 6), dim=st.integers(1, 300), own=st.booleans())
def test_norms_of_heads(tokens: int, heads: int, dim: int, own: bool) -> None:
    x = noise(tokens, heads + 2, dim, dtype=torch.float16)[:, 1:-1]
    weight = noise(heads, dim, seed=1) if own else noise(dim, seed=1)
    assert_rounded(norm.rms_norm(x, weight, 1e-6), norm_oracle.rms_norm(x.double(), weight, 1e-6))


@few
@given(
    slots=st.lists(st.integers(0, 4 * 16 - 1), min_size=1, max_size=4, unique=True),
    padding=st.integers(0, 2),
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 9),
    half=st.integers(1, 70),
    layer=st.integers(0, 1),
)
def test_rotations_and_writes(slots: list[int], padding: int, heads: int, kv_heads: int, half: int, layer: int) -> None:
    slots = slots + [-1] * padding
    dim, tokens = 2 * half, len(slots)
    q, k, v = noise(tokens, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), 1)
    cos, sin = noise(2, tokens, 1, dim, seed=1)
    pool = torch.full((4, 2, 2, 16, kv_heads, dim), torch.nan, device=DEVICE)
    at = torch.tensor(slots, device=DEVICE)
    exact_q, exact_pool = q.double(), pool.double()
    rotate_oracle.rotate_write(exact_q, k, v, cos, sin, exact_pool, layer, at, None)
    rotate_write.rotate_write(q, k, v, cos, sin, pool, layer, at, None)
    assert_rounded(q, exact_q, scale=torch.full_like(exact_q, 4.0))
    assert torch.equal(pool.isnan(), exact_pool.isnan())
    written = ~pool.isnan()
    assert_rounded(pool[written], exact_pool[written], scale=torch.full_like(exact_pool[written], 4.0))


@few
@given(vectors=st.integers(1, 1500), ids=st.lists(st.integers(-1, 5), max_size=4, unique=True))
def test_blocks_of_any_size(vectors: int, ids: list[int]) -> None:
    pool = noise(6, 4 * vectors)
    chosen = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
    ours, theirs = torch.zeros(2, len(ids), 4 * vectors, device=DEVICE)
    blocks.gather_blocks(pool, chosen, ours)
    blocks_oracle.gather_blocks(pool, chosen, theirs)
    assert torch.equal(ours, theirs)
    blocks.clear_blocks(pool, chosen)
    assert not pool[[block for block in ids if block >= 0]].any()
    blocks.scatter_blocks(ours, chosen, pool)
    assert torch.equal(pool, noise(6, 4 * vectors))


PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=6)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(moves=st.lists(st.tuples(st.booleans(), PAIRS), max_size=8), staging=st.integers(1, 4), kernel=st.booleans())
def test_the_mover_does_what_lists_of_numbers_do(
    moves: list[tuple[bool, list[tuple[int, int]]]], staging: int, kernel: bool
) -> None:
    """Any order of spills and promotions, waited for one by one, against two lists."""
    pool = torch.arange(6, dtype=torch.float32, device=DEVICE)[:, None].repeat(1, 8)
    host = HostBlocks(8, 32, pin=DEVICE.type == "cuda", chunk_bytes=3 * 32)
    for slot in range(8):
        host.slots(slot)[0].view(torch.float32).fill_(100 + slot)
    blocks_now, slots_now = [float(block) for block in range(6)], [100.0 + slot for slot in range(8)]
    flat, none = Curve((1, 2), (1.0, 1.0)), Curve((1,), (0.0,))
    costs = WayCosts(copy=flat, stage=none) if kernel else WayCosts(copy=none, stage=flat)
    mover = BlockMover(pool, host, costs=MoverCosts(costs, costs), kernels=blocks_oracle, staging_bytes=staging * 32)
    for to_host, pairs in moves:
        written = {slot: block for block, slot in pairs} if to_host else dict(pairs)
        if to_host:
            mover.spill(list(written.values()), list(written)).wait()
            for slot, block in written.items():
                slots_now[slot] = blocks_now[block]
        else:
            mover.promote(list(written.values()), list(written)).wait()
            for block, slot in written.items():
                blocks_now[block] = slots_now[slot]
    assert pool[:, 0].tolist() == blocks_now
    assert pool[:, -1].tolist() == blocks_now
    assert [float(host.slots(slot)[0].view(torch.float32)[3]) for slot in range(8)] == slots_now
