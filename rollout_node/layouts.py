"""Which tensors an engine can take: names, whole shapes and dtypes, known before the first byte moves.

SGLang itself answers 200 to a name it does not have and casts a wrong dtype in silence, so a refit is
checked against what the engine was started from:

    reference engine   ``GET /weight_layout``
    SGLang             the safetensors headers of its ``model_path``, if this host can read them
    neither            nothing is known: the node says so (`LayoutAccepted.checked` is False)

The safetensors format: an unsigned 64-bit little-endian length, then that many bytes of JSON, name →
``{"dtype", "shape", "data_offsets"}`` (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ..proto.errors import WeightcastError
from ..proto.layout import TensorSpec
from ..proto.messages import LayoutProblem

_MAX_HEADER_BYTES = 100_000_000
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
#: Floating dtypes that an engine converts between when it loads; others must come as they are.
_CONVERTIBLE = frozenset({"float16", "bfloat16", "float32", "float64"})
_SERVER_DTYPES = {"half": "float16", "float": "float32"}
#: Tables that some exporters write and every engine computes for itself.
_COMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
#: Draft ("multi-token prediction") layers travel in some checkpoints; the target model has no place for them.
_DRAFT = re.compile(r"^mtp\.")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
LM_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


class CheckpointUnreadable(WeightcastError):
    """The engine's model folder cannot be read from this host, so its layout is not known here."""

    code = "incompatible"


class ExpectedTensor(msgspec.Struct, frozen=True):
    """What the engine takes under one name. ``dtypes`` is never empty; the first is the one to send."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


class ExpectedLayout(msgspec.Struct, frozen=True):
    """Everything the engine takes. ``optional`` names may be missing from a refit.

    ``kv_heads`` is the model's number of key/value heads, where its configuration says so.
    """

    tensors: dict[str, ExpectedTensor]
    optional: frozenset[str] = frozenset()
    dtype: str = ""
    kv_heads: int | None = None


def compare_layout(sent: Iterable[TensorSpec], expected: ExpectedLayout) -> list[LayoutProblem]:
    """Every way in which ``sent`` is not what the engine takes; empty if it is.

    Names are compared first, so that the list starts with what is unknown and missing.
    """
    by_name = {spec.name: spec for spec in sent}
    problems = [
        LayoutProblem("unknown", spec.name, sent=_describe(spec.dtype, spec.shape))
        for spec in by_name.values()
        if spec.name not in expected.tensors and not _COMPUTED.search(spec.name)
    ]
    problems += [
        LayoutProblem("missing", name, expected=_describe(wanted.dtypes[0], wanted.shape))
        for name, wanted in expected.tensors.items()
        if name not in by_name and name not in expected.optional and not _COMPUTED.search(name)
    ]
    for name, spec in by_name.items():
        wanted = expected.tensors.get(name)
        if wanted is None:
            continue
        if spec.shape != wanted.shape:
            problems.append(
                LayoutProblem("shape", name, sent=str(list(spec.shape)), expected=str(list(wanted.shape)))
            )
        if spec.dtype not in wanted.dtypes:
            hint = (
                f"cast it to {wanted.dtypes[0]}" if spec.dtype in _CONVERTIBLE else "send it as it is stored"
            )
            problems.append(
                LayoutProblem(
                    "dtype", name, sent=spec.dtype, expected=f"{' or '.join(wanted.dtypes)} ({hint})"
                )
            )
    return problems


def exact_layout(tensors: Iterable[TensorSpec], optional: Iterable[str]) -> ExpectedLayout:
    """The layout of an engine that says exactly what it holds."""
    return ExpectedLayout(
        tensors={spec.name: ExpectedTensor(spec.shape, (spec.dtype,)) for spec in tensors},
        optional=frozenset(optional),
    )


def read_checkpoint_layout(
    model_path: str, *, server_dtype: str, revision: str | None = None
) -> ExpectedLayout:
    """What an SGLang server started from ``model_path`` takes.

    Args:
        model_path: a folder, or a Hugging Face name that is in this host's cache.
        server_dtype: the server's ``dtype`` argument, as "auto" or "bfloat16".
        revision: the server's ``revision`` argument.

    Raises:
        CheckpointUnreadable: if there is no such folder here, or it holds no readable safetensors.
    """
    folder = find_checkpoint(model_path, revision=revision)
    config = read_config(folder)
    stored: dict[str, TensorSpec] = {}
    for path in _safetensors_files(folder):
        for spec in read_safetensors_header(path):
            stored[spec.name] = spec
    return checkpoint_layout(stored.values(), config, server_dtype=server_dtype)


def checkpoint_layout(
    stored: Iterable[TensorSpec], config: dict[str, Any], *, server_dtype: str
) -> ExpectedLayout:
    """What a server with this checkpoint and ``config.json`` takes (see `read_checkpoint_layout`).

    A tensor stored in the checkpoint's main dtype is held in the server's, and must be sent so. One that
    is stored in another plain floating dtype (a float32 router bias in a bfloat16 model) may be sent
    either way. Anything else, such as float8 or integers, must be sent as it is stored.
    """
    text_config = config.get("text_config") or config
    main = _main_dtype(config) or _main_dtype(text_config) or "float32"
    held = resolve_server_dtype(server_dtype, config)
    tensors: dict[str, ExpectedTensor] = {}
    dtypes: tuple[str, ...]
    for spec in stored:
        if spec.dtype == main and main in _CONVERTIBLE:
            dtypes = (held,)
        elif spec.dtype in _CONVERTIBLE and spec.dtype != held:
            dtypes = (spec.dtype, held)
        else:
            dtypes = (spec.dtype,)
        tensors[spec.name] = ExpectedTensor(spec.shape, dtypes)
    optional: set[str] = set()
    tied = config.get("tie_word_embeddings", text_config.get("tie_word_embeddings"))
    if tied or (tied is None and LM_HEAD not in tensors):
        if _EMBEDDING in tensors:
            tensors.setdefault(LM_HEAD, tensors[_EMBEDDING])
        optional.add(LM_HEAD)
    layers = text_config.get("num_hidden_layers")
    optional.update(name for name in tensors if _beyond_target(name, layers))
    heads = text_config.get("num_key_value_heads", text_config.get("num_attention_heads"))
    return ExpectedLayout(
        tensors=tensors,
        optional=frozenset(optional),
        dtype=held,
        kv_heads=heads if isinstance(heads, int) else None,
    )


def resolve_server_dtype(argument: str, config: dict[str, Any]) -> str:
    """The dtype in which SGLang holds a model, from its ``dtype`` argument and ``config.json``.

    "auto" follows the configuration, except that float32 models are held as float16, and Gemma ones as
    bfloat16 (``_get_and_verify_dtype`` in SGLang's ``configs/model_config.py``).
    """
    argument = argument.lower()
    if argument != "auto":
        return _SERVER_DTYPES.get(argument, argument)
    main = _main_dtype(config) or _main_dtype(config.get("text_config") or {}) or "float32"
    if main != "float32":
        return main
    return "bfloat16" if str(config.get("model_type", "")).startswith("gemma") else "float16"


def read_safetensors_header(path: Path) -> list[TensorSpec]:
    """Names, dtypes and shapes in one safetensors file; no tensor bytes are read.

    Raises:
        CheckpointUnreadable: if the file is not safetensors.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise CheckpointUnreadable(f"{path} is not safetensors: its header has {length} bytes")
            text = file.read(length)
        if len(text) != length:
            raise CheckpointUnreadable(f"{path} is cut short: {len(text)} of {length} header bytes")
        header = json.loads(text)
        return [
            TensorSpec(name, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except OSError as error:
        raise CheckpointUnreadable(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointUnreadable(f"{path} is not safetensors: {error!r}") from error


def find_checkpoint(model_path: str, *, revision: str | None = None) -> Path:
    """The folder that ``model_path`` names on this host: itself, or a snapshot in the Hugging Face cache.

    Raises:
        CheckpointUnreadable: if there is none.
    """
    folder = Path(model_path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    model = hub / f"models--{model_path.replace('/', '--')}"
    name = revision or "main"
    try:
        commit = (model / "refs" / name).read_text(encoding="utf-8").strip()
    except OSError:
        commit = name
    snapshot = model / "snapshots" / commit
    if (snapshot / "config.json").is_file():
        return snapshot
    raise CheckpointUnreadable(f"this host has no {model_path!r}, neither as a folder nor in {hub}")


def read_config(folder: Path) -> dict[str, Any]:
    """The model's ``config.json``.

    Raises:
        CheckpointUnreadable: if it cannot be read.
    """
    return _read_json(folder / "config.json")


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = _read_json(index).get("weight_map", {}).values()
        return [folder / name for name in sorted(set(names))]
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not files:
        raise CheckpointUnreadable(f"{folder} holds no safetensors")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointUnreadable(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointUnreadable(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointUnreadable(f"{path} is no JSON object")
    return value


def _beyond_target(name: str, layers: object) -> bool:
    number = _LAYER.search(name)
    return bool(_DRAFT.match(name)) or (
        isinstance(layers, int) and number is not None and int(number.group(1)) >= layers
    )


def _main_dtype(config: dict[str, Any]) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")
    return value.removeprefix("torch.") if isinstance(value, str) else None


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
