"""A Llama decoder over sharded parameters: loading as SGLang loads, and a forward pass in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from ...proto.errors import InvalidConfig
from .sharding import (
    DecoderConfig,
    expected_tensors,
    kv_heads_of_rank,
    optional_tensors,
    parameter_shapes,
    placements,
)


class KeyValueCache:
    """Keys and values of one sequence: per layer and kind ``[capacity, kv heads, head_dim]``, float32."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        config = decoder.config
        shape = (config.num_hidden_layers, 2, capacity, decoder.kv_heads, config.head_dim)
        self.entries = torch.empty(shape, dtype=torch.float32, device=decoder.device)
        self.length = 0

    def adopt(self, other: KeyValueCache, length: int) -> None:
        """Start from the first ``length`` positions of another sequence's cache."""
        self.entries[:, :, :length] = other.entries[:, :, :length]
        self.length = length


class Decoder:
    """One tensor-parallel rank's part of the model.

    ``parameters`` holds the weights in the config's dtype under SGLang's names; all arithmetic is in
    float32, so greedy output does not depend on how tokens were batched. The default process group
    must span the ``tp_size`` ranks.
    """

    def __init__(self, config: DecoderConfig, *, tp_rank: int, tp_size: int, device: torch.device) -> None:
        self.config, self.tp_rank, self.tp_size, self.device = config, tp_rank, tp_size, device
        first, last = kv_heads_of_rank(config, tp_rank, tp_size)
        self.kv_heads = last - first
        self.heads = config.num_attention_heads // tp_size
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.placements = placements(config, tp_rank, tp_size)
        self.parameters = {
            name: torch.zeros(shape, dtype=self.dtype, device=device)
            for name, shape in parameter_shapes(config, tp_size).items()
        }
        powers = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        angles = torch.outer(
            torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device),
            config.rope_theta**-powers,
        )
        self._cos, self._sin = angles.cos()[:, None, :], angles.sin()[:, None, :]

    # --- weights ---------------------------------------------------------------------------------

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole Hugging Face tensors, in order, as SGLang does.

        A name the model does not have is skipped without a word, another dtype is cast, and a tensor
        longer than expected along a sharded axis is cut. Tensors before a failing one stay loaded.

        Raises:
            ValueError, RuntimeError: for a shape that does not fit.
        """
        for name, tensor in tensors:
            place = self.placements.get(name)
            if place is None:
                continue
            part, target = tensor, self.parameters[place.parameter]
            if place.axis >= 0:
                rows, vocabulary = tensor.shape[place.axis], self.config.vocab_size
                if place.exact and rows != vocabulary:
                    raise ValueError(f"{name} has {rows} rows, the vocabulary {vocabulary}")
                count = place.stop - place.start
                part = tensor.narrow(place.axis, place.start, count)
                target = target.narrow(place.axis, place.row, count)
            if part.shape != target.shape:
                raise ValueError(f"{name} has shape {list(part.shape)}, expected {list(target.shape)}")
            target.copy_(part)

    def held_part(self, name: str) -> Tensor:
        """This rank's part of a Hugging Face tensor, padding cut off (a view of the parameter)."""
        if name in optional_tensors(self.config):
            name = "model.embed_tokens.weight"
        place = self.placements[name]
        parameter = self.parameters[place.parameter]
        if place.axis < 0:
            return parameter
        return parameter.narrow(place.axis, place.row, place.stop - place.start)

    # --- arithmetic ------------------------------------------------------------------------------

    @torch.inference_mode()
    def next_logits(self, tokens: list[int], cache: KeyValueCache) -> Tensor:
        """Append ``tokens`` to the sequence in ``cache``; float32 logits ``[vocab_size]`` of what follows."""
        config = self.config
        positions = slice(cache.length, cache.length + len(tokens))
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = self._embed(torch.tensor(tokens, device=self.device))
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(hidden, f"{prefix}input_layernorm.weight")
            hidden = hidden + self._attend(normed, prefix, cache.entries[layer], positions, cos, sin)
            normed = self._norm(hidden, f"{prefix}post_attention_layernorm.weight")
            hidden = hidden + self._feed_forward(normed, prefix)
        cache.length = positions.stop
        last = self._norm(hidden[-1:], "model.norm.weight")
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        logits = self._linear(last, head)[0]
        if self.tp_size > 1:
            parts = [torch.empty_like(logits) for _ in range(self.tp_size)]
            dist.all_gather(parts, logits)
            logits = torch.cat(parts)
        return logits[: config.vocab_size]

    def _linear(self, x: Tensor, parameter: str) -> Tensor:
        return functional.linear(x, self.parameters[parameter].float())

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        if self.tp_size > 1:
            dist.all_reduce(x)
        return x

    def _norm(self, x: Tensor, parameter: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * self.parameters[parameter].float()

    def _embed(self, tokens: Tensor) -> Tensor:
        table = self.parameters["model.embed_tokens.weight"]
        place = self.placements["model.embed_tokens.weight"]
        ours = (tokens >= place.start) & (tokens < place.stop)
        rows = table[torch.where(ours, tokens - place.start, 0)].float()
        return self._sum_over_ranks(rows * ours[:, None])

    def _attend(
        self, x: Tensor, prefix: str, cached: Tensor, positions: slice, cos: Tensor, sin: Tensor
    ) -> Tensor:
        size = self.config.head_dim
        qkv = self._linear(x, f"{prefix}self_attn.qkv_proj.weight")
        qkv = qkv.view(len(qkv), -1, size)
        query, key = qkv[:, : self.heads], qkv[:, self.heads : -self.kv_heads]
        value = qkv[:, -self.kv_heads :]
        cached[0, positions] = _rotate(key, cos, sin)
        cached[1, positions] = value
        groups = self.heads // self.kv_heads
        keys = cached[0, : positions.stop].repeat_interleave(groups, dim=1)
        values = cached[1, : positions.stop].repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", _rotate(query, cos, sin), keys) / math.sqrt(size)
        seen = torch.arange(positions.stop, device=self.device)
        own = torch.arange(positions.start, positions.stop, device=self.device)
        scores = scores.masked_fill(seen[None, :] > own[:, None], float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
        return self._sum_over_ranks(self._linear(mixed, f"{prefix}self_attn.o_proj.weight"))

    def _feed_forward(self, x: Tensor, prefix: str) -> Tensor:
        gate, up = self._linear(x, f"{prefix}mlp.gate_up_proj.weight").chunk(2, dim=-1)
        return self._sum_over_ranks(self._linear(functional.silu(gate) * up, f"{prefix}mlp.down_proj.weight"))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves layout (NeoX), as Llama checkpoints on Hugging Face expect."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


# --- checkpoints ---------------------------------------------------------------------------------


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in name order.

    Raises:
        InvalidConfig: if there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidConfig(f"{folder} holds no *.safetensors file")
    return files


def read_checkpoint(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every (name, tensor) of a model folder, one at a time, mapped from disk."""
    for path in checkpoint_files(folder):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                yield name, tensors.get_tensor(name)


def check_checkpoint(folder: Path, config: DecoderConfig) -> None:
    """Refuse a folder that lacks a tensor of the model or has one of another shape, before any is loaded.

    Raises:
        InvalidConfig: naming every such tensor.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in checkpoint_files(folder):
        with safe_open(path, framework="pt") as tensors:
            shapes |= {
                name: tuple(tensors.get_slice(name).get_shape())
                for name in tensors.keys()  # noqa: SIM118
            }
    problems = [
        f"{spec.name} has shape {list(shapes[spec.name])}, expected {list(spec.shape)}"
        if spec.name in shapes
        else f"{spec.name} is missing"
        for spec in expected_tensors(config)
        if shapes.get(spec.name) != spec.shape
        and (spec.name in shapes or spec.name not in optional_tensors(config))
    ]
    if problems:
        raise InvalidConfig(f"{folder}: " + "; ".join(problems))
