"""The plain twin of the engines: a Llama forward pass with no cache, no shards and no fused weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def greedy(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], prompt: Sequence[int], count: int
) -> list[int]:
    """The ``count`` likeliest tokens after ``prompt``, in float32, recomputing everything for each."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(_logits(weights, config, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def _logits(weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: list[int]) -> Tensor:
    w = {name: tensor.float() for name, tensor in weights.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, eps = config["hidden_size"] // heads, config["rms_norm_eps"]
    frequencies = config["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(len(tokens)).float(), frequencies).repeat(1, 2)[None]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w[name]

    def rotate(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-right, left), -1) * angles.sin()

    def by_head(x: Tensor, count: int) -> Tensor:
        return x.view(len(tokens), count, size).transpose(0, 1)

    x = w["model.embed_tokens.weight"][tokens]
    mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        y = norm(x, f"{prefix}input_layernorm.weight")
        q = rotate(by_head(y @ w[f"{prefix}self_attn.q_proj.weight"].T, heads))
        k = rotate(by_head(y @ w[f"{prefix}self_attn.k_proj.weight"].T, kv_heads))
        v = by_head(y @ w[f"{prefix}self_attn.v_proj.weight"].T, kv_heads)
        k, v = k.repeat_interleave(heads // kv_heads, 0), v.repeat_interleave(heads // kv_heads, 0)
        mixed = ((q @ k.transpose(1, 2) / math.sqrt(size) + mask).softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + mixed @ w[f"{prefix}self_attn.o_proj.weight"].T
        y = norm(x, f"{prefix}post_attention_layernorm.weight")
        gate = functional.silu(y @ w[f"{prefix}mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ w[f"{prefix}mlp.up_proj.weight"].T)) @ w[f"{prefix}mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, "model.norm.weight") @ head.T
