"""The whole of it from the command line: demo and push, on the reference engine and on SGLang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import LOOPBACK, Engine, reference_engine, sglang_engine, sglang_python
from safetensors.torch import load_file
from weightcast.proto.config import BroadcasterConfig
from weightcast.proto.errors import RefitFailed
from weightcast.rollout_node.reference.model import TinyLlama, write_model
from weightcast.trainer_hooks import Publisher

WEIGHTCAST = [sys.executable, "-m", "weightcast.proto.cli"]
PROMPT = [40, 41, 42, 43]


def run(*arguments: str, seconds: float = 110) -> tuple[int, str, str]:
    """One command: exit status, stdout, stderr."""
    done = subprocess.run(
        [*WEIGHTCAST, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | LOOPBACK,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def check_demo(output: str, *, engine: str, nodes: int, refits: int) -> None:
    """The JSON object that the demo promises, and what it must say."""
    assert output.count("\n") == 1
    summary = json.loads(output)
    assert summary["ok"] is True and summary["engine"] == engine and summary["nodes"] == nodes
    assert len(summary["refits"]) == refits
    versions = [refit["version"] for refit in summary["refits"]]
    assert versions == sorted(set(versions))
    for refit in summary["refits"]:
        assert refit["bytes"] > 0 and refit["buckets"] > 1
        assert {"gather", "pause", "wire", "load", "verify", "total"} <= set(refit["seconds"])
        assert 0 < refit["seconds"]["wire"] <= refit["seconds"]["total"]
        assert refit["output"] == {"matches_trainer": True, "changed": True}
        assert len(refit["nodes"]) == nodes
        for node in refit["nodes"].values():
            assert node == {"outcome": "ready", "version": refit["version"], "digest": "match"}


def test_demo_on_the_reference_engine() -> None:
    status, out, err = run("demo", "--json", "--nodes", "2", "--tp", "1,2", "--refits", "2")
    assert status == 0, err
    check_demo(out, engine="reference", nodes=2, refits=2)


@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_demo_on_sglang() -> None:
    # Two servers, not three: each takes a minute to start. `make demo-sglang` runs three.
    options = ["--engine", "sglang", "--sglang-python", sglang_python(), "--nodes", "2", "--tp", "1,2"]
    status, out, err = run("demo", "--json", "--refits", "2", *options, seconds=880)
    assert status == 0, err
    check_demo(out, engine="sglang", nodes=2, refits=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "--nodes is 0"),
        (["--tp", "1,2"], "--tp is '1,2'; it must be one number, or 3"),
        (["--tp", "two"], "--tp is 'two'"),
        (["--bucket-bytes", "0"], "--bucket-bytes '0' holds nothing"),
        (["--engine", "sglang"], "--sglang-python"),
        (["--engine", "sglang", "--sglang-python", "/nowhere/python"], "/nowhere/python"),
    ],
)
def test_demo_names_the_option_that_is_wrong(options: Sequence[str], message: str) -> None:
    status, out, err = run("demo", *options)
    assert status == 2 and message in " ".join(err.split()) and out == ""


def test_demo_that_is_ended_leaves_nothing_behind() -> None:
    demo = subprocess.Popen(
        [*WEIGHTCAST, "demo", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | LOOPBACK,
    )
    try:
        root = psutil.Process(demo.pid)
        family: list[psutil.Process] = []
        # Three agents, their engines and ranks, broadcaster and source: all started, none ready yet.
        while len(family) < 8:
            family = root.children(recursive=True)
            assert demo.poll() is None
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(60) == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == []
    finally:
        demo.kill()
        demo.wait()


@pytest.fixture
def pair(sharded_engine: Engine, tmp_path: Path) -> Iterator[list[Engine]]:
    """Two engines of one kind on one float32 model, the second with two ranks."""
    if sharded_engine.kind == "reference":
        single = reference_engine(sharded_engine.model, tmp_path)
    else:
        single = sglang_engine(sharded_engine.model, tmp_path, dtype="float32")
    with single as started:
        yield [started, sharded_engine]
        # Other tests use the shared one as it was started.
        restored = sharded_engine.post("/update_weights_from_disk", model_path=str(sharded_engine.model))
        assert restored.status == 200


@pytest.mark.timeout(700)
def test_push_is_as_good_as_a_load_from_disk(pair: list[Engine], tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, seed in ((old, 11), (new, 12)):
        write_model(folder, TinyLlama(max_position_embeddings=4096, dtype="float32"), seed=seed)

    def load_from_disk(folder: Path) -> list[Any]:
        for engine in pair:
            reply = engine.post("/update_weights_from_disk", model_path=str(folder))
            assert reply.status == 200, reply
        return [(engine.checksums(), engine.output_ids(PROMPT)) for engine in pair]

    wanted = load_from_disk(new)
    before = load_from_disk(old)
    urls = [part for engine in pair for part in ("--engine", engine.url)]
    status, out, err = run("push", str(new), *urls, "--json", "--bucket-bytes", "100kB", "--label", "pushed")
    assert status == 0, err
    report = json.loads(out)
    assert report["ok"] is True and report["buckets"] > 1
    assert {node["digest"] for node in report["nodes"].values()} == {"match"}
    now = [(engine.checksums(), engine.output_ids(PROMPT)) for engine in pair]
    assert now == wanted != before
    assert [engine.label for engine in pair] == ["pushed", "pushed"]


@pytest.mark.timeout(700)
def test_a_refit_that_breaks_off_half_way_is_healed_by_the_next(pair: list[Engine], tmp_path: Path) -> None:
    """Three receivers: gloo passes a broadcast on between them, so one may wait for another, not for us."""
    weights = load_file(pair[0].model / "model.safetensors")
    passes = 0

    def breaks_off() -> Iterator[tuple[str, Any]]:
        nonlocal passes
        passes += 1
        for number, named in enumerate(weights.items()):
            if passes > 1 and number == len(weights) // 2:
                raise RuntimeError("the trainer broke off")
            yield named

    config = BroadcasterConfig(
        job="half", control="tcp://127.0.0.1:0", http="127.0.0.1:0", run_dir=str(tmp_path / "run"),
        backend="gloo", engines=tuple(engine.url for engine in pair),
    )  # fmt: skip
    with Publisher(launch=config, bucket_bytes=40_000) as publisher:
        assert publisher.refit(1, weights).ok
        with pytest.raises(RefitFailed, match="the trainer broke off") as caught:
            publisher.refit(2, breaks_off)
        report: Any = caught.value.report
        assert {node.outcome for node in report.nodes.values()} == {"quarantined"}
        # Nobody was left waiting in a broadcast that never ends: all were done long before the deadline.
        assert report.seconds.total < config.deadlines.release / 2
        healed = publisher.refit(3, weights)
        assert {node.digest for node in healed.nodes.values()} == {"match"}
    assert [engine.label for engine in pair] == [healed.label] * 2
