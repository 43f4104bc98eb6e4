"""A seeded workload of many tenants, shaped like the public traces of KV reuse: block level, and none of their data.

What it is shaped by, and how near it comes (`shape_of` measures, `kv_replay.py` prints both):

- Qwen-Bailian, two hours of one serving instance, 16-token blocks (Wang et al., "KVCache Cache in the Wild", USENIX ATC
  2025, arXiv 2506.02634, github.com/alibaba-edu/qwen-bailian-usagetraces-anon): with endless room 54 % (business) to
  62 % (consumers) of the blocks are found; 10 % of the blocks are 77 % of all reuses; 80 % of the reuses come within 10
  minutes for consumers and within 10 seconds for business; hardly any reuse crosses users.
- Mooncake, one hour (Qin et al., FAST 2025, arXiv 2407.00079): inputs of 7590 tokens on average and outputs of 182,
  with a long tail; half of all blocks are found at best, and least recently used is the best of the plain orders.

Three kinds of tenants. *Chats* are conversations of people: a system prefix, then turns with minutes of thought in
between. *Jobs* are bursts of single calls that share a template, and often a document, seconds apart. *Agents* are long
conversations with a tool's answers, seconds apart. Tenants, each tenant's adapters, and each adapter's prefixes have
zipf popularity; lengths are lognormal with a cut tail. `scans` adds requests that nobody repeats, `loops` a batch that
reads the same documents round and round: what breaks the simple orders (both none in the plain workload).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["BLOCK", "Request", "Trace", "TraceShape", "make_trace", "shape_of"]

BLOCK = 16  # tokens
CONTEXT = 32_768  # tokens; what would be longer ends its conversation
SECONDS_PER_OUTPUT_TOKEN, SECONDS_TO_FIRST_TOKEN = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class Request:
    """One call. `blocks` are all that it fills, prompt and output, head first: equal numbers are equal prefixes."""

    start: float  # seconds
    stop: float
    namespace: str
    blocks: tuple[int, ...]
    prompt_blocks: int  # of these, what is looked for; the last token of a prompt is always computed


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by start, and how many different blocks there are in all of them: the working set."""

    requests: tuple[Request, ...]
    distinct: int
    namespaces: tuple[str, ...]  # the busiest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How much of what. Tokens are (median, sigma) of a lognormal; `gap` are seconds between turns, likewise."""

    kind: str
    go_on: tuple[float, ...]  # probability of another turn after the first, second, ... (the last one repeats)
    gap: tuple[float, float]
    message: tuple[float, float]
    output: tuple[float, float]
    prefix: tuple[float, float]
    document: tuple[float, float]
    with_document: float  # share of conversations (jobs: of jobs) that begin with one


CHAT = Mix(
    kind="chat",
    go_on=(0.4, 0.55, 0.65),
    gap=(240.0, 1.6),
    message=(120.0, 1.3),
    output=(220.0, 0.9),
    prefix=(350.0, 0.8),
    document=(2500.0, 1.0),
    with_document=0.15,
)
JOB = Mix(
    kind="job",
    go_on=(0.75,),
    gap=(2.0, 1.2),
    message=(900.0, 1.1),
    output=(90.0, 0.8),
    prefix=(900.0, 0.8),
    document=(3000.0, 0.9),
    with_document=0.2,
)
AGENT = Mix(
    kind="agent",
    go_on=(0.5, 0.6, 0.7),
    gap=(20.0, 1.6),
    message=(900.0, 1.3),
    output=(120.0, 0.8),
    prefix=(1800.0, 0.6),
    document=(4000.0, 0.8),
    with_document=0.2,
)
KINDS = (CHAT, JOB, CHAT, AGENT, CHAT, JOB)  # of the tenants in order of size, over and over


@dataclass(slots=True)
class _Tenant:
    name: str
    mix: Mix
    prefixes: list[list[tuple[int, ...]]]  # by adapter, the most popular first: ids of their blocks


@dataclass(slots=True)
class _Names:
    """Numbers for blocks: equal only for the same path."""

    fresh: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def take(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self.fresh, count))


def make_trace(
    seed: int,
    *,
    requests: int = 9000,
    tenants: int = 12,
    hours: float = 2.0,
    scans: float = 0.0,
    loops: float = 0.0,
) -> Trace:
    """`scans`, `loops`: requests of these kinds for each ordinary one."""
    chance, names = random.Random(seed), _Names()
    everybody = [_tenant(chance, names, at) for at in range(tenants)]
    weights = _zipf(tenants, 0.9)
    made: list[Request] = []
    while len(made) < requests:
        tenant = chance.choices(everybody, weights)[0]
        made += _conversation(chance, names, tenant, chance.uniform(0, hours * 3600))
    for _ in range(round(scans * requests)):
        blocks = names.take(_blocks(chance, (4000.0, 0.8)))
        made.append(_request(chance.uniform(0, hours * 3600), everybody[0].name, blocks, 100))
    made += _loop(names, everybody[0].name, round(loops * requests), hours * 3600)
    made = sorted((r for r in made if r.start <= hours * 3600), key=lambda r: r.start)
    distinct = len({block for r in made for block in r.blocks})
    return Trace(tuple(made), distinct, tuple(tenant.name for tenant in everybody))


def _tenant(chance: random.Random, names: _Names, at: int) -> _Tenant:
    mix = KINDS[at % len(KINDS)]
    adapters = chance.randint(1, 5)
    prefixes = [
        [names.take(_blocks(chance, mix.prefix)) for _ in range(chance.randint(2, 12))] for _ in range(adapters)
    ]
    return _Tenant(f"t{at:02d}-{mix.kind}", mix, prefixes)


def _conversation(chance: random.Random, names: _Names, tenant: _Tenant, start: float) -> Iterator[Request]:
    mix = tenant.mix
    prefixes = chance.choices(tenant.prefixes, _zipf(len(tenant.prefixes), 1.0))[0]
    head = chance.choices(prefixes, _zipf(len(prefixes), 1.1))[0]
    if chance.random() < mix.with_document:
        head += names.take(_blocks(chance, mix.document))
    for turn in itertools.count():
        prompt = head + names.take(_blocks(chance, mix.message))
        output = _tokens(chance, mix.output)
        if len(prompt) * BLOCK + output > CONTEXT:
            return
        blocks = prompt + names.take(output // BLOCK)
        request = _request(start, tenant.name, blocks, output, prompt_blocks=len(prompt))
        yield request
        if mix.kind != "job":
            head = blocks
        start += chance.lognormvariate(math.log(mix.gap[0]), mix.gap[1])
        if mix.kind != "job":
            start += request.stop - request.start
        if chance.random() > mix.go_on[min(turn, len(mix.go_on) - 1)]:
            return


def _loop(names: _Names, namespace: str, count: int, seconds: float) -> Iterator[Request]:
    """Four times over the same documents, in order."""
    documents = [names.take(250) for _ in range(max(1, count // 4))]
    for at in range(count):
        yield _request(seconds * at / count, namespace, documents[at % len(documents)], 10)


def _request(start: float, namespace: str, blocks: Sequence[int], output: int, prompt_blocks: int = 0) -> Request:
    seconds = SECONDS_TO_FIRST_TOKEN + SECONDS_PER_OUTPUT_TOKEN * output
    return Request(start, start + seconds, namespace, tuple(blocks), prompt_blocks or len(blocks))


def _tokens(chance: random.Random, lognormal: tuple[float, float]) -> int:
    median, sigma = lognormal
    return max(1, min(round(chance.lognormvariate(math.log(median), sigma)), CONTEXT // 2))


def _blocks(chance: random.Random, lognormal: tuple[float, float]) -> int:
    return -(-_tokens(chance, lognormal) // BLOCK)


def _zipf(count: int, exponent: float) -> list[float]:
    return [1 / (rank + 1) ** exponent for rank in range(count)]


@dataclass(frozen=True, slots=True)
class TraceShape:
    """The figures that the papers give of theirs."""

    requests: int
    distinct: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    found_with_endless_room: float  # share of the prompts' blocks
    reuses_of_top_tenth: float  # share of all reuses that the most reused 10 % of the blocks have
    reuses_within_10_min: float
    reuses_within_10_s: float


def shape_of(trace: Trace) -> TraceShape:
    last: dict[int, float] = {}  # when a block's last request ended, or will
    times: dict[int, int] = {}
    soon = very_soon = reuses = asked = 0
    for request in trace.requests:
        asked += request.prompt_blocks
        for block in request.blocks[: request.prompt_blocks]:
            if block in last:
                reuses += 1
                times[block] = times.get(block, 0) + 1
                soon += request.start - last[block] <= 600
                very_soon += request.start - last[block] <= 10
        last |= dict.fromkeys(request.blocks, request.stop)
    most = sorted(times.values(), reverse=True)[: trace.distinct // 10]
    count = len(trace.requests)
    return TraceShape(
        requests=count,
        distinct=trace.distinct,
        mean_prompt_tokens=BLOCK * asked / count,
        mean_output_tokens=BLOCK * sum(len(r.blocks) - r.prompt_blocks for r in trace.requests) / count,
        found_with_endless_room=reuses / asked,
        reuses_of_top_tenth=sum(most) / max(1, reuses),
        reuses_within_10_min=soon / max(1, reuses),
        reuses_within_10_s=very_soon / max(1, reuses),
    )
