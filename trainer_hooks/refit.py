"""One refit on one rank, in lockstep with all others.

    describe → settle ─┬─► [slot → settle →] produce → settle → gather → packed ─┬─► report → settle
                       └──────────────── for each bucket ◄───────────────────────┘

Every `settle` is a common decision (see `agreement`): if any rank fails, or rank 0 learns that the refit
is over, all ranks raise the same error at the next one. The one in brackets is needed only for streamed
sources, whose code may run collectives of its own: nobody may enter those while rank 0 waits for a slot.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import msgspec
import torch

from ..proto.errors import (
    BroadcasterUnavailable,
    Cause,
    InvalidConfig,
    RefitFailed,
    RefitRejected,
)
from ..proto.layout import Layout, TensorSpec, plan_buckets
from ..proto.messages import RefitReport
from .agreement import Agreement, Ballot, Verdict
from .conversation import RefitConversation, cause_of, check_version
from .gather import Gatherer, GatherPlan
from .packing import BucketWriter
from .rank0 import Rank0
from .sources import BucketFeed, Described, NamedTensors, TensorSource


@dataclass
class RankSeat:
    """What one rank keeps from refit to refit. ``root`` on rank 0 only."""

    agreement: Agreement
    gatherer: Gatherer
    root: Rank0 | None
    bucket_bytes: int
    together: tuple[frozenset[str], ...]
    #: Seconds that ranks wait for one another.
    patience: float
    #: What a streamed source was seen to yield; forgotten after a failure.
    learned: list[Described] | None = None


@dataclass
class _Failure:
    """Why this rank cannot go on, as it will say in its next ballot."""

    error: BaseException
    cause: Cause
    kind: str


class RankRefit:
    """One refit on one rank."""

    def __init__(self, seat: RankSeat, *, number: int, step: int, label: str, source: NamedTensors) -> None:
        self._seat = seat
        self._root = seat.root
        self._number = number
        self._step = step
        self._label = label
        self._given = source
        self._failure: _Failure | None = None
        self._conversation: RefitConversation | None = None
        self._feed: BucketFeed | None = None
        self._seconds_left_of_rank0 = 0.0

    @property
    def rank(self) -> int:
        return self._seat.agreement.rank

    def run(self) -> RefitReport:
        """All of it. Raises the error common to all ranks."""
        source, described, layout, plans = self._agree_on_layout()
        if self._root is not None:
            with self._noting():
                self._talk().begin(self._step, self._label, layout)
        self._feed = BucketFeed(source, described, layout, self.rank)
        for bucket in range(len(layout.buckets)):
            self._send_bucket(bucket, layout, plans, streamed=source.streamed)
        report = None
        if self._root is not None and self._failure is None:
            with self._noting():
                report = self._talk().finish()
        verdict = self._settle(report)
        if verdict.report is None:
            raise RefitFailed("the refit ended without a report")
        return verdict.report

    def close(self) -> None:
        """End the source's iterator, and the conversation if an interrupt left it open."""
        if self._feed is not None:
            self._feed.close()
        if self._conversation is not None:
            self._conversation.drop()

    # --- layout ------------------------------------------------------------------------------------

    def _agree_on_layout(self) -> tuple[TensorSource, list[Described], Layout, list[GatherPlan]]:
        seat = self._seat
        source: TensorSource | None = None
        described: list[Described] = []
        layout = Layout((), ())
        with self._noting():
            check_version(self._step, self._label)
            source = TensorSource(self._given)
            if source.streamed and seat.learned is not None:
                described = seat.learned
            else:
                described = source.describe(seat.agreement.rank)
            layout = plan_buckets(
                [item.spec for item in described],
                bucket_bytes=seat.bucket_bytes,
                together=seat.together,
            )
        if self._root is not None and self._failure is None:
            with self._noting():
                self._root.connect()
                self._conversation = RefitConversation(
                    link=self._root.link, pool=self._root.pool, refit=self._number
                )
        duties = duty_fingerprints([item.plan for item in described], seat.agreement.world)
        streamed = source is not None and source.streamed
        identity = f"{self._step} {self._label} {streamed} {layout.fingerprint()}"
        ballot = Ballot(
            cause=None if self._failure is None else self._failure.cause,
            fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
            duties=duties.get(seat.agreement.rank, ""),
            misfits=tuple(index for index, item in enumerate(described) if not item.fits),
        )

        def judge(ballots: Sequence[Ballot]) -> Verdict:
            failed = self._judge_failures(ballots)
            if failed is not None:
                return failed
            for rank, other in enumerate(ballots):
                if other.fingerprint != ballot.fingerprint:
                    return Verdict(kind="explain", cause=Cause("trainer_failed", "", rank=rank))
                if other.duties != duties.get(rank, ""):
                    return Verdict(kind="failed", cause=_sharded_otherwise(rank))
            misfits = sorted({index for other in ballots for index in other.misfits})
            link = self._root.link if self._root is not None else None
            return Verdict(whole=tuple(misfits), refit_seconds=link.refit_seconds if link else 0.0)

        verdict = seat.agreement.settle(ballot, judge, rank0_seconds=60.0)
        if verdict.kind == "explain" and verdict.cause is not None:
            verdict = self._explain(verdict.cause.rank or 0, layout)
        raise_common(verdict, None if self._failure is None else self._failure.error)
        if source is None:
            raise RefitFailed("the tensors could not be listed")
        if streamed:
            seat.learned = described
        self._seconds_left_of_rank0 = verdict.refit_seconds
        return source, described, layout, _with_whole(described, verdict.whole)

    def _explain(self, rank: int, layout: Layout) -> Verdict:
        """All ranks come once more; rank 0 and the differing rank show their lists, to name the tensor."""
        specs = layout.tensors if self.rank in (0, rank) else ()
        identity = f"{self._step!r} {self._label!r}"

        def judge(ballots: Sequence[Ballot]) -> Verdict:
            failed = self._judge_failures(ballots)
            if failed is not None:
                return failed
            said = _first_difference(layout.tensors, ballots[rank].specs)
            if said is None:
                said = f"step and label {ballots[rank].fingerprint} (rank 0: {identity}), or other options"
            message = (
                f"the ranks disagree: rank {rank} has {said}. Every rank must pass the same names and shapes"
            )
            return Verdict(kind="failed", cause=Cause("trainer_failed", message, rank=rank))

        return self._seat.agreement.settle(Ballot(fingerprint=identity, specs=specs), judge)

    # --- buckets -----------------------------------------------------------------------------------

    def _send_bucket(
        self, bucket: int, layout: Layout, plans: Sequence[GatherPlan], *, streamed: bool
    ) -> None:
        writer = slot = None
        if self._root is not None and self._failure is None:
            with self._noting(bucket):
                slot = self._talk().slot_for(bucket, layout.bucket_nbytes(bucket))
                writer = BucketWriter(slot, layout, bucket, self._root.digests)
        if streamed:
            self._settle()
        started = time.monotonic()
        sharded: list[tuple[int, torch.Tensor]] = []
        packing = 0.0
        if self._failure is None:
            with self._noting(bucket):
                packing = self._produce(bucket, plans, writer, sharded)
        if self._seat.agreement.world > 1 or self._failure is not None:
            self._settle()
        with self._noting(bucket):
            deadline = time.monotonic() + self._seat.patience
            for index, tensor in sharded:
                into = None if writer is None else writer.place_of(index)
                self._seat.gatherer.gather(tensor, plans[index], into=into, deadline=deadline)
            self._seat.gatherer.finish(deadline=deadline)
            gathered = time.monotonic() - started - packing
            if writer is not None and slot is not None:
                started = time.monotonic()
                digests = writer.finish()
                packing += time.monotonic() - started
                fields = {
                    "bucket": bucket,
                    "digests": digests,
                    "gather_seconds": gathered,
                    "pack_seconds": packing,
                }
                self._talk().packed(fields, slot)

    def _produce(
        self,
        bucket: int,
        plans: Sequence[GatherPlan],
        writer: BucketWriter | None,
        sharded: list[tuple[int, torch.Tensor]],
    ) -> float:
        """Pack what rank 0 has whole; collect what must be gathered. Seconds spent packing."""
        packing = 0.0
        if self._feed is None:
            raise RefitFailed("the refit has no tensors")
        for index, tensor in self._feed.bucket(bucket):
            if plans[index].kind not in ("plain", "absent"):
                sharded.append((index, tensor))
            elif writer is not None:
                started = time.monotonic()
                writer.put(index, tensor)
                packing += time.monotonic() - started
        return packing

    # --- failure -----------------------------------------------------------------------------------

    def _noting(self, bucket: int | None = None) -> _NoteFailure:
        return _NoteFailure(self, bucket)

    def _settle(self, report: RefitReport | None = None) -> Verdict:
        """Decide with all ranks whether to go on; raises the common error if not."""

        def judge(ballots: Sequence[Ballot]) -> Verdict:
            return self._judge_failures(ballots) or Verdict(report=report)

        ballot = Ballot(cause=None if self._failure is None else self._failure.cause)
        verdict = self._seat.agreement.settle(ballot, judge, rank0_seconds=self._seconds_left_of_rank0)
        raise_common(verdict, None if self._failure is None else self._failure.error)
        return verdict

    def _judge_failures(self, ballots: Sequence[Ballot]) -> Verdict | None:
        own = self._failure
        failed = first_cause(ballots, None if own is None else own.kind)
        if failed is None or failed.cause is None:
            return None
        # Its own error may carry the report already; otherwise the refit is taken back, which yields one.
        report = getattr(own.error, "report", None) if own is not None else None
        if report is None and self._conversation is not None:
            report = self._conversation.cancel(failed.cause)
        return msgspec.structs.replace(failed, report=report)

    def _talk(self) -> RefitConversation:
        if self._conversation is None:
            raise RefitFailed("the refit is not open with the broadcaster")
        return self._conversation


class _NoteFailure:
    """Keeps the first error of a block for this rank's next ballot. Interrupts pass through."""

    def __init__(self, refit: RankRefit, bucket: int | None) -> None:
        self._refit = refit
        self._bucket = bucket

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        if not isinstance(error, Exception):
            return False
        if self._refit._failure is None:
            cause = cause_of(error, rank=self._refit.rank, bucket=self._bucket)
            self._refit._failure = _Failure(error, cause, kind_of(error))
        return True


def duty_fingerprints(plans: Sequence[GatherPlan], world: int) -> dict[int, str]:
    """For every rank of the job that has to send something: a hash of all it has to do, in order."""
    hashes: dict[int, hashlib._Hash] = {}
    for index, plan in enumerate(plans):
        for rank, duty in plan.duties().items():
            hashes.setdefault(rank, hashlib.sha256()).update(f"{index}:{duty};".encode())
    return {rank: found.hexdigest() for rank, found in hashes.items() if rank < world}


def raise_common(verdict: Verdict, own: BaseException | None = None) -> None:
    """Raise what a verdict says, on every rank alike; ``own`` is this rank's part in it.

    Raises:
        RefitFailed, RefitRejected, InvalidConfig, BroadcasterUnavailable: by the verdict's kind.
    """
    if not verdict.kind:
        return
    cause = verdict.cause or Cause("internal", "the refit failed without a cause")
    if verdict.kind == "config":
        raise InvalidConfig(cause.message, cause=cause) from own
    if verdict.kind == "rejected":
        raise RefitRejected(cause.message, cause=cause) from own
    if verdict.kind == "unavailable":
        raise BroadcasterUnavailable(cause.message, cause=cause) from own
    raise RefitFailed(cause.message, cause=cause, report=verdict.report) from own


def _with_whole(described: Sequence[Described], misfits: tuple[int, ...]) -> list[GatherPlan]:
    plans = [item.plan for item in described]
    for index in misfits:
        plan = plans[index]
        if plan.kind == "boxes":
            plans[index] = GatherPlan("whole", ranks=plan.ranks, device=plan.device)
    return plans


def kind_of(error: BaseException) -> str:
    """The verdict's kind for an error of rank 0."""
    if isinstance(error, RefitRejected):
        return "rejected"
    if isinstance(error, InvalidConfig):
        return "config"
    return "unavailable" if isinstance(error, BroadcasterUnavailable) else "failed"


def first_cause(ballots: Sequence[Ballot], rank0_kind: str | None) -> Verdict | None:
    """The verdict for the failure of the lowest failed rank, or None if all are well."""
    for rank, ballot in enumerate(ballots):
        if ballot.cause is not None:
            return Verdict(kind=(rank0_kind if rank == 0 else None) or "failed", cause=ballot.cause)
    return None


def _sharded_otherwise(rank: int) -> Cause:
    message = (
        f"the ranks disagree: rank {rank} holds other shards, or holds them on another device, than rank 0's "
        "meshes and placements say. Every rank must pass the same DTensors"
    )
    return Cause("trainer_failed", message, rank=rank)


def _first_difference(mine: Sequence[TensorSpec], other: Sequence[TensorSpec]) -> str | None:
    for index in range(max(len(mine), len(other))):
        here = mine[index] if index < len(mine) else None
        there = other[index] if index < len(other) else None
        if here != there:
            return f"{_say(there)} as tensor {index} where rank 0 has {_say(here)}"
    return None


def _say(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.name!r} ({spec.dtype} {list(spec.shape)})"
