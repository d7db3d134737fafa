"""The source's group under NCCL, against ranks that join as SGLang workers do. All share one GPU."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from weightcast.broadcaster.group import OpenStore, SourceGroup

pytestmark = pytest.mark.gpu

#: NCCL refuses two ranks on one GPU of one host; with a host id of its own each rank talks over sockets.
ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}


class Rank:
    """One NCCL rank in a process of its own (gloo_peer.py)."""

    def __init__(self, number: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "gloo_peer.py"), "nccl"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT, "NCCL_HOSTID": f"rank-{number}"},
        )
        assert self.answer() == {"ready": True}

    def order(self, order: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    for name, value in {**ENVIRONMENT, "NCCL_HOSTID": "source"}.items():
        monkeypatch.setenv(name, value)
    found = [Rank(1), Rank(2)]
    yield found
    for rank in found:
        rank.process.kill()
        rank.process.wait()


def test_slots_are_staged_and_broadcast_over_nccl(ranks: list[Rank]) -> None:
    store = OpenStore(host="127.0.0.1", timeout_seconds=60)
    name = f"weightcast-test-{uuid.uuid4().hex}-e1"
    for number, rank in enumerate(ranks, start=1):
        url = f"tcp://127.0.0.1:{store.port}"
        rank.order({"join": {"url": url, "name": name, "rank": number, "world": 3, "seconds": 60}})
    group = SourceGroup(
        store=store, name=name, host="127.0.0.1", world_size=3, backend="nccl", timeout_seconds=60
    )
    for rank in ranks:
        assert rank.answer() == {"joined": name}
    slot = torch.empty(64 << 20, dtype=torch.uint8)
    for nbytes in (1000, 64 << 20, 3):
        slot[:nbytes] = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        for rank in ranks:
            rank.order({"receive": nbytes})
        seconds = group.broadcast(slot[:nbytes], timeout_seconds=60)
        expected = hashlib.sha256(slot[:nbytes].numpy().tobytes()).hexdigest()
        for rank in ranks:
            assert rank.answer() == {"sha256": expected}
        assert seconds < 60
    for rank in ranks:
        rank.order({"leave": name})
    group.close()
    for rank in ranks:
        assert rank.answer() == {"left": name}
