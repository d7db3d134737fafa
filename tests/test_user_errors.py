"""Errors that users make: each is named within a deadline, and the server goes on with its old version."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ADMIN_KEY
from engines import Engine, reference_engine
from node_kit import weights_of
from weightcast.proto.config import BroadcasterConfig, Deadlines
from weightcast.proto.errors import RefitFailed
from weightcast.trainer_hooks import Publisher

PROMPT = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def server(bfloat16_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with reference_engine(bfloat16_model, tmp_path_factory.mktemp("errors"), admin_key=ADMIN_KEY) as started:
        yield started


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{ADMIN_KEY}\n")
    return path


def publisher(
    run_dir: Path, url: str, *, key: Path | None = None, nodes: int = 0, **options: Any
) -> Publisher:
    """A publisher with a broadcaster of its own for one plain server, and little patience."""
    config = BroadcasterConfig(
        job="errors", control="tcp://127.0.0.1:0", http="127.0.0.1:0", run_dir=str(run_dir), backend="gloo",
        engines=(url,), nodes=nodes, admin_key_file=str(key or ""), deadlines=Deadlines(nodes=5.0),
    )  # fmt: skip
    return Publisher(launch=config, **options)


def changed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor * 0.5 for name, tensor in weights.items()}


def test_an_engine_that_is_down_and_a_node_too_few(tmp_path: Path, server: Engine, key_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with publisher(tmp_path / "down", url) as down, pytest.raises(RefitFailed) as caught:
        down.refit(1, weights_of(server.model))
    assert caught.value.cause.code == "no_nodes"
    assert url in str(caught.value) and "onnect" in str(caught.value)
    with (
        publisher(tmp_path / "few", server.url, key=key_file, nodes=2) as few,
        pytest.raises(RefitFailed, match="1 of 2 rollout nodes are registered"),
    ):
        few.refit(1, weights_of(server.model))


def test_a_wrong_key_stops_before_anything_is_touched(tmp_path: Path, server: Engine) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-key\n")
    before, label = server.output_ids(PROMPT), server.label
    with publisher(tmp_path / "run", server.url, key=wrong) as locked, pytest.raises(RefitFailed) as caught:
        locked.refit(1, changed(weights_of(server.model)))
    cause = caught.value.cause
    assert cause.code == "unauthorized" and cause.node and "not-the-key" not in str(caught.value)
    assert server.output_ids(PROMPT) == before and server.label == label


def test_wrong_tensors_are_listed_and_the_next_refit_works(
    tmp_path: Path, server: Engine, key_file: Path
) -> None:
    weights = changed(weights_of(server.model))
    before = server.output_ids(PROMPT)
    cases: list[tuple[dict[str, torch.Tensor], list[str]]] = [
        ({}, ["names no tensors"]),
        (weights | {"visual.w": torch.ones(2)}, ["unknown visual.w"]),
        ({n: w for n, w in weights.items() if n != "lm_head.weight"}, ["missing lm_head.weight"]),
        (weights | {"model.norm.weight": torch.ones(3).bfloat16()}, ["shape model.norm.weight", "[3]"]),
        (weights | {"model.norm.weight": torch.ones(64)}, ["dtype model.norm.weight", "cast it to bfloat16"]),
        (weights | {"model.norm.weight": torch.ones(64).to_sparse()}, ["'model.norm.weight'", "sparse"]),
    ]
    with publisher(tmp_path / "run", server.url, key=key_file) as sender:
        for number, (tensors, words) in enumerate(cases):
            with pytest.raises(RefitFailed) as caught:
                sender.refit(1, tensors)
            assert all(word in str(caught.value) for word in words), (number, str(caught.value))
            assert server.output_ids(PROMPT) == before
        # Legal oddities: a tensor larger than the bucket, and one that is not contiguous.
        odd = "model.layers.0.mlp.up_proj.weight"
        report = sender.refit(1, weights | {odd: weights[odd].t().contiguous().t()})
        assert {node.digest for node in report.nodes.values()} == {"match"}
        assert server.output_ids(PROMPT) != before and server.label == report.label


def test_tensors_larger_than_a_bucket_and_a_source_that_raises(
    tmp_path: Path, server: Engine, key_file: Path
) -> None:
    weights = weights_of(server.model)

    def raises_half_way() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(weights.items()):
            if calls > 1 and number == len(weights) // 2:
                raise RuntimeError("the optimizer exploded")
            yield pair

    calls = 0

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal calls
        calls += 1
        return raises_half_way()

    with publisher(tmp_path / "run", server.url, key=key_file, bucket_bytes=1000) as sender:
        assert sender.refit(1, weights).buckets > 10
        with pytest.raises(RefitFailed, match="the optimizer exploded") as caught:
            sender.refit(2, source)  # the first pass lists, the second sends and raises
        report: Any = caught.value.report
        (node,) = report.nodes.values()
        assert node.outcome == "quarantined" and node.version is None
        assert server.get("/ready").status == 503  # bytes of it arrived: not served until a whole refit
        assert server.label != report.label
        healed = sender.refit(3, weights)
        assert healed.ok and server.get("/ready").status == 200 and server.label == healed.label
