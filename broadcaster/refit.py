"""One refit, phase by phase. No I/O: it is told of messages and time, and appends orders.

    nodes → propose → [leave → open → join] → pack → prepare → stream → [checksums] → finish → release → done
                             └ only if the members changed       any failure up to here │
                                                  abort ◄────────────────────────────────┘ → done

Until the first bucket is ordered, a failure costs nothing: `Abort` lets every node resume its old version.
After that the epoch is poisoned (the source is killed) and every node that may hold bytes of the new version
stays paused until a whole refit. From finish on the bytes are complete: each node is judged for itself.

Every phase has a deadline (`due`, `expire`). Orders carry a little less than it, so that whoever is slow can
say why before it is cut off.
"""

from __future__ import annotations

from typing import Any

from ..proto.checksums import ChecksumPlan, ChecksumTaker
from ..proto.config import BroadcasterConfig
from ..proto.errors import Cause, InvalidLayout, ProtocolError
from ..proto.messages import (
    Abort,
    Aborted,
    BroadcastBucket,
    BucketLoaded,
    BucketPacked,
    BucketSent,
    Checksums,
    Credit,
    Finish,
    FromNode,
    FromSource,
    GroupReady,
    Join,
    Joined,
    LayoutAccepted,
    LayoutRefused,
    Leave,
    Left,
    Message,
    NodeState,
    Prepare,
    Prepared,
    Propose,
    RefitAccepted,
    RefitBegin,
    RefitFinished,
    RefitReport,
    Release,
    Released,
    SetChecksumPlans,
    StageFailed,
    StoreOpened,
    Stream,
    ToNode,
    ToTrainer,
    Verified,
    Version,
)
from .buckets import BucketLedger
from .epochs import Epochs
from .events import Action, RefitEnded, TellNode, TellSource, TellTrainer
from .fleet import Fleet, Node
from .lateness import WITH_GROUP, Phase, late_node, waits
from .participants import Participant, explain_refusal, root_cause, write_report
from .ranks import InvalidRanks
from .verdict import judge

#: Share of a deadline that an order is given.
_ORDER_SHARE = 0.9


class Refit:
    """One refit. ``number`` is the broadcaster's own; ``begin.refit`` is the trainer's."""

    def __init__(
        self,
        *,
        number: int,
        trainer: bytes,
        begin: RefitBegin,
        config: BroadcasterConfig,
        incarnation: str,
        fleet: Fleet,
        epochs: Epochs,
        out: list[Action],
        now: float,
    ) -> None:
        self.number = number
        self.trainer: bytes | None = trainer
        self.begin = begin
        self.version = Version(incarnation=begin.incarnation, step=begin.step, label=begin.label)
        self.ledger = BucketLedger(begin.layout)
        self.phase = Phase.NODES
        self.participants: dict[str, Participant] = {}
        self.report: RefitReport | None = None
        self.started = self.phase_since = now
        self.config = config
        self._incarnation = incarnation
        self.fleet = fleet
        self.epochs = epochs
        self._out = out
        self._causes: list[Cause] = []
        self.epoch = 0
        self.joined_at: float | None = None
        self.packed_at = 0.0
        self._plans: list[ChecksumPlan] = []
        self._checksums: tuple[tuple[str, ...], ...] | None = None
        self._digests: dict[str, int] = {}
        self.still_loading: set[str] = set()

    # --- what it is told ---------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Begin: as soon as enough nodes are registered."""
        self._enter(Phase.NODES, now)
        self.fleet_changed(now)

    @property
    def over(self) -> bool:
        return self.phase is Phase.DONE

    @property
    def needs_trainer(self) -> bool:
        """Whether bytes are still to come from the trainer's slots."""
        return self.phase not in (Phase.CHECKSUMS, Phase.FINISH, Phase.RELEASE, Phase.ABORT, Phase.DONE)

    @property
    def needs_source(self) -> bool:
        """Whether the refit cannot go on without the group that the source holds now."""
        return self.phase in WITH_GROUP

    def fleet_changed(self, now: float) -> None:
        """A node registered: perhaps there are enough now."""
        if self.phase is Phase.NODES and len(self.fleet.alive()) >= self.config.nodes_needed:
            self._propose(now)

    def node_gone(self, node: Node, cause: Cause, now: float) -> None:
        """A node was lost, ended or is another instance now."""
        member = self.participants.get(node.name)
        if member is None or member.node is not node or member.gone:
            return
        member.gone, member.owes, member.cause = True, None, cause
        self.still_loading.discard(member.name)
        self.fail(cause, now)
        self._advance(now)

    def node_said(self, node: Node, message: FromNode, now: float) -> bool:
        """Take a node's answer. False for one that nobody waits for: late, repeated, of another refit."""
        member = self.participants.get(node.name)
        if member is None or member.node is not node or member.gone or not self._is_mine(message):
            return False
        if message.epoch != member.asked_epoch:
            return False
        if isinstance(message, StageFailed):
            return self._stage_failed(member, message, now)
        if isinstance(message, BucketLoaded):
            return self._bucket_loaded(member, message, now)
        if isinstance(message, Left):
            return self._left(member, message.group_name, now)
        if isinstance(message, LayoutRefused) and member.owes is LayoutAccepted:
            member.owes = None
            self._layout_refused(member, message, now)
            return True
        if member.owes is None or type(message) is not member.owes:
            return False
        member.owes = None
        match message:
            case LayoutAccepted():
                self._take_plan(member, message.plan, now)
            case Prepared():
                member.prepared = message
            case Verified():
                member.verified = message
            case Released():
                self._take_released(member, message)
            case Aborted():
                member.aborted = message
                member.touched = member.touched or message.touched
        self._advance(now)
        return True

    def source_said(self, message: FromSource, now: float) -> bool:
        """Take the source's answer. False for one that nobody waits for."""
        group = self.epochs.group
        match message:
            case StoreOpened():
                if self.phase is not Phase.OPEN or group is None or message.group_name != group.name:
                    return False
                group.port = message.port
                self._join(now)
            case GroupReady():
                if self.phase is not Phase.JOIN or group is None or message.group_name != group.name:
                    return False
                group.ready = True
                self._advance(now)
            case BucketSent():
                if not self._is_mine(message) or message.epoch != self.epoch:
                    return False
                return self._bucket_sent(message, now)
            case Checksums():
                if not self._is_mine(message) or self.phase not in (Phase.STREAM, Phase.CHECKSUMS):
                    return False
                self._checksums = message.values
                self._advance(now)
            case _:
                return False
        return True

    def source_changed(self, now: float) -> None:
        """The source got ready or mapped a slot: what waited for it goes on."""
        if self.phase is Phase.OPEN and self.epochs.group is None:
            self._open(now)
        elif self.phase is Phase.STREAM:
            self._broadcast_packed(now)

    def bucket_packed(self, message: BucketPacked, now: float) -> bool:
        """The trainer packed a bucket. False for one already known."""
        if self.phase in (Phase.ABORT, Phase.DONE):
            return False
        try:
            if not self.ledger.take_packed(message):
                return False
        except ProtocolError as error:
            self.fail(Cause(code="protocol", message=str(error), bucket=message.bucket), now)
            return True
        self.packed_at = now
        if self.phase is Phase.PACK:
            self._prepare(now)
        elif self.phase is Phase.STREAM:
            self._broadcast_packed(now)
        return True

    def fail(self, cause: Cause, now: float) -> None:
        """Something failed. Up to the last bucket that ends the refit; later it is one node's affair."""
        self._causes.append(cause)
        if self.phase in (Phase.FINISH, Phase.RELEASE, Phase.ABORT, Phase.DONE):
            return
        self._abort(cause, now)

    def learn(self, cause: Cause) -> None:
        """More is known of why a refit is being aborted."""
        if self.phase is Phase.ABORT:
            self._causes.append(cause)

    def cancel(self, cause: Cause, now: float) -> bool:
        """The trainer takes the refit back. False if nodes were already released, or it is ending anyway."""
        if self.phase in (Phase.RELEASE, Phase.ABORT, Phase.DONE):
            return False
        self._causes.append(cause)
        self._abort(cause, now)
        return True

    # --- deadlines ---------------------------------------------------------------------------------

    def due(self) -> float | None:
        """When the earliest deadline passes."""
        if self.phase is Phase.DONE:
            return None
        return min(due for due, _ in waits(self))

    def expire(self, now: float) -> None:
        """Act on a deadline that has passed."""
        late = [wait for wait in waits(self) if wait[0] <= now]
        if self.phase is Phase.DONE or not late:
            return
        if self.phase in (Phase.FINISH, Phase.RELEASE, Phase.ABORT):
            for member in self.owing():
                member.owes = None
                if self.phase is not Phase.ABORT:
                    member.cause = late_node(self, member, now)
                    self.fail(member.cause, now)
            self._advance(now)
        else:
            _, describe = min(late, key=lambda wait: wait[0])
            self.fail(describe(self, now), now)

    # --- phases ------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self.phase_since = phase, now

    def _advance(self, now: float) -> None:
        """Go on if nobody owes an answer any more."""
        if self.owing():
            return
        match self.phase:
            case Phase.PROPOSE:
                self._group_or_prepare(now)
            case Phase.LEAVE:
                self._open(now)
            case Phase.JOIN if self.epochs.group is not None and self.epochs.group.ready:
                self._accepted(now)
            case Phase.PREPARE:
                self._stream(now)
            case Phase.STREAM if not self.still_loading and self.ledger.sent == self.ledger.total:
                if self._plans and self._checksums is None:
                    self._enter(Phase.CHECKSUMS, now)
                else:
                    self._finish(now)
            case Phase.CHECKSUMS if self._checksums is not None:
                self._finish(now)
            case Phase.FINISH:
                self._release(now)
            case Phase.RELEASE | Phase.ABORT:
                self._done(now)
            case _:
                pass

    def _propose(self, now: float) -> None:
        self._enter(Phase.PROPOSE, now)
        for node in self.fleet.alive():
            self.participants[node.name] = Participant(node=node, was=node.state)
        seconds = self.config.deadlines.propose * _ORDER_SHARE
        order = Propose(
            **self._stamp(), version=self.version, layout=self.begin.layout, timeout_seconds=seconds
        )
        for member in self._present():
            self._ask(member, order, LayoutAccepted)

    def _take_plan(self, member: Participant, plan: ChecksumPlan | None, now: float) -> None:
        if plan is None or not plan.entries:
            return
        if plan not in self._plans:
            try:
                ChecksumTaker(self.begin.layout, plan)
            except InvalidLayout as error:
                message = f"node {member.name!r} asks for checksums that this refit cannot give: {error}"
                member.cause = Cause(code="protocol", message=message, node=member.name)
                self.fail(member.cause, now)
                return
            self._plans.append(plan)
        member.plan = self._plans.index(plan)

    def _layout_refused(self, member: Participant, refused: LayoutRefused, now: float) -> None:
        member.cause = explain_refusal(member.name, refused)
        self.fail(member.cause, now)

    def _group_or_prepare(self, now: float) -> None:
        members = tuple(member.node.as_member() for member in self._present())
        if self.epochs.fits(members):
            self._accepted(now)
            return
        self._enter(Phase.LEAVE, now)
        self.epochs.close(self._stamp())
        seconds = self.config.deadlines.release * _ORDER_SHARE
        for member in self._present():
            self._tell_to_leave(member, seconds)
            member.owes = Left if member.node.holds else None
        self._advance(now)

    def _left(self, member: Participant, name: str, now: float) -> bool:
        if name not in member.node.holds:
            return False
        member.node.holds.discard(name)
        if member.owes is Left and not member.node.holds:
            member.owes = None
            self._advance(now)
        return True

    def _open(self, now: float) -> None:
        if self.phase is not Phase.OPEN:
            self._enter(Phase.OPEN, now)
        if not self.epochs.ready:
            return
        members = tuple(member.node.as_member() for member in self._present())
        try:
            self.epochs.open(members, self._stamp(), self.config.deadlines.join * _ORDER_SHARE)
        except InvalidRanks as error:
            self.fail(Cause(code="incompatible", message=str(error)), now)

    def _join(self, now: float) -> None:
        group = self.epochs.group
        if group is None:
            return
        self.phase = Phase.JOIN  # one deadline covers the store and the joining
        self.epoch = group.epoch
        for member in self._present():
            member.disturbed = True
            # Held from now on, answered or not: a join whose answer is lost may still have happened.
            member.node.holds.add(group.name)
            order = Join(
                **self._stamp(),
                group_name=group.name,
                master_address=self.config.advertise,
                master_port=group.port,
                rank_offset=group.ranks.offsets[member.name],
                world_size=group.ranks.world_size,
                backend=group.backend,
                timeout_seconds=self.config.deadlines.join * _ORDER_SHARE,
            )
            self._ask(member, order, Joined)

    def _accepted(self, now: float) -> None:
        self.epoch = self.epochs.epoch
        self.joined_at = now
        self._tell_trainer(RefitAccepted(**self._trainer_stamp(), nodes=tuple(self.participants)))
        self._enter(Phase.PACK, now)
        if self.ledger.packed:
            self._prepare(now)

    def _prepare(self, now: float) -> None:
        self._enter(Phase.PREPARE, now)
        seconds = self.config.deadlines.prepare * _ORDER_SHARE
        order = Prepare(**self._stamp(), pause_mode=self.config.pause_mode, timeout_seconds=seconds)
        for member in self._present():
            member.disturbed = True
            member.node.state = NodeState.REFITTING
            self._ask(member, order, Prepared)

    def _stream(self, now: float) -> None:
        self._enter(Phase.STREAM, now)
        limits = self.config.deadlines
        # A node waits for a bucket from the moment it loaded the one before, so its deadline has to leave
        # the trainer its own time to pack. The machine's deadlines are the tight ones.
        timeouts = tuple(limits.pack + limits.bucket_seconds(nbytes) for nbytes in self.ledger.nbytes)
        order = Stream(**self._stamp(), bucket_timeouts=timeouts)
        for member in self._present():
            self.still_loading.add(member.name)
            member.loaded_at = now
            self._tell(member, order)
        plans = SetChecksumPlans(**self._stamp(), layout=self.begin.layout, plans=tuple(self._plans))
        self._out.append(TellSource(message=plans))
        self._broadcast_packed(now)

    def _broadcast_packed(self, now: float) -> None:
        try:
            for order in self.ledger.orders(self.epochs.attached, now):
                message = BroadcastBucket(
                    **self._stamp(),
                    bucket=order.bucket,
                    slot=order.slot,
                    nbytes=order.nbytes,
                    timeout_seconds=self.config.deadlines.bucket_seconds(order.nbytes) * _ORDER_SHARE,
                )
                self._out.append(TellSource(message=message))
        except ProtocolError as error:
            self.fail(Cause(code="protocol", message=str(error), bucket=self.ledger.ordered), now)

    def _bucket_sent(self, message: BucketSent, now: float) -> bool:
        if self.phase is not Phase.STREAM or not self.ledger.take_sent(message, now):
            return False
        self._tell_trainer(Credit(**self._trainer_stamp(), slot=message.slot, bucket=message.bucket))
        self._broadcast_packed(now)
        self._advance(now)
        return True

    def _bucket_loaded(self, member: Participant, message: BucketLoaded, now: float) -> bool:
        if self.phase is not Phase.STREAM or message.bucket != member.loaded:
            return False
        # It may run ahead of the source: under NCCL an engine answers when its receive is queued on the
        # stream, before any byte was sent. The refit goes on only when the source has sent everything too.
        member.touched = True
        member.loaded += 1
        member.loaded_at = now
        member.load_seconds += message.seconds
        if member.loaded == self.ledger.total:
            self.still_loading.discard(member.name)
            self._advance(now)
        return True

    def _finish(self, now: float) -> None:
        self._enter(Phase.FINISH, now)
        digests = self.ledger.digests()
        seconds = self.config.deadlines.finish * _ORDER_SHARE
        for member in self._present():
            values: tuple[str, ...] = ()
            if member.plan is not None and self._checksums is not None:
                values = self._checksums[member.plan]
            order = Finish(**self._stamp(), digests=digests, checksums=values, timeout_seconds=seconds)
            self._ask(member, order, Verified)

    def _release(self, now: float) -> None:
        self._enter(Phase.RELEASE, now)
        evidences = {
            member.name: member.verified.evidence for member in self._present() if member.verified is not None
        }
        self._digests = self.ledger.digests_by_name()
        verdicts = judge(
            evidences,
            digests=self._digests,
            before={member.name: member.node.proof for member in self._present() if member.node.proof},
            allow_unproven=self.config.allow_unproven,
        )
        seconds = self.config.deadlines.release * _ORDER_SHARE
        for member in self._present():
            unfit = member.take_verdict(verdicts.get(member.name))
            if unfit is None:
                self._ask(member, Release(**self._stamp(), timeout_seconds=seconds), Released)
            else:
                self._causes.append(unfit)
                self._ask(member, Abort(**self._stamp(), cause=unfit, timeout_seconds=seconds), Aborted)
        self._advance(now)

    def _take_released(self, member: Participant, message: Released) -> None:
        if message.label == self.version.label:
            member.released = message
            return
        text = f"the engine shows weight version {message.label!r} where {self.version.label!r} was set"
        member.cause = Cause(code="release_failed", message=text, node=member.name)
        self._causes.append(member.cause)

    def _stage_failed(self, member: Participant, message: StageFailed, now: float) -> bool:
        member.touched = member.touched or message.touched
        if message.stage == "leave":
            # SGLang drops the name first and destroys then: either way the engine no longer has the group.
            member.node.holds.clear()
            if member.owes is Left:
                member.owes = None
                self._advance(now)
            return True
        if self.phase is Phase.ABORT:
            # The order that was in hand when the abort went out: evidence of the root cause, no answer to it.
            member.cause = member.cause or message.cause
            self._causes.append(message.cause)
            return True
        if self.phase is not Phase.STREAM and member.owes is None:
            return False
        member.owes = None
        member.cause = message.cause
        self.fail(message.cause, now)
        self._advance(now)
        return True

    # --- the end -----------------------------------------------------------------------------------

    def _abort(self, cause: Cause, now: float) -> None:
        group_in_doubt = self.phase in (Phase.OPEN, Phase.JOIN) or self.ledger.ordered > 0
        if group_in_doubt and self.epochs.group is not None:
            self.epochs.poison(f"epoch {self.epochs.epoch} is poisoned: {cause.message}")
        self._enter(Phase.ABORT, now)
        self.still_loading.clear()
        seconds = self.config.deadlines.release * _ORDER_SHARE
        for member in self._present():
            self._ask(member, Abort(**self._stamp(), cause=cause, timeout_seconds=seconds), Aborted)
            if group_in_doubt:
                # gloo passes a broadcast on from receiver to receiver: one that failed must drop its
                # connections, or the one behind it waits for torch's own time-out, deaf to everything.
                self._tell_to_leave(member, seconds)
        self._advance(now)

    def _tell_to_leave(self, member: Participant, seconds: float) -> None:
        member.node.holds -= self.epochs.abandoned
        for name in sorted(member.node.holds):
            self._tell(member, Leave(**self._stamp(), group_name=name, timeout_seconds=seconds))

    def _done(self, now: float) -> None:
        self._enter(Phase.DONE, now)
        cause = root_cause(self._causes)
        for member in self.participants.values():
            if member.released is not None and not member.gone:
                member.become_ready(self.version, self._digests)
            else:
                member.settle_unreleased(cause or Cause(code="internal", message="nobody said why"))
        self.report = write_report(
            version=self.version,
            epoch=self.epoch,
            ledger=self.ledger,
            participants=self.participants.values(),
            cause=cause,
            join_seconds=0.0 if self.joined_at is None else self.joined_at - self.started,
            total_seconds=now - self.started,
        )
        self._tell_trainer(RefitFinished(**self._trainer_stamp(), report=self.report))
        self._out.append(RefitEnded(report=self.report))

    # --- small tools -------------------------------------------------------------------------------

    def _present(self) -> list[Participant]:
        return [member for member in self.participants.values() if not member.gone]

    def owing(self) -> list[Participant]:
        return [member for member in self.participants.values() if member.owes is not None]

    def _is_mine(self, message: Message) -> bool:
        return message.refit == self.number and message.incarnation in ("", self._incarnation)

    def _ask(self, member: Participant, order: ToNode, answer: type[Message]) -> None:
        member.owes = answer
        self._tell(member, order)

    def _tell(self, member: Participant, order: ToNode) -> None:
        member.asked_epoch = order.epoch
        self._out.append(TellNode(peer=member.node.peer, message=order))

    def _tell_trainer(self, message: ToTrainer) -> None:
        if self.trainer is not None:
            self._out.append(TellTrainer(peer=self.trainer, message=message))

    def _stamp(self) -> dict[str, Any]:
        return {
            "job": self.config.job,
            "incarnation": self._incarnation,
            "epoch": self.epoch,
            "refit": self.number,
        }

    def _trainer_stamp(self) -> dict[str, Any]:
        return {**self._stamp(), "incarnation": self.begin.incarnation, "refit": self.begin.refit}
