"""The device's draws lie where the distribution says: drawn parameters, rows from all-equal to all-distinct."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina_kernels.gpu.sampling import sample
from lamina_kernels.gpu.sampling_seats import SeatParams, SeatState
from lamina_kernels.gpu.tuned import SamplingShape
from lamina_kernels.oracles import sampling as oracle

SMALL = SamplingShape(chunk=64, num_warps=4, listed=8, small_warps=4)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@st.composite
def seated(choose: st.DrawFn, vocab: int) -> SeatParams:
    sometimes, ids = st.booleans(), st.integers(0, vocab - 1)
    return SeatParams(
        temperature=choose(st.floats(0.05, 9)),
        top_k=choose(st.integers(0, vocab + 2)) if choose(sometimes) else 0,
        top_p=choose(st.floats(0.001, 0.999)) if choose(sometimes) else 1.0,
        min_p=choose(st.floats(0.001, 1)) if choose(sometimes) else 0.0,
        repetition_penalty=choose(st.floats(0.5, 2)) if choose(sometimes) else 1.0,
        presence_penalty=choose(st.floats(-2, 2)) if choose(sometimes) else 0.0,
        seed=choose(st.integers(-(2**63), 2**64 - 1)),
        index=choose(st.integers(0, 2**31)),
        bias=tuple(choose(st.dictionaries(ids, st.floats(-30, 30, width=32), max_size=3)).items()),
        forbidden=tuple(choose(st.sets(ids, max_size=1))),
        min_tokens=choose(st.integers(0, 3)),
    )


def allowed(y: torch.Tensor, params: SeatParams, state: SeatState) -> set[int]:
    """What may come within 1e-5 of the uniform, with filters moved by what float32 may move them."""
    place, found = oracle.uniform(0, state), set()
    for p_shift in (-3e-6, 0.0, 3e-6):
        for m_shift in (1 - 1e-5, 1.0, 1 + 1e-5):
            top_p = min(max(params.top_p + p_shift, 1e-9), 1 - 1e-9) if params.top_p < 1 else 1.0
            moved = replace(params, top_p=top_p, min_p=min(1.0, params.min_p * m_shift))
            other = SeatState.create(1, y.numel(), torch.device("cpu"))
            other.fill(0, moved)
            kept = oracle.distribution(y, 0, other)
            total, before = math.fsum(kept.values()), 0.0
            for token in sorted(kept):
                after = before + kept[token] / total
                if before - 1e-5 <= place < after + 1e-5:
                    found.add(token)
                before = after
    return found


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_a_draw_lies_where_the_distribution_says(data: st.DataObject) -> None:
    """Edits, filters and the inverse distribution, in chunks of 64; top_k above 64 and wide nuclei included."""
    vocab = data.draw(st.sampled_from([2, 5, 70, 150]))
    params = data.draw(seated(vocab))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    levels = data.draw(st.sampled_from([1, 3, 10**6]))
    values = np.round(generator.normal(0, 2, vocab) * levels) / levels
    logits = torch.tensor(values[None], dtype=torch.float32, device=DEVICE)
    state = SeatState.create(1, vocab, DEVICE)
    history = data.draw(st.lists(st.integers(0, vocab - 1), max_size=4, unique=True))
    state.fill(0, params, position=2, prompt=history[:2], output_counts=[(token, 3) for token in history[2:]])
    host = SeatState(
        *(t.cpu().clone() for t in (state.fields, state.listed, state.history, state.position)), state.last_token
    )
    y = oracle.edited(logits[0].cpu(), 0, host)
    got = sample(logits, torch.zeros(1, dtype=torch.int32, device=DEVICE), state, params.needs, shape=SMALL)
    if not math.isfinite(float(y.max())):
        assert int(got.statuses[0]) != 0
    else:
        assert int(got.tokens[0]) in allowed(y, params, host)
