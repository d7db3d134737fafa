"""Collecting one sharded tensor on trainer rank 0, straight into the slot that will carry it.

Why not `DTensor.full_tensor()`: it leaves the whole tensor on *every* rank, pads uneven shards, and costs
one collective per mesh dimension. A refit needs the bytes once, on one rank. So each rank that owns a
piece sends it point to point, and rank 0 receives it where it belongs in the slot:

    rank 1   to_local() ──isend──►  irecv into  slot[offset:][rows 4..8)      contiguous: no copy at all
    rank 2   to_local() ──isend──►  irecv into  a piece, then slot[:, cols]    strided: one copy of the piece

`plan_gather` is pure: from the mesh, the placements and the shape it says which rank sends which box of
the whole tensor. Nested sharding of one tensor dimension (FSDP2 over tensor parallelism, torch's
``_StridedShard``) is resolved to the order in which the dimension was really cut, so every local shard
is one box. Uneven and empty shards follow ``torch.chunk``, as DTensor does. Of equal copies (replicated
mesh dimensions) only the one nearest rank 0 is sent.

Three things are not covered by boxes:
- ``Partial``: reduced first by torch (`DTensor.redistribute`), then gathered as above.
- a placement this module does not know, a ``_StridedShard`` whose split factor matches no set of mesh
  dimensions, a mesh whose ranks do not ascend, and a local shard whose shape is not its box: gathered by
  `DTensor.full_tensor`.
- a mesh without rank 0 (the twin of a parameter that each tensor-parallel rank keeps in a mesh of its
  own): nothing is sent, because rank 0's own mesh holds the same tensor.
The first two run torch collectives in the mesh's own groups, whose time-outs are the user's.

CPU shards travel over our own gloo group whatever the default backend is, so CPU-offloaded parameters
of an NCCL job work. CUDA shards travel over the default group when it is NCCL, else through the host.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..proto.errors import InvalidLayout, WeightcastError

#: Half-open ranges, one per tensor dimension, of the whole tensor.
Box = tuple[tuple[int, int], ...]

_TAG = 0x5743


@dataclass(frozen=True)
class GatherPlan:
    """How one tensor comes to rank 0. ``kind``:

    plain: rank 0 has it whole · boxes: `boxes` are sent · whole: `DTensor.full_tensor` ·
    absent: this rank's copy is in a mesh without rank 0.
    """

    kind: str
    #: (global rank, its box), non-empty boxes only, rank order of the mesh.
    boxes: tuple[tuple[int, Box], ...] = ()
    #: All ranks of the mesh reduce first.
    reduce: bool = False
    #: Members of the mesh.
    ranks: tuple[int, ...] = ()
    #: "cpu" or "cuda": where the shards are.
    device: str = "cpu"

    def duties(self) -> dict[int, str]:
        """What each rank must do for this tensor; ranks with nothing to do are left out."""
        if self.kind == "whole" or self.reduce:
            everyone = f"{self.kind}{'+reduce' if self.reduce else ''}:{self.device}"
            return {rank: everyone + repr(dict(self.boxes).get(rank, "")) for rank in self.ranks}
        return {rank: f"{box}:{self.device}" for rank, box in self.boxes}


PLAIN = GatherPlan("plain")
ABSENT = GatherPlan("absent")


def plan_gather(tensor: torch.Tensor, *, name: str, rank: int) -> tuple[GatherPlan, bool]:
    """The plan for one tensor of this rank, and whether the local shard fits it.

    Raises:
        InvalidLayout: on rank 0, for a DTensor whose mesh does not contain rank 0.
    """
    if not isinstance(tensor, DTensor):
        return PLAIN, True
    mesh = tensor.device_mesh
    ranks = tuple(mesh.mesh.flatten().tolist())
    if 0 not in ranks or rank not in ranks:
        if rank == 0:
            raise InvalidLayout(f"{name!r} lives on trainer ranks {list(ranks)}; rank 0 has no part of it")
        return ABSENT, True
    local = tensor._local_tensor  # for its shape and device only: to_local() would be part of autograd
    mesh_shape, placements, shape = tuple(mesh.mesh.shape), tuple(tensor.placements), tuple(tensor.shape)
    plan = plan_boxes(mesh_shape, ranks, placements, shape, local.device.type)
    if plan.kind != "boxes":
        return plan, True
    mine = dict(plan_all_boxes(mesh_shape, ranks, placements, shape))[rank]
    return plan, tuple(local.shape) == tuple(stop - start for start, stop in mine)


@lru_cache(maxsize=4096)
def plan_boxes(
    mesh_shape: tuple[int, ...],
    ranks: tuple[int, ...],
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    device: str,
) -> GatherPlan:
    """Which rank of the mesh sends which box of a tensor of ``shape``; ``ranks`` are in row-major order."""
    reduce = any(isinstance(placement, Partial) for placement in placements)
    placements = _reduced(placements)
    if any(type(placement) not in (Shard, _StridedShard, Replicate) for placement in placements):
        return GatherPlan("whole", ranks=ranks, device=device)
    if _cut_orders(mesh_shape, placements) is None or not _ascends(mesh_shape, ranks):
        return GatherPlan("whole", ranks=ranks, device=device)
    root = _coordinate(mesh_shape, ranks.index(0))
    senders = []
    for position, (rank, box) in enumerate(plan_all_boxes(mesh_shape, ranks, placements, shape)):
        coordinate = _coordinate(mesh_shape, position)
        nearest = all(
            not isinstance(p, Replicate) or coordinate[dim] == root[dim] for dim, p in enumerate(placements)
        )
        if nearest and all(stop > start for start, stop in box):
            senders.append((rank, box))
    return GatherPlan("boxes", boxes=tuple(senders), reduce=reduce, ranks=ranks, device=device)


@lru_cache(maxsize=4096)
def plan_all_boxes(
    mesh_shape: tuple[int, ...],
    ranks: tuple[int, ...],
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
) -> tuple[tuple[int, Box], ...]:
    """The box of every rank of the mesh, empty ones too, in row-major order."""
    orders = _cut_orders(mesh_shape, _reduced(placements)) or {}
    boxes = []
    for position, rank in enumerate(ranks):
        coordinate = _coordinate(mesh_shape, position)
        box = [(0, extent) for extent in shape]
        for tensor_dim, order in orders.items():
            for mesh_dim in order:
                box[tensor_dim] = _chunk(box[tensor_dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
        boxes.append((rank, tuple(box)))
    return tuple(boxes)


def _reduced(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    return tuple(Replicate() if isinstance(p, Partial) else p for p in placements)


def _chunk(span: tuple[int, int], pieces: int, number: int) -> tuple[int, int]:
    start, stop = span
    size = -(-(stop - start) // pieces)
    return min(start + number * size, stop), min(start + (number + 1) * size, stop)


def _coordinate(mesh_shape: tuple[int, ...], position: int) -> tuple[int, ...]:
    coordinate = []
    for extent in reversed(mesh_shape):
        position, index = divmod(position, extent)
        coordinate.append(index)
    return tuple(reversed(coordinate))


def _ascends(mesh_shape: tuple[int, ...], ranks: tuple[int, ...]) -> bool:
    """Whether ranks grow along every mesh dimension.

    Where they do not, torch's collectives go by the order of ranks and its shard sizes by the mesh
    coordinate: which shard a rank really holds then depends on how the tensor was made.
    """
    step = 1
    for extent in reversed(mesh_shape):
        for position in range(len(ranks)):
            if position // step % extent and ranks[position] <= ranks[position - step]:
                return False
        step *= extent
    return True


def _cut_orders(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> dict[int, list[int]] | None:
    """For each sharded tensor dimension, its mesh dimensions in the order in which they cut it.

    Plain shards cut from left to right. A ``_StridedShard`` with split factor f was applied after mesh
    dimensions to its right with f pieces in all. None if no order fits.
    """
    orders: dict[int, list[int]] = {}
    for mesh_dim in range(len(mesh_shape) - 1, -1, -1):
        placement = placements[mesh_dim]
        if isinstance(placement, Replicate) or mesh_shape[mesh_dim] == 1:
            continue
        tensor_dim: int = placement.dim  # type: ignore[attr-defined]
        factor: int = getattr(placement, "split_factor", 1)
        order = orders.setdefault(tensor_dim, [])
        place = 0
        while math.prod(mesh_shape[dim] for dim in order[:place]) < factor and place < len(order):
            place += 1
        if math.prod(mesh_shape[dim] for dim in order[:place]) != factor:
            return None
        order.insert(place, mesh_dim)
    return orders


class Gatherer:
    """Moves shards. One per publisher, on every rank.

    Within a bucket: `gather` for each sharded tensor in the same order on all ranks, then `finish`.
    """

    def __init__(self, *, rank: int, group: dist.ProcessGroup | None) -> None:
        self._rank = rank
        self._group = group
        self._pending: list[tuple[Any, bool]] = []
        self._kept: list[torch.Tensor] = []
        self._nccl = group is not None and "cuda:nccl" in dist.get_backend_config()
        if self._nccl:
            # A point-to-point batch may not be a communicator's first use unless every rank takes part.
            dist.all_reduce(torch.zeros(1, device="cuda"))

    def gather(
        self, tensor: torch.Tensor, plan: GatherPlan, *, into: torch.Tensor | None, deadline: float
    ) -> None:
        """Take this rank's part in one tensor. ``into``: rank 0's place for it, whole, on the CPU.

        On rank 0 the bytes are all there only after `finish`.

        Raises:
            GatherFailed: if a peer is lost or ``deadline`` (monotonic seconds) passes.
        """
        if not isinstance(tensor, DTensor) or plan.kind in ("plain", "absent"):
            return
        with torch.no_grad():
            if plan.kind == "whole":
                whole = tensor.full_tensor()
                if into is not None:
                    into.copy_(whole)
                return
            if plan.reduce:
                tensor = tensor.redistribute(placements=_reduced(tuple(tensor.placements)))
            local = tensor.to_local().detach()
            if isinstance(local, AsyncCollectiveTensor):
                local = local.wait()
            if into is None:
                self._send(local, plan, deadline)
            elif local.device.type == "cpu":
                self._receive(local, plan, into, deadline)
            else:
                landing = torch.empty(into.shape, dtype=into.dtype, device=local.device)
                self._receive(local, plan, landing, deadline)
                self.finish(deadline=deadline)
                into.copy_(landing)

    def finish(self, *, deadline: float) -> None:
        """Wait until everything begun by `gather` has left (senders) or arrived (rank 0)."""
        pending, self._pending = self._pending, []
        try:
            for work, over_nccl in pending:
                _wait(work, over_nccl=over_nccl, deadline=deadline)
        finally:
            self._kept.clear()

    def abandon(self) -> None:
        """Forget what is under way after a failure; nothing more is written into the slot."""
        self._pending.clear()
        self._kept.clear()

    def _send(self, local: torch.Tensor, plan: GatherPlan, deadline: float) -> None:
        if self._rank not in dict(plan.boxes):
            return
        self._post([(dist.isend, _as_bytes(local.contiguous()), 0)], deadline)

    def _receive(self, local: torch.Tensor, plan: GatherPlan, into: torch.Tensor, deadline: float) -> None:
        posts, staged = [], []
        for rank, box in plan.boxes:
            region = into[tuple(slice(start, stop) for start, stop in box)]
            if rank == self._rank:
                region.copy_(local)
            elif region.is_contiguous():
                posts.append((dist.irecv, _as_bytes(region), rank))
            else:
                piece = torch.empty(region.shape, dtype=region.dtype, device=region.device)
                staged.append((region, piece))
                posts.append((dist.irecv, _as_bytes(piece), rank))
        self._post(posts, deadline)
        if staged:
            # Waiting here, not at the bucket's end, keeps one tensor's pieces in flight at most.
            self.finish(deadline=deadline)
            for region, piece in staged:
                region.copy_(piece)

    def _post(self, posts: list[tuple[Any, torch.Tensor, int]], deadline: float) -> None:
        if not posts:
            return
        on_host = posts[0][1].device.type == "cpu"
        if not on_host and not self._nccl:
            self._post_through_host(posts, deadline)
            return
        try:
            if on_host:
                works = [op(data, peer, group=self._group, tag=_TAG) for op, data, peer in posts]
            else:
                works = dist.batch_isend_irecv([dist.P2POp(op, data, peer) for op, data, peer in posts])
        except RuntimeError as error:
            raise GatherFailed(f"a shard could not be exchanged: {error}") from error
        self._pending.extend((work, not on_host) for work in works)
        self._kept.extend(data for _, data, _ in posts)

    def _post_through_host(self, posts: list[tuple[Any, torch.Tensor, int]], deadline: float) -> None:
        copies = [
            (op, data.cpu() if op is dist.isend else torch.empty_like(data, device="cpu"), peer)
            for op, data, peer in posts
        ]
        self._post(copies, deadline)
        self.finish(deadline=deadline)
        for (op, data, _), (_, copy, _) in zip(posts, copies, strict=True):
            if op is dist.irecv:
                data.copy_(copy)


class GatherFailed(WeightcastError):
    """A shard did not get to rank 0: a peer is gone, or a deadline of ours passed."""

    code = "trainer_failed"


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Bytes, because neither gloo nor NCCL knows every dtype.
    return tensor.reshape(-1).view(torch.uint8)


def _wait(work: Any, *, over_nccl: bool, deadline: float) -> None:
    left = deadline - time.monotonic()
    try:
        if over_nccl:
            # NCCL's own wait only orders streams: it returns at once and can never time out.
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise GatherFailed("a shard was not exchanged over NCCL before the deadline")
                time.sleep(0.0002)
            work.wait()
        else:
            work.wait(timedelta(seconds=max(left, 0.001)))
    except RuntimeError as error:
        raise GatherFailed(f"a shard was not exchanged: {error}") from error
