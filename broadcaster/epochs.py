"""The source process and the weights update group it holds, as control knows them.

An epoch is one generation of the group: its number is part of the group's name. A group is kept from
refit to refit while its members stay the same. After anything ambiguous it is *poisoned*: never used
again, never repaired. There is no safe way to abort a gloo collective from inside, and destroying an NCCL
group after a fault can hang, so poisoning ends the whole source process (SIGKILL): its peers' collectives
then fail at once, and a new source is started for the next epoch.

    source: starting ──SourceReady──► ready ──killed or exited──► starting (after a pause if it keeps failing)
    group:  none ──opening──► open (StoreOpened) ──GroupReady──► ready ──closed or poisoned──► none
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..proto.config import BroadcasterConfig
from ..proto.errors import Cause
from ..proto.messages import CloseGroup, ForgetSlot, OpenGroup
from .events import Action, KillSource, StartSource, TellSource
from .ranks import Member, RankLayout, assign_ranks, group_name

#: Seconds before a source that ended without ever being ready is started again; doubled up to the last.
_RETRY_SECONDS = (0.5, 30.0)


@dataclass(slots=True, kw_only=True)
class Group:
    """One epoch's group. ``port`` is 0 until its store listens; ``seconds`` is the source's own joining."""

    epoch: int
    name: str
    members: tuple[Member, ...]
    ranks: RankLayout
    backend: str
    port: int = 0
    ready: bool = False


class Epochs:
    """Counts epochs, and starts, uses and ends the source. Appends its orders to ``out``."""

    def __init__(self, *, config: BroadcasterConfig, incarnation: str, out: list[Action]) -> None:
        self.epoch = 0
        self.group: Group | None = None
        self.generation = 0
        self.ready = False
        self.device = ""
        #: Slots the present source has mapped: number → bytes.
        self.attached: dict[int, int] = {}
        #: Groups that were poisoned under NCCL: no engine is ever told to leave those (it would hang).
        self.abandoned: set[str] = set()
        #: Why the last source ended, for those who wait for the next.
        self.last_end = ""
        self.retry_at: float | None = None
        self._failures = 0
        self._config = config
        self._incarnation = incarnation
        self._out = out

    def start(self) -> None:
        """Start the next source process."""
        self.retry_at = None
        self.generation += 1
        self._out.append(StartSource(generation=self.generation))

    def source_ready(self, device: str) -> None:
        """The source runs and listens to orders. ``device`` is "cpu" or "cuda:N"."""
        self.ready, self.device, self._failures = True, device, 0

    def source_ended(self, reason: str, now: float) -> None:
        """The source ended by itself: start another, later and later if none ever gets ready."""
        was_ready = self.ready
        self._forget(reason)
        if was_ready:
            self.start()
            return
        first, last = _RETRY_SECONDS
        self.retry_at = now + min(last, first * 2**self._failures)
        self._failures += 1

    def poison(self, reason: str) -> None:
        """End the source at once, and with it the group; start another."""
        if self.retry_at is not None:
            return
        self._out.append(KillSource(generation=self.generation))
        self._forget(reason)
        self.start()

    def backend(self) -> str:
        """ "nccl" or "gloo", as configured or as the source's device asks for."""
        if self._config.backend != "auto":
            return self._config.backend
        return "nccl" if self.device.startswith("cuda") else "gloo"

    def fits(self, members: tuple[Member, ...]) -> bool:
        """Whether the group that exists is ready and has exactly these members."""
        return self.group is not None and self.group.ready and self.group.members == members

    def open(self, members: tuple[Member, ...], stamp: dict[str, Any], timeout_seconds: float) -> Group:
        """Begin the next epoch with these members: rank layout, name, order to the source.

        Raises:
            InvalidRanks: if the members cannot form a group.
        """
        ranks = assign_ranks(members)
        self.epoch += 1
        name = group_name(job=self._config.job, incarnation=self._incarnation, epoch=self.epoch)
        self.group = Group(epoch=self.epoch, name=name, members=members, ranks=ranks, backend=self.backend())
        order = OpenGroup(
            **{**stamp, "epoch": self.epoch},
            group_name=name,
            host=self._config.advertise,
            world_size=ranks.world_size,
            backend=self.group.backend,
            timeout_seconds=timeout_seconds,
        )
        self._out.append(TellSource(message=order))
        return self.group

    def close(self, stamp: dict[str, Any]) -> None:
        """Leave a healthy group; its nodes are told `Leave` at the same time."""
        if self.group is None:
            return
        order = CloseGroup(**{**stamp, "epoch": self.group.epoch}, group_name=self.group.name)
        self._out.append(TellSource(message=order))
        self.group = None

    def forget_slot(self, slot: int, stamp: dict[str, Any]) -> None:
        """The trainer took a slot back: the source unmaps it."""
        if self.attached.pop(slot, None) is not None:
            self._out.append(TellSource(message=ForgetSlot(**stamp, slot=slot)))

    def why_not_ready(self) -> Cause:
        """Cause of a wait for a source that does not come."""
        message = "the source process did not get ready"
        if self.last_end:
            message += f"; the one before it ended: {self.last_end}"
        return Cause(code="source_lost", message=message)

    def _forget(self, reason: str) -> None:
        if self.group is not None and self.group.backend == "nccl":
            self.abandoned.add(self.group.name)
        self.last_end = reason
        self.group, self.ready, self.device = None, False, ""
        self.attached.clear()
