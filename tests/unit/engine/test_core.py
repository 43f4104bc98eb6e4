"""The engine core on a tiny random model: outputs do not depend on how the work was scheduled."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import collect, drive, publish_adapter, request, tiny_core, write_adapter
from lamina.engine.core import EngineCore
from lamina.engine.runner import EagerRunner
from lamina.errors import ContextLengthExceeded, EngineOverloaded, InvalidRequest, LimitExceeded, NotFound
from lamina.types import FinishReason, GenerationRequest


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def digests(store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("peft")
    shapes: list[tuple[int, tuple[str, ...]]] = [
        (4, ("q_proj", "v_proj")),
        (8, ("gate_proj", "up_proj", "down_proj")),
        (16, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        (3, ("o_proj", "k_proj")),
    ]
    return [
        publish_adapter(store, write_adapter(folder / str(i), rank=rank, seed=i, targets=targets))
        for i, (rank, targets) in enumerate(shapes)
    ]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 211), k=length)


def workload(digests: list[str]) -> list[GenerationRequest]:
    adapters = [None, *digests]
    return [
        request(
            f"r{i}",
            prompt(i, 5 + 7 * i) if i % 4 else prompt(99, 40) + prompt(i, 3),
            adapter=adapters[i % len(adapters)],
            tenant=f"tenant{i % 3}",
            max_tokens=14 + 9 * (i % 4),
        )
        for i in range(12)
    ]


@pytest.fixture(scope="module")
def alone(store: Path, digests: list[str]) -> dict[tuple[str, int], list[int]]:
    """Each request on an engine of its own, nothing cached, whole prompt in one chunk."""
    outputs = {}
    for item in workload(digests):
        core = tiny_core(store, prefix_caching=False, max_batch_tokens=512)
        outputs.update(drive(core, [item])[0])
        core.close()
    return outputs


def test_adapters_change_the_output(alone: dict[tuple[str, int], list[int]], store: Path, digests: list[str]) -> None:
    """The workload is worth testing with: the same prompt answers differently under each adapter."""
    outputs = set()
    for digest in [None, *digests]:
        core = tiny_core(store)
        tokens, _ = drive(core, [request("x", prompt(1, 30), adapter=digest, max_tokens=12)])
        outputs.add(tuple(tokens["x", 0]))
        core.close()
    assert len(outputs) == 1 + len(digests)


@pytest.mark.parametrize("chunk", [8, 16, 23, 64, 512])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("blocks", [12, 64], ids=["scarce", "plenty"])
def test_scheduling_never_changes_the_output(
    alone: dict[tuple[str, int], list[int]],
    store: Path,
    digests: list[str],
    chunk: int,
    cache: bool,
    blocks: int,
) -> None:
    """Mixed adapters in one batch, any chunk size, cached or not, preempted or not: the tokens of running alone."""
    core = tiny_core(store, max_batch_tokens=chunk, prefix_caching=cache, num_blocks=blocks)
    for _ in range(2):  # the second round meets a warm cache
        tokens, endings = drive(core, workload(digests))
        assert tokens == alone
        assert set(endings.values()) == {FinishReason.LENGTH}
    if blocks == 12:
        assert core.stats().preemptions > 0
    else:
        assert (core.stats().prefix_hit_tokens > 0) == cache
    core.close()
    core.check_integrity()
    assert core.stats().blocks_active == 0


def test_choices_share_the_prompt_and_then_part(store: Path) -> None:
    """n choices equal n requests with their own index; their prompt blocks are held once."""
    core = tiny_core(store)
    item = request("many", prompt(5, 40), n=5, temperature=1.5, seed=11, max_tokens=20, ignore_eos=True)
    core.submit(item)
    core.step()  # prefill and first tokens
    assert core.stats().running == 5
    assert core.stats().blocks_active == 3  # 40 tokens, shared
    core.step()
    assert core.stats().blocks_active == 2 + 5  # each owns its tail now
    tokens, _ = drive(core)
    assert len({tuple(tokens["many", i]) for i in range(5)}) == 5
    again, _ = drive(tiny_core(store, num_blocks=8), [item])
    firsts = {key: again[key][-len(tokens[key]) :] for key in tokens}
    assert {k: v[-18:] for k, v in firsts.items()} == {k: v[-18:] for k, v in tokens.items()}


def test_same_seed_same_output_in_any_company(store: Path) -> None:
    """A seeded request draws the same tokens alone and among others."""
    item = request("s", prompt(3, 20), temperature=1.0, seed=5, max_tokens=12)
    lone, _ = drive(tiny_core(store), [item])
    crowd = [request(f"o{i}", prompt(i, 10), temperature=1.0, seed=i, max_tokens=9) for i in range(6)]
    together, _ = drive(tiny_core(store), [*crowd, item])
    assert together["s", 0] == lone["s", 0]


def test_cancel_at_every_moment_frees_everything(store: Path, digests: list[str]) -> None:
    """Whenever a request is cancelled, its blocks come back and the others finish as if nothing happened."""
    for moment in range(14):
        core = tiny_core(store, max_batch_tokens=16, num_blocks=16)
        requests = [
            request("a", prompt(1, 50), adapter=digests[0], n=3),
            request("b", prompt(2, 20), adapter=digests[1]),
        ]
        tokens: dict[tuple[str, int], list[int]] = {}
        endings: dict[tuple[str, int], FinishReason] = {}
        for item in requests:
            core.submit(item)
        for _ in range(moment):
            collect(core.step(), tokens, endings)
        core.cancel("a")
        core.check_integrity()
        while core.has_work():
            collect(core.step(), tokens, endings)
            core.check_integrity()
        assert endings["b", 0] is FinishReason.LENGTH
        assert core.stats().blocks_active == 0
        core.close()


@pytest.mark.parametrize("moment", range(6))
def test_cancelling_one_choice_leaves_its_siblings(store: Path, moment: int) -> None:
    """Also when the choice, or the parent it forks from, is cancelled before it was born."""
    for index in (0, 2):
        core = tiny_core(store, max_batch_tokens=16)
        core.submit(request("a", prompt(1, 40), n=3))
        tokens: dict[tuple[str, int], list[int]] = {}
        endings: dict[tuple[str, int], FinishReason] = {}
        for _ in range(moment):
            collect(core.step(), tokens, endings)
        core.cancel("a", index)
        while core.has_work():
            collect(core.step(), tokens, endings)
            core.check_integrity()
        expected = {("a", i): FinishReason.LENGTH for i in range(3)} | {("a", index): FinishReason.CANCELLED}
        assert endings == expected


def test_prefix_cache_is_split_by_adapter_and_namespace(store: Path, digests: list[str]) -> None:
    """Another adapter or another tenant never hits; the same tenant and adapter do."""
    core = tiny_core(store)

    def hit(**who: Any) -> int:
        before = core.stats().prefix_hit_tokens
        drive(core, [request("x", prompt(8, 40), **who)])
        return core.stats().prefix_hit_tokens - before

    assert hit(tenant="a") == 0
    assert hit(tenant="a") == 32  # two full blocks; the third is partial
    assert hit(tenant="b") == 0
    assert hit(tenant="a", adapter=digests[0]) == 0
    assert hit(tenant="a", adapter=digests[1]) == 0
    assert hit(tenant="a", adapter=digests[0]) == 32


def test_a_wholly_cached_prompt_still_computes_its_last_token(store: Path) -> None:
    """A prompt of exactly full blocks hits all but its last block."""
    core = tiny_core(store)
    first, _ = drive(core, [request("x", prompt(8, 48))])
    second, _ = drive(core, [request("x", prompt(8, 48))])
    assert core.stats().prefix_hit_tokens == 32
    assert first == second


def test_eos_and_stop_tokens_end_a_choice(store: Path) -> None:
    """Stop tokens are reported, and are the last token; ignore_eos runs on."""
    core = tiny_core(store)
    free, _ = drive(core, [request("x", prompt(4, 12), max_tokens=10)])
    stop = free["x", 0][4]
    cut, endings = drive(core, [request("x", prompt(4, 12), max_tokens=10, stop_token_ids=(stop,))])
    assert cut["x", 0] == free["x", 0][: free["x", 0].index(stop) + 1]
    assert endings["x", 0] is FinishReason.STOP


def test_fair_share_between_tenants(store: Path) -> None:
    """A tenant with one request does not wait behind another tenant's fifty."""
    core = tiny_core(store, max_running=2, max_batch_tokens=32)
    for i in range(50):
        core.submit(request(f"flood{i}", prompt(i, 20), tenant="a", max_tokens=4))
    for _ in range(4):
        core.step()
    core.submit(request("single", prompt(77, 20), tenant="b", max_tokens=4))
    tokens: dict[tuple[str, int], list[int]] = {}
    endings: dict[tuple[str, int], FinishReason] = {}
    while ("single", 0) not in endings:
        collect(core.step(), tokens, endings)
    assert len(endings) < 12, "the flood was served first"
    core.close()


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "empty-prompt": ({"prompt": []}, InvalidRequest),
    "token-outside": ({"prompt": [5, 211]}, InvalidRequest),
    "negative-token": ({"prompt": [-1]}, InvalidRequest),
    "prompt-too-long": ({"prompt": [3] * 600}, ContextLengthExceeded),
    "completion-too-long": ({"prompt": [3] * 10, "max_tokens": 600}, ContextLengthExceeded),
    "never-fits-the-pool": ({"prompt": [3] * 100, "max_tokens": 100}, ContextLengthExceeded),
    "unknown-adapter": ({"prompt": [3], "adapter": "0" * 64}, NotFound),
    "too-many-choices": ({"prompt": [3], "n": 17}, InvalidRequest),
    "nan-temperature": ({"prompt": [3], "temperature": float("nan")}, InvalidRequest),
}


@pytest.mark.parametrize(("fields", "error"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_leave_no_trace(store: Path, fields: dict[str, Any], error: type[Exception]) -> None:
    """What can never run is refused at once with a typed error."""
    core = tiny_core(store, num_blocks=10)
    fields = dict(fields)
    item = request("x", fields.pop("prompt"), **fields)
    with pytest.raises(error):
        core.submit(item)
    assert not core.has_work()
    core.check_integrity()


def test_queue_limit_is_stated(store: Path) -> None:
    """Beyond max_waiting the refusal names the limit and when to retry."""
    core = tiny_core(store, max_waiting=2)
    core.submit(request("a", [3], tenant="a"))
    core.submit(request("b", [3], tenant="b"))
    with pytest.raises(EngineOverloaded, match="2 requests") as refusal:
        core.submit(request("c", [3], tenant="c"))
    assert refusal.value.retry_after_s


def test_one_tenant_cannot_fill_the_queue(store: Path) -> None:
    """Half of the places stay for the others; the refusal carries the numbers."""
    core = tiny_core(store, max_waiting=4)
    for name in ("a", "b"):
        core.submit(request(name, [3], tenant="flood"))
    with pytest.raises(LimitExceeded, match="may have 2") as refusal:
        core.submit(request("c", [3], tenant="flood"))
    assert (refusal.value.limit, refusal.value.have) == (2, 2)
    core.submit(request("d", [3], tenant="calm"))


def test_poison_left_in_a_block_reaches_nobody(store: Path) -> None:
    """NaN keys and values that a broken adapter left behind are gone when the next tenant gets the block."""
    expected, _ = drive(tiny_core(store), [request(f"r{i}", prompt(i, 5 + 9 * i)) for i in range(4)])
    core = tiny_core(store)
    core._runner._pool.data.fill_(float("nan"))
    tokens, _ = drive(core, [request(f"r{i}", prompt(i, 5 + 9 * i)) for i in range(4)])
    assert tokens == expected


def test_cancelling_before_the_siblings_are_born_ends_all_of_them(store: Path) -> None:
    """Whoever waits for n endings gets n."""
    core = tiny_core(store)
    core.submit(request("a", prompt(1, 20), n=3))
    core.cancel("a")
    endings = {event.index: event.finish_reason for event in core.step()}
    assert endings == dict.fromkeys(range(3), FinishReason.CANCELLED)
    assert not core.has_work()


def test_a_deleted_adapter_serves_out_its_requests(store: Path, digests: list[str]) -> None:
    """Unloading waits for preempted and waiting requests too; then the adapter is gone."""
    core = tiny_core(store, num_blocks=12, max_batch_tokens=32)
    items = [request(f"r{i}", prompt(i, 30), adapter=digests[2], max_tokens=40) for i in range(5)]
    tokens: dict[tuple[str, int], list[int]] = {}
    endings: dict[tuple[str, int], FinishReason] = {}
    for item in items:
        core.submit(item)
    while not core.stats().running:
        collect(core.step(), tokens, endings)
    core.unload_adapter(digests[2])
    while core.has_work():
        collect(core.step(), tokens, endings)
    assert set(endings.values()) == {FinishReason.LENGTH}
    assert core.stats().preemptions > 0
    assert not any(adapter.loaded for adapter in core.stats().adapters)


def test_many_waiting_adapters_do_not_pile_up(store: Path, digests: list[str]) -> None:
    """With room for one adapter, tenants take turns, memory stays bounded, and everybody is served."""
    sizes = {}
    for digest in digests:
        probe = tiny_core(store)
        drive(probe, [request("x", [3], adapter=digest)])
        sizes[digest] = probe._adapters.slots.used_bytes
        probe.close()
    core = tiny_core(store, adapter_bytes=max(sizes.values()))
    items = [
        request(f"{digest[:6]}-{i}", prompt(i, 20), adapter=digest, tenant=digest)
        for digest in digests
        for i in range(5)
    ]

    def bounded(core: EngineCore) -> None:
        assert len(core._adapters._pending) <= 2
        core.check_integrity()

    _, endings = drive(core, items, each_step=bounded)
    assert set(endings.values()) == {FinishReason.LENGTH}
    core.close()


def test_duplicate_ids_are_refused(store: Path) -> None:
    core = tiny_core(store)
    core.submit(request("a", [3]))
    with pytest.raises(InvalidRequest, match="running already"):
        core.submit(request("a", [4]))


def test_a_failing_forward_ends_only_its_requests(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in a step ends the requests in it with an error event, frees their blocks, and the engine goes on."""
    core = tiny_core(store)
    runner = core._runner
    real = runner.forward

    def broken(batch: object) -> object:
        raise RuntimeError("device lost")

    monkeypatch.setattr(runner, "forward", broken)
    core.submit(request("a", prompt(1, 20), n=2))
    tokens: dict[tuple[str, int], list[int]] = {}
    endings: dict[tuple[str, int], FinishReason] = {}
    while core.has_work():
        collect(core.step(), tokens, endings)
    assert endings == {("a", 0): FinishReason.ERROR, ("a", 1): FinishReason.ERROR}
    core.check_integrity()
    monkeypatch.setattr(runner, "forward", real)
    _, endings = drive(core, [request("b", prompt(2, 20))])
    assert endings["b", 0] is FinishReason.LENGTH


def test_stats_add_up(store: Path, digests: list[str]) -> None:
    """Counters are the sums over all requests; blocks are always free + active + cached."""

    def balanced(core: EngineCore) -> None:
        stats = core.stats()
        assert stats.blocks_free + stats.blocks_active + stats.blocks_cached == stats.blocks_total

    core = tiny_core(store)
    items = workload(digests)
    tokens, _ = drive(core, items, each_step=balanced)
    stats = core.stats()
    assert stats.prompt_tokens == sum(len(item.prompt_token_ids) for item in items)
    assert stats.generation_tokens == sum(map(len, tokens.values()))
    assert stats.finished == len(items)
    assert (stats.running, stats.waiting, stats.blocks_active) == (0, 0, 0)


def test_a_closed_engine_lets_go_of_weights_and_pool_at_once(tmp_path: Path) -> None:
    """Not when the garbage collector comes by: they are gigabytes, and whoever closes one engine may open another."""
    core = tiny_core(tmp_path)
    drive(core, [request("a", [5, 6, 7])])
    runner = core._runner
    assert isinstance(runner, EagerRunner)
    large = [weakref.ref(runner._model), weakref.ref(runner._pool)]
    gc.collect()
    gc.disable()
    try:
        del runner
        core.close()
        assert [reference() for reference in large] == [None, None]
    finally:
        gc.enable()
