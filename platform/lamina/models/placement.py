"""Where each checkpoint tensor goes: the fused weights of the model, row by row. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lamina.models.config import ModelConfig
from lamina_lora.geometry import SITES, BaseGeometry

__all__ = ["Placement", "Shape", "fused_shapes", "ignored", "placements"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Checkpoint tensor `source` of `shape` fills rows `row` to `row + shape[0]` of the fused tensor `target`."""

    source: str
    shape: Shape
    target: str
    row: int = 0


def placements(config: ModelConfig) -> list[Placement]:
    """Every tensor that a checkpoint of this shape must have, and nothing else."""
    table = (config.vocab_size, config.hidden_size)
    found = [Placement("model.embed_tokens.weight", table, "embedding")]
    for layer in range(config.num_layers):
        found += _layer(config, config.geometry(), layer)
    found.append(Placement("model.norm.weight", (config.hidden_size,), "final_norm"))
    if not config.tie_embeddings:
        found.append(Placement("lm_head.weight", table, "head"))
    return found


def fused_shapes(plan: list[Placement]) -> Mapping[str, Shape]:
    """Name and shape of each fused tensor that the plan fills completely."""
    shapes: dict[str, Shape] = {}
    for item in plan:
        rows = max(shapes.get(item.target, (0,))[0], item.row + item.shape[0])
        shapes[item.target] = (rows, *item.shape[1:])
    return shapes


def ignored(config: ModelConfig, name: str) -> bool:
    """Whether a checkpoint tensor carries nothing: rotary tables, and the head of a model that ties it."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")


def _layer(config: ModelConfig, geometry: BaseGeometry, layer: int) -> Iterator[Placement]:
    biases = {"qkv": config.qkv_bias, "o": config.o_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}
    for site, slices in SITES.items():
        for target in slices:
            inputs, outputs = geometry.targets[target]
            name, row = geometry.module_name(layer, target), geometry.column_of(target)
            yield Placement(f"{name}.weight", (outputs, inputs), f"{layer}.{site}.weight", row)
            if biases[site]:
                yield Placement(f"{name}.bias", (outputs,), f"{layer}.{site}.bias", row)
    for name, target in _norms(config):
        yield Placement(f"model.layers.{layer}.{name}.weight", (config.hidden_size,), f"{layer}.{target}")
    if config.qk_norm:
        for head in ("q_norm", "k_norm"):
            yield Placement(f"model.layers.{layer}.self_attn.{head}.weight", (config.head_dim,), f"{layer}.{head}")


def _norms(config: ModelConfig) -> list[tuple[str, str]]:
    """(name in the checkpoint, name here). Where post norms exist, `post_attention_layernorm` is one of them."""
    if not config.post_norms:
        return [("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm")]
    return [
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "after_attention"),
        ("pre_feedforward_layernorm", "mlp_norm"),
        ("post_feedforward_layernorm", "after_mlp"),
    ]
