"""What the node's machine is told (events) and what it orders (actions). Frozen values, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ..proto.checksums import ChecksumPlan
from ..proto.errors import Cause
from ..proto.layout import Layout
from ..proto.messages import (
    Abort,
    Finish,
    FromNode,
    Join,
    Leave,
    NodeInfo,
    Prepare,
    Propose,
    Release,
    Stream,
    ToNode,
    Version,
)

#: An order that is carried out on the engine.
Order = Propose | Join | Prepare | Stream | Finish | Release | Abort | Leave


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The connection to the broadcaster stands (again)."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The connection to the broadcaster broke, or its host stopped answering."""


@dataclass(frozen=True, slots=True)
class EngineFound:
    """The engine answers, and this is what it says it is."""

    info: NodeInfo


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The engine ended, or nothing listens at its address any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineAbsent:
    """The engine does not answer yet, or refuses us."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Said:
    """The broadcaster's message."""

    message: ToNode


class Mark(Enum):
    """What a stage is about to do (its outcome may stay unknown) or has done."""

    JOINING = auto()
    LEFT = auto()
    PAUSING = auto()
    RESUMED = auto()
    SESSION_OPENING = auto()
    SESSION_CLOSED = auto()
    #: The first byte of the new version may reach the engine from now on.
    TOUCHING = auto()


@dataclass(frozen=True, slots=True)
class Marked:
    mark: Mark


@dataclass(frozen=True, slots=True)
class BucketTaken:
    """One bucket is loaded; ``seconds`` is the engine's whole call."""

    bucket: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StageDone:
    """The stage in hand ended well; ``answer`` goes to the broadcaster. `Stream` ends without one."""

    answer: FromNode | None


@dataclass(frozen=True, slots=True)
class StageBroke:
    """The stage in hand failed, or was told to stop."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; some deadline may be due."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The agent is to end."""


Event = (
    LinkUp
    | LinkDown
    | EngineFound
    | EngineGone
    | EngineAbsent
    | Said
    | Marked
    | BucketTaken
    | StageDone
    | StageBroke
    | Tick
    | Stop
)


# --- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this to the broadcaster."""

    message: FromNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a stage needs to know beyond its order."""

    layout: Layout | None = None
    plan: ChecksumPlan | None = None
    version: Version | None = None
    group_name: str | None = None
    #: A session of ours may be open in the engine.
    session_open: bool = False
    #: Monotonic time at which the engine was paused by us.
    paused_at: float | None = None
    #: `Abort` only: the engine was paused by us and no byte of a new version reached it.
    resume: bool = False
    #: `Abort` only: bytes of a new version may be in the engine.
    touched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """Carry this order out on the engine until the monotonic time ``until``; one at a time."""

    order: Order
    context: Context
    until: float


@dataclass(frozen=True, slots=True)
class StopStage:
    """Let the stage in hand end after the request it is waiting for, and begin no other."""


@dataclass(frozen=True, slots=True)
class KillStage:
    """End the stage in hand now; its last request is left unanswered."""


@dataclass(frozen=True, slots=True)
class FindEngine:
    """Ask the engine who it is until it answers; then `EngineFound`."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Send heartbeats this often from now on; 0 stops them."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """After `Stop`: nothing is left to wait for."""


Action = Tell | Carry | StopStage | KillStage | FindEngine | Beat | Note | Ended
