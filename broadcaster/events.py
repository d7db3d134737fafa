"""What the machine is told (events) and what it orders (actions). Frozen values, nothing else.

``peer`` is a ZeroMQ routing id. ``generation`` numbers the source processes of one broadcaster, so that
a word from one that was already replaced is recognised.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..proto.messages import FromNode, FromSource, FromTrainer, RefitReport, ToNode, ToSource, ToTrainer

# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSaid:
    """An agent's message."""

    peer: bytes
    message: FromNode


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnreachable:
    """A message for this agent could not be handed to its connection."""

    peer: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSaid:
    """A trainer's message."""

    peer: bytes
    message: FromTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLinked:
    """The trainer opened its slot link. While that is open, the trainer lives."""

    peer: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReceived:
    """A slot's descriptor arrived over the slot link; it is on its way to the source."""

    peer: bytes
    slot: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLinkClosed:
    """The slot link ended: the trainer closed it, died, or sent what is no slot."""

    peer: bytes
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSaid:
    """A source process's message."""

    generation: int
    message: FromSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceExited:
    """A source process ended without being told to (perhaps noticed only when it was to be killed)."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; some deadline may be due."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The broadcaster is to end."""


Event = (
    NodeSaid
    | NodeUnreachable
    | TrainerSaid
    | TrainerLinked
    | SlotReceived
    | TrainerLinkClosed
    | SourceSaid
    | SourceExited
    | Tick
    | Stop
)

# --- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TellNode:
    peer: bytes
    message: ToNode


@dataclass(frozen=True, slots=True, kw_only=True)
class TellTrainer:
    peer: bytes
    message: ToTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class TellSource:
    message: ToSource


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSource:
    """Start source process number ``generation`` and hand it every slot held. None runs now."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillSource:
    """End the source at once (SIGKILL): its collectives then fail at every peer.

    No event follows, unless it turns out to have ended by itself before.
    """

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenForSlots:
    """Accept one slot link for this trainer at ``path``."""

    peer: bytes
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropSlot:
    """Close one slot's descriptor (the source was told `ForgetSlot`)."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropTrainer:
    """Close this trainer's slot link or listener and every slot it sent. No event follows."""

    peer: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitEnded:
    """A refit is over; for logs and metrics."""

    report: RefitReport


@dataclass(frozen=True, slots=True)
class Ended:
    """After `Stop`: nothing is left to wait for."""


Action = (
    TellNode
    | TellTrainer
    | TellSource
    | StartSource
    | KillSource
    | ListenForSlots
    | DropSlot
    | DropTrainer
    | RefitEnded
    | Ended
)
