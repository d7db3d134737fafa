"""A broadcaster as the trainer's child, for real: it starts, says why it cannot, and never outlives us."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engines import LOOPBACK, reference_engine
from plain_llama import greedy
from safetensors.torch import load_file
from weightcast.proto.config import BroadcasterConfig, read_announcement
from weightcast.proto.errors import BroadcasterUnavailable
from weightcast.rollout_node.reference.model import TinyLlama, write_model
from weightcast.trainer_hooks import Publisher

# Imports in three new processes, on a machine that may be busy with other tests.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LOOPBACK.items():
        monkeypatch.setenv(name, value)


def config(**fields: object) -> BroadcasterConfig:
    return BroadcasterConfig(control="tcp://127.0.0.1:0", http="127.0.0.1:0", backend="gloo", **fields)  # type: ignore[arg-type]


def announced(run_dir: Path) -> psutil.Process:
    announcement = read_announcement(run_dir)
    assert announcement is not None
    return psutil.Process(announcement.pid)


def test_child_serves_until_close_and_a_second_one_says_why_it_cannot(tmp_path: Path) -> None:
    with Publisher(launch=config(), run_dir=tmp_path) as publisher:
        child = announced(tmp_path)
        family = [child, *child.children(recursive=True)]
        with pytest.raises(BroadcasterUnavailable, match="is the broadcaster of") as caught:
            Publisher(launch=config(), run_dir=tmp_path)
        assert str(tmp_path / "broadcaster.log") in str(caught.value)
        assert child.is_running(), "the failed start left the running one alone"
    assert publisher.incarnation
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert read_announcement(tmp_path) is None
    assert list(tmp_path.glob("config-*.toml")) == []


OWNER = """
import signal, sys
from pathlib import Path
from weightcast.proto.config import BroadcasterConfig
from weightcast.trainer_hooks import Publisher
config = BroadcasterConfig(control="tcp://127.0.0.1:0", http="127.0.0.1:0", backend="gloo")
publisher = Publisher(launch=config, run_dir=sys.argv[1])
print("ready", flush=True)
signal.pause()
"""


def test_child_ends_when_its_trainer_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with contextlib.closing(owner.stdout or pytest.fail("no output")) as output:
        assert output.readline() == "ready\n"
        child = announced(tmp_path)
        family = [child, *child.children(recursive=True)]
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
        _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    for number, name in enumerate(("old", "new")):
        write_model(tmp_path / name, TinyLlama(max_position_embeddings=512, dtype="float32"), seed=number)
    yield tmp_path / "old", tmp_path / "new"


def test_push_to_plain_servers_changes_what_they_generate(folders: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = folders
    prompt = [5, 3, 8]
    settings = json.loads((new / "config.json").read_text())
    expected = greedy(load_file(new / "model.safetensors"), settings, prompt, 8)
    logs = [tmp_path / f"log{number}" for number in range(2)]
    for folder in logs:
        folder.mkdir()
    with reference_engine(old, logs[0]) as first, reference_engine(old, logs[1]) as second:
        assert first.output_ids(prompt, max_new_tokens=8) != expected
        command = [sys.executable, "-m", "weightcast.proto.cli", "push", str(new), "--step", "4", "--json"]
        command += [
            "--engine",
            first.url,
            "--engine",
            second.url,
            "--bucket-bytes",
            "64KiB",
            "--label",
            "new-4",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["ok"] and report["buckets"] > 3
        assert {node["digest"] for node in report["nodes"].values()} == {"match"}
        for engine in (first, second):
            assert engine.label == "new-4"
            assert engine.output_ids(prompt, max_new_tokens=8) == expected
