"""The translation to FlashInfer's arguments, with a stand-in that computes what those arguments say.

The package itself is not there: whether it understands them as its documentation says is not tested.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lamina_kernels.gpu import flashinfer
from support.kernel_numbers import DEVICE
from support.paged_attention import LAYER, Paged, assert_near, decode_reference, prefill_reference, queries, tiles_of

PLANS: list[dict[str, Any]] = []


class StandIn:
    """Attention by the documented meaning of plan and run; rows of one request are its last positions."""

    def __init__(self, workspace: Tensor, layout: str, *, backend: str, use_tensor_cores: bool = False) -> None:
        assert (workspace.dtype, layout, backend) == (torch.uint8, "NHD", "fa2")

    def plan(self, *arrays: Tensor, **options: Any) -> None:
        assert all(array.dtype == torch.int32 for array in arrays)
        self.arrays = [array.cpu() for array in arrays]
        self.options = options
        PLANS.append(options)

    def attend(self, starts: Tensor, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> None:
        indptr, indices, last = self.arrays[-3:]
        options = self.options
        assert cache[0].stride() == cache[1].stride()
        for i in range(len(last)):
            pages = indices[indptr[i] : indptr[i + 1]].long().to(q.device)
            size = (len(pages) - 1) * options["page_size"] + int(last[i])
            keys, values = (side[pages].flatten(0, 1)[:size].double() for side in cache)
            group = options["num_qo_heads"] // options["num_kv_heads"]
            rows = range(int(starts[i]), int(starts[i + 1]))
            for row in rows:
                position = size - len(rows) + row - rows.start
                distance = position - torch.arange(size, device=q.device)
                hidden = distance < 0
                if options["window_left"] >= 0:
                    hidden |= distance > options["window_left"]
                scores = torch.einsum("hd,nhd->hn", q[row].double(), keys.repeat_interleave(group, 1))
                scores = scores * options["sm_scale"]
                if options["logits_soft_cap"]:
                    scores = options["logits_soft_cap"] * torch.tanh(scores / options["logits_soft_cap"])
                weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
                seen = values.repeat_interleave(group, 1).masked_fill(hidden[:, None, None], 0)
                out[row] = torch.einsum("hn,nhd->hd", weights, seen).to(out.dtype)


class Decode(StandIn):
    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        assert {"head_dim", "fixed_split_size"} <= set(self.options)
        self.attend(torch.arange(len(q) + 1), q, cache, out)


class Prefill(StandIn):
    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        assert self.options["causal"]
        assert self.options["head_dim_qk"] == q.shape[2]
        self.attend(self.arrays[0], q, cache, out)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> flashinfer.FlashInfer:
    PLANS.clear()
    module = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill)
    monkeypatch.setitem(sys.modules, "flashinfer", module)  # type: ignore[arg-type]
    return flashinfer.FlashInfer(DEVICE, workspace_bytes=1024)


def empty_like(q: Tensor) -> Tensor:
    return torch.full((q.shape[0], q[0].numel()), torch.nan, dtype=q.dtype, device=q.device)


NUMBERS = [{}, {"window": 20}, {"window": 7, "softcap": 3.0}]


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_decode(library: flashinfer.FlashInfer, numbers: dict[str, Any]) -> None:
    window = numbers.get("window", 1000)
    contexts = (33, 16, 1, 90, 0, 0)
    ranges = [(max(context - window, 0), context) for context in contexts]
    paged = Paged.of(ranges, kv_heads=2, dim=64, dtype=torch.float16)
    paged.pool.nan_to_num_()  # the stand-in gathers whole pages
    q, numbers = queries(len(contexts), 6, 64, torch.float16), {"scale": 0.1} | numbers
    library.begin_decode(paged.tables.cpu().numpy(), paged.contexts.cpu().numpy())
    for _ in range(2):
        out = empty_like(q)
        library.paged_decode(q, paged.pool, LAYER, paged.tables, paged.contexts, out, **numbers)
        assert_near(out, decode_reference(paged, q, **numbers))
    assert len(PLANS) == 1


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_prefill(library: flashinfer.FlashInfer, numbers: dict[str, Any]) -> None:
    window = numbers.get("window", 1000)
    spans = [(1, 2, 9, 60), (0, 11, 20, 0), (2, 31, 0, 5), (2, 31, 1, 5)]
    ranges = [(0, 20), (max(61 - window, 0), 69), (0, 6)]
    paged = Paged.of(ranges, kv_heads=2, dim=64, dtype=torch.float16)
    paged.pool.nan_to_num_()
    q, numbers = queries(32, 6, 64, torch.float16), {"scale": 0.1} | numbers
    tiles = tiles_of(paged, q, spans)
    library.begin_prefill(paged.tables.cpu().numpy(), spans)
    out = empty_like(q)
    library.paged_prefill(q, paged.pool, LAYER, paged.tables, tiles, paged.contexts, out, **numbers)
    assert_near(out, prefill_reference(paged, q, tiles, **numbers))
    assert out[:2].isnan().all()


def test_no_rows(library: flashinfer.FlashInfer) -> None:
    paged = Paged.of([(0, 0)], kv_heads=2, dim=64, dtype=torch.float16)
    q, tables = queries(1, 2, 64, torch.float16), paged.tables.cpu().numpy()
    out = empty_like(q)
    library.begin_prefill(tables, [])
    tiles = tiles_of(paged, q, [])
    library.paged_prefill(q, paged.pool, LAYER, paged.tables, tiles, paged.contexts, out, scale=1.0)
    assert out.isnan().all()
    library.begin_decode(tables, np.zeros(1, dtype=np.int32))
    library.paged_decode(q, paged.pool, LAYER, paged.tables, paged.contexts, out, scale=1.0)
    assert out.eq(0).all()


def test_what_it_cannot_do(library: flashinfer.FlashInfer) -> None:
    for dim, dtype in ((96, torch.float16), (64, torch.float32)):
        paged = Paged.of([(0, 4)], kv_heads=1, dim=dim, dtype=dtype)
        q = queries(1, 1, dim, dtype)
        with pytest.raises(ValueError, match="FlashInfer"):
            library.paged_decode(q, paged.pool, LAYER, paged.tables, paged.contexts, empty_like(q), scale=1.0)
    with pytest.raises(ValueError, match="unused decode rows"):
        library.begin_decode(np.zeros((2, 1), dtype=np.int32), np.array([0, 3], dtype=np.int32))
    with pytest.raises(ValueError, match="follow each other"):
        library.begin_prefill(np.zeros((2, 1), dtype=np.int32), [(0, 0, 2, 0), (1, 3, 2, 0)])


def test_planning_comes_first(library: flashinfer.FlashInfer) -> None:
    paged = Paged.of([(0, 4)], kv_heads=1, dim=64, dtype=torch.float16)
    q = queries(1, 1, 64, torch.float16)
    with pytest.raises(RuntimeError, match="begin_decode"):
        library.paged_decode(q, paged.pool, LAYER, paged.tables, paged.contexts, empty_like(q), scale=1.0)


def test_it_is_not_available_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not flashinfer.available()
