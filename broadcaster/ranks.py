"""Rank layout of a weights update group: a pure function from its nodes to their ranks.

An SGLang server's tensor-parallel worker t takes rank ``rank_offset + t``. That formula has no term for
pipeline or data parallelism: with ``pp_size`` 2, two processes would claim one rank and everybody would
wait out the rendezvous. So such nodes, and any duplicate or gap, are refused before anyone joins.

    rank 0: the source;  nodes in order of their names, each with tp_size ranks, from 1
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..proto.errors import WeightcastError


class InvalidRanks(WeightcastError):
    """The nodes cannot form one weights update group; the message names the node and the number."""

    code = "incompatible"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node as a group sees it. Another ``instance`` is another member, whatever its name."""

    name: str
    instance: str
    tp_size: int
    pp_size: int = 1
    dp_size: int = 1


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """First rank and number of ranks of each node, by name. Rank 0 is the source's."""

    offsets: dict[str, int]
    sizes: dict[str, int]
    world_size: int

    def node_of(self, rank: int) -> str:
        """Name of the node that has ``rank``; empty for rank 0 and ranks outside the group."""
        for name, offset in self.offsets.items():
            if offset <= rank < offset + self.sizes[name]:
                return name
        return ""


def refuse_unsupported_parallelism(*, name: str, tp_size: int, pp_size: int, dp_size: int) -> None:
    """Refuse a node whose processes cannot all have a rank of their own.

    Raises:
        InvalidRanks: naming the node, the size and what to use instead.
    """
    if pp_size != 1:
        raise InvalidRanks(
            f"node {name!r} runs pp_size {pp_size}: an engine's ranks in a weights update group count "
            "tensor parallelism only. Start it with --pp-size 1, or update it from disk"
        )
    if dp_size != 1:
        raise InvalidRanks(
            f"node {name!r} runs dp_size {dp_size}: SGLang refuses weights update groups under data "
            "parallelism. Start one server for each replica instead"
        )
    if tp_size < 1:
        raise InvalidRanks(f"node {name!r} says tp_size {tp_size}; it must be at least 1")


def assign_ranks(members: Iterable[Member]) -> RankLayout:
    """Give every node its ranks, in the order of names (the same for the same nodes, however listed).

    Raises:
        InvalidRanks: for no nodes, a name twice, or a node with pipeline or data parallelism.
    """
    offsets: dict[str, int] = {}
    sizes: dict[str, int] = {}
    next_rank = 1
    for member in sorted(members, key=lambda member: member.name):
        refuse_unsupported_parallelism(
            name=member.name, tp_size=member.tp_size, pp_size=member.pp_size, dp_size=member.dp_size
        )
        if member.name in offsets:
            raise InvalidRanks(f"two nodes are named {member.name!r}; a node's name must be its own")
        offsets[member.name] = next_rank
        sizes[member.name] = member.tp_size
        next_rank += member.tp_size
    if not offsets:
        raise InvalidRanks("a weights update group needs at least one node")
    layout = RankLayout(offsets=offsets, sizes=sizes, world_size=next_rank)
    check_cover(layout)
    return layout


def check_cover(layout: RankLayout) -> None:
    """Check that ranks 1 .. world_size - 1 belong to exactly one node each.

    Raises:
        InvalidRanks: naming the first rank that is free or taken twice.
    """
    owner: dict[int, str] = {}
    for name, offset in layout.offsets.items():
        for rank in range(offset, offset + layout.sizes[name]):
            if rank in owner:
                raise InvalidRanks(f"rank {rank} belongs to {owner[rank]!r} and to {name!r}")
            owner[rank] = name
    for rank in range(1, layout.world_size):
        if rank not in owner:
            raise InvalidRanks(f"rank {rank} of {layout.world_size} belongs to no node")
    if len(owner) != layout.world_size - 1:
        raise InvalidRanks(f"{len(owner)} ranks are given out in a world of {layout.world_size}")


def group_name(*, job: str, incarnation: str, epoch: int) -> str:
    """Name of an epoch's group: new for each epoch and each life of the broadcaster.

    An engine may still hold the group of a broadcaster that died, and refuses a name it has.
    """
    return f"weightcast-{job}-{incarnation}-e{epoch}"
