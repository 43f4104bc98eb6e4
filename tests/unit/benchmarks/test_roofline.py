"""The roofline against arithmetic done by hand, and against figures that others published."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chips import CHIPS, detect, find
from costs import (
    Lora,
    Work,
    attention_work,
    base_works,
    decode,
    fused_seconds,
    prefill,
    seconds,
    tier_seconds,
    two_launch_seconds,
    two_launch_works,
)
from lamina.models.config import ModelConfig
from roofline import main
from shapes import PRESETS, Shape, model_shape, ranks

LLAMA, H200, A100 = PRESETS["llama-3-8b"], CHIPS["h200"], CHIPS["a100"]
SCRIPT = Path(__file__).parents[3] / "benchmarks" / "roofline.py"


def test_shapes_have_the_parameters_that_the_models_are_known_for() -> None:
    """8.03, 8.19 and 0.135 billion; the norms are not counted."""
    assert LLAMA.parameters == pytest.approx(8.030e9, rel=1e-3)
    assert PRESETS["qwen3-8b"].parameters == pytest.approx(8.19e9, rel=1e-3)
    assert PRESETS["smollm2-135m"].parameters == pytest.approx(134.5e6, rel=1e-3)


def test_lora_parameters_per_rank_and_base_weights_match_the_known_figures() -> None:
    """2.62 M per unit of rank on all seven projections; 16 GB of weights take 3.35 ms at 4.8 TB/s."""
    assert LLAMA.per_rank == 2_621_440
    assert 2 * LLAMA.parameters / H200.bytes_per_s == pytest.approx(3.35e-3, rel=2e-3)
    assert LLAMA.kv_bytes() == 128 * 1024


@pytest.mark.parametrize(
    ("rank", "adapters", "expected_us"),
    [(16, 1, 17), (16, 16, 280), (16, 64, 1120), (64, 1, 70), (64, 16, 1120), (64, 64, 4500)],
)
def test_decode_lora_takes_as_long_as_its_weights_take_to_read(rank: int, adapters: int, expected_us: float) -> None:
    lora = Lora(ranks(adapters, rank), rows=adapters)
    assert 1e6 * two_launch_seconds(LLAMA, lora, H200) == pytest.approx(expected_us, rel=0.04)


def test_a_base_step_reads_every_weight_but_the_embedding_table() -> None:
    """One row of the table is read, so a step takes 3.13 ms, not 3.35."""
    works = base_works(LLAMA, decode(1, 1), H200)
    table = 2 * LLAMA.vocab * LLAMA.hidden
    assert sum(work.bytes for work in works) == pytest.approx(2 * LLAMA.parameters - table, rel=1e-3)
    assert seconds(works, H200) == pytest.approx(3.127e-3, rel=1e-3)


def test_launches_cost_as_reported_unless_a_graph_holds_them() -> None:
    """4 sites, 32 layers, shrink and expand: 256 launches, 15 to 30 % of a step from the host, half that in a graph."""
    lora = Lora(ranks(1, 16), rows=1)
    assert sum(work.launches for work in two_launch_works(LLAMA, lora)) == 256
    step = seconds(base_works(LLAMA, decode(1, 1), H200), H200)
    eager, graph = (two_launch_seconds(LLAMA, lora, H200, how) for how in ("eager", "graph"))
    assert 0.15 < eager / step < 0.30
    assert graph < eager / 2
    assert fused_seconds(LLAMA, lora, H200, "graph") - two_launch_seconds(LLAMA, lora, H200) == pytest.approx(128e-6)


@pytest.mark.parametrize(("rank", "share"), [(16, 0.006), (256, 0.096)])
def test_prefill_operations_grow_by_the_known_share(rank: int, share: float) -> None:
    works = two_launch_works(LLAMA, Lora(ranks(1, rank), rows=2048))
    base = 2 * 2048 * LLAMA.linear_parameters
    assert sum(work.flops for work in works) / base == pytest.approx(share, rel=0.01)


def test_prefill_activations_cost_a_few_percent_where_the_cache_cannot_hold_them() -> None:
    """About 6 % on an A100 for reading and writing y once more; nothing while the L2 holds it."""
    tokens, lora = 8192, Lora(ranks(1, 1), rows=8192)
    base = 2 * tokens * LLAMA.linear_parameters / A100.flops_per_s()
    expands = [work for work in two_launch_works(LLAMA, lora, A100) if work.name == "expand"]
    assert seconds(expands, A100) / base == pytest.approx(0.06, rel=0.1)
    few = two_launch_works(LLAMA, Lora(ranks(1, 1), rows=64), A100)
    assert sum(work.bytes for work in few) == 2 * LLAMA.per_rank


def test_the_fused_plan_pays_for_every_slot_and_the_other_only_for_used_ones() -> None:
    one_of_64, one = Lora(ranks(64, 16), rows=1), Lora(ranks(1, 16), rows=1)
    assert two_launch_seconds(LLAMA, one_of_64, H200) == two_launch_seconds(LLAMA, one, H200)
    assert fused_seconds(LLAMA, one_of_64, H200) > 20 * fused_seconds(LLAMA, one, H200)
    assert fused_seconds(LLAMA, one, H200) == pytest.approx(two_launch_seconds(LLAMA, one, H200), rel=1e-6)


def test_mixed_ranks_are_dealt_in_turn_and_rows_evenly() -> None:
    lora = Lora(ranks(6, "mixed"), rows=4)
    assert lora.ranks == (8, 16, 32, 64, 8, 16)
    assert lora.dealt == ((8, 1), (16, 1), (32, 1), (64, 1))
    assert Lora((8, 16), rows=5).dealt == ((8, 3), (16, 2))


@pytest.mark.parametrize("lora", [Lora((), rows=8), Lora((16,), rows=0)], ids=["no adapters", "no rows"])
def test_nothing_costs_nothing(lora: Lora) -> None:
    assert two_launch_seconds(LLAMA, lora, H200, "eager") == 0
    assert fused_seconds(LLAMA, lora, H200, "eager") == 0


def test_attention_reads_each_key_and_value_once() -> None:
    """64 sequences of 1024 tokens: 8.6 GB of KV a step in bf16, half in fp8; a causal prompt has half a square."""
    one_layer = attention_work(LLAMA, decode(64, 1024), H200)
    assert LLAMA.layers * one_layer.bytes == 64 * 1024 * LLAMA.kv_bytes()
    assert attention_work(LLAMA, decode(64, 1024, kv_itemsize=1), H200).bytes == one_layer.bytes / 2
    prompt = attention_work(LLAMA, prefill(1000), H200)
    assert prompt.flops == 4 * 4096 * 1000 * 1001 / 2
    behind = attention_work(LLAMA, prefill(1000, prefix=500), H200)
    assert behind.flops - prompt.flops == 4 * 4096 * 1000 * 500


def test_work_takes_the_longer_of_bytes_and_operations() -> None:
    assert Work("copy", 4.8e12).seconds(H200) == 1.0
    assert Work("gemm", 1.0, 989e12).seconds(H200) == 1.0
    assert Work("fp8", 1.0, 1979e12, itemsize=1).seconds(H200) == 1.0
    assert tier_seconds(64e9, H200) == 1.0


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA L40", None),
    ],
)
def test_devices_are_recognised_only_if_their_figures_are_known(name: str, key: str | None) -> None:
    found = detect(name)
    assert (found and found.key) == key


def test_chips_are_found_by_key_and_refused_otherwise() -> None:
    assert find("h200") is H200
    with pytest.raises(ValueError, match="chip must be cpu or one of a100"):
        find("tpu")
    for chip in CHIPS.values():
        assert chip.source
        assert chip.flops_per_s(1) >= chip.flops_per_s(2) > chip.flops_per_s(4)


def test_a_model_folder_gives_the_same_shape_as_its_preset(tmp_path: Path) -> None:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = Shape.of(ModelConfig.from_folder(tmp_path), "llama-3-8b")
    assert shape == LLAMA
    assert model_shape(str(tmp_path)).parameters == LLAMA.parameters


@pytest.mark.parametrize("rank", ["0", "257", "x"])
def test_ranks_out_of_range_are_refused(rank: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - int()'s own message is one of them
        ranks(2, rank)


def test_the_command_prints_both_tables_without_loading_torch() -> None:
    code = f"import runpy, sys; sys.argv[1:] = ['--batch', '8']; runpy.run_path({str(SCRIPT)!r}, run_name='m')"
    code += "['main'](); assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=SCRIPT.parent, env=_path()
    )
    assert "weights 16.06 GB, 3.35 ms to read once" in done.stdout
    assert "two-launch graph" in done.stdout


def _path() -> dict[str, str]:
    return {"PYTHONPATH": str(SCRIPT.parent)}


def test_the_command_names_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "nothing"])
    assert "--model is one of llama-3-8b, qwen3-8b, smollm2-135m or a folder" in capsys.readouterr().err
