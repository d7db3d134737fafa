"""Every decision of the broadcaster, without I/O: ``handle(event, now)`` returns the actions to carry out.

Nothing here reads a clock, a socket or a random number, so a whole fleet with its crashes can be run in
simulated time, and what went wrong once goes wrong again.

One trainer is attached at a time, one refit runs at a time. A trainer that comes back after a crash is
served as soon as the refit of the life before is over.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from ..proto.config import BroadcasterConfig
from ..proto.errors import Cause, InvalidLayout
from ..proto.layout import check_layout
from ..proto.messages import (
    PROTOCOL_VERSION,
    BucketPacked,
    FromTrainer,
    Goodbye,
    Heartbeat,
    Leave,
    Left,
    Message,
    RefitBegin,
    RefitCancel,
    RefitReport,
    Register,
    Rejected,
    SlotAttached,
    SlotRetired,
    SourceFailed,
    SourceReady,
    StageFailed,
    TrainerGoodbye,
    TrainerHello,
    TrainerRejected,
    TrainerWelcome,
    Version,
    Waiting,
    Welcome,
)
from .epochs import Epochs
from .events import (
    Action,
    DropSlot,
    DropTrainer,
    Ended,
    Event,
    ListenForSlots,
    NodeSaid,
    NodeUnreachable,
    SlotReceived,
    SourceExited,
    SourceSaid,
    Stop,
    TellNode,
    TellTrainer,
    Tick,
    TrainerLinkClosed,
    TrainerLinked,
    TrainerSaid,
)
from .fleet import Fleet, Node
from .lateness import name_receivers
from .refit import Refit

#: Agents beat this many times within the time after which silence means lost.
_BEATS_PER_SILENCE = 5
#: Seconds an ending broadcaster waits for nodes to leave the group.
_FAREWELL_SECONDS = 5.0


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The attached trainer. ``slots``: number → bytes, as received over its slot link."""

    peer: bytes
    incarnation: str
    pid: int
    link_due: float
    linked: bool = False
    slots: dict[int, int] = field(default_factory=dict)


class Machine:
    """The broadcaster's state. ``incarnation`` names this life of it; ``run_dir`` holds its local sockets."""

    def __init__(self, *, config: BroadcasterConfig, incarnation: str, run_dir: str) -> None:
        self.config = config
        self.fleet = Fleet(silence_seconds=config.deadlines.heartbeat)
        self.trainer: Trainer | None = None
        self.refit: Refit | None = None
        self.last_report: RefitReport | None = None
        self.ignored_messages = 0
        self.bytes_sent = 0
        self._out: list[Action] = []
        self.epochs = Epochs(config=config, incarnation=incarnation, out=self._out)
        self._incarnation = incarnation
        self._run_dir = run_dir
        self._waiting: Refit | None = None
        self._committed: Version | None = None
        self._refits = self._links = 0
        self._farewell_due: float | None = None
        self._stopping = self._ended = False

    def start(self) -> list[Action]:
        """The first actions: the source takes seconds to load torch, so it is started at once."""
        self.epochs.start()
        return self._take_out()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at time ``now`` (seconds, never going back) and return what is to be done."""
        match event:
            case NodeSaid(peer=peer, message=message):
                self._node_said(peer, message, now)
            case NodeUnreachable(peer=peer):
                self.fleet.forget_expected(peer)
                node = self.fleet.by_peer(peer)
                if node is not None and node.alive:
                    self.fleet.lose(node, "its agent's connection is gone")
                    self._node_gone(node, now)
            case TrainerSaid(peer=peer, message=message):
                self._trainer_said(peer, message, now)
            case TrainerLinked(peer=peer):
                if self.trainer is not None and self.trainer.peer == peer:
                    self.trainer.linked = True
            case SlotReceived(peer=peer, slot=slot, nbytes=nbytes):
                if self.trainer is not None and self.trainer.peer == peer:
                    self.trainer.slots[slot] = nbytes
            case TrainerLinkClosed(peer=peer, reason=reason):
                if self.trainer is not None and self.trainer.peer == peer:
                    self._trainer_gone(reason, now)
            case SourceSaid(generation=generation, message=message):
                self._source_said(generation, message, now)
            case SourceExited(generation=generation, reason=reason):
                self._source_exited(generation, reason, now)
            case Tick():
                self._tick(now)
            case Stop():
                self._stop(now)
        self._settle(now)
        return self._take_out()

    def next_deadline(self) -> float | None:
        """When `handle` must be called with a `Tick` at the latest, if nothing else happens."""
        dues = [self.fleet.next_loss(), self.epochs.retry_at, self._farewell_due]
        if self.refit is not None:
            dues.append(self.refit.due())
        if self.trainer is not None and not self.trainer.linked:
            dues.append(self.trainer.link_due)
        return min((due for due in dues if due is not None), default=None)

    # --- nodes -------------------------------------------------------------------------------------

    def _node_said(self, peer: bytes, message: Any, now: float) -> None:
        if isinstance(message, Register):
            self._register(peer, message, now)
            return
        if isinstance(message, Waiting):
            if self._refuse_stranger(message) is None:
                self.fleet.expect(
                    peer=peer, name=message.name, engine_url=message.engine_url, cause=message.cause
                )
            return
        if isinstance(message, Heartbeat):
            node = self.fleet.heard(peer=peer, instance=message.instance, doing=message.doing, now=now)
            if node is None:
                self.ignored_messages += 1
            return
        node = self.fleet.by_peer(peer)
        if node is None or message.job != self.config.job:
            self.ignored_messages += 1
        elif isinstance(message, Goodbye):
            if message.instance != node.info.instance:
                self.ignored_messages += 1
                return
            self.fleet.leave(node)
            self._node_gone(node, now)
        elif isinstance(message, Left) and self.refit is None:
            node.holds.discard(message.group_name)
        elif isinstance(message, StageFailed) and self._farewell_due is not None:
            node.holds.clear()
        elif self.refit is None or not self.refit.node_said(node, message, now):
            self.ignored_messages += 1

    def _register(self, peer: bytes, message: Register, now: float) -> None:
        refusal = self._refuse_stranger(message)
        if refusal is None:
            before = self.fleet.nodes.get(message.node.name)
            result = self.fleet.register(peer=peer, info=message.node, now=now)
            refusal = result.refusal
            if result.restarted and before is not None:
                before.cause = Cause(
                    code="node_down", message="its agent or engine was restarted", node=before.name
                )
                self._node_gone(before, now)
        if refusal is not None:
            self._out.append(TellNode(peer=peer, message=Rejected(job=self.config.job, cause=refusal)))
            return
        seconds = self.config.deadlines.heartbeat / _BEATS_PER_SILENCE
        welcome = Welcome(
            job=self.config.job,
            incarnation=self._incarnation,
            heartbeat_seconds=seconds,
            life=self._incarnation,
        )
        self._out.append(TellNode(peer=peer, message=welcome))
        if self.refit is not None:
            self.refit.fleet_changed(now)

    def _node_gone(self, node: Node, now: float) -> None:
        cause = node.cause or Cause(code="node_down", message="it is gone", node=node.name)
        if self.refit is not None:
            self.refit.node_gone(node, cause, now)
        group = self.epochs.group
        if group is not None and node.as_member() in group.members:
            # Its rank is dead or may be: no collective of this group can be trusted to end.
            self.epochs.poison(f"node {node.name!r} left epoch {group.epoch}: {cause.message}")

    # --- trainer -----------------------------------------------------------------------------------

    def _trainer_said(self, peer: bytes, message: FromTrainer, now: float) -> None:
        if isinstance(message, TrainerHello):
            self._hello(peer, message, now)
            return
        trainer = self.trainer
        if trainer is None or trainer.peer != peer or message.incarnation != trainer.incarnation:
            if isinstance(message, RefitBegin):
                text = "this broadcaster does not know the trainer (it may have restarted); say hello first"
                self._reject(peer, message, Cause(code="protocol", message=text))
            else:
                self.ignored_messages += 1
            return
        match message:
            case RefitBegin():
                self._begin(trainer, message, now)
            case TrainerGoodbye():
                self._trainer_gone("it said goodbye", now)
            case SlotRetired(slot=slot):
                if trainer.slots.pop(slot, None) is not None:
                    self.epochs.forget_slot(slot, {"job": self.config.job, "incarnation": self._incarnation})
                    self._out.append(DropSlot(slot=slot))
            case BucketPacked() | RefitCancel():
                refit = self._refit_of(message)
                if refit is None:
                    self.ignored_messages += 1
                elif isinstance(message, BucketPacked):
                    self.ignored_messages += not refit.bucket_packed(message, now)
                else:
                    self.ignored_messages += not refit.cancel(message.cause, now)

    def _hello(self, peer: bytes, message: TrainerHello, now: float) -> None:
        refusal = self._refuse_stranger(message)
        if refusal is None and self.trainer is not None and self.trainer.peer != peer:
            text = (
                f"trainer process {self.trainer.pid} is attached to this broadcaster; "
                "end it first, or give this job a broadcaster of its own"
            )
            refusal = Cause(code="busy", message=text)
        if refusal is not None:
            self._reject(peer, message, refusal)
            return
        if self.trainer is not None:
            self._trainer_gone("it attached anew", now)
        self._links += 1
        path = os.path.join(self._run_dir, f"slots-{self._links}.sock")  # noqa: PTH118
        self.trainer = Trainer(
            peer=peer,
            incarnation=message.incarnation,
            pid=message.pid,
            link_due=now + self.config.deadlines.heartbeat,
        )
        self._out.append(ListenForSlots(peer=peer, path=path))
        welcome = TrainerWelcome(
            job=self.config.job,
            incarnation=message.incarnation,
            slots_path=path,
            refit_seconds=self.config.deadlines.refit,
        )
        self._out.append(TellTrainer(peer=peer, message=welcome))

    def _begin(self, trainer: Trainer, message: RefitBegin, now: float) -> None:
        running = self._refit_of(message)
        if running is not None:
            self.ignored_messages += 1
            return
        refusal = self._refuse_refit(trainer, message)
        if refusal is not None:
            self._reject(trainer.peer, message, refusal)
            return
        self._refits += 1
        refit = Refit(
            number=self._refits,
            trainer=trainer.peer,
            begin=message,
            config=self.config,
            incarnation=self._incarnation,
            fleet=self.fleet,
            epochs=self.epochs,
            out=self._out,
            now=now,
        )
        if self.refit is not None:
            self._waiting = refit
            return
        self.refit = refit
        refit.start(now)

    def _refuse_refit(self, trainer: Trainer, message: RefitBegin) -> Cause | None:
        if self._stopping:
            return Cause(code="broadcaster_lost", message="the broadcaster is ending")
        if self._waiting is not None or (self.refit is not None and self.refit.trainer == trainer.peer):
            return Cause(code="busy", message="a refit of this trainer is still running; wait for its report")
        committed = self._committed
        floor = self.fleet.newest_step(message.incarnation)
        if committed is not None and committed.incarnation == message.incarnation:
            # The whole fleet has it: installing it again cannot be meant. (After a partial failure the same
            # step may be sent again, to heal the nodes that missed it.)
            floor = max(floor or 0, committed.step + 1)
        if floor is not None and message.step < floor:
            text = f"step {message.step} is not newer than what the fleet holds; send step {floor} or later"
            return Cause(code="stale_version", message=text)
        try:
            check_layout(message.layout)
        except InvalidLayout as error:
            return Cause(code="invalid_layout", message=str(error))
        return None

    def _refit_of(self, message: Message) -> Refit | None:
        for refit in (self.refit, self._waiting):
            if (
                refit is not None
                and refit.trainer is not None
                and refit.begin.refit == message.refit
                and refit.begin.incarnation == message.incarnation
            ):
                return refit
        return None

    def _trainer_gone(self, reason: str, now: float) -> None:
        trainer = self.trainer
        if trainer is None:
            return
        self.trainer = None
        cause = Cause(code="trainer_lost", message=f"trainer process {trainer.pid} is gone: {reason}")
        self._waiting = None
        if self.refit is not None and self.refit.trainer == trainer.peer:
            self.refit.trainer = None
            if self.refit.needs_trainer:
                self.refit.fail(cause, now)
        for slot in trainer.slots:
            self.epochs.forget_slot(slot, {"job": self.config.job, "incarnation": self._incarnation})
        self._out.append(DropTrainer(peer=trainer.peer))

    def _reject(self, peer: bytes, message: Message, cause: Cause) -> None:
        answer = TrainerRejected(
            job=self.config.job, incarnation=message.incarnation, refit=message.refit, cause=cause
        )
        self._out.append(TellTrainer(peer=peer, message=answer))

    # --- source ------------------------------------------------------------------------------------

    def _source_said(self, generation: int, message: Any, now: float) -> None:
        if generation != self.epochs.generation:
            self.ignored_messages += 1
            return
        match message:
            case SourceReady(device=device):
                self.epochs.source_ready(device)
            case SlotAttached(slot=slot, nbytes=nbytes):
                self.epochs.attached[slot] = nbytes
            case SourceFailed(cause=cause):
                self._source_failed(cause, now)
                return
            case _:
                sent_before = 0 if self.refit is None else self.refit.ledger.bytes_sent
                if self.refit is None or not self.refit.source_said(message, now):
                    self.ignored_messages += 1
                else:
                    self.bytes_sent += self.refit.ledger.bytes_sent - sent_before
                return
        if self.refit is not None:
            self.refit.source_changed(now)

    def _source_failed(self, cause: Cause, now: float) -> None:
        generation = self.epochs.generation
        if self.refit is not None:
            self.refit.fail(name_receivers(self.refit, cause), now)
        if self.epochs.generation == generation:
            self.epochs.poison(cause.message)

    def _source_exited(self, generation: int, reason: str, now: float) -> None:
        cause = Cause(code="source_lost", message=f"the source process ended: {reason}")
        if generation != self.epochs.generation:
            if self.refit is not None:
                self.refit.learn(cause)
            return
        had_group = self.epochs.group is not None
        self.epochs.source_ended(reason, now)
        if had_group and self.refit is not None and self.refit.needs_source:
            self.refit.fail(cause, now)

    # --- time and end ------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        for node in self.fleet.lose_silent(now):
            self._node_gone(node, now)
        if self.trainer is not None and not self.trainer.linked and now >= self.trainer.link_due:
            self._trainer_gone("it never opened its slot link", now)
        if self.epochs.retry_at is not None and now >= self.epochs.retry_at:
            self.epochs.start()
        if self.refit is not None:
            self.refit.expire(now)

    def _stop(self, now: float) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._waiting = None
        if self.refit is not None:
            self.refit.cancel(Cause(code="broadcaster_lost", message="the broadcaster was told to end"), now)

    def _settle(self, now: float) -> None:
        while self.refit is not None and self.refit.over:
            self.last_report = self.refit.report
            if self.last_report is not None and self.last_report.ok:
                self._committed = self.refit.version
            self.refit, self._waiting = self._waiting, None
            if self.refit is not None and not self.refit.over:
                self.refit.start(now)
        if self._stopping and self.refit is None and not self._ended:
            self._bid_farewell(now)

    def _bid_farewell(self, now: float) -> None:
        """Leave the group everywhere, so that engines keep nothing of a broadcaster that is gone."""
        if self._farewell_due is None:
            seconds = min(_FAREWELL_SECONDS, self.config.deadlines.release)
            self._farewell_due = now + seconds
            stamp: dict[str, Any] = {
                "job": self.config.job,
                "incarnation": self._incarnation,
                "epoch": self.epochs.epoch,
            }
            self.epochs.close(stamp)
            for node in self.fleet.alive():
                node.holds -= self.epochs.abandoned
                for name in sorted(node.holds):
                    order = Leave(**stamp, group_name=name, timeout_seconds=seconds)
                    self._out.append(TellNode(peer=node.peer, message=order))
        if now >= self._farewell_due or not any(node.holds for node in self.fleet.alive()):
            self._ended, self._farewell_due = True, None
            self._out.append(Ended())

    def _refuse_stranger(self, message: Message) -> Cause | None:
        if message.protocol != PROTOCOL_VERSION:
            text = (
                f"this broadcaster speaks protocol {PROTOCOL_VERSION}, the peer {message.protocol}; "
                "install the same weightcast on both sides"
            )
            return Cause(code="protocol", message=text)
        if message.job != self.config.job:
            text = f"this broadcaster serves job {self.config.job!r}, not {message.job!r}"
            return Cause(code="incompatible", message=text)
        return None

    def _take_out(self) -> list[Action]:
        actions = list(self._out)
        self._out.clear()
        return actions
