"""How SGLang holds a Llama decoder, written down a second time and by hand, as the oracle of checksums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from weightcast.proto.checksums import ChecksumEntry, ChecksumPlan, ChecksumTaker, Piece
from weightcast.proto.layout import Layout, TensorSpec


def checksum_plan(config: Mapping[str, Any], tp_size: int) -> ChecksumPlan:
    """Every parameter of every rank, put together from Hugging Face tensors."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads
    rows = -(-config["vocab_size"] // 64) * 64 // tp_size
    entries: list[ChecksumEntry] = []
    for rank in range(tp_size):

        def part(name: str, axis: int, extent: int, rank: int = rank) -> Piece:
            share = extent // tp_size
            return Piece(name, axis, rank * share, (rank + 1) * share)

        def add(parameter: str, *pieces: Piece, rank: int = rank) -> None:
            entries.append(ChecksumEntry(rank, parameter, pieces))

        add("model.embed_tokens.weight", part("model.embed_tokens.weight", 0, rows * tp_size))
        for layer in range(config["num_hidden_layers"]):
            attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
            add(
                f"{attention}.qkv_proj.weight",
                part(f"{attention}.q_proj.weight", 0, heads * size),
                part(f"{attention}.k_proj.weight", 0, kv_heads * size),
                part(f"{attention}.v_proj.weight", 0, kv_heads * size),
            )
            add(f"{attention}.o_proj.weight", part(f"{attention}.o_proj.weight", 1, heads * size))
            add(
                f"{mlp}.gate_up_proj.weight",
                part(f"{mlp}.gate_proj.weight", 0, config["intermediate_size"]),
                part(f"{mlp}.up_proj.weight", 0, config["intermediate_size"]),
            )
            add(f"{mlp}.down_proj.weight", part(f"{mlp}.down_proj.weight", 1, config["intermediate_size"]))
            for norm in ("input_layernorm", "post_attention_layernorm"):
                name = f"model.layers.{layer}.{norm}.weight"
                add(name, Piece(name))
        add("model.norm.weight", Piece("model.norm.weight"))
        add("lm_head.weight", part("lm_head.weight", 0, rows * tp_size))
    return ChecksumPlan(tuple(entries))


def expected_checksums(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], tp_size: int
) -> list[dict[str, str]]:
    """Per rank, the checksum of every parameter, computed from whole tensors."""
    specs = tuple(
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in weights.items()
    )
    plan = checksum_plan(config, tp_size)
    taker = ChecksumTaker(Layout(specs, tuple((index,) for index in range(len(specs)))), plan)
    for index, tensor in enumerate(weights.values()):
        taker.take(index, memoryview(bytes(tensor.contiguous().untyped_storage())))
    ranks: list[dict[str, str]] = [{} for _ in range(tp_size)]
    for entry, value in zip(plan.entries, taker.values(), strict=True):
        ranks[entry.rank][entry.parameter] = value
    return ranks
