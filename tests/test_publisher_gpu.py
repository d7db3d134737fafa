"""The publisher on CUDA tensors and NCCL: the bytes of `full_tensor`, from two ranks that share a GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_broadcaster import FakeBroadcaster
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from trainer_ranks import run_ranks
from weightcast.trainer_hooks import Publisher

pytestmark = pytest.mark.gpu


def refits(rank: int, world: int, run_dir: str) -> dict[str, bytes]:
    mesh = init_device_mesh("cuda", (world,))
    torch.manual_seed(0)
    sharded = nn.Sequential(
        nn.Linear(33, 130, dtype=torch.bfloat16), nn.Linear(130, 7), nn.LayerNorm(7)
    ).cuda()
    fully_shard(sharded)
    offloaded = nn.Linear(65, 9)
    fully_shard(offloaded, mesh=mesh, offload_policy=CPUOffloadPolicy())
    whole = torch.randn(50, 31, device="cuda")
    tensors = [
        *sharded.state_dict().items(),
        *((f"offloaded.{name}", tensor) for name, tensor in offloaded.state_dict().items()),
        ("columns", distribute_tensor(whole, mesh, [Shard(1)])),
        ("partial", DTensor.from_local(whole * (rank + 1), mesh, [Partial()])),
        ("plain", whole.t()),
        ("scalar", torch.tensor(3.5, device="cuda")),
        ("host", torch.arange(11)),
    ]
    with Publisher(run_dir=run_dir, bucket_bytes=4096, control_timeout=30.0) as publisher:
        assert publisher.refit(0, tensors).ok
        assert publisher.refit(1, tensors).ok
    found = {}
    for name, tensor in tensors:
        # An offloaded shard has no CPU collective in an NCCL job: it is moved for the oracle.
        full = tensor.cuda().full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = full.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def test_cuda_and_offloaded_shards_arrive_bit_exactly(tmp_path: Path) -> None:
    with contextlib.closing(FakeBroadcaster(tmp_path)) as fake:
        results: list[Any] = run_ranks(refits, 2, str(tmp_path), backend="nccl")
        assert [refit.tensors == results[0] for refit in fake.refits] == [True, True]
        assert len(fake.refit.buckets) > 3
        assert fake.problems == []
