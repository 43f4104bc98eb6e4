"""Our rounding to float8_e4m3fn is torch's, but for what lies beyond its range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from lamina_kernels.gpu.fp8 import E4M3_MAX, to_e4m3
from support.kernel_numbers import DEVICE, noise


@triton.jit
def _encode(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, to_e4m3(tl.load(x + i)))


def encoded(x: Tensor) -> Tensor:
    codes = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    _encode[(1,)](x.to(DEVICE), codes, N=len(x))
    return codes.cpu().view(torch.float8_e4m3fn)


def test_every_half_rounds_as_in_torch() -> None:
    """All 65536 fp16 numbers, among them every tie, both zeros, infinities and NaN."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16).float()
    expected = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    ours = encoded(x)
    assert torch.equal(ours.float().isnan(), x.isnan())
    number = ~x.isnan()
    assert torch.equal(ours.view(torch.uint8)[number], expected.view(torch.uint8)[number])


def test_a_hair_beside_a_tie() -> None:
    """float32 has numbers so close to a tie that fp16 cannot tell: they go to their own side."""
    codes = torch.arange(0x7E, dtype=torch.uint8)
    low = codes.view(torch.float8_e4m3fn).float()
    high = (codes + 1).view(torch.float8_e4m3fn).float()
    tie = (low + high) / 2
    below, above = torch.nextafter(tie, low), torch.nextafter(tie, high)
    ours = encoded(torch.cat((below, tie, above, torch.zeros(512 - 3 * 126))))[: 3 * 126].float()
    assert torch.equal(ours[:126], low)
    assert torch.equal(ours[252:], high)
    even = torch.where(codes % 2 == 0, low, high)
    assert torch.equal(ours[126:252], even)


def test_random_numbers_of_every_size() -> None:
    x = noise(1024).cpu() * torch.exp2(noise(1024, seed=1).cpu() * 8)
    expected = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    assert torch.equal(encoded(x).view(torch.uint8), expected.view(torch.uint8))
