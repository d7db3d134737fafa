"""Rank 0 of a weights update group, inside the test: really broadcasts over gloo to an engine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from engines import Engine, Reply
from torch import Tensor
from torch.distributed import distributed_c10d

_DEADLINE_SECONDS = 60.0
_names = itertools.count()


def describe(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Names, dtypes and shapes as an update call announces them."""
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """All bytes back to back, uint8."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()])


class RankZero:
    """One live group {this process, one engine}. HTTP calls run in a thread beside the collectives."""

    def __init__(self, engine: Engine, pool: ThreadPoolExecutor, *, name: str = "") -> None:
        self.engine = engine
        self.name = name or f"test-{os.getpid()}-{next(_names)}"
        self._pool = pool
        self.store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_DEADLINE_SECONDS),
        )
        self.group: dist.ProcessGroup | None = None

    def ask_to_join(self) -> Future[Reply]:
        """Tell the engine to join; it blocks until `join` is called here."""
        return self._pool.submit(
            self.engine.post,
            "/init_weights_update_group",
            master_address="127.0.0.1",
            master_port=self.store.port,
            rank_offset=1,
            world_size=1 + self.engine.tp_size,
            group_name=self.name,
            backend="gloo",
        )

    def join(self) -> None:
        """Join as rank 0, under prefixes as SGLang lays them."""
        timeout, world = timedelta(seconds=_DEADLINE_SECONDS), 1 + self.engine.tp_size
        group_name: Any = self.name
        group, _ = distributed_c10d._new_process_group_helper(
            world,
            0,
            [],
            distributed_c10d.Backend("gloo"),
            distributed_c10d.PrefixStore(group_name, self.store),
            group_name=group_name,
            timeout=timeout,
        )
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
        self.group = group

    def send(self, tensors: Mapping[str, Tensor], **fields: Any) -> Reply:
        """One update call with the bytes broadcast beside it, as a flattened bucket unless said otherwise."""
        body = {**describe(tensors), "group_name": self.name, "load_format": "flattened_bucket", **fields}
        reply = self._pool.submit(self.engine.post, "/update_weights_from_distributed", **body)
        if body["load_format"] == "flattened_bucket":
            dist.broadcast(flatten(tensors), src=0, group=self.group)
        else:
            for tensor in tensors.values():
                dist.broadcast(tensor.contiguous(), src=0, group=self.group)
        return reply.result(_DEADLINE_SECONDS)

    def announce(self, **fields: Any) -> Reply:
        """An update call with nothing broadcast: for calls that are refused before they receive."""
        body = {"names": [], "dtypes": [], "shapes": [], "group_name": self.name, **fields}
        return self.engine.post("/update_weights_from_distributed", **body)

    def leave(self) -> Reply:
        """Both sides leave."""
        reply = self._pool.submit(self.engine.post, "/destroy_weights_update_group", group_name=self.name)
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
        return reply.result(_DEADLINE_SECONDS)


@contextmanager
def rank_zero(engine: Engine, *, name: str = "") -> Iterator[RankZero]:
    """A group that both sides have joined; left at the end."""
    with ThreadPoolExecutor(4) as pool:
        source = RankZero(engine, pool, name=name)
        joined = source.ask_to_join()
        source.join()
        reply = joined.result(_DEADLINE_SECONDS)
        assert reply.status == 200, reply
        yield source
        reply = source.leave()
        assert reply.status == 200, reply
