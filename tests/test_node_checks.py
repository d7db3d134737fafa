"""Evidence: plans against a plain twin that fuses and cuts whole arrays, and verdict material."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping

import numpy as np
import pytest
import sglang_layout
from weightcast.proto.checksums import ChecksumPlan, ChecksumTaker
from weightcast.proto.digest import digest_bytes, format_digest
from weightcast.proto.layout import Layout, TensorSpec, plan_buckets
from weightcast.rollout_node.checks import (
    build_checksum_plan,
    judge_checksums,
    judge_digests,
    sharding_group,
)
from weightcast.rollout_node.client import RankChecksums

Weights = dict[str, np.ndarray]


def make_weights(
    *, heads: int, kv_heads: int, vocab: int, bias: bool = False, qk_norm: bool = False, tied: bool = False
) -> Weights:
    """Random float32 tensors of one decoder layer, head size 4, in Hugging Face's names."""
    size, hidden, inner = 4, heads * 4, 24
    layer = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        shapes[f"{layer}.self_attn.{name}_proj.weight"] = (count * size, hidden)
        if bias:
            shapes[f"{layer}.self_attn.{name}_proj.bias"] = (count * size,)
        if qk_norm and name != "v":
            shapes[f"{layer}.self_attn.{name}_norm.weight"] = (size,)
    shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, heads * size)
    shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = (inner, hidden)
    shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
    for norm in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"):
        shapes[f"{norm}.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def hold(weights: Weights, *, rank: int, ranks: int, kv_heads: int) -> Weights:
    """The plain twin: what an engine's rank holds, by slicing and concatenating whole arrays."""
    held: Weights = {}

    def share(array: np.ndarray, axis: int = 0, part: int = rank, parts: int = ranks) -> np.ndarray:
        return np.split(array, parts, axis)[part]

    def padded(array: np.ndarray) -> np.ndarray:
        step = 64 if -(-len(array) // 64) * 64 % ranks == 0 else 64 * ranks
        return np.concatenate([array, np.zeros((-len(array) % step, array.shape[1]), array.dtype)])

    for name, array in weights.items():
        if ".k_proj." in name or ".v_proj." in name or ".up_proj." in name:
            continue
        if ".q_proj." in name:
            parts = [share(array)]
            for other in ("k_proj", "v_proj"):
                whole = weights[name.replace("q_proj", other)]
                by_head = np.split(whole, kv_heads)
                per_rank = max(1, kv_heads // ranks)
                first = rank * kv_heads // ranks
                parts += by_head[first : first + per_rank]
            held[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
        elif ".gate_proj." in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            held[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([share(array), share(up)])
        elif ".o_proj." in name or ".down_proj." in name:
            held[name] = share(array, axis=1)
        elif "embed_tokens" in name or "lm_head" in name:
            held[name] = share(padded(array))
        else:
            held[name] = array
    return held


def checksum(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def layout_of(weights: Mapping[str, np.ndarray], bucket_bytes: int = 2000) -> Layout:
    specs = [TensorSpec(name, str(array.dtype), array.shape) for name, array in weights.items()]
    return plan_buckets(specs, bucket_bytes=bucket_bytes)


def compute(plan: ChecksumPlan, layout: Layout, weights: Weights) -> tuple[str, ...]:
    taker = ChecksumTaker(layout, plan)
    for bucket in range(len(layout.buckets)):
        data = b"".join(weights[placed.spec.name].tobytes() for placed in layout.place(bucket))
        taker.take(bucket, memoryview(data))
    return taker.values()


MODELS = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("vocab", [100, 512])
@pytest.mark.parametrize("architecture", MODELS)
def test_plan_computes_what_every_rank_holds(
    architecture: str, vocab: int, kv_heads: int, ranks: int
) -> None:
    weights = make_weights(heads=8, kv_heads=kv_heads, vocab=vocab, **MODELS[architecture])
    held = [hold(weights, rank=rank, ranks=ranks, kv_heads=kv_heads) for rank in range(ranks)]
    layout = layout_of(weights)
    plan = build_checksum_plan(
        architecture=architecture,
        parameters=[list(parameters) for parameters in held],
        layout=layout,
        dtype="float32",
        kv_heads=kv_heads,
    )
    expected = {(rank, name): checksum(array) for rank, own in enumerate(held) for name, array in own.items()}
    values = compute(plan, layout, weights)
    keys = [(entry.rank, entry.parameter) for entry in plan.entries]
    assert dict(zip(keys, values, strict=True)) == expected and len(keys) == len(expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_plan_equals_the_one_written_by_hand(ranks: int) -> None:
    config = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "vocab_size": 100,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
    }
    by_hand = sglang_layout.checksum_plan(config, ranks)
    weights = make_weights(heads=8, kv_heads=2, vocab=100)
    layout = layout_of(weights)
    parameters = [
        [entry.parameter for entry in by_hand.entries if entry.rank == rank] for rank in range(ranks)
    ]
    plan = build_checksum_plan(
        architecture="LlamaForCausalLM", parameters=parameters, layout=layout, dtype="float32", kv_heads=2
    )
    assert compute(plan, layout, weights) == compute(by_hand, layout, weights)


def test_tied_head_that_is_sent_must_equal_the_embedding() -> None:
    weights = make_weights(heads=4, kv_heads=4, vocab=64, tied=True)
    held = hold(weights, rank=0, ranks=1, kv_heads=4)
    sent = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].copy()}
    ranks = [RankChecksums(checksums={name: checksum(array) for name, array in held.items()})]
    for change, wrong in ((0.0, ()), (1.0, ("model.embed_tokens.weight (rank 0)",))):
        sent["lm_head.weight"][0, 0] += change
        layout = layout_of(sent)
        plan = build_checksum_plan(
            architecture="LlamaForCausalLM",
            parameters=[list(held)],
            layout=layout,
            dtype="float32",
            kv_heads=4,
        )
        evidence = judge_checksums(plan, compute(plan, layout, sent), ranks, group="g")
        assert evidence.mismatches == wrong
        assert evidence.compared == evidence.total == len(held)


@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        ({"architecture": "DeepseekV3ForCausalLM"}, None),
        ({"dtype": "bfloat16"}, None),
        ({"kv_heads": None}, {"model.layers.0.self_attn.qkv_proj.weight"}),
        ({"extra": "model.layers.0.mlp.experts.w13_weight"}, {"model.layers.0.mlp.experts.w13_weight"}),
    ],
)
def test_parameters_without_a_rule_count_as_not_compared(
    change: dict[str, str | None], left_out: set[str] | None
) -> None:
    weights = make_weights(heads=4, kv_heads=4, vocab=64)
    names = [*hold(weights, rank=0, ranks=2, kv_heads=4), *([change["extra"]] if "extra" in change else [])]
    plan = build_checksum_plan(
        architecture=change.get("architecture") or "LlamaForCausalLM",
        parameters=[names, names],
        layout=layout_of(weights),
        dtype=change.get("dtype") or "float32",
        kv_heads=change.get("kv_heads", 4),  # type: ignore[arg-type]
    )
    planned = {entry.parameter for entry in plan.entries}
    assert planned == (set() if left_out is None else set(names) - left_out)
    ranks = [RankChecksums(checksums=dict.fromkeys(names, "0" * 16))] * 2
    evidence = judge_checksums(plan, ["0" * 16] * len(plan.entries), ranks, group="g")
    assert evidence.compared == len(plan.entries) < evidence.total == 2 * len(names)
    assert evidence.kind == ("checksums" if plan.entries else "agreement")


def test_checksums_that_differ_or_lack_are_named_with_their_rank() -> None:
    weights = make_weights(heads=4, kv_heads=4, vocab=64)
    names = list(hold(weights, rank=0, ranks=2, kv_heads=4))
    plan = build_checksum_plan(
        architecture="LlamaForCausalLM",
        parameters=[names, names],
        layout=layout_of(weights),
        dtype="float32",
        kv_heads=4,
    )
    sent = ["a" * 16] * len(plan.entries)
    good = dict.fromkeys(names, "a" * 16)
    bad = {**good, "model.norm.weight": "b" * 16}
    judged = judge_checksums(
        plan, sent, [RankChecksums(checksums=good), RankChecksums(checksums=bad)], group="g"
    )
    assert judged.mismatches == ("model.norm.weight (rank 1)",)
    lacking = judge_checksums(plan, sent, [RankChecksums(checksums=good)], group="g")
    assert len(lacking.mismatches) == len(names)


def test_fingerprints_tell_ranks_names_and_values_apart() -> None:
    answers = [
        [RankChecksums(checksums={"a": "1", "b": "2"})],
        [RankChecksums(checksums={"a": "2", "b": "1"})],
        [RankChecksums(checksums={"a": "1"}), RankChecksums(checksums={"b": "2"})],
        [RankChecksums(checksums={"b": "2"}), RankChecksums(checksums={"a": "1"})],
    ]
    prints = [judge_checksums(None, (), answer, group="g").fingerprint for answer in answers]
    assert len(set(prints)) == len(prints)
    reordered = [RankChecksums(checksums={"b": "2", "a": "1"})]
    assert judge_checksums(None, (), reordered, group="g").fingerprint == prints[0]


def test_groups_differ_by_everything_that_makes_checksums_incomparable() -> None:
    base = {"architecture": "A", "dtype": "bfloat16", "device": "cuda", "parameters": [["a", "b"]]}
    changes = [
        {},
        {"architecture": "B"},
        {"dtype": "float16"},
        {"device": "cpu"},
        {"parameters": [["a"], ["b"]]},
        {"parameters": [["a", "c"]]},
    ]
    groups = [sharding_group(**{**base, **change}) for change in changes]  # type: ignore[arg-type]
    assert len(set(groups)) == len(groups)
    assert sharding_group(**{**base, "parameters": [["b", "a"]]}) == groups[0]  # type: ignore[arg-type]


def test_digests_are_compared_tensor_by_tensor() -> None:
    weights = make_weights(heads=4, kv_heads=4, vocab=64)
    layout = layout_of(weights)
    sent = [digest_bytes(weights[spec.name]) for spec in layout.tensors]
    held = {name: format_digest(digest_bytes(array)) for name, array in weights.items()}
    good = judge_digests(layout, sent, held, group="g")
    assert (good.mismatches, good.compared, good.total) == ((), len(weights), len(weights))
    for name in itertools.islice(held, 3):
        flipped = weights[name].copy()
        flipped.view(np.uint8).reshape(-1)[-1] ^= 1
        wrong = {**held, name: format_digest(digest_bytes(flipped))}
        judged = judge_digests(layout, sent, wrong, group="g")
        assert judged.mismatches == (name,) and judged.fingerprint != good.fingerprint
    del held["model.norm.weight"]
    assert judge_digests(layout, sent, held, group="g").mismatches == ("model.norm.weight",)


def test_tied_head_digest_is_the_embeddings() -> None:
    weights = make_weights(heads=4, kv_heads=4, vocab=64, tied=True)
    held = {name: format_digest(digest_bytes(array)) for name, array in weights.items()}
    sent = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].copy()}
    for change, wrong in ((0.0, ()), (1.0, ("lm_head.weight",))):
        sent["lm_head.weight"][0, 0] += change
        layout = layout_of(sent)
        digests = [digest_bytes(sent[spec.name]) for spec in layout.tensors]
        assert judge_digests(layout, digests, held, group="g").mismatches == wrong
