"""Shards to rank 0: the planned boxes against torch's own `full_tensor`, bit for bit, on real ranks."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from trainer_ranks import run_ranks
from weightcast.proto.errors import InvalidLayout
from weightcast.trainer_hooks.agreement import Agreement
from weightcast.trainer_hooks.gather import Gatherer, GatherPlan, plan_all_boxes, plan_boxes, plan_gather
from weightcast.trainer_hooks.refit import duty_fingerprints

Outcome = tuple[str, str, str]  # case, plan kind, "" or what is wrong


class Bench:
    """On every rank: gathers cases one by one and notes on rank 0 how each went."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.agreement = Agreement(patience=20.0)
        self.gatherer = Gatherer(rank=rank, group=self.agreement.group)
        self.outcomes: list[Outcome] = []

    def check(self, case: str, tensor: torch.Tensor) -> None:
        plan, fits = plan_gather(tensor, name=case, rank=self.rank)
        if plan.kind == "plain":
            return
        kind = plan.kind
        if not fits:
            kind = "misfit"
            plan = GatherPlan("whole", ranks=plan.ranks)
        into = torch.full(tensor.shape, 77).to(tensor.dtype) if self.rank == 0 else None
        deadline = time.monotonic() + 20
        self.gatherer.gather(tensor, plan, into=into, deadline=deadline)
        self.gatherer.finish(deadline=deadline)
        oracle = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        wrong = ""
        if into is not None and not torch.equal(into, oracle.detach()):
            wrong = f"{tensor.shape} {getattr(tensor, 'placements', '')}: {into} is not {oracle}"
        self.outcomes.append((case, kind, wrong))


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def all_cases(rank: int, world: int) -> tuple[list[Outcome], list[Outcome]]:
    bench = Bench(rank, world)
    placed = list(placed_cases(bench, world))
    bench.outcomes.clear()
    return placed, module_cases(bench, world)


def placed_cases(bench: Bench, world: int) -> list[Outcome]:
    rank = bench.rank
    meshes = [init_device_mesh("cpu", (world,))]
    if world == 4:
        meshes += [init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))]
    shapes = [(8, 4), (7, 3), (1, 5), (3,), (0, 4)]
    dtypes = itertools.cycle([torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float64])
    for mesh, shape in itertools.product(meshes, shapes):
        options = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for placements in itertools.product(options, repeat=mesh.ndim):
            tensor = distribute_tensor(values(shape, next(dtypes)), mesh, placements)
            bench.check(f"{tuple(mesh.mesh.shape)} {shape} {placements}", tensor)
    bench.check("0-dim", distribute_tensor(values((), torch.float32), meshes[0], [Replicate()]))
    partial = DTensor.from_local(values((5, 3), torch.float32) * (rank + 1), meshes[0], [Partial()])
    bench.check("partial", partial)
    transposed = distribute_tensor(values((6, 8), torch.float32), meshes[0], [Shard(0)]).t()
    bench.check("transposed", transposed)
    if world == 4:
        mixed = DTensor.from_local(
            values((2, 3), torch.float32) * (rank + 1),
            meshes[1],
            [Partial(), Shard(0)],
            shape=(4, 3),
            stride=(3, 1),
        )
        bench.check("partial over shards", mixed)
        strided = [_StridedShard(0, split_factor=2), Shard(0)]
        bench.check("strided", distribute_tensor(values((8, 3), torch.float32), meshes[1], strided))
    return bench.outcomes


def module_cases(bench: Bench, world: int) -> list[Outcome]:
    def build(width: int, hidden: int) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, width))

    def check_all(case: str, module: nn.Module) -> None:
        for name, tensor in module.state_dict(keep_vars=True).items():
            bench.check(f"{case} {name}", tensor)

    for width, hidden in ((8, 16), (7, 13), (3, 5)):
        check_all(f"fsdp {width}x{hidden}", fully_shard(build(width, hidden)))
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        check_all("hsdp", fully_shard(build(7, 13), mesh=mesh))
        for width, hidden in ((8, 16), (6, 10)):
            both = parallelize_module(
                build(width, hidden), mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
            )
            check_all(f"tp {width}x{hidden}", both)
            check_all(f"fsdp+tp {width}x{hidden}", fully_shard(both, mesh=mesh["outer"]))
    return bench.outcomes


@pytest.mark.parametrize("world", [2, 4])
def test_shards_gather_what_full_tensor_gathers(world: int) -> None:
    placed, modules = run_ranks(all_cases, world)[0]
    assert len(placed) > (15 if world == 2 else 90)
    assert len(modules) >= 18
    assert [wrong for _, _, wrong in placed + modules if wrong] == []
    # Nothing that torch's own sharding makes may silently take the slow way.
    assert {kind for _, kind, _ in placed + modules} == {"boxes"}


def strange_cases(rank: int, world: int) -> list[Any]:
    bench = Bench(rank, world)
    mesh = init_device_mesh("cpu", (world,))
    # Split factor 2 with nothing to its right: no nested cut explains it.
    bench.check(
        "lone strided",
        distribute_tensor(values((8, 3), torch.float32), mesh, [_StridedShard(0, split_factor=2)]),
    )
    # Local shards that torch.chunk would not make.
    odd = DTensor.from_local(
        values((3 if rank == 0 else 1, 2), torch.float32), mesh, [Shard(0)], shape=(4, 2), stride=(2, 1)
    )
    plan, fits = plan_gather(odd, name="odd", rank=rank)
    own = DeviceMesh("cpu", torch.tensor([rank]))
    backwards = DeviceMesh("cpu", torch.tensor([1, 0]))
    bench.check("descending ranks", distribute_tensor(values((4, 2), torch.float32), backwards, [Shard(0)]))
    elsewhere, _ = plan_gather(
        DTensor.from_local(values((2, 2), torch.float32), own, [Replicate()]), name="n", rank=rank
    )
    return [bench.outcomes, plan.kind, fits, elsewhere.kind]


def test_what_boxes_do_not_cover_is_seen_and_taken_whole() -> None:
    first, second = run_ranks(strange_cases, 2)
    assert first[0] == [("lone strided", "whole", ""), ("descending ranks", "whole", "")]
    assert (first[1], first[2], second[2]) == ("boxes", False, False)
    assert (first[3], second[3]) == ("boxes", "absent")


def boxes_of(mesh: tuple[int, ...], placements: tuple[Any, ...], shape: tuple[int, ...]) -> GatherPlan:
    return plan_boxes(mesh, tuple(range(torch.Size(mesh).numel())), placements, shape, "cpu")


def test_plans_as_a_table() -> None:
    assert boxes_of((2,), (Shard(0),), (4, 3)).boxes == ((0, ((0, 2), (0, 3))), (1, ((2, 4), (0, 3))))
    assert boxes_of((3,), (Shard(0),), (4,)).boxes == ((0, ((0, 2),)), (1, ((2, 4),)))  # rank 2 is empty
    assert boxes_of((2, 2), (Replicate(), Shard(1)), (1, 4)).boxes == (
        (0, ((0, 1), (0, 2))),
        (1, ((0, 1), (2, 4))),
    )
    # FSDP over tensor parallelism: cut by the inner dimension first.
    assert boxes_of((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), (8,)).boxes == (
        (0, ((0, 2),)),
        (1, ((4, 6),)),
        (2, ((2, 4),)),
        (3, ((6, 8),)),
    )
    assert boxes_of((2, 2), (Shard(0), Shard(0)), (8,)).boxes[1] == (1, ((2, 4),))
    assert boxes_of((2,), (_StridedShard(0, split_factor=3),), (6,)).kind == "whole"
    assert boxes_of((2,), (Partial(),), (6,)).reduce


def test_boxes_cover_every_element_exactly_once() -> None:
    for shape in ((13, 4), (5, 7), (1, 1), (9, 2)):
        for placements in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
            count = torch.zeros(shape, dtype=torch.int64)
            for _, box in boxes_of((3, 2), placements, shape).boxes:
                count[tuple(slice(start, stop) for start, stop in box)] += 1
            assert (count == 1).all(), (shape, placements)


def test_empty_shards_have_a_place_but_are_not_sent() -> None:
    everyone = plan_all_boxes((4,), (0, 1, 2, 3), (Shard(0),), (2, 3))
    assert [stop - start for _, ((start, stop), _) in everyone] == [1, 1, 0, 0]


def test_duties_differ_when_one_rank_is_sharded_otherwise() -> None:
    rows, columns = boxes_of((2,), (Shard(0),), (4, 4)), boxes_of((2,), (Shard(1),), (4, 4))
    assert duty_fingerprints([rows], 2)[1] != duty_fingerprints([columns], 2)[1]
    assert duty_fingerprints([rows], 2) == duty_fingerprints([rows], 2)


def test_a_mesh_without_rank_0_is_refused_on_rank_0() -> None:
    class Elsewhere(DTensor):
        @staticmethod
        def __new__(cls: type[Elsewhere]) -> Elsewhere:
            return torch.Tensor._make_wrapper_subclass(cls, (2,))  # type: ignore[attr-defined]

        device_mesh = DeviceMesh("cpu", torch.tensor([1, 2]), _init_backend=False, _rank=1)  # type: ignore[assignment]

    with pytest.raises(InvalidLayout, match=r"'w' lives on trainer ranks \[1, 2\]"):
        plan_gather(Elsewhere(), name="w", rank=0)
