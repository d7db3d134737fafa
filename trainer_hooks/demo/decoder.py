"""The demo's model: a small Llama-architecture decoder with Hugging Face's parameter names.

Plain on purpose: no fused weights, no cache. An engine that serves the same weights (fused, sharded,
with a KV cache) must give the same greedy tokens, and the demo checks that it does.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, under the names that a Hugging Face ``config.json`` uses."""

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [..., size] float32."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // self.heads
        self.theta = config.rope_theta
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [batch, tokens, hidden] float32."""
        batch, tokens, _ = x.shape
        q, k, v = (
            projection(x).view(batch, tokens, heads, self.head_dim).transpose(1, 2)
            for projection, heads in (
                (self.q_proj, self.heads),
                (self.k_proj, self.kv_heads),
                (self.v_proj, self.kv_heads),
            )
        )
        q, k = self._rotate(q), self._rotate(k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))
        return result

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = self.head_dim // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos().to(x.device), angles.sin().to(x.device)
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class MLP(nn.Module):
    """Gated linear unit with SiLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [..., hidden] float32."""
        result: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [batch, tokens, hidden] float32."""
        x = x + self.self_attn(self.input_layernorm(x))
        result: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Stack(nn.Module):
    """Embedding, layers and final norm: what Hugging Face prefixes with ``model.``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids``: [batch, tokens] int64; returns [batch, tokens, hidden] float32."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.norm(x)
        return result


class Decoder(nn.Module):
    """The whole model. The same seed gives the same weights on every rank."""

    def __init__(self, config: DecoderConfig, *, seed: int) -> None:
        super().__init__()
        self.config = config
        self.model = Stack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [batch, tokens, vocab] float32 of ``ids`` [batch, tokens] int64."""
        result: torch.Tensor = self.lm_head(self.model(ids))
        return result

    @torch.no_grad()
    def generate_greedily(self, prompts: list[list[int]], *, new_tokens: int) -> list[list[int]]:
        """The ``new_tokens`` most likely continuation tokens of each prompt; prompts of equal length."""
        ids = torch.tensor(prompts, dtype=torch.int64)
        for _ in range(new_tokens):
            following = self(ids)[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, following), dim=1)
        continuations: list[list[int]] = ids[:, len(prompts[0]) :].tolist()
        return continuations


def save_checkpoint(model: Decoder, folder: Path) -> None:
    """Write ``model`` as a Hugging Face Llama folder: config.json and model.safetensors, float32."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    described = msgspec.to_builtins(model.config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
