"""The agent's logic as a state machine without I/O: ``feed(event, now) → actions``.

    looking for the engine → registering → registered
                 ▲                              │ engine gone or restarted, broadcaster lost
                 └──────────────────────────────┘

    a refit:
        IDLE ─Propose─► PROPOSED ─Prepare─► PREPARED ─Stream─► LOADED ─Finish─► VERIFIED ─Release─► IDLE
        any stage fails → FAILED;  Abort, from anywhere → IDLE

`Join` and `Leave` change the membership of a weights update group and may come before `Prepare`. One
order is carried out at a time; others wait their turn in order of arrival. `Abort` goes first: the stage
in hand may finish the request it is waiting for, no later than the abort's own deadline.

Two facts outlive a refit, because they are about the engine: ``touched`` (bytes of a version that was
never verified may be in it) and ``paused_at`` (we paused it). An engine is resumed only when a version was
released, or when it was not touched and it was we who paused it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

import msgspec

from ..proto.checksums import ChecksumPlan
from ..proto.errors import Cause
from ..proto.layout import Layout
from ..proto.messages import (
    PROTOCOL_VERSION,
    Abort,
    Aborted,
    BucketLoaded,
    Finish,
    FromNode,
    Goodbye,
    Join,
    LayoutAccepted,
    LayoutRefused,
    Leave,
    Message,
    NodeInfo,
    Prepare,
    Prepared,
    Propose,
    Register,
    Rejected,
    Release,
    StageFailed,
    Stream,
    Verified,
    Version,
    Waiting,
    Welcome,
)
from .steps import (
    Action,
    Beat,
    BucketTaken,
    Carry,
    Context,
    Ended,
    EngineAbsent,
    EngineFound,
    EngineGone,
    Event,
    FindEngine,
    KillStage,
    LinkDown,
    LinkUp,
    Mark,
    Marked,
    Note,
    Order,
    Said,
    StageBroke,
    StageDone,
    Stop,
    StopStage,
    Tell,
    Tick,
)

#: Seconds between two registrations that nobody answers.
REGISTER_AGAIN = 2.0
#: Seconds between two registrations after one was refused.
REGISTER_AFTER_REFUSAL = 10.0
#: Heartbeat intervals without a connection after which the broadcaster is lost.
BEATS_UNTIL_LOST = 5
#: Seconds for what an agent does on its own: closing a refit that nobody leads any more.
OWN_ACCORD = 30.0
#: The same, when the agent was told to end.
STOPPING = 5.0


class Phase(Enum):
    """How far the refit in hand has come."""

    IDLE = auto()
    PROPOSED = auto()
    PREPARED = auto()
    LOADED = auto()
    VERIFIED = auto()
    FAILED = auto()


_PHASE_BEFORE: dict[type[Message], tuple[Phase, ...]] = {
    Join: (Phase.PROPOSED,),
    Prepare: (Phase.PROPOSED,),
    Stream: (Phase.PREPARED,),
    Finish: (Phase.LOADED,),
    Release: (Phase.VERIFIED,),
}
_PHASE_AFTER: dict[type[Message], Phase] = {
    LayoutAccepted: Phase.PROPOSED,
    LayoutRefused: Phase.FAILED,
    Prepared: Phase.PREPARED,
    Verified: Phase.VERIFIED,
}


class NodeMachine:
    """One rollout node. All times are seconds on one monotonic clock."""

    def __init__(self, *, job: str, name: str, engine_url: str) -> None:
        self.job = job
        self.name = name
        self.engine_url = engine_url
        self.phase = Phase.IDLE
        self.touched = False
        self.paused_at: float | None = None
        self.group_name: str | None = None
        self.registered = False
        self._info: NodeInfo | None = None
        self._engine_here = False
        #: Why the engine is not there, while it is not.
        self._absent: Cause | None = None
        self._found_paused = False
        self._session_open = False
        self._linked = False
        self._lost = False
        self._life: str | None = None
        self._beat_seconds = 2.0
        self._register_at: float | None = None
        self._lost_at: float | None = None
        self._refusal: str = ""
        self._refit: tuple[str, int] | None = None
        self._last_refit: tuple[str, int] | None = None
        self._epoch = 0
        self._version: Version | None = None
        self._layout: Layout | None = None
        self._plan: ChecksumPlan | None = None
        self._doing = "idle"
        self._running: Order | None = None
        self._unanswered: Order | None = None
        self._queue: deque[Order] = deque()
        self._abort: Abort | None = None
        self._abort_by: float | None = None
        self._engine_gone: str | None = None
        self._stopping = False
        self._now = 0.0
        self._actions: list[Action] = []

    # --- what the shell asks ---------------------------------------------------------------------

    @property
    def doing(self) -> str:
        """What a heartbeat says."""
        return self._doing

    @property
    def info(self) -> NodeInfo | None:
        """What the node says of itself now; None while its engine is not there."""
        if self._info is None or not self._engine_here:
            return None
        paused = self._found_paused or self.paused_at is not None
        return msgspec.structs.replace(self._info, paused=paused)

    @property
    def wakes_at(self) -> float | None:
        """When the machine wants a `Tick`, if nothing else happens before."""
        times = [at for at in (self._register_at, self._lost_at, self._abort_by) if at is not None]
        return min(times, default=None)

    def start(self) -> list[Action]:
        """The first actions."""
        return [FindEngine()]

    def feed(self, event: Event, now: float) -> list[Action]:
        """Take one event at monotonic time ``now`` and return what is to be done, in order."""
        self._now = now
        self._actions = []
        match event:
            case Said(message):
                self._hear(message)
            case Marked(mark):
                self._take_mark(mark)
            case BucketTaken():
                self._bucket_taken(event)
            case StageDone(answer):
                self._stage_done(answer)
            case StageBroke(cause):
                self._stage_broke(cause)
            case LinkUp():
                self._linked, self._lost, self._lost_at = True, False, None
                self._register()
            case LinkDown():
                self._link_down()
            case EngineFound(info):
                self._engine_found(info)
            case EngineGone(reason):
                self._engine_left(reason)
            case EngineAbsent(cause):
                self._absent = cause
                self._tell_why_absent()
            case Tick():
                self._tick()
            case Stop():
                self._stop()
        self._go_on()
        return self._actions

    # --- registration ----------------------------------------------------------------------------

    def _register(self) -> None:
        self._register_at = None
        info = self.info
        if info is None:
            self._tell_why_absent()
        if info is None or not self._linked or self._stopping:
            return
        self._tell(Register(job=self.job, node=info))
        self._register_at = self._now + REGISTER_AGAIN

    def _tell_why_absent(self) -> None:
        """So that whoever waits for this node can be told what it waits for itself."""
        if self._absent is not None and self._linked and not self._stopping:
            self._tell(Waiting(job=self.job, name=self.name, engine_url=self.engine_url, cause=self._absent))

    def _engine_found(self, info: NodeInfo) -> None:
        known = self._info
        self._engine_gone = self._absent = None
        self._info, self._engine_here = info, True
        if known is not None and known.instance == info.instance:
            if not self.registered:
                self._register()
            return
        # Another process: it holds neither our pause, nor our group, nor our bytes.
        self._found_paused = info.paused
        self.paused_at, self.group_name, self.touched, self._session_open = None, None, False, False
        self._leave_refit(Phase.IDLE)
        if known is not None:
            self._note(f"the engine restarted (instance {known.instance} → {info.instance})", warning=True)
        self._register()

    def _engine_left(self, reason: str) -> None:
        self._engine_gone = reason
        self._note(f"the engine is gone: {reason}", warning=True)
        if self._running is None:
            self._drop_engine()

    def _drop_engine(self) -> None:
        if self._info is not None and self.registered:
            self._tell(Goodbye(job=self.job, instance=self._info.instance))
        self._forget_registration()
        self._leave_refit(Phase.IDLE)
        self._engine_here = False
        self._engine_gone = None
        if not self._stopping:
            self._actions.append(FindEngine())

    def _forget_registration(self) -> None:
        self.registered = False
        self._register_at = None
        self._actions.append(Beat(0.0))

    def _link_down(self) -> None:
        if self._linked:
            self._linked = False
            self._register_at = None
            self._lost_at = self._now + BEATS_UNTIL_LOST * self._beat_seconds

    def _broadcaster_lost(self) -> None:
        self._lost, self._lost_at = True, None
        seconds = BEATS_UNTIL_LOST * self._beat_seconds
        self._note(f"no connection to the broadcaster for {seconds:.0f} s; waiting for it", warning=True)
        self._forget_registration()
        self._drop_what_it_led(f"the broadcaster was gone for {seconds:.0f} s")

    def _drop_what_it_led(self, why: str) -> None:
        """A broadcaster that is gone ends nothing any more: neither its refit nor its group."""
        self._close_refit(why)
        if self.group_name is not None:
            self._queue.append(Leave(job=self.job, group_name=self.group_name, timeout_seconds=OWN_ACCORD))

    def _close_refit(self, why: str, *, seconds: float = OWN_ACCORD) -> None:
        """End the refit that nobody leads any more, as an `Abort` would."""
        if self._refit is None:
            return
        incarnation, refit = self._refit
        cause = Cause(code="broadcaster_lost", message=why, node=self.name)
        self._begin_abort(
            Abort(job=self.job, incarnation=incarnation, refit=refit, cause=cause, timeout_seconds=seconds)
        )

    def _welcome(self, welcome: Welcome) -> None:
        if not self._engine_here:
            return
        if self._life is not None and welcome.life != self._life:
            self._drop_what_it_led("another broadcaster took over")
        if not self.registered or welcome.life != self._life:
            self._note("registered with the broadcaster")
        if welcome.life != self._life:
            # Every broadcaster numbers its refits and epochs anew.
            self._last_refit, self._epoch = None, 0
        self._life, self._refusal = welcome.life, ""
        self.registered, self._register_at = True, None
        self._beat_seconds = welcome.heartbeat_seconds
        self._actions.append(Beat(welcome.heartbeat_seconds))

    def _rejected(self, rejected: Rejected) -> None:
        words = rejected.cause.describe()
        if words != self._refusal:
            self._note(f"the broadcaster refuses this node: {words}", warning=True)
        self._refusal = words
        self._forget_registration()
        self._register_at = self._now + REGISTER_AFTER_REFUSAL

    # --- orders ----------------------------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        if message.job != self.job or message.protocol != PROTOCOL_VERSION:
            self._note(
                f"ignored a {type(message).__name__} of job {message.job!r}, protocol {message.protocol} "
                f"(ours: {self.job!r}, {PROTOCOL_VERSION})",
                warning=True,
            )
            return
        match message:
            case Welcome():
                self._welcome(message)
            case Rejected():
                self._rejected(message)
            case Abort():
                self._hear_abort(message)
            case Propose() | Join() | Prepare() | Stream() | Finish() | Release() | Leave():
                if not self._stopping:
                    self._queue.append(message)
            case _:
                self._note(f"ignored a {type(message).__name__}", warning=True)

    def _go_on(self) -> None:
        """Begin what is next, if nothing is in hand."""
        while self._running is None:
            if self._abort is not None:
                order, self._abort, self._abort_by = self._abort, None, None
                self._carry(order, until=self._now + order.timeout_seconds)
            elif self._engine_gone is not None:
                self._drop_engine()
            elif self._queue:
                self._take(self._queue.popleft())
            else:
                break
        if self._stopping and self._running is None:
            if self.registered and self._info is not None:
                self._tell(Goodbye(job=self.job, instance=self._info.instance))
            self.registered = False
            self._actions.append(Ended())

    def _take(self, order: Order) -> None:
        match order:
            case Leave():
                self._carry(order)
            case Propose():
                self._take_propose(order)
            case _:
                self._take_stage(order)

    def _take_propose(self, order: Propose) -> None:
        refit = (order.incarnation, order.refit)
        last = self._last_refit
        if last is not None and last[0] == refit[0] and refit[1] <= last[1]:
            self._note(f"ignored the stale refit {order.refit} (now at {last[1]})", warning=True)
            return
        if not self._engine_here:
            self._refuse(order, "node_down", "the engine is not there")
            return
        # A refit still open is one whose leader forgot it; what it left behind is seen to by Prepare.
        self._refit = self._last_refit = refit
        self._version, self._layout, self._plan = order.version, order.layout, None
        self.phase = Phase.IDLE
        self._carry(order)

    def _take_stage(self, order: Join | Prepare | Stream | Finish | Release | Abort) -> None:
        stage = type(order).__name__
        stale_epoch = order.epoch < self._epoch if isinstance(order, Join) else order.epoch != self._epoch
        if (order.incarnation, order.refit) != self._refit or stale_epoch:
            self._note(
                f"ignored a stale {stage} (refit {order.refit}, epoch {order.epoch}; "
                f"now at {self._refit}, epoch {self._epoch})",
                warning=True,
            )
            return
        if self.phase not in _PHASE_BEFORE[type(order)]:
            self._refuse(
                order, "protocol", f"{stage} came out of turn: the node is {self.phase.name.lower()}"
            )
            return
        if not isinstance(order, Join) and self.group_name is None:
            self._refuse(order, "protocol", f"{stage} came, but the engine is in no weights update group")
            return
        buckets = len(self._layout.buckets) if self._layout is not None else 0
        if isinstance(order, Stream) and len(order.bucket_timeouts) != buckets:
            given = len(order.bucket_timeouts)
            self._refuse(order, "protocol", f"Stream has {given} deadlines for {buckets} buckets")
            return
        if isinstance(order, Join):
            self._epoch = order.epoch
        self._carry(order)

    def _carry(self, order: Order, *, until: float | None = None) -> None:
        seconds = sum(order.bucket_timeouts) if isinstance(order, Stream) else order.timeout_seconds
        self._running = order
        self._doing = type(order).__name__.lower()
        self._actions.append(
            Carry(
                order=order,
                until=self._now + seconds if until is None else until,
                context=Context(
                    layout=self._layout,
                    plan=self._plan,
                    version=self._version,
                    group_name=self.group_name,
                    session_open=self._session_open,
                    paused_at=self.paused_at,
                    resume=self.paused_at is not None and not self.touched and not self._found_paused,
                    touched=self.touched,
                ),
            )
        )

    # --- what a stage reports --------------------------------------------------------------------

    def _take_mark(self, mark: Mark) -> None:
        match mark:
            case Mark.JOINING:
                self.group_name = self._running.group_name if isinstance(self._running, Join) else None
            case Mark.LEFT:
                # A Leave may name a group of long ago that is not the one we are in.
                if not isinstance(self._running, Leave) or self._running.group_name == self.group_name:
                    self.group_name = None
            case Mark.PAUSING:
                self.paused_at = self._now if self.paused_at is None else self.paused_at
            case Mark.RESUMED:
                self.paused_at, self._found_paused = None, False
            case Mark.SESSION_OPENING:
                self._session_open = True
            case Mark.SESSION_CLOSED:
                self._session_open = False
            case Mark.TOUCHING:
                self.touched = True

    def _bucket_taken(self, taken: BucketTaken) -> None:
        if isinstance(self._running, Stream) and self._layout is not None:
            self._doing = f"bucket {taken.bucket + 1} of {len(self._layout.buckets)}"
            self._answer(
                self._running, BucketLoaded(job=self.job, bucket=taken.bucket, seconds=taken.seconds)
            )

    def _stage_done(self, answer: FromNode | None) -> None:
        order, self._running = self._running, None
        self._doing = "idle"
        if order is None:
            return
        if isinstance(order, Stream):
            self.phase = Phase.LOADED
        elif isinstance(order, Release):
            # What is in the engine was verified: whole, and known.
            self.touched = False
            if self._info is not None and self._version is not None:
                self._info = msgspec.structs.replace(self._info, label=self._version.label)
            if self._abort is None:
                self._leave_refit(Phase.IDLE)
        elif isinstance(order, Abort):
            self._leave_refit(Phase.IDLE)
        elif answer is not None:
            self.phase = _PHASE_AFTER.get(type(answer), self.phase)
        if isinstance(answer, LayoutAccepted):
            self._plan = answer.plan
        # Once a refit is called off, its abort speaks for it.
        if answer is not None and (self._abort is None or isinstance(order, Leave)):
            self._answer(order, answer)

    def _stage_broke(self, cause: Cause) -> None:
        order, self._running = self._running, None
        self._doing = "idle"
        if order is None:
            return
        if self._engine_gone is not None:
            cause = msgspec.structs.replace(cause, code="node_down", message=self._engine_gone)
        in_hand = (order.incarnation, order.refit) == self._refit
        if isinstance(order, Abort):
            self._leave_refit(Phase.IDLE)
        elif in_hand and not isinstance(order, Leave):
            self.phase = Phase.FAILED
        if isinstance(order, Leave) or (in_hand and self._abort is None):
            self._fail(order, cause)

    # --- aborting --------------------------------------------------------------------------------

    def _hear_abort(self, order: Abort) -> None:
        if (order.incarnation, order.refit) == self._refit:
            self._begin_abort(order)
            return
        info = self.info
        self._answer(
            order,
            Aborted(
                job=self.job,
                touched=self.touched,
                serving=info is not None and not info.paused and not self.touched,
                detail="the node was not in this refit",
            ),
        )

    def _begin_abort(self, order: Abort) -> None:
        if isinstance(self._running, Abort) or self._abort is not None:
            return
        self._note(f"refit {order.refit} is off: {order.cause.describe()}", warning=True)
        self._queue = deque(waiting for waiting in self._queue if isinstance(waiting, Leave))
        self._abort = order
        if self._running is not None:
            self._abort_by = self._now + order.timeout_seconds
            self._actions.append(StopStage())

    def _tick(self) -> None:
        if self._register_at is not None and self._now >= self._register_at:
            self._register()
        if self._lost_at is not None and self._now >= self._lost_at:
            self._broadcaster_lost()
        if self._abort is not None and self._abort_by is not None and self._now >= self._abort_by:
            order, busy = self._abort, type(self._running).__name__
            self._abort = self._abort_by = None
            self._leave_refit(Phase.IDLE)
            self._actions.append(KillStage())
            seconds = order.timeout_seconds
            message = f"the engine is still busy with {busy} {seconds:.0f} s after the refit was called off"
            self._fail(order, Cause(code="deadline", message=message, node=self.name, seconds=seconds))

    def _leave_refit(self, phase: Phase) -> None:
        self.phase = phase
        self._refit = self._version = self._layout = self._plan = None

    def _stop(self) -> None:
        self._stopping = True
        self._register_at = self._lost_at = None
        self._queue.clear()
        self._close_refit("the agent was told to end", seconds=STOPPING)
        if self._running is not None and self._abort is None:
            self._actions.append(StopStage())

    # --- answers ---------------------------------------------------------------------------------

    def _refuse(self, order: Order, code: str, message: str) -> None:
        self.phase = Phase.FAILED if code == "protocol" else self.phase
        self._fail(order, Cause(code=code, message=message))

    def _fail(self, order: Order, cause: Cause) -> None:
        stage = type(order).__name__.lower()
        cause = msgspec.structs.replace(cause, node=self.name, epoch=order.epoch)
        self._note(f"{stage} failed: {cause.describe()}", warning=True)
        self._answer(order, StageFailed(job=self.job, stage=stage, cause=cause, touched=self.touched))

    def _answer(self, order: Message, answer: FromNode) -> None:
        """Send ``answer`` under the epoch and refit of the order it answers."""
        self._tell(
            msgspec.structs.replace(
                answer, incarnation=order.incarnation, epoch=order.epoch, refit=order.refit
            )
        )

    def _tell(self, message: FromNode) -> None:
        # A short break is bridged by the socket's queue; what was said to a lost broadcaster is not
        # repeated to the next one.
        if not self._lost:
            self._actions.append(Tell(message))

    def _note(self, text: str, *, warning: bool = False) -> None:
        self._actions.append(Note(text, warning))
