"""Small random Llama models as Hugging Face folders, for demos and tests. Loadable by SGLang as well.

`python -m weightcast.rollout_node.reference.model DIR` writes the default one.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from .sharding import expected_tensors, read_config


@dataclass(frozen=True, kw_only=True)
class TinyLlama:
    """Sizes of a model. The defaults make 0.1 million parameters that generate byte-level text.

    ``dtype`` is torch's name. SGLang needs ``--dtype float32`` to serve a float32 model as it is.
    """

    vocab_size: int = 300
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 512
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"

    def hf_config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.hidden_size // self.num_attention_heads,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": self.dtype,
        }


def write_config(folder: Path, model: TinyLlama) -> None:
    """Write ``config.json``, making the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(model.hf_config())))


def random_weights(folder: Path, *, seed: int, scale: float = 0.2) -> dict[str, Tensor]:
    """Random tensors for the model whose ``config.json`` lies in ``folder``, by Hugging Face name.

    Matrices are normal with standard deviation ``scale``; norms are near 1, each element another, so
    that a misplaced one shows. The same seed gives the same bytes.
    """
    config = read_config(folder)
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for spec in expected_tensors(config):
        if config.tie_word_embeddings and spec.name == "lm_head.weight":
            continue
        values = torch.randn(spec.shape, generator=generator) * scale
        if len(spec.shape) == 1:
            values = 1 + values * 0.1
        weights[spec.name] = values.to(getattr(torch, config.dtype))
    return weights


def write_model(folder: Path, model: TinyLlama, *, seed: int) -> dict[str, Tensor]:
    """Write a whole random model folder; its tensors by Hugging Face name."""
    write_config(folder, model)
    weights = random_weights(folder, seed=seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Write a small random Llama model folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default=TinyLlama.dtype)
    options = parser.parse_args()
    write_model(options.folder, replace(TinyLlama(), dtype=options.dtype), seed=options.seed)


if __name__ == "__main__":
    main()
