"""Every LoRA table against the naive oracle in float64, on shapes that are meant to hurt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lamina_kernels.cpu.build import BuildFailed
from lamina_kernels.cpu.lora import NativeLoraTable
from lamina_kernels.lora import LoraSegments, LoraTable, LoraWeights, TorchLoraTable, expand, shrink
from lamina_kernels.oracles import lora as oracle

IN, WIDTHS = 37, (40, 17, 9)  # no multiple of a vector or a tile
OUT = sum(WIDTHS)
COLUMNS = (0, 40, 57)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

Make = Callable[[int, torch.dtype], LoraTable]


def _torch_table(sites: int, dtype: torch.dtype) -> LoraTable:
    return TorchLoraTable(sites)


def _native_table(sites: int, dtype: torch.dtype) -> LoraTable:
    try:
        return NativeLoraTable(sites, dtype)
    except BuildFailed as reason:
        pytest.skip(str(reason))


@pytest.fixture(params=[_torch_table, _native_table], ids=["torch", "native"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


def lora(
    ranks: tuple[int, ...],
    slices: tuple[int, ...],
    seed: int,
    dtype: torch.dtype = torch.float32,
    dora: tuple[int, ...] = (),
) -> LoraWeights:
    """The slices in `dora` have gains."""
    generator = torch.Generator().manual_seed(seed)
    return LoraWeights(
        a=(torch.randn(sum(ranks), IN, generator=generator) / IN**0.5).to(dtype),
        b=tuple(
            (torch.randn(r, WIDTHS[s], generator=generator) / r**0.5).to(dtype)
            for r, s in zip(ranks, slices, strict=True)
        ),
        columns=tuple(COLUMNS[s] for s in slices),
        gains=tuple(torch.randn(WIDTHS[s], generator=generator) if s in dora else None for s in slices)
        if dora
        else None,
    )


def expected(
    weights: list[LoraWeights],
    segments: list[tuple[int, int, int]],
    x: Tensor,
    y: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    chosen = [weights[slot] for slot, _, _ in segments]
    rows = [(start, stop) for _, start, stop in segments]
    x, y = x.double(), y.double()
    h = torch.full((len(x), max((w.rank for w in chosen), default=1)), torch.nan, dtype=torch.float64)
    oracle.shrink(x, chosen, rows, h)
    oracle.expand(h, chosen, rows, y, bias)
    return y


def filled(make: Make, weights: list[LoraWeights], dtype: torch.dtype = torch.float32) -> LoraTable:
    table = make(1, dtype)
    for slot, one in enumerate(weights):
        table.put(slot, table.prepare([one]))
    return table


MIXED = [((1, 1, 1), (0, 1, 2)), ((7, 7), (0, 2)), ((8,), (1,)), ((64, 64, 64), (0, 1, 2)), ((3, 16, 5), (0, 1, 2))]
BATCHES = {
    "one row": [(0, 0, 1)],
    "one row each, last slot first": [(4, 0, 1), (3, 1, 2), (2, 2, 3), (1, 3, 4), (0, 4, 5)],
    "base rows before, between and after": [(3, 2, 5), (1, 9, 16)],
    "ragged": [(0, 0, 2), (1, 2, 5), (2, 5, 9), (3, 9, 14), (4, 14, 20)],
    "a slot twice": [(3, 0, 3), (1, 3, 4), (3, 6, 7)],
    "out of order": [(2, 10, 20), (0, 0, 10)],
    "long": [(3, 0, 67), (1, 67, 200), (0, 200, 201)],
    "nothing": [],
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("segments", BATCHES.values(), ids=BATCHES)
def test_matches_the_oracle(make: Make, segments: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
    """Each segment gets its own adapter's change; rows in no segment keep their bits, NaN included."""
    weights = [lora(ranks, slices, seed, dtype) for seed, (ranks, slices) in enumerate(MIXED)]
    tokens = max((stop for _, _, stop in segments), default=0) + 2
    x, y = torch.randn(tokens, IN).to(dtype), torch.randn(tokens, OUT).to(dtype)
    base = torch.ones(tokens, dtype=torch.bool)
    for _, start, stop in segments:
        base[start:stop] = False
    x[base] = y[base] = torch.nan
    want = expected(weights, segments, x, y)
    filled(make, weights, dtype).apply(0, LoraSegments(segments), x, y)
    torch.testing.assert_close(y.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)
    assert y[base].isnan().all()


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dora_scales_all_but_the_bias(make: Make, dtype: torch.dtype, with_bias: bool) -> None:
    """Slices with gains, signed and all different, beside slices and adapters without, and base rows."""
    weights = [
        lora((7, 3, 5), (0, 1, 2), 0, dtype, dora=(0, 1, 2)),
        lora((4, 4), (0, 2), 1, dtype, dora=(2,)),
        lora((16,), (1,), 2, dtype),
        lora((64,), (1,), 3, dtype, dora=(1,)),
    ]
    segments = [(3, 0, 1), (0, 2, 9), (2, 9, 14), (1, 14, 17), (0, 17, 18)]
    x, y = torch.randn(19, IN).to(dtype), torch.randn(19, OUT).to(dtype)
    bias = torch.randn(OUT).to(dtype) if with_bias else None
    base = y[[1, 18]].clone()
    want = expected(weights, segments, x, y, bias)
    filled(make, weights, dtype).apply(0, LoraSegments(segments), x, y, bias)
    torch.testing.assert_close(y.double(), want, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
    assert torch.equal(y[[1, 18]], base)


def test_a_bias_matters_only_to_dora(make: Make) -> None:
    """Without gains the bias stays in y as it is, whatever it holds."""
    table = filled(make, [lora((7, 7), (0, 2), 1)])
    x, y = torch.randn(3, IN), torch.randn(3, OUT)
    with_bias = y.clone()
    table.apply(0, LoraSegments([(0, 0, 3)]), x, y)
    table.apply(0, LoraSegments([(0, 0, 3)]), x, with_bias, torch.full((OUT,), torch.nan))
    assert torch.equal(y, with_bias)


def test_columns_of_missing_slices_keep_their_bits(make: Make) -> None:
    """An adapter without k leaves k's columns alone, whatever they hold."""
    y = torch.full((3, OUT), torch.nan)
    y[:, :40] = y[:, 57:] = 0
    filled(make, [lora((7, 7), (0, 2), 1)]).apply(0, LoraSegments([(0, 0, 3)]), torch.randn(3, IN), y)
    assert y[:, 40:57].isnan().all()
    assert not y[:, :40].isnan().any()
    assert (y[:, :40] != 0).any()


def test_more_adapters_than_rows(make: Make) -> None:
    """Loaded adapters that are not in the batch do not matter."""
    weights = [lora((4,), (0,), seed) for seed in range(20)]
    x, y = torch.randn(2, IN), torch.zeros(2, OUT)
    want = expected(weights, [(19, 0, 1), (7, 1, 2)], x, y)
    filled(make, weights).apply(0, LoraSegments([(19, 0, 1), (7, 1, 2)]), x, y)
    torch.testing.assert_close(y.double(), want, rtol=2e-6, atol=2e-6)


def test_rows_with_a_stride(make: Make) -> None:
    """x and y may be columns of wider tensors."""
    weights = [lora((5, 2), (0, 1), 3)]
    x, y = torch.randn(4, IN + 3)[:, 2:-1], torch.randn(4, OUT + 6)
    want = expected(weights, [(0, 1, 4)], x, y[:, 5:-1])
    around = y[:, [0, 4, -1]].clone()
    filled(make, weights).apply(0, LoraSegments([(0, 1, 4)]), x, y[:, 5:-1])
    torch.testing.assert_close(y[:, 5:-1].double(), want, rtol=2e-6, atol=2e-6)
    assert torch.equal(y[:, [0, 4, -1]], around)


def test_a_site_without_the_adapter_is_left_alone(make: Make) -> None:
    """An adapter that skips a site changes nothing there, also beside one that does not."""
    table = make(2, torch.float32)
    table.put(0, table.prepare([None, lora((4,), (0,), 0)]))
    table.put(1, table.prepare([lora((4,), (0,), 1), None]))
    x, y = torch.randn(2, IN), torch.zeros(2, OUT)
    table.apply(0, LoraSegments([(0, 0, 1), (1, 1, 2)]), x, y)
    assert (y[0] == 0).all()
    assert (y[1] != 0).any()


def test_a_reused_slot_serves_its_new_adapter(make: Make) -> None:
    """Nothing of the former adapter is left, whatever their ranks and slices."""
    old, new = lora((64, 64, 64), (0, 1, 2), 0), lora((3,), (1,), 1)
    table = filled(make, [old])
    table.drop(0)
    table.put(0, table.prepare([new]))
    x, y = torch.randn(3, IN), torch.zeros(3, OUT)
    table.apply(0, LoraSegments([(0, 0, 3)]), x, y)
    torch.testing.assert_close(y.double(), expected([new], [(0, 0, 3)], x, torch.zeros(3, OUT)), rtol=2e-6, atol=2e-6)


def test_a_dropped_slot_changes_nothing(make: Make) -> None:
    """A stale batch cannot read freed memory."""
    table = filled(make, [lora((4,), (0,), 0)])
    table.drop(0)
    y = torch.zeros(1, OUT)
    table.apply(0, LoraSegments([(0, 0, 1)]), torch.randn(1, IN), y)
    assert (y == 0).all()


@pytest.mark.parametrize("dora", [(), (0, 1, 2)], ids=["plain", "dora"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_native_rows_do_not_depend_on_the_batch(dtype: torch.dtype, dora: tuple[int, ...]) -> None:
    """A row's bits are the same alone, in any batch, at any place and with any number of threads."""
    weights = [lora(ranks, slices, seed, dtype, dora) for seed, (ranks, slices) in enumerate(MIXED)]
    table = filled(_native_table, weights, dtype)
    x, y, bias = torch.randn(150, IN).to(dtype), torch.randn(150, OUT).to(dtype), torch.randn(OUT).to(dtype)
    together, alone, threads = y.clone(), y.clone(), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        table.apply(0, LoraSegments([(3, 0, 70), (4, 70, 150)]), x, together, bias)
        torch.set_num_threads(1)
        for row in range(150):
            segment = LoraSegments([(3 if row < 70 else 4, 0, 1)])
            table.apply(0, segment, x[row : row + 1], alone[row : row + 1], bias)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together, alone)


def test_torch_functions_match_the_oracle_in_float64() -> None:
    """`shrink` and `expand` have the oracle's signature and, in float64, its result."""
    weights = [lora(ranks, slices, seed, torch.float64, dora=(0, 2)) for seed, (ranks, slices) in enumerate(MIXED)]
    rows = [(0, 1), (2, 9), (9, 10), (12, 20), (20, 23)]
    x, y = torch.randn(23, IN, dtype=torch.float64), torch.randn(23, OUT, dtype=torch.float64)
    h = torch.full((23, 192), torch.nan, dtype=torch.float64)
    want_h, want_y = h.clone(), y.clone()
    shrink(x, weights, rows, h)
    oracle.shrink(x, weights, rows, want_h)
    torch.testing.assert_close(h, want_h, equal_nan=True)
    bias = torch.randn(OUT, dtype=torch.float64)
    expand(h, weights, rows, y, bias)
    oracle.expand(want_h, weights, rows, want_y, bias)
    torch.testing.assert_close(y, want_y)


@pytest.mark.parametrize(
    "segments",
    [[(0, 0, 0)], [(0, 3, 2)], [(0, -1, 1)], [(0, 0, 2), (1, 1, 3)], [(-1, 0, 1)]],
    ids=["empty", "reversed", "negative row", "overlap", "negative slot"],
)
def test_bad_segments_are_refused(segments: list[tuple[int, int, int]]) -> None:
    """Segments are checked once, when the batch is built."""
    with pytest.raises(ValueError, match=r"segment|slots"):
        LoraSegments(segments)


def test_native_refuses_what_would_leave_its_tensors() -> None:
    """Wrong widths, rows, dtypes, strides and slots never reach the kernel."""
    table = filled(_native_table, [lora((4,), (2,), 0)])
    good = LoraSegments([(0, 0, 2)])
    x, y = torch.randn(2, IN), torch.zeros(2, OUT)
    bad = [
        (TypeError, good, x.double(), y),
        (TypeError, good, x, y.bfloat16()),
        (ValueError, good, x[:, :-1], y),
        (ValueError, good, x, y[:, :-1]),
        (ValueError, good, x[:1], y),
        (ValueError, good, x, y[:1]),
        (ValueError, good, torch.randn(IN, 2).t(), y),
        (ValueError, LoraSegments([(9, 0, 2)]), x, y),
    ]
    for error, segments, bad_x, bad_y in bad:
        with pytest.raises(error):
            table.apply(0, segments, bad_x, bad_y)
    for bias in (torch.zeros(OUT - 1), torch.zeros(OUT).half(), torch.zeros(2 * OUT)[::2], torch.zeros(1, OUT)):
        with pytest.raises(ValueError, match="bias must be"):
            table.apply(0, good, x, y, bias)
    with pytest.raises(ValueError, match="wide"):
        table.put(1, table.prepare([LoraWeights(torch.zeros(1, IN + 1), (torch.zeros(1, 3),), (0,))]))


def test_tables_refuse_what_another_kernel_prepared() -> None:
    """Weights laid out for another kernel or dtype are never taken for their own."""
    weights = [lora((4,), (0,), 0)]
    native, half = _native_table(1, torch.float32), _native_table(1, torch.float16)
    for table, other in ((TorchLoraTable(1), native), (native, TorchLoraTable(1)), (native, half)):
        with pytest.raises(TypeError, match="prepared"):
            table.put(0, other.prepare(weights))


def test_weights_must_agree_with_each_other() -> None:
    """A has one row per rank of each slice."""
    with pytest.raises(ValueError, match="slice"):
        LoraWeights(torch.zeros(3, IN), (torch.zeros(2, 4),), (0,))
