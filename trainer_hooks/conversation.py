"""Rank 0's side of one refit with the broadcaster, and the slots it fills.

    RefitBegin → (slot → BucketPacked)… → RefitFinished          Credit: that slot may be refilled

A slot belongs to the broadcaster from its `BucketPacked` until its `Credit`, and at the latest until the
refit's report. A bucket larger than a slot gets a slot of its own size, which is made when the bucket's
turn comes and given back with its credit; one such slot exists at a time.
"""

from __future__ import annotations

import time
from typing import Any, NoReturn

from ..proto.errors import (
    BroadcasterUnavailable,
    Cause,
    InvalidConfig,
    InvalidLayout,
    ProtocolError,
    RefitFailed,
    RefitRejected,
    WeightcastError,
)
from ..proto.layout import Layout
from ..proto.messages import (
    BucketPacked,
    Credit,
    RefitAccepted,
    RefitBegin,
    RefitCancel,
    RefitFinished,
    RefitReport,
    SlotRetired,
    TrainerRejected,
)
from ..proto.slots import Slot
from .link import Link

#: What the trainer waits beyond the broadcaster's own deadline for a refit, seconds.
GRACE_SECONDS = 15.0
#: Engines repeat the label in every answer.
_LONGEST_LABEL = 256


class SlotPool:
    """Rank 0's slots: ``count`` of ``nbytes`` bytes, and at most one outsized one."""

    def __init__(self, *, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.regular: list[Slot] = []
        self.outsized: Slot | None = None
        self._count = count
        self._made = count
        #: slot number → bucket whose bytes are still leaving it.
        self._taken: dict[int, int] = {}

    def open(self) -> list[Slot]:
        """The regular slots, made on the first call. Their memory is used when first written.

        Raises:
            OSError: if the system gives no memory files.
        """
        while len(self.regular) < self._count:
            self.regular.append(Slot.create(len(self.regular), self.nbytes))
        return self.regular

    def free(self) -> Slot | None:
        """A regular slot that may be filled now."""
        return next((slot for slot in self.regular if slot.number not in self._taken), None)

    def make_outsized(self, nbytes: int) -> Slot:
        """One more slot, under a number that was never used."""
        self.outsized = Slot.create(self._made, nbytes)
        self._made += 1
        return self.outsized

    def taken(self, slot: int, bucket: int) -> None:
        """The slot is the broadcaster's from now on."""
        self._taken[slot] = bucket

    def credited(self, slot: int, bucket: int) -> bool:
        """The slot's bytes have left. False if it did not hold that bucket."""
        if self._taken.get(slot) != bucket:
            return False
        del self._taken[slot]
        return True

    def all_free(self) -> None:
        """The refit is over, or the broadcaster is gone: nobody reads any slot."""
        self._taken.clear()

    def drop_outsized(self) -> int | None:
        """Close the outsized slot; its number, if there was one."""
        slot, self.outsized = self.outsized, None
        if slot is None:
            return None
        slot.close()
        return slot.number

    def close(self) -> None:
        """Close every slot."""
        self.drop_outsized()
        while self.regular:
            self.regular.pop().close()


class RefitConversation:
    """One refit, as rank 0 speaks of it with the broadcaster. Every wait ends at ``deadline``."""

    def __init__(self, *, link: Link, pool: SlotPool, refit: int) -> None:
        self._link = link
        self._pool = pool
        self._refit = refit
        self._open = False
        self.nodes: tuple[str, ...] = ()
        self.deadline = 0.0

    def begin(self, step: int, label: str, layout: Layout) -> None:
        """Announce the refit. Buckets may be packed at once; a refusal shows in the next wait."""
        self.deadline = time.monotonic() + self._link.refit_seconds + GRACE_SECONDS
        self._link.send(RefitBegin(**self._link.stamp(self._refit), step=step, label=label, layout=layout))
        self._open = True

    def slot_for(self, bucket: int, nbytes: int) -> Slot:
        """Wait for a slot that may be filled with ``bucket``.

        Raises:
            RefitFailed: if the broadcaster ended the refit, or gave no credit in time.
            RefitRejected: if it refused the refit.
            BroadcasterUnavailable: if it is gone.
        """
        started = time.monotonic()
        while True:
            if nbytes <= self._pool.nbytes:
                slot = self._pool.free()
                if slot is not None:
                    return slot
            elif self._pool.outsized is None:
                slot = self._pool.make_outsized(nbytes)
                self._link.send_slot(slot)
                return slot
            message = self._next()
            if message is None:
                waited = time.monotonic() - started
                self._fail(
                    Cause(
                        "deadline", "the broadcaster gave no slot back in time", bucket=bucket, seconds=waited
                    )
                )
            self._heed(message)

    def packed(self, message_fields: dict[str, Any], slot: Slot) -> None:
        """Tell that ``slot`` holds a bucket. It is the broadcaster's until credited."""
        message = BucketPacked(**self._link.stamp(self._refit), slot=slot.number, **message_fields)
        self._pool.taken(slot.number, message.bucket)
        self._link.send(message)

    def finish(self) -> RefitReport:
        """Wait for the report.

        Raises:
            RefitFailed, RefitRejected, BroadcasterUnavailable: as `slot_for`.
        """
        while True:
            message = self._next()
            if message is None:
                self._fail(Cause("deadline", "the broadcaster sent no report in time"))
            if isinstance(message, RefitFinished):
                self._end()
                if message.report.ok:
                    return message.report
                raise failure_of(message.report)
            self._heed(message)

    def cancel(self, cause: Cause) -> RefitReport | None:
        """Take the refit back and wait until the broadcaster has wound it up. Its report, if it gives one."""
        if not self._open:
            return None
        try:
            self._link.send(RefitCancel(**self._link.stamp(self._refit), cause=cause))
            while (message := self._next()) is not None:
                if isinstance(message, RefitFinished):
                    self._end()
                    return message.report
                self._heed(message)
        except (BroadcasterUnavailable, ProtocolError, RefitRejected):
            # The refit has failed already, for the cause we came with; this only says that no report comes.
            return None
        finally:
            if self._open:
                self._end()
                self._link.close(goodbye=False)
        return None

    def drop(self) -> None:
        """Leave in the middle, after an interrupt: the broadcaster sees the link end."""
        if self._open:
            self._link.close(goodbye=False)
            self._end()

    def _next(self) -> Any | None:
        try:
            while (message := self._link.receive(self.deadline)) is not None:
                if getattr(message, "refit", 0) in (0, self._refit):
                    return message
            return None
        except BroadcasterUnavailable:
            self._end()
            raise

    def _heed(self, message: Any) -> None:
        match message:
            case Credit(slot=slot, bucket=bucket):
                if not self._pool.credited(slot, bucket):
                    raise ProtocolError(
                        f"the broadcaster credits slot {slot} for bucket {bucket}, which it does not hold"
                    )
                if self._pool.outsized is not None and slot == self._pool.outsized.number:
                    self._pool.drop_outsized()
                    self._link.send(SlotRetired(**self._link.stamp(self._refit), slot=slot))
            case RefitAccepted(nodes=nodes):
                self.nodes = nodes
            case TrainerRejected(cause=cause):
                self._end()
                raise RefitRejected(cause.message, cause=cause)
            case RefitFinished(report=report):
                self._end()
                if report.ok:
                    raise ProtocolError("the broadcaster reports success before every bucket was packed")
                raise failure_of(report)
            case _:
                raise ProtocolError(
                    f"the broadcaster sent a {type(message).__name__} in the middle of a refit"
                )

    def _fail(self, cause: Cause) -> NoReturn:
        raise RefitFailed(cause.message, cause=cause)

    def _end(self) -> None:
        self._open = False
        self._pool.all_free()
        number = self._pool.drop_outsized()
        if number is not None and self._link.is_open:
            self._link.send(SlotRetired(**self._link.stamp(self._refit), slot=number))


def check_version(step: object, label: str) -> None:
    """Check what a refit is to install: the step of the version, and the label that engines show.

    Raises:
        InvalidLayout: naming the value and what it must be.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 63:
        raise InvalidLayout(f"step is {step!r}; it must be an integer from 0 up, below 2**63")
    if not 0 < len(label) <= _LONGEST_LABEL or not label.isprintable():
        raise InvalidLayout(
            f"label is {label[:_LONGEST_LABEL]!r}; it must be 1 to {_LONGEST_LABEL} printable characters"
        )


def failure_of(report: RefitReport) -> RefitFailed:
    """The error for a report that is not ``ok``."""
    causes = [report.cause, *(node.cause for node in report.nodes.values())]
    cause = next((cause for cause in causes if cause is not None), None)
    if cause is None:
        behind = ", ".join(
            f"{name}: {node.outcome}" for name, node in report.nodes.items() if node.outcome != "ready"
        )
        cause = Cause(
            "internal", f"not every node holds version {report.version} ({behind or 'no node at all'})"
        )
    return RefitFailed(cause.message, cause=cause, report=report)


def cause_of(error: BaseException, *, rank: int, bucket: int | None = None) -> Cause:
    """The cause that all ranks will raise for an error of one."""
    if isinstance(error, (RefitFailed, RefitRejected, BroadcasterUnavailable, InvalidConfig, ProtocolError)):
        return error.cause
    text = str(error) if isinstance(error, WeightcastError) else f"{type(error).__name__}: {error}"
    return Cause("trainer_failed", text, rank=rank, bucket=bucket)
