"""All ranks of a refit decide together: each brings a ballot, rank 0 judges, everybody gets one verdict.

    rank N    Ballot(cause or fingerprints)  ──────►  rank 0: judge(all ballots)
    every rank                               ◄──────  Verdict

A rank that fails alone would leave the others waiting in a gather for bytes that never come; a rank 0
that gives up alone would leave them waiting for it. So nothing is gathered before a verdict says that
everybody is well, and whatever rank 0 knows (no credit in time, the refit is over, the broadcaster is
gone) takes part as its own ballot.

The ballots are msgpack over point-to-point messages of a gloo group of our own (never pickle): a dead
rank breaks its own connection at once and is named, whatever backend the training uses. A rank that is
only silent is named when the deadline passes; the group cannot be used after that, because its late
ballot would be taken for a new one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from ..proto.errors import Cause
from ..proto.layout import TensorSpec
from ..proto.messages import RefitReport

_TAG = 0x5742
#: How much longer other ranks wait for rank 0 than rank 0 may take, seconds.
GRACE_SECONDS = 30.0
_FOREVER = timedelta(days=7)


class Ballot(msgspec.Struct, frozen=True):
    """What one rank brings. ``cause``: why it cannot go on."""

    cause: Cause | None = None
    #: Of everything that must be equal on all ranks: step, label, layout.
    fingerprint: str = ""
    #: Of what this rank is going to send (`GatherPlan.duties`).
    duties: str = ""
    #: Tensors whose local shard is not the box that its placements say.
    misfits: tuple[int, ...] = ()
    #: Only when asked for: all names, dtypes and shapes.
    specs: tuple[TensorSpec, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """What all ranks do next. ``kind``: "" go on · failed · rejected · unavailable · explain."""

    kind: str = ""
    cause: Cause | None = None
    report: RefitReport | None = None
    incarnation: str = ""
    #: The broadcaster's deadline for the refit, once known.
    refit_seconds: float = 0.0
    #: Tensors to gather with `DTensor.full_tensor`.
    whole: tuple[int, ...] = ()


Judge = Callable[[Sequence[Ballot]], Verdict]
_Received = TypeVar("_Received", Ballot, Verdict)


class Agreement:
    """The ranks' common decisions. One per publisher, on every rank; trivial without torch.distributed.

    Args:
        patience: seconds that ranks wait for one another.

    Raises:
        RuntimeError: from torch, if the gloo group cannot be made.
    """

    def __init__(self, *, patience: float) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.world = dist.get_world_size() if together else 1
        self.group: dist.ProcessGroup | None = None
        #: Why no further verdict is possible, once that is so.
        self.broken: Cause | None = None
        self._patience = patience
        self._kept: list[tuple[Any, torch.Tensor]] = []
        if self.world > 1:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))

    def settle(self, ballot: Ballot, judge: Judge, *, rank0_seconds: float = 0.0) -> Verdict:
        """Bring this rank's ballot and get everybody's verdict. ``judge`` runs on rank 0 alone.

        Args:
            rank0_seconds: how long rank 0 may need before it comes, beyond the patience of all.

        Returns:
            the verdict; one of kind "failed" with a cause that names the missing rank if a rank is lost.
        """
        if self.broken is not None:
            return Verdict(kind="failed", cause=self.broken)
        if self.world == 1:
            return judge([ballot])
        if self.rank:
            return self._bring(ballot, self._patience + rank0_seconds + GRACE_SECONDS)
        ballots, missing = self._collect(ballot)
        if missing is None:
            self._kept.clear()  # whoever voted has read the last verdict
            verdict = judge(ballots)
        else:
            self.broken = missing
            verdict = judge([Ballot(cause=missing)])
        for rank in range(1, self.world):
            try:
                self._send(verdict, rank)
            except RuntimeError as error:
                self.broken = self.broken or Cause(
                    "trainer_failed", f"trainer rank {rank} is gone: {error}", rank=rank
                )
        return verdict

    def close(self) -> None:
        """Drop the gloo group. Safe to call twice."""
        group, self.group = self.group, None
        if group is not None and self.broken is None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _bring(self, ballot: Ballot, seconds: float) -> Verdict:
        started = time.monotonic()
        try:
            self._send(ballot, 0)
            verdict = self._receive(0, Verdict, timedelta(seconds=seconds))
            self._kept.clear()
            return verdict
        except RuntimeError as error:
            self.broken = Cause(
                "trainer_failed",
                f"trainer rank 0 is gone or gave no verdict within {seconds:.0f} s, so the ranks can no "
                f"longer agree: restart the job, or build a new Publisher on every rank. {error}",
                rank=0,
                seconds=time.monotonic() - started,
            )
            return Verdict(kind="failed", cause=self.broken)

    def _collect(self, mine: Ballot) -> tuple[list[Ballot], Cause | None]:
        ballots = [mine]
        lost: list[str] = []

        # A gloo wait that times out closes every connection of its group, and then the others could not
        # be told why. So a thread waits without limit, and the deadline is kept here.
        def take_each() -> None:
            for rank in range(1, self.world):
                try:
                    ballots.append(self._receive(rank, Ballot, _FOREVER))
                except (RuntimeError, msgspec.DecodeError) as error:
                    lost.append(str(error))
                    return

        waiter = threading.Thread(target=take_each, name="weightcast-ballots", daemon=True)
        waiter.start()
        waiter.join(self._patience)
        received = list(ballots)
        if len(received) == self.world:
            return received, None
        missing = len(received)
        reason = f"is gone: {lost[0]}" if lost else f"did not come within {self._patience:.0f} s"
        return received, Cause(
            "trainer_failed",
            f"trainer rank {missing} {reason}. refit() must be called on every rank; after a lost rank, "
            "build a new Publisher on every rank",
            rank=missing,
        )

    def _send(self, message: Ballot | Verdict, rank: int) -> None:
        data = bytearray(msgspec.msgpack.encode(message))
        size = torch.tensor([len(data)], dtype=torch.int64)
        body = torch.frombuffer(data, dtype=torch.uint8)
        # Not waited for: a frozen peer must not hold up the others. Kept until the next vote.
        for part in (size, body):
            self._kept.append((dist.isend(part, dst=rank, group=self.group, tag=_TAG), part))

    def _receive(self, rank: int, kind: type[_Received], limit: timedelta) -> _Received:
        size = torch.empty(1, dtype=torch.int64)
        for_size = dist.irecv(size, src=rank, group=self.group, tag=_TAG)
        if for_size is None:
            raise RuntimeError("this rank is no member of the group")
        for_size.wait(limit)
        body = torch.empty(int(size.item()), dtype=torch.uint8)
        for_body = dist.irecv(body, src=rank, group=self.group, tag=_TAG)
        if for_body is None:
            raise RuntimeError("this rank is no member of the group")
        for_body.wait(limit)
        return msgspec.msgpack.decode(body.numpy().data, type=kind)
