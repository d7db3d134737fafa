"""What an engine takes: read from checkpoints, compared with what is sent."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from weightcast.proto.layout import TensorSpec
from weightcast.rollout_node.layouts import (
    CheckpointUnreadable,
    ExpectedLayout,
    checkpoint_layout,
    compare_layout,
    exact_layout,
    find_checkpoint,
    read_checkpoint_layout,
    read_safetensors_header,
    resolve_server_dtype,
)

EMBEDDING = TensorSpec("model.embed_tokens.weight", "bfloat16", (512, 64))
HEAD = TensorSpec("lm_head.weight", "bfloat16", (512, 64))
NORM = TensorSpec("model.norm.weight", "bfloat16", (64,))
ROUTER_BIAS = TensorSpec("model.layers.0.mlp.router.bias", "float32", (8,))
FP8 = TensorSpec("model.layers.0.mlp.up_proj.weight", "float8_e4m3fn", (128, 64))
BFLOAT16 = {"torch_dtype": "bfloat16", "tie_word_embeddings": False, "num_hidden_layers": 1}


def expected(*stored: TensorSpec, dtype: str = "auto", **config: Any) -> ExpectedLayout:
    return checkpoint_layout(stored, {**BFLOAT16, **config}, server_dtype=dtype)


def recast(spec: TensorSpec, dtype: str) -> TensorSpec:
    return TensorSpec(spec.name, dtype, spec.shape)


def kinds(sent: list[TensorSpec], layout: ExpectedLayout) -> list[tuple[str, str]]:
    return [(problem.kind, problem.name) for problem in compare_layout(sent, layout)]


def test_equal_layouts_have_no_problems_in_any_order() -> None:
    assert compare_layout([NORM, HEAD, EMBEDDING], expected(EMBEDDING, NORM, HEAD)) == []


def test_every_problem_is_listed_names_first() -> None:
    half = TensorSpec(EMBEDDING.name, "float32", (256, 64))
    layout = expected(EMBEDDING, NORM, HEAD)
    assert kinds([half, HEAD, TensorSpec("visual.x", "bfloat16", ())], layout) == [
        ("unknown", "visual.x"),
        ("missing", NORM.name),
        ("shape", EMBEDDING.name),
        ("dtype", EMBEDDING.name),
    ]
    shape, dtype = compare_layout([half, HEAD, NORM], layout)
    assert (shape.sent, shape.expected) == ("[256, 64]", "[512, 64]")
    assert dtype.sent == "float32" and "cast it to bfloat16" in dtype.expected


@pytest.mark.parametrize(
    ("stored", "sent", "server", "fits"),
    [
        (NORM, "bfloat16", "auto", True),
        (NORM, "float32", "auto", False),
        (NORM, "float16", "auto", False),
        # The server was told to hold it otherwise: what it holds is what must come.
        (NORM, "float32", "float32", True),
        (NORM, "bfloat16", "float32", False),
        (NORM, "float16", "half", True),
        # Stored apart from the rest on purpose: as stored, or as the server would cast it.
        (ROUTER_BIAS, "float32", "auto", True),
        (ROUTER_BIAS, "bfloat16", "auto", True),
        (ROUTER_BIAS, "float16", "auto", False),
        # Nothing converts to or from float8.
        (FP8, "float8_e4m3fn", "auto", True),
        (FP8, "bfloat16", "auto", False),
    ],
)
def test_dtypes(stored: TensorSpec, sent: str, server: str, fits: bool) -> None:
    problems = compare_layout(
        [recast(stored, sent)], expected(stored, dtype=server, tie_word_embeddings=True)
    )
    assert [problem.kind for problem in problems] == ([] if fits else ["dtype"])


def test_float32_checkpoint_is_held_as_float16_and_must_be_sent_so() -> None:
    layout = expected(recast(NORM, "float32"), torch_dtype="float32", tie_word_embeddings=True)
    assert layout.dtype == "float16"
    assert compare_layout([recast(NORM, "float16")], layout) == []
    assert kinds([recast(NORM, "float32")], layout) == [("dtype", NORM.name)]


@pytest.mark.parametrize(
    ("argument", "config", "held"),
    [
        ("auto", {"torch_dtype": "bfloat16"}, "bfloat16"),
        ("auto", {"dtype": "float16"}, "float16"),
        ("auto", {"torch_dtype": "float32"}, "float16"),
        ("auto", {}, "float16"),
        ("auto", {"torch_dtype": "float32", "model_type": "gemma2"}, "bfloat16"),
        ("auto", {"text_config": {"torch_dtype": "bfloat16"}}, "bfloat16"),
        ("half", {"torch_dtype": "bfloat16"}, "float16"),
        ("float", {"torch_dtype": "bfloat16"}, "float32"),
        ("bfloat16", {"torch_dtype": "float32"}, "bfloat16"),
    ],
)
def test_server_dtype(argument: str, config: dict[str, Any], held: str) -> None:
    assert resolve_server_dtype(argument, config) == held


@pytest.mark.parametrize(
    ("config", "stored", "sent", "problems"),
    [
        ({"tie_word_embeddings": True}, [EMBEDDING], [EMBEDDING], []),
        ({"tie_word_embeddings": True}, [EMBEDDING], [EMBEDDING, HEAD], []),
        ({"tie_word_embeddings": True}, [EMBEDDING, HEAD], [EMBEDDING], []),
        ({"tie_word_embeddings": False}, [EMBEDDING, HEAD], [EMBEDDING], [("missing", HEAD.name)]),
        ({"tie_word_embeddings": False}, [EMBEDDING], [EMBEDDING, HEAD], [("unknown", HEAD.name)]),
        ({"tie_word_embeddings": None}, [EMBEDDING], [EMBEDDING, HEAD], []),
        ({"tie_word_embeddings": None}, [EMBEDDING, HEAD], [EMBEDDING], [("missing", HEAD.name)]),
    ],
)
def test_tied_and_untied_heads(
    config: dict[str, Any], stored: list[TensorSpec], sent: list[TensorSpec], problems: list[tuple[str, str]]
) -> None:
    assert kinds(sent, expected(*stored, **config)) == problems


def test_tables_that_engines_compute_and_draft_layers_may_be_there_or_not() -> None:
    table = TensorSpec("model.layers.0.self_attn.rotary_emb.inv_freq", "float32", (8,))
    draft = TensorSpec("model.layers.1.eh_proj.weight", "bfloat16", (4, 4))
    mtp = TensorSpec("mtp.fc.weight", "bfloat16", (4, 4))
    tied = {"tie_word_embeddings": True}
    assert kinds([NORM, table], expected(NORM, **tied)) == []
    assert kinds([NORM], expected(NORM, table, draft, mtp, **tied)) == []
    assert kinds([NORM, draft], expected(NORM, draft, **tied)) == []


def test_exact_layout_takes_only_what_it_names() -> None:
    layout = exact_layout([EMBEDDING, ROUTER_BIAS], optional=[ROUTER_BIAS.name])
    assert kinds([EMBEDDING], layout) == []
    assert kinds([EMBEDDING, recast(ROUTER_BIAS, "bfloat16")], layout) == [("dtype", ROUTER_BIAS.name)]


def write_checkpoint(folder: Path, *, split: bool) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**BFLOAT16, "num_key_value_heads": 2}))
    tensors = {
        EMBEDDING.name: torch.zeros(512, 64, dtype=torch.bfloat16),
        HEAD.name: torch.zeros(512, 64, dtype=torch.bfloat16),
        "scalar": torch.zeros((), dtype=torch.float32),
        "table": torch.zeros(3, 0, dtype=torch.int64),
    }
    if not split:
        save_file(tensors, folder / "model.safetensors")
        return
    names = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    save_file({"stray": torch.zeros(1)}, folder / "other.safetensors")


@pytest.mark.parametrize("split", [False, True])
def test_checkpoint_folders(tmp_path: Path, split: bool) -> None:
    write_checkpoint(tmp_path / "model", split=split)
    layout = read_checkpoint_layout(str(tmp_path / "model"), server_dtype="auto")
    assert {name: (tensor.shape, tensor.dtypes[0]) for name, tensor in layout.tensors.items()} == {
        EMBEDDING.name: ((512, 64), "bfloat16"),
        HEAD.name: ((512, 64), "bfloat16"),
        "scalar": ((), "float32"),
        "table": ((3, 0), "int64"),
    }
    assert (layout.dtype, layout.kv_heads, layout.optional) == ("bfloat16", 2, frozenset())


def test_checkpoint_named_as_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--org--name"
    write_checkpoint(model / "snapshots" / "c0ffee", split=False)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("c0ffee\n")
    assert find_checkpoint("org/name") == model / "snapshots" / "c0ffee"
    assert find_checkpoint("org/name", revision="c0ffee") == model / "snapshots" / "c0ffee"
    with pytest.raises(CheckpointUnreadable, match="org/other"):
        find_checkpoint("org/other")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 19) + b'{"x":{"dtype":"X"}}',
    ],
)
def test_files_that_are_no_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointUnreadable, match=r"model\.safetensors"):
        read_safetensors_header(path)


def test_folder_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointUnreadable, match="holds no safetensors"):
        read_checkpoint_layout(str(tmp_path), server_dtype="auto")
