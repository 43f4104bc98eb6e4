"""The whole engine on random Llama-3-8B-shaped weights: device kernels give the tokens of plain torch, alone and mixed.

The reference runs in float32 on the CPU. In float32 the device must agree with it; in 16 bits roundings differ between
any two ways of computing: there the agreement is a figure, beside the one that plain torch reaches on the device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from chips import Chip
from fixtures.engines import drive
from gpu_case import short
from gpu_model import Workshop, device_backend, model_config, prompt
from gpu_report import Figure, Item
from gpu_scale import Scale
from gpu_setup import DEVICE, ON_GPU
from lamina.models.interface import CausalLM
from lamina.types import GenerationRequest
from lamina.wiring.backends import Backend, TorchBackend

__all__ = ["items"]

LAYERS, VOCAB = 2 if ON_GPU else 1, 16384  # Llama's width; fewer layers and tokens, as the reference runs on a CPU
RANKS = (16, 8) if ON_GPU else (3,)
REQUESTS, NEW = (8, 12) if ON_GPU else (2, 3)
AGREE = 0.95
"""Share of tokens up to the first difference. The devices add in different orders, so two logits within rounding may
change places; a wrong kernel makes nearly all tokens differ."""

Tokens = dict[tuple[str, int], list[int]]


def items(scale: Scale, chip: Chip) -> Iterator[Item]:
    shape = replace(scale.shape, vocab=VOCAB) if ON_GPU else scale.shape
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        parity = _Parity(Workshop(model_config(shape, LAYERS), Path(scratch)))
        yield "plain torch on the CPU", parity.prepare
        for dtype in (torch.float32, torch.bfloat16, torch.float16) if ON_GPU else (torch.float32,):
            yield f"device kernels, {short(dtype)}", partial(parity.compare, dtype)


class _Parity:
    """One set of requests, and its tokens as plain torch generates them in float32 on the CPU."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._requests: list[GenerationRequest] = []
        self._expected: Tokens = {}

    def prepare(self) -> None:
        self._workshop.draw()
        adapters = [None, *(self._workshop.adapter(rank, seed) for seed, rank in enumerate(RANKS))]
        lengths = [(40 + 8 * i) % 70 + 1 if ON_GPU else 3 + i for i in range(REQUESTS)]
        config = self._workshop.config
        self._requests = [prompt(config, i, length, NEW, adapters) for i, length in enumerate(lengths)]
        cpu, backend = torch.device("cpu"), TorchBackend()
        model = self._workshop.model(torch.float32, cpu, backend)
        self._expected = self._tokens(model, torch.float32, cpu, backend, self._requests)

    def compare(self, dtype: torch.dtype) -> list[Figure]:
        assert self._expected, "there is no reference to compare with"
        backend = device_backend()
        model = self._workshop.model(dtype, DEVICE, backend)
        mixed = self._tokens(model, dtype, DEVICE, backend, self._requests)
        alone: Tokens = {}
        for item in self._requests[-2 if ON_GPU else -1 :]:  # with adapters
            alone |= self._tokens(model, dtype, DEVICE, backend, [item])
        shares = {
            "against fp32 on the CPU": _agreement(mixed, self._expected),
            "alone against mixed": _agreement(alone, {key: mixed[key] for key in alone}),
        }
        if ON_GPU:
            plain = TorchBackend()
            by_torch = self._tokens(self._workshop.model(dtype, DEVICE, plain), dtype, DEVICE, plain, self._requests)
            shares["by plain torch here, against fp32 on the CPU"] = _agreement(by_torch, self._expected)
        if dtype is torch.float32:
            for name, share in shares.items():
                assert share >= AGREE, f"only {share:.0%} of the tokens agree {name}"
        note = "of tokens up to the first difference"
        return [
            Figure(name=f"engine, {short(dtype)} {name}", unit="%", measured=round(100 * share, 1), note=note)
            for name, share in shares.items()
        ]

    def _tokens(
        self,
        model: CausalLM,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend,
        requests: Sequence[GenerationRequest],
    ) -> Tokens:
        core = self._workshop.core(model, dtype, device, backend)
        try:
            tokens, endings = drive(core, requests)
        finally:
            core.close()
        assert len(endings) == len(requests), "not every request ended"
        return tokens


def _agreement(found: Tokens, wanted: Tokens) -> float:
    same = total = 0
    for key, tokens in wanted.items():
        total += len(tokens)
        for a, b in zip(found[key], tokens, strict=True):
            if a != b:
                break
            same += 1
    return same / total
