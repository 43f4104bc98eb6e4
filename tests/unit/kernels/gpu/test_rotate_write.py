"""Rotary embedding and the write into the pool, against float64 and against the eager model code."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lamina.models.rope import Rope
from lamina.models.rope_config import RopeConfig
from lamina_kernels.gpu.rotate_write import rotate_write
from lamina_kernels.oracles import rotate_write as oracle
from support.kernel_numbers import DEVICE, DTYPES, assert_rounded, noise

LAYERS, BLOCK_SIZE, BLOCKS = 3, 16, 10
FP8 = torch.float8_e4m3fn
# tokens, query heads, KV heads, head dim: SmolLM2, Llama-3 and Qwen3 8B, and dims that are no powers of two
SHAPES = [(3, 9, 3, 64), (1, 32, 8, 128), (2, 5, 5, 80), (2, 2, 1, 96), (1, 4, 2, 256), (1, 1, 1, 2)]


@dataclass(frozen=True)
class Arguments:
    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    signed_sin: Tensor
    pool: Tensor
    layer: int
    slots: Tensor
    kv_scales: Tensor | None

    def run(self) -> Arguments:
        rotate_write(**vars(self))
        return self

    def exact(self) -> Arguments:
        """What should be there afterwards, from copies; q in float64, and the pool if it is not fp8."""
        pool = self.pool.clone() if self.kv_scales is not None else self.pool.double()
        copies = replace(self, q=self.q.double(), pool=pool)
        oracle.rotate_write(**vars(copies))
        return copies

    def rows(self, chosen: Tensor) -> Arguments:
        """Some of the tokens, in that order, with a fresh pool."""
        some = {name: getattr(self, name)[chosen] for name in ("k", "v", "cos", "signed_sin", "slots")}
        return replace(self, q=self.q[chosen].clone(), pool=torch.full_like(self.pool, torch.nan), **some)


def arguments(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, *, fp8: bool = False) -> Arguments:
    """Views of one projection, every slot another, the pool full of NaN; the last token has the last slot."""
    fused = noise(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = fused.split((heads, kv_heads, kv_heads), 1)
    cos, signed_sin = noise(2, tokens, 1, dim, dtype=dtype, seed=1)  # no angles: each element has its own factor
    shape = (BLOCKS, 2, LAYERS, BLOCK_SIZE, kv_heads, dim)
    pool = torch.full(shape, torch.nan, device=DEVICE).to(FP8 if fp8 else dtype)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE - 1, generator=torch.Generator().manual_seed(2))[:tokens]
    slots[-1] = BLOCKS * BLOCK_SIZE - 1
    scales = torch.tensor([[1.0, 2.0], [0.25, 0.0625], [0.007, 0.03]], device=DEVICE) if fp8 else None
    return Arguments(q, k, v, cos, signed_sin, pool, 1, slots.to(DEVICE), scales)


def assert_written(pool: Tensor, exact: Tensor, scale: float) -> None:
    """The rounded values where something was written, the old NaN everywhere else."""
    written = ~exact.isnan()
    assert torch.equal(pool.isnan(), ~written)
    assert_rounded(pool[written], exact[written], scale=torch.full_like(exact[written], scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    given = arguments(*shape, dtype)
    k, v = given.k.clone(), given.v.clone()
    exact = given.exact()
    given.run()
    assert_rounded(given.q, exact.q, scale=torch.full_like(exact.q, 4.0))
    assert_written(given.pool, exact.pool, 4.0)
    assert torch.equal(given.k, k)
    assert torch.equal(given.v, v)


def test_many_tokens() -> None:
    given = arguments(63, 2, 1, 64, torch.float16)
    exact = given.exact()
    given.run()
    assert_rounded(given.q, exact.q, scale=torch.full_like(exact.q, 4.0))
    assert_written(given.pool, exact.pool, 4.0)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_each_layer_and_side_has_its_place_and_scale(layer: int) -> None:
    """Values into fp8 are exact: dividing by a scale of 2^n rounds nothing. Keys may differ where a tie is near."""
    given = replace(arguments(3, 9, 3, 64, torch.float16, fp8=True), layer=layer)
    exact = given.exact()
    given.run()
    ours, theirs = given.pool.float(), exact.pool.float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    if layer != 2:  # whose scales are no powers of two
        assert torch.equal(ours[:, 1].nan_to_num(), theirs[:, 1].nan_to_num())
    assert ((ours - theirs).abs() <= theirs.abs() / 8).logical_or(ours.isnan()).all()
    assert (ours != theirs).logical_and(~ours.isnan()).sum() <= 2


def test_values_beyond_fp8_are_cut() -> None:
    given = arguments(2, 2, 1, 64, torch.float16, fp8=True)
    given.v[:] = torch.tensor([60000.0, -60000.0], dtype=torch.float16, device=DEVICE)[:, None, None]
    given.run()
    block, offset = given.slots[0] // BLOCK_SIZE, given.slots[0] % BLOCK_SIZE
    assert (given.pool[block, 1, 1, offset].float() == 448).all()
    assert (given.pool[-1, 1, 1, -1].float() == -448).all()


def test_padding_rows_write_nothing() -> None:
    given = arguments(3, 9, 3, 64, torch.float16)
    given.slots[1] = -1
    q = given.q.clone()
    exact = given.exact()
    given.run()
    assert torch.equal(given.q[1], q[1])
    assert_written(given.pool, exact.pool, 4.0)
    assert int((~given.pool.isnan()).sum()) == 2 * 2 * 3 * 64


def test_nothing_to_do() -> None:
    given = arguments(1, 9, 3, 64, torch.float16)
    empty = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert given.rows(empty).run().pool.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_models_rotation(dtype: torch.dtype) -> None:
    """The eager code rounds x * cos once more: apart by one rounding of that term, and of the result, at most."""
    given = arguments(3, 9, 3, 64, dtype)
    positions = torch.tensor([0, 5, 4000], device=DEVICE)
    rotation = Rope(RopeConfig(theta=1e4), 64, dtype, DEVICE).at(positions)
    given = replace(given, cos=rotation.cos, signed_sin=rotation.signed_sin)
    eager = given.q.clone()
    rotation(eager)
    terms = given.q.double().abs() * given.cos.double().abs() + eager.double().abs()
    given.run()
    error = (given.q.double() - eager.double()).abs()
    assert (error <= 1.01 * torch.finfo(dtype).eps * terms + 1e-6).all()


@pytest.mark.parametrize("fp8", [False, True])
def test_a_row_is_the_same_bits_in_every_batch(fp8: bool) -> None:
    given = arguments(4, 9, 3, 64, torch.float16, fp8=fp8)
    order = torch.tensor([2, 0, 3, 1], device=DEVICE)
    together, moved = given.rows(torch.arange(4, device=DEVICE)).run(), given.rows(order).run()
    alone = given.rows(torch.tensor([2], device=DEVICE)).run()
    assert torch.equal(moved.q, together.q[order])
    assert torch.equal(moved.pool.view(torch.uint8), together.pool.view(torch.uint8))
    assert torch.equal(alone.q[0], together.q[2])
    mine = ~alone.pool.float().isnan()
    assert torch.equal(alone.pool.float()[mine], together.pool.float()[mine])


def test_pools_of_more_than_two_to_the_31_elements() -> None:
    """Offsets are 64 bits wide. On a CPU the pool takes only the pages that are touched."""
    blocks = 2**31 // (2 * 32 * 16 * 8 * 128) + 2
    pool = torch.empty((blocks, 2, 32, 16, 8, 128), dtype=FP8, device=DEVICE)
    given = arguments(1, 1, 8, 128, torch.float16)
    slots = torch.tensor([blocks * 16 - 1], device=DEVICE)
    replace(given, pool=pool, layer=31, slots=slots, kv_scales=torch.ones(32, 2, device=DEVICE)).run()
    assert torch.equal(pool[-1, 1, -1, -1].float(), given.v[0].float().to(FP8).float())


GIVEN = arguments(2, 4, 2, 8, torch.float16)
GIVEN_FP8 = arguments(2, 4, 2, 8, torch.float16, fp8=True)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (replace(GIVEN, q=GIVEN.q.float()), TypeError),
        (replace(GIVEN, cos=GIVEN.cos.float()), TypeError),
        (replace(GIVEN, pool=GIVEN.pool.float()), TypeError),
        (replace(GIVEN, slots=GIVEN.slots.int()), TypeError),
        (replace(GIVEN_FP8, kv_scales=torch.ones(3, 2, device=DEVICE).half()), TypeError),
        (replace(GIVEN_FP8, kv_scales=None), ValueError),
        (replace(GIVEN, kv_scales=torch.ones(3, 2, device=DEVICE)), ValueError),
        (replace(GIVEN_FP8, kv_scales=torch.ones(2, 2, device=DEVICE)), ValueError),
        (replace(GIVEN, q=GIVEN.q[0]), ValueError),
        (replace(GIVEN, k=GIVEN.k[:1]), ValueError),
        (replace(GIVEN, v=GIVEN.v[:, :1]), ValueError),
        (replace(GIVEN, cos=GIVEN.cos[:, 0]), ValueError),
        (replace(GIVEN, slots=GIVEN.slots[:1]), ValueError),
        (replace(GIVEN, layer=3), ValueError),
        (replace(GIVEN, layer=-1), ValueError),
        (replace(GIVEN, pool=GIVEN.pool[:, :1]), ValueError),
        (replace(GIVEN, pool=GIVEN.pool[:, :, ::2]), ValueError),
        (replace(GIVEN, q=GIVEN.q.transpose(1, 2).contiguous().transpose(1, 2)), ValueError),
        (replace(GIVEN, cos=torch.ones(2, 1, 16, dtype=torch.float16, device=DEVICE)[..., ::2]), ValueError),
        (replace(GIVEN, slots=GIVEN.slots.to("meta")), ValueError),
        (replace(GIVEN, q=GIVEN.q[..., :7], k=GIVEN.k[..., :7], v=GIVEN.v[..., :7]), ValueError),
    ],
)
def test_what_is_refused(given: Arguments, error: type[Exception]) -> None:
    with pytest.raises(error):
        given.run()
