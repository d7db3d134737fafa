"""Which slice of which tensor lies where: SGLang's fused, tensor-parallel layout of a Llama decoder.

Pure and without torch. `placements` is the one table that loading, digests and tests read:

    Hugging Face tensor                  parameter on each rank
    self_attn.{q,k,v}_proj.weight   →    self_attn.qkv_proj.weight     rows of this rank's heads
    mlp.{gate,up}_proj.weight       →    mlp.gate_up_proj.weight       rows, gate above up
    self_attn.o_proj, mlp.down_proj →    the same name                 columns
    model.embed_tokens, lm_head     →    the same name                 rows, padded with zeros
    norms                           →    the same name                 whole

Key-value heads are replicated where there are fewer of them than ranks; the vocabulary is padded to a
multiple of 64 (``sglang/srt/layers/linear.py``, ``vocab_parallel_embedding.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ...proto.errors import InvalidConfig
from ...proto.layout import ITEM_SIZES, TensorSpec

#: SGLang pads the vocabulary to a multiple of this many rows.
VOCABULARY_PADDING = 64

_ARCHITECTURE = "LlamaForCausalLM"


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a Llama decoder is, read from a Hugging Face ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    architecture: str = _ARCHITECTURE


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank keeps its part of one Hugging Face tensor.

    Elements ``[start, stop)`` along ``axis`` of the tensor lie at ``row`` onwards along the same axis of
    ``parameter``. ``axis`` < 0: the whole tensor is the whole parameter. ``exact``: the engine refuses
    another extent along ``axis`` (a longer tensor is otherwise cut to size without a word, as by SGLang).
    """

    parameter: str
    axis: int = -1
    start: int = 0
    stop: int = 0
    row: int = 0
    exact: bool = False


def read_config(folder: Path) -> DecoderConfig:
    """Read ``config.json`` of a Hugging Face model folder.

    Raises:
        InvalidConfig: naming the file and the field, for anything but a plain Llama decoder.
    """
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise InvalidConfig(f"{path} is not a JSON object: {error}") from error
    architectures = raw.get("architectures") or [_ARCHITECTURE]
    if architectures != [_ARCHITECTURE]:
        raise InvalidConfig(
            f"{path}: architectures is {architectures}; the reference engine runs {_ARCHITECTURE}"
        )
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            raise InvalidConfig(f"{path}: {field} is set; the reference engine has no biases")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise InvalidConfig(f"{path}: RoPE scaling {rope} is not supported; only the default is")
    eos = raw.get("eos_token_id")
    heads = raw.get("num_attention_heads")
    known = {field: raw[field] for field in DecoderConfig.__struct_fields__ if raw.get(field) is not None}
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "dtype": raw.get("torch_dtype") or "float32",
        "eos_token_ids": [] if eos is None else eos if isinstance(eos, list) else [eos],
    }
    try:
        config = msgspec.convert(defaults | known, DecoderConfig)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"{path}: {error}") from error
    if not config.head_dim:
        config = msgspec.structs.replace(config, head_dim=config.hidden_size // config.num_attention_heads)
    if config.dtype not in ITEM_SIZES:
        raise InvalidConfig(f"{path}: dtype {config.dtype!r} is unknown")
    return config


def check_tp(config: DecoderConfig, tp_size: int) -> None:
    """Refuse a tensor-parallel size that the model cannot be cut into.

    Raises:
        InvalidConfig: naming what does not divide.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if tp_size < 1 or heads % tp_size:
        raise InvalidConfig(f"--tp is {tp_size}; it must divide the {heads} attention heads")
    if config.intermediate_size % tp_size:
        raise InvalidConfig(f"--tp is {tp_size}; it must divide intermediate_size {config.intermediate_size}")
    if kv_heads % tp_size and tp_size % kv_heads:
        raise InvalidConfig(
            f"--tp is {tp_size}; it must divide, or be a multiple of, {kv_heads} key-value heads"
        )


def padded_vocabulary(config: DecoderConfig, tp_size: int) -> int:
    """Rows of the padded vocabulary over all ranks."""
    unit = VOCABULARY_PADDING
    if -(-config.vocab_size // unit) * unit % tp_size:
        unit *= tp_size
    return -(-config.vocab_size // unit) * unit


def kv_heads_of_rank(config: DecoderConfig, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Key-value heads ``[first, last)`` that one rank keeps."""
    if config.num_key_value_heads >= tp_size:
        count = config.num_key_value_heads // tp_size
        return tp_rank * count, (tp_rank + 1) * count
    first = tp_rank * config.num_key_value_heads // tp_size
    return first, first + 1


def expected_tensors(config: DecoderConfig) -> tuple[TensorSpec, ...]:
    """The Hugging Face tensors of the model, whole, in model order; a tied ``lm_head`` included."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (config.vocab_size, hidden))]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes += [
            (f"{prefix}self_attn.q_proj.weight", (queries, hidden)),
            (f"{prefix}self_attn.k_proj.weight", (keys, hidden)),
            (f"{prefix}self_attn.v_proj.weight", (keys, hidden)),
            (f"{prefix}self_attn.o_proj.weight", (hidden, queries)),
            (f"{prefix}mlp.gate_proj.weight", (inner, hidden)),
            (f"{prefix}mlp.up_proj.weight", (inner, hidden)),
            (f"{prefix}mlp.down_proj.weight", (hidden, inner)),
            (f"{prefix}input_layernorm.weight", (hidden,)),
            (f"{prefix}post_attention_layernorm.weight", (hidden,)),
        ]
    shapes += [("model.norm.weight", (hidden,)), ("lm_head.weight", (config.vocab_size, hidden))]
    return tuple(TensorSpec(name, config.dtype, shape) for name, shape in shapes)


def optional_tensors(config: DecoderConfig) -> tuple[str, ...]:
    """Tensors that a checkpoint may leave out: the tied ``lm_head``, which is never loaded."""
    return ("lm_head.weight",) if config.tie_word_embeddings else ()


def parameter_shapes(config: DecoderConfig, tp_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one rank's parameters, by SGLang's names, in SGLang's order."""
    hidden, inner = config.hidden_size, config.intermediate_size // tp_size
    queries = config.num_attention_heads // tp_size * config.head_dim
    first, last = kv_heads_of_rank(config, 0, tp_size)
    keys = (last - first) * config.head_dim
    vocabulary = (padded_vocabulary(config, tp_size) // tp_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.qkv_proj.weight": (queries + 2 * keys, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}mlp.gate_up_proj.weight": (2 * inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def placements(config: DecoderConfig, tp_rank: int, tp_size: int) -> dict[str, Placement]:
    """Where one rank keeps its part of each tensor, by Hugging Face name. A tied head has no entry."""
    inner = config.intermediate_size // tp_size
    queries = config.num_attention_heads // tp_size * config.head_dim
    first, last = kv_heads_of_rank(config, tp_rank, tp_size)
    keys, key_start = (last - first) * config.head_dim, first * config.head_dim
    rows = padded_vocabulary(config, tp_size) // tp_size
    vocabulary = (min(tp_rank * rows, config.vocab_size), min((tp_rank + 1) * rows, config.vocab_size))

    def cut(parameter: str, axis: int, start: int, count: int, row: int = 0) -> Placement:
        return Placement(parameter=parameter, axis=axis, start=start, stop=start + count, row=row)

    def vocabulary_rows(parameter: str) -> Placement:
        return Placement(parameter=parameter, axis=0, start=vocabulary[0], stop=vocabulary[1], exact=True)

    table = {"model.embed_tokens.weight": vocabulary_rows("model.embed_tokens.weight")}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        qkv, gate_up = f"{prefix}self_attn.qkv_proj.weight", f"{prefix}mlp.gate_up_proj.weight"
        o_proj, down = f"{prefix}self_attn.o_proj.weight", f"{prefix}mlp.down_proj.weight"
        table |= {
            f"{prefix}self_attn.q_proj.weight": cut(qkv, 0, tp_rank * queries, queries),
            f"{prefix}self_attn.k_proj.weight": cut(qkv, 0, key_start, keys, queries),
            f"{prefix}self_attn.v_proj.weight": cut(qkv, 0, key_start, keys, queries + keys),
            o_proj: cut(o_proj, 1, tp_rank * queries, queries),
            f"{prefix}mlp.gate_proj.weight": cut(gate_up, 0, tp_rank * inner, inner),
            f"{prefix}mlp.up_proj.weight": cut(gate_up, 0, tp_rank * inner, inner, inner),
            down: cut(down, 1, tp_rank * inner, inner),
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            table[f"{prefix}{norm}.weight"] = Placement(parameter=f"{prefix}{norm}.weight")
    table["model.norm.weight"] = Placement(parameter="model.norm.weight")
    if not config.tie_word_embeddings:
        table["lm_head.weight"] = vocabulary_rows("lm_head.weight")
    return table
