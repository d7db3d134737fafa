"""The main job over NCCL: engines, source and trainer on one GPU, each a host of its own to NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from engines import Engine, reference_engine
from safetensors.torch import load_file
from weightcast.proto.config import BroadcasterConfig
from weightcast.rollout_node.reference.model import TinyLlama, write_model
from weightcast.trainer_hooks import Publisher

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

#: NCCL refuses two ranks on one GPU of one host; with a host id of its own each rank talks over sockets.
NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}
MODEL = TinyLlama(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8, dtype="float32"
)
PROMPT = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("old") / "model"
    write_model(folder, MODEL, seed=1)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                reference_engine(
                    folder,
                    tmp_path_factory.mktemp(f"engine-{number}"),
                    arguments=["--device", "cuda"],
                    environment=NCCL | {"NCCL_HOSTID": f"engine-{number}"},
                )
            )
            for number in range(2)
        ]


def test_push_over_nccl(fleet: list[Engine], tmp_path: Path) -> None:
    write_model(tmp_path / "new", MODEL, seed=2)
    urls = [part for engine in fleet for part in ("--engine", engine.url)]
    done = subprocess.run(
        [
            sys.executable, "-m", "weightcast.proto.cli", "push", str(tmp_path / "new"), *urls,
            "--json", "--bucket-bytes", "8MiB", "--label", "pushed",
        ],
        capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | NCCL | {"NCCL_HOSTID": "source"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["buckets"] > 3 and {node["digest"] for node in report["nodes"].values()} == {"match"}
    assert [engine.label for engine in fleet] == ["pushed", "pushed"]


def test_publisher_sends_cuda_tensors_over_nccl(
    fleet: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (NCCL | {"NCCL_HOSTID": "source"}).items():
        monkeypatch.setenv(name, value)
    config = BroadcasterConfig(
        job="gpu", control="tcp://127.0.0.1:0", http="127.0.0.1:0", run_dir=str(tmp_path / "run"),
        backend="nccl", engines=tuple(engine.url for engine in fleet),
    )  # fmt: skip
    outputs = [engine.output_ids(PROMPT) for engine in fleet]
    with Publisher(launch=config, bucket_bytes=8 << 20) as publisher:
        for step, seed in ((1, 3), (2, 4)):
            folder = tmp_path / f"new-{seed}"
            write_model(folder, MODEL, seed=seed)
            weights = {name: w.cuda() for name, w in load_file(folder / "model.safetensors").items()}
            report = publisher.refit(step, weights)
            assert {node.digest for node in report.nodes.values()} == {"match"}
            now = [engine.output_ids(PROMPT) for engine in fleet]
            assert now[0] == now[1] and now != outputs
            outputs = now
