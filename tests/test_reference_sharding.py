"""The sharding table as a table: every element of every tensor lies somewhere, nothing overlaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weightcast.proto.errors import InvalidConfig
from weightcast.rollout_node.reference.model import TinyLlama, write_config
from weightcast.rollout_node.reference.sharding import (
    DecoderConfig,
    check_tp,
    expected_tensors,
    padded_vocabulary,
    parameter_shapes,
    placements,
    read_config,
)


def config(*, heads: int = 8, kv_heads: int = 2, vocab_size: int = 300, tied: bool = False) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=heads * 4,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        dtype="bfloat16",
        eos_token_ids=(2,),
    )


@given(
    tp_size=st.sampled_from([1, 2, 4, 8]),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    vocab_size=st.integers(1, 700),
)
def test_ranks_together_hold_every_element_of_every_tensor(
    tp_size: int, kv_heads: int, vocab_size: int
) -> None:
    model = config(kv_heads=kv_heads, vocab_size=vocab_size)
    tables = [placements(model, rank, tp_size) for rank in range(tp_size)]
    for spec in expected_tensors(model):
        places = [table[spec.name] for table in tables]
        if places[0].axis < 0:
            assert parameter_shapes(model, tp_size)[places[0].parameter] == spec.shape
            continue
        covered = {index for place in places for index in range(place.start, place.stop)}
        assert covered == set(range(spec.shape[places[0].axis]))


@given(tp_size=st.sampled_from([1, 2, 4, 8]), kv_heads=st.sampled_from([1, 2, 4, 8]))
def test_every_row_of_a_parameter_belongs_to_one_tensor_or_is_padding(tp_size: int, kv_heads: int) -> None:
    model = config(kv_heads=kv_heads)
    for rank in range(tp_size):
        rows: dict[str, list[int]] = {}
        for place in placements(model, rank, tp_size).values():
            if place.axis == 0:
                taken = range(place.row, place.row + place.stop - place.start)
                rows.setdefault(place.parameter, []).extend(taken)
        for parameter, taken in rows.items():
            extent = parameter_shapes(model, tp_size)[parameter][0]
            assert len(set(taken)) == len(taken)
            assert set(taken) <= set(range(extent))
            if "embed" not in parameter and "lm_head" not in parameter:
                assert len(taken) == extent


@pytest.mark.parametrize(
    ("vocab_size", "tp_size", "rows"), [(300, 1, 320), (300, 2, 320), (64, 4, 64), (64, 3, 192), (1, 1, 64)]
)
def test_vocabulary_is_padded_as_sglang_pads_it(vocab_size: int, tp_size: int, rows: int) -> None:
    assert padded_vocabulary(config(vocab_size=vocab_size), tp_size) == rows


@pytest.mark.parametrize("tp_size", [0, 3, 16])
def test_a_size_that_does_not_divide_is_refused_by_name(tp_size: int) -> None:
    with pytest.raises(InvalidConfig, match=f"--tp is {tp_size}"):
        check_tp(config(), tp_size)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "architectures"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"torch_dtype": "float17"}, "float17"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
    ],
)
def test_a_model_it_cannot_run_is_refused_by_field(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TinyLlama().hf_config() | change))
    with pytest.raises(InvalidConfig, match=words):
        read_config(tmp_path)


def test_rope_parameters_and_dtype_are_read_as_transformers_5_writes_them(tmp_path: Path) -> None:
    raw = TinyLlama().hf_config()
    del raw["rope_theta"], raw["torch_dtype"]
    raw |= {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    read = read_config(tmp_path)
    assert (read.rope_theta, read.dtype) == (5000.0, "float16")


def test_no_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"nothing/config\.json"):
        read_config(tmp_path / "nothing")


def test_written_config_is_read_back(tmp_path: Path) -> None:
    write_config(tmp_path, TinyLlama(tie_word_embeddings=True))
    assert read_config(tmp_path).tie_word_embeddings
