"""A node inside one refit, and the report made from all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..proto.errors import Cause
from ..proto.messages import (
    Aborted,
    LayoutRefused,
    Message,
    NodeReport,
    NodeState,
    PhaseSeconds,
    Prepared,
    RefitReport,
    Released,
    Verified,
    Version,
)
from .buckets import BucketLedger
from .fleet import Node
from .verdict import Proof, Verdict

#: Tensors that a refusal names.
_SHOWN_PROBLEMS = 10
#: Codes that are often the echo of another fault: when one rank dies, its peers and the source fail too,
#: and whose word arrives first is chance. Higher is more of an echo.
_ECHO = {"deadline": 1, "bucket_failed": 2, "join_failed": 2, "broadcast_failed": 3}


def root_cause(causes: Iterable[Cause]) -> Cause | None:
    """The cause that most likely led to the others; among equals the first that was heard."""
    return min(causes, key=lambda cause: _ECHO.get(cause.code, 0), default=None)


def explain_refusal(name: str, refused: LayoutRefused) -> Cause:
    """Cause of a refit whose tensors one engine cannot take: the first problems, tensor by tensor."""
    shown = refused.problems[:_SHOWN_PROBLEMS]
    words = "; ".join(
        f"{problem.kind} {problem.name}"
        f" (sent {problem.sent or 'nothing'}, the engine has {problem.expected or 'nothing'})"
        for problem in shown
    )
    more = refused.total - len(shown)
    message = f"{refused.total} tensors do not fit the engine: {words}" + (
        f"; and {more} more" if more else ""
    )
    return Cause(code="layout_mismatch", message=message, node=name)


@dataclass(slots=True, kw_only=True)
class Participant:
    """One node in one refit: what it owes, what it answered, what became of it."""

    node: Node
    was: NodeState
    #: The answer it owes, and the epoch its order was stamped with.
    owes: type[Message] | None = None
    asked_epoch: int = 0
    #: Lost, ended or replaced by another instance since the refit began.
    gone: bool = False
    #: It was told to join or to pause: without a good answer nobody knows that it serves.
    disturbed: bool = False
    #: Bytes of the new version may be in its engine.
    touched: bool = False
    plan: int | None = None
    loaded: int = 0
    loaded_at: float = 0.0
    load_seconds: float = 0.0
    prepared: Prepared | None = None
    verified: Verified | None = None
    verdict: Verdict | None = None
    released: Released | None = None
    aborted: Aborted | None = None
    cause: Cause | None = None

    @property
    def name(self) -> str:
        return self.node.name

    def take_verdict(self, verdict: Verdict | None) -> Cause | None:
        """Note the verdict (None if it was never verified); why it must not serve, or None if it may."""
        self.verdict = verdict
        if verdict is not None and self.cause is None:
            self.cause = verdict.cause
        if verdict is None and self.cause is None:
            return Cause(code="finish_failed", message="it was not verified", node=self.name)
        return self.cause

    def become_ready(self, version: Version, digests: Mapping[str, int]) -> None:
        """It was shown to hold ``version``, shows its label, and serves."""
        self.node.state, self.node.version, self.node.cause = NodeState.READY, version, None
        shown = self.verified.evidence.fingerprint if self.verified is not None else ""
        self.node.proof = Proof(digests=digests, fingerprint=shown)

    def settle_unreleased(self, cause: Cause) -> None:
        """The refit ended without releasing it: back to what it was if that is certain, else quarantined."""
        if self.gone:
            return
        answer = self.aborted
        untouched = not self.touched and (
            (answer is not None and answer.serving) or (answer is None and not self.disturbed)
        )
        if untouched or (not self.touched and self.was is NodeState.QUARANTINED):
            self.node.state = self.was
            return
        if self.cause is None:
            detail = f": {answer.detail}" if answer is not None and answer.detail else ""
            why = (
                "it may hold part of a version that nobody verified"
                if self.touched
                else f"it could not be shown to serve again{detail}"
            )
            message = f"{why}; paused until the next whole refit. The refit failed: {cause.message}"
            self.cause = Cause(code=cause.code, message=message, node=self.name, epoch=cause.epoch)
        self.node.state, self.node.version, self.node.cause = NodeState.QUARANTINED, None, self.cause
        self.node.proof = None

    def report(self, version: Version) -> NodeReport:
        """What became of it, for the trainer."""
        evidence = self.verified.evidence if self.verified is not None else None
        if self.gone:
            outcome = "lost"
        elif self.node.state is NodeState.READY and self.node.version == version:
            outcome = "ready"
        elif self.node.state is NodeState.QUARANTINED:
            outcome = "quarantined"
        else:
            outcome = "unchanged"
        holds = None if self.gone or self.node.version is None else self.node.version.step
        return NodeReport(
            outcome=outcome,
            version=holds,
            digest=self.verdict.digest if self.verdict is not None else "none",
            evidence="" if evidence is None else f"{evidence.kind} {evidence.compared}/{evidence.total}",
            pause_seconds=self.released.paused_seconds if self.released is not None else 0.0,
            load_seconds=self.load_seconds,
            cause=self.cause,
        )


def write_report(
    *,
    version: Version,
    epoch: int,
    ledger: BucketLedger,
    participants: Iterable[Participant],
    cause: Cause | None,
    join_seconds: float,
    total_seconds: float,
) -> RefitReport:
    """The report of a refit that is over. It is ok only if there are nodes and every one is ready."""
    members = list(participants)
    nodes = {member.name: member.report(version) for member in members}
    ok = bool(nodes) and all(report.outcome == "ready" for report in nodes.values())
    verified = [member.verified for member in members if member.verified is not None]
    released = [member.released for member in members if member.released is not None]
    slowest_load = max((member.load_seconds for member in members), default=0.0)
    seconds = PhaseSeconds(
        gather=sum(message.gather_seconds for message in ledger.packed),
        pack=sum(message.pack_seconds for message in ledger.packed),
        join=join_seconds,
        pause=max((answer.paused_seconds for answer in released), default=0.0),
        wire=ledger.wire_seconds,
        load=max(0.0, slowest_load - ledger.wire_seconds),
        flush=max((answer.flush_seconds for answer in verified), default=0.0),
        verify=max((answer.verify_seconds for answer in verified), default=0.0),
        resume=max((answer.resume_seconds for answer in released), default=0.0),
        total=total_seconds,
    )
    return RefitReport(
        ok=ok,
        version=version.step,
        label=version.label,
        incarnation=version.incarnation,
        epoch=epoch,
        bytes=ledger.bytes_sent,
        tensors=len(ledger.layout.tensors),
        buckets=ledger.total,
        seconds=seconds,
        wire_rate=ledger.bytes_sent / ledger.wire_seconds if ledger.wire_seconds > 0 else 0.0,
        nodes=nodes,
        cause=None if ok else cause,
    )
