"""Process groups of one rank: the default group of the engine, and joining a weights update group.

A weights update group is joined exactly as SGLang joins it (``init_custom_process_group`` in
``sglang/srt/utils/common.py``): a TCP store hosted by rank 0, a prefix with the group's name, then
torch's inner group constructor. The public `torch.distributed.init_process_group` lays other prefixes
into the store, so both ends would wait for each other until the timeout.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

#: How long ranks of one engine may take to find each other at start.
START_TIMEOUT = timedelta(seconds=120)
#: A collective among ranks waits out a peer that is in a slow load, but not for ever.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def open_default_group(*, run_dir: Path, tp_rank: int, tp_size: int, device: torch.device) -> None:
    """Join the default group of one engine's ranks; CPU tensors go over gloo, CUDA tensors over NCCL.

    Raises:
        torch.distributed.DistStoreError: if a rank does not come in time.
    """
    store = dist.FileStore(str(run_dir / "default-group"), tp_size)  # type: ignore[attr-defined]
    store.set_timeout(START_TIMEOUT)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=tp_rank,
        world_size=tp_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def join_update_group(
    *, master_address: str, master_port: int, rank: int, world_size: int, group_name: str, backend: str
) -> dist.ProcessGroup:
    """Join a weights update group as SGLang does, with torch's own timeouts and no other.

    Raises:
        RuntimeError, ValueError: whatever torch raises: no store there, a name in use, a wrong rank.
    """
    host = f"[{master_address}]" if ":" in master_address else master_address
    timeout = distributed_c10d.default_pg_timeout
    store, rank, world_size = next(
        rendezvous(f"tcp://{host}:{master_port}", rank, world_size, timeout=timeout)
    )
    store.set_timeout(timeout)
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        distributed_c10d.Backend(backend),
        distributed_c10d.PrefixStore(group_name, store),
        group_name=cast(Any, group_name),
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return cast(dist.ProcessGroup, group)


def gather_bytes(payload: bytes, *, tp_rank: int, tp_size: int) -> list[bytes] | None:
    """Collect one byte string from every rank on rank 0 (None on the others)."""
    if tp_size == 1:
        return [payload]
    if tp_rank:
        size = torch.tensor([len(payload)])
        dist.send(size, 0)
        dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0)
        return None
    gathered = [payload]
    for other in range(1, tp_size):
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, other)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(buffer, other)
        gathered.append(buffer.numpy().tobytes())
    return gathered
