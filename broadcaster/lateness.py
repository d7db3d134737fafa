"""The deadlines of a refit, and what to say when one passes.

A wait is a time and a function that says who was waited for. Only `refit.expire` acts on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ..proto.errors import Cause
from .participants import Participant

if TYPE_CHECKING:
    from .refit import Refit


class Phase(StrEnum):
    """Where a refit stands; drawn in refit.py."""

    NODES = "nodes"
    PROPOSE = "propose"
    LEAVE = "leave"
    OPEN = "open"
    JOIN = "join"
    PACK = "pack"
    PREPARE = "prepare"
    STREAM = "stream"
    CHECKSUMS = "checksums"
    FINISH = "finish"
    RELEASE = "release"
    ABORT = "abort"
    DONE = "done"


#: Phases that cannot go on without the group the source holds.
WITH_GROUP = frozenset({Phase.OPEN, Phase.JOIN, Phase.PACK, Phase.PREPARE, Phase.STREAM, Phase.CHECKSUMS})

#: When it is over, and its cause, asked for with the refit and the time only if it is.
Wait = tuple[float, Callable[["Refit", float], Cause]]


def waits(refit: Refit) -> Iterator[Wait]:
    """Every wait of the refit as it stands."""
    limits = refit.config.deadlines
    if refit.phase is not Phase.ABORT:
        yield refit.started + limits.refit, _late_refit
    match refit.phase:
        case Phase.NODES:
            yield refit.phase_since + limits.nodes, _too_few_nodes
        case Phase.PROPOSE:
            yield refit.phase_since + limits.propose, _late_nodes
        case Phase.OPEN | Phase.JOIN:
            yield refit.phase_since + limits.join, _late_join
        case Phase.PACK:
            yield max(refit.started, refit.joined_at or 0.0) + limits.pack, _late_trainer
        case Phase.PREPARE:
            yield refit.phase_since + limits.prepare, _late_nodes
        case Phase.STREAM:
            yield from _stream_waits(refit)
        case Phase.CHECKSUMS:
            yield refit.phase_since + limits.finish, _late_checksums
        case Phase.FINISH:
            yield refit.phase_since + limits.finish, _late_nodes
        case Phase.LEAVE | Phase.RELEASE | Phase.ABORT:
            yield refit.phase_since + limits.release, _late_nodes
        case _:
            pass


def _stream_waits(refit: Refit) -> Iterator[Wait]:
    limits, ledger = refit.config.deadlines, refit.ledger
    if ledger.ordered > ledger.sent:
        yield ledger.head_since + limits.bucket_seconds(ledger.nbytes[ledger.sent]), _late_source
    elif len(ledger.packed) > ledger.ordered:
        yield max(refit.packed_at, refit.phase_since) + limits.bucket, _slot_never_came
    elif ledger.sent < ledger.total:
        since = ledger.sent_at[-1] if ledger.sent_at else refit.phase_since
        yield since + limits.pack, _late_trainer
    for name in refit.still_loading:
        member = refit.participants[name]
        if member.loaded < ledger.sent:
            since = max(ledger.sent_at[member.loaded], member.loaded_at)
            allowed = limits.bucket_seconds(ledger.nbytes[member.loaded])
            yield since + allowed, partial(_late_member, member.name)


def _late_refit(refit: Refit, now: float) -> Cause:
    message = f"the refit was not over by its deadline; it was at {refit.phase}"
    return Cause(code="deadline", message=message, epoch=refit.epoch, seconds=now - refit.started)


def _too_few_nodes(refit: Refit, now: float) -> Cause:
    found = [node.name for node in refit.fleet.alive()]
    absent = [f"{name}: {node.cause.message}" for name, node in sorted(refit.fleet.expected.items())]
    message = (
        f"{len(found)} of {refit.config.nodes_needed} rollout nodes are registered "
        f"({', '.join(found) or 'none'}); "
    )
    if absent:
        message += f"agents wait for {'; '.join(absent)}"
    else:
        message += (
            "start a rollout-node agent for each engine, pointing at this broadcaster's control endpoint"
        )
    return Cause(code="no_nodes", message=message, seconds=now - refit.phase_since)


def late_node(refit: Refit, member: Participant, now: float) -> Cause:
    """Cause: this node did not answer, or did not load its next bucket, in time."""
    bucket = member.loaded if refit.phase is Phase.STREAM else None
    what = (
        f"did not load bucket {bucket}" if bucket is not None else f"did not answer the {refit.phase} order"
    )
    return Cause(
        code="deadline",
        message=f"node {member.name!r} {what} in time (its agent says: {member.node.doing})",
        node=member.name,
        epoch=refit.epoch,
        bucket=bucket,
        seconds=now - (refit.phase_since if bucket is None else member.loaded_at or refit.phase_since),
    )


def _late_member(name: str, refit: Refit, now: float) -> Cause:
    member = refit.participants[name]
    member.cause = late_node(refit, member, now)
    return member.cause


def _late_nodes(refit: Refit, now: float) -> Cause:
    owing = refit.owing()
    first = late_node(refit, owing[0], now) if owing else _late_refit(refit, now)
    for member in owing:
        member.cause = late_node(refit, member, now)
    if len(owing) < 2:
        return first
    names = ", ".join(member.name for member in owing)
    message = f"nodes {names} did not answer the {refit.phase} order in time"
    return Cause(
        code="deadline", message=message, node=owing[0].name, epoch=refit.epoch, seconds=first.seconds
    )


def _late_join(refit: Refit, now: float) -> Cause:
    group = refit.epochs.group
    if not refit.epochs.ready:
        return refit.epochs.why_not_ready()
    if group is None or group.port == 0:
        message = "the source did not open the group's store in time"
        return Cause(code="source_lost", message=message, epoch=refit.epoch, seconds=now - refit.phase_since)
    owing = refit.owing()
    if owing:
        member = owing[0]
        ranks = group.ranks
        first = ranks.offsets[member.name]
        names = ", ".join(other.name for other in owing)
        message = (
            f"nodes {names} did not join the group; from their hosts, "
            f"{refit.config.advertise}:{group.port} (the rendezvous store) must be reachable"
        )
        for other in owing:
            other.cause = late_node(refit, other, now)
        return Cause(
            code="join_failed",
            message=message,
            node=member.name,
            rank=first,
            epoch=refit.epoch,
            seconds=now - refit.phase_since,
        )
    message = "every node says it joined, but the source never saw the group complete"
    return Cause(
        code="join_failed", message=message, rank=0, epoch=refit.epoch, seconds=now - refit.phase_since
    )


def _late_trainer(refit: Refit, now: float) -> Cause:
    bucket = len(refit.ledger.packed)
    message = f"the trainer packed no bucket {bucket} of {refit.ledger.total} in time"
    return Cause(code="deadline", message=message, bucket=bucket, seconds=now - refit.phase_since)


def _late_source(refit: Refit, now: float) -> Cause:
    bucket = refit.ledger.sent
    cause = Cause(
        code="broadcast_failed",
        message=f"the broadcast of bucket {bucket} did not end in time",
        epoch=refit.epoch,
        bucket=bucket,
        seconds=now - refit.ledger.head_since,
    )
    return name_receivers(refit, cause)


def name_receivers(refit: Refit, cause: Cause) -> Cause:
    """Add to a cause that came from the source which nodes had not taken the bucket: it cannot know them."""
    if refit.phase is not Phase.STREAM or cause.bucket is None:
        return cause
    behind = sorted(name for name in refit.still_loading if refit.participants[name].loaded <= cause.bucket)
    return msgspec.structs.replace(
        cause,
        message=f"{cause.message}; nodes still receiving: {', '.join(behind) or 'none'}",
        node=behind[0] if len(behind) == 1 else cause.node,
    )


def _slot_never_came(refit: Refit, now: float) -> Cause:
    message = refit.ledger.packed[refit.ledger.ordered]
    return Cause(
        code="protocol",
        message=f"bucket {message.bucket} lies in slot {message.slot}, "
        "which was never sent over the slot link",
        bucket=message.bucket,
        seconds=now - refit.packed_at,
    )


def _late_checksums(refit: Refit, now: float) -> Cause:
    return Cause(
        code="source_lost",
        message="the source did not hand over the checksums of the bytes it sent",
        epoch=refit.epoch,
        seconds=now - refit.phase_since,
    )
