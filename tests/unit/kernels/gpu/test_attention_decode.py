"""Decode attention over paged keys and values, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from lamina_kernels.gpu import tuned
from lamina_kernels.gpu.attention_decode import SPLITS, DecodeScratch, paged_decode
from lamina_kernels.gpu.attention_tile import widen_fp8
from support.kernel_numbers import DEVICE, DTYPES
from support.paged_attention import LAYER, Paged, assert_near, decode, decode_reference, queries

CONTEXTS = (1, 15, 16, 17, 33, 0, 300)  # 0: an unused row


def whole(*contexts: int) -> list[tuple[int, int]]:
    return [(0, context) for context in contexts]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contexts(dtype: torch.dtype) -> None:
    paged = Paged.of(whole(*CONTEXTS), kv_heads=1, dim=64, dtype=dtype)
    q = queries(len(CONTEXTS), 3, 64, dtype)
    out = decode(paged, q)
    assert_near(out, decode_reference(paged, q))
    assert out[CONTEXTS.index(0)].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 128), (2, 2, 64), (8, 1, 64), (20, 1, 64)])
def test_grouped_queries(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """One to more query heads on a KV head than a matrix product is high at least."""
    paged = Paged.of(whole(20, 3), kv_heads=kv_heads, dim=dim, dtype=dtype)
    q = queries(2, heads, dim, dtype)
    assert_near(decode(paged, q), decode_reference(paged, q))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [80, 96, 256])
@pytest.mark.parametrize("block_size", [16, 32])
def test_head_dims(dim: int, block_size: int, dtype: torch.dtype) -> None:
    paged = Paged.of(whole(33, 70), kv_heads=1, dim=dim, dtype=dtype, block_size=block_size)
    q = queries(2, 2, dim, dtype)
    assert_near(decode(paged, q), decode_reference(paged, q))


@pytest.mark.parametrize("window", [1, 5, 16, 100])
def test_a_window_hides_what_lies_before(window: int) -> None:
    """Blocks before it may be gone: their table entries are wild and their memory is NaN."""
    contexts = (1, 17, 33, 600)
    ranges = [(max(context - window, 0), context) for context in contexts]
    paged = Paged.of(ranges, kv_heads=1, dim=64, dtype=torch.float32)
    q = queries(len(contexts), 3, 64, torch.float32)
    assert_near(decode(paged, q, window=window), decode_reference(paged, q, window=window))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [2.0, 50.0])
def test_soft_cap(softcap: float, dtype: torch.dtype) -> None:
    """Scores far beyond the cap saturate at both ends."""
    paged = Paged.of(whole(33), kv_heads=1, dim=64, dtype=dtype)
    q = queries(1, 2, 64, dtype) * 10
    got, wanted = (f(paged, q, scale=2.0, softcap=softcap, window=20) for f in (decode, decode_reference))
    assert_near(got, wanted, factor=3)


@triton.jit
def _widen_all(codes, halves):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 256)
    tl.store(halves + i, widen_fp8(tl.load(codes + i)))


def test_every_fp8_code_is_widened_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    halves = torch.empty(256, dtype=torch.float16, device=DEVICE)
    _widen_all[(1,)](codes, halves)
    torch.testing.assert_close(halves, codes.view(torch.float8_e4m3fn).half(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("by_hand", [True, False])
def test_fp8_keys_and_values(by_hand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to widen them. NaN by the chip's way is read as 480 in the interpreter, and still must not be read."""
    monkeypatch.setattr("lamina_kernels.gpu.attention_pool._widens_fp8", lambda device: not by_hand)
    paged = Paged.of(whole(17, 300), kv_heads=1, dim=64, dtype=torch.float32).in_fp8()
    for dtype in DTYPES:
        q = queries(2, 3, 64, dtype)
        assert_near(decode(paged, q), decode_reference(paged, q), factor=3)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts of few keys, which the interpreter is quick with."""
    small = tuned.DecodeTile(keys=16, min_tiles=2, num_warps=4, num_stages=2)
    monkeypatch.setattr(tuned, "decode_tile", lambda head_dim, element_size: small)


@pytest.mark.usefixtures("small_parts")
def test_a_context_longer_than_all_parts_at_their_least() -> None:
    context = SPLITS * 2 * 16 + 77
    paged = Paged.of(whole(context), kv_heads=1, dim=64, dtype=torch.float16)
    q = queries(1, 2, 64, torch.float16)
    assert_near(decode(paged, q), decode_reference(paged, q))
    assert_near(decode(paged, q, window=90), decode_reference(paged, q, window=90))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_do_not_change_a_bit(dtype: torch.dtype) -> None:
    """Alone, first, last, beside longer and unused rows, with a wider table: the grid differs, the row does not."""
    q = queries(3, 4, 64, dtype)
    alone = decode(Paged.of(whole(70), kv_heads=1, dim=64, dtype=dtype), q[:1])
    for contexts, at in (((70, 200, 3), 0), ((7, 0, 70), 2), ((64, 70, 70), 1)):
        paged = Paged.of(whole(*contexts), kv_heads=1, dim=64, dtype=dtype, seed=at + 1)
        among = decode(paged, q[0].expand(3, -1, -1).clone())
        assert torch.equal(among[at], alone[0])


def test_another_sequence_s_nan_stays_there() -> None:
    paged = Paged.of(whole(40, 40), kv_heads=1, dim=64, dtype=torch.float32)
    q = queries(2, 2, 64, torch.float32)
    clean = decode(paged, q)
    paged.pool[paged.tables[1, 1].long()] = torch.nan
    poisoned = decode(paged, q)
    assert torch.equal(poisoned[0], clean[0])
    assert poisoned[1].isnan().all()


def test_outputs_may_lie_in_a_wider_row() -> None:
    paged = Paged.of(whole(33, 5), kv_heads=1, dim=64, dtype=torch.float32)
    q = queries(2, 2, 64, torch.float32)
    wide = torch.full((2, 200), torch.nan, device=DEVICE)
    scratch = DecodeScratch.allocate(2, 2, 64, q.device)
    paged_decode(q, paged.pool, LAYER, paged.tables, paged.contexts, wide[:, 8:136], scratch, scale=0.125)
    assert torch.equal(wide[:, 8:136], decode(paged, q))
    assert wide[:, :8].isnan().all()
    assert wide[:, 136:].isnan().all()


def test_no_rows() -> None:
    paged = Paged.of([], kv_heads=1, dim=64, dtype=torch.float32)
    assert decode(paged, queries(0, 2, 64, torch.float32)).shape == (0, 128)


class TestRefusals:
    """A kernel would read or write elsewhere."""

    @staticmethod
    def launch(**changes: object) -> None:
        paged = Paged.of(whole(5, 6), kv_heads=1, dim=64, dtype=torch.float32)
        arguments = {
            "q": queries(2, 2, 64, torch.float32),
            "pool": paged.pool,
            "layer": LAYER,
            "tables": paged.tables,
            "contexts": paged.contexts,
            "out": torch.empty(2, 128, device=DEVICE),
            "scratch": DecodeScratch.allocate(2, 2, 64, torch.device(DEVICE)),
            "scale": 1.0,
        }
        paged_decode(**(arguments | changes))  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"q": torch.zeros(2, 128)}, "rows, heads, dim"),
            ({"q": torch.zeros(2, 2, 48)}, "head dim must be"),
            ({"q": torch.zeros(2, 64, 2).transpose(1, 2)}, "must be contiguous"),
            ({"q": torch.zeros(3, 2, 64)}, "out is"),
            ({"layer": 3}, "layer 3"),
            ({"layer": -1}, "layer -1"),
            ({"pool": torch.zeros(9, 2, 3, 24, 1, 64)}, "block size"),
            ({"pool": torch.zeros(9, 2, 3, 16, 1, 128)[..., :64]}, "contiguous"),
            ({"pool": torch.zeros(9, 2, 3, 16, 3, 64)}, "multiple of KV heads"),
            ({"out": torch.zeros(2, 64)}, "out is"),
            ({"out": torch.zeros(128, 2).t()}, "contiguous"),
            ({"contexts": torch.zeros(3, dtype=torch.int32)}, "contexts"),
            ({"scratch": DecodeScratch.allocate(1, 2, 64, torch.device(DEVICE))}, "scratch"),
            ({"scratch": DecodeScratch.allocate(2, 4, 64, torch.device(DEVICE))}, "scratch"),
            ({"window": 0}, "window"),
            ({"softcap": 0.0}, "softcap"),
            ({"scale": float("nan")}, "scale"),
            ({"kv_scales": torch.ones(3, 2)}, "kv_scales"),
            ({"pool": torch.zeros(9, 2, 3, 16, 1, 64).to(torch.float8_e4m3fn)}, "kv_scales"),
        ],
    )
    def test_shapes_and_numbers(self, changes: dict[str, object], message: str) -> None:
        placed = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in changes.items()}
        with pytest.raises(ValueError, match=message):
            self.launch(**placed)

    @pytest.mark.parametrize(
        "changes",
        [
            {"q": torch.zeros(2, 2, 64, dtype=torch.float64)},
            {"out": torch.zeros(2, 128, dtype=torch.float16)},
            {"pool": torch.zeros(9, 2, 3, 16, 1, 64, dtype=torch.float16)},
            {"tables": torch.zeros(2, 1, dtype=torch.int64)},
            {"contexts": torch.zeros(2, dtype=torch.int64)},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_dtypes(self, changes: dict[str, torch.Tensor]) -> None:
        with pytest.raises(TypeError):
            self.launch(**{name: x.to(DEVICE) for name, x in changes.items()})
