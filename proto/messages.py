"""Control messages: msgspec structs, tagged, versioned, msgpack over ZeroMQ.

Who speaks to whom, and in which order on the good path:

    trainer                    control                         node agents            source
    TrainerHello      ──────►
                      ◄──────  TrainerWelcome                  Register      ──────►
    (slots over a Unix socket ─────────────────────────────────────────────────────►  SlotAttached)
    RefitBegin        ──────►  Propose                ──────►
                               ◄──────  LayoutAccepted | LayoutRefused
                               OpenGroup ─────────────────────────────────────────►
                               ◄─────────────────────────────────────────  StoreOpened
                               Join                   ──────►
                               ◄──────  Joined                 ◄─────────  GroupReady
                      ◄──────  RefitAccepted
    BucketPacked      ──────►  Prepare                ──────►               (once the first is packed)
                               ◄──────  Prepared
                               Stream                 ──────►
                               BroadcastBucket ───────────────────────────────────►   (each as it is packed)
                      ◄──────  Credit                          ◄─────────  BucketSent
                               ◄──────  BucketLoaded
                               Finish                 ──────►               (all loaded)
                               ◄──────  Verified
                               Release                ──────►
                               ◄──────  Released
                      ◄──────  RefitFinished(report)

Instead of its good answer a node sends `StageFailed`, the source `SourceFailed`. `Abort` ends a refit on
a node: it closes the session and resumes the engine only if no byte of the new version was loaded.

This module imports no torch, so control processes start fast and can be simulated by the thousand.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec.msgpack import Decoder

from .checksums import ChecksumPlan
from .errors import Cause
from .layout import Layout

#: Version of this contract. A peer with another one is told so and not listened to.
PROTOCOL_VERSION = 1


class PauseMode(StrEnum):
    """How an engine is paused; the words are SGLang's ``/pause_generation`` modes."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class NodeState(StrEnum):
    """Where a rollout node stands.

    joining → idle → refitting → ready | quarantined;  any → lost (agent silent) → joining (comes back)
    """

    #: Known by name, not (or no longer) registered.
    JOINING = "joining"
    #: Registered; serves whatever it was started with, which nothing has verified.
    IDLE = "idle"
    #: In a refit; paused or about to be.
    REFITTING = "refitting"
    #: Holds a verified version.
    READY = "ready"
    #: Must not serve: paused until a whole verified refit.
    QUARANTINED = "quarantined"
    #: Silent for longer than the heartbeat deadline.
    LOST = "lost"


class Version(msgspec.Struct, frozen=True):
    """What a refit installs. ``label`` is the string that the engine shows as its weight version."""

    incarnation: str
    step: int
    label: str


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every message carries. ``epoch`` and ``refit`` are 0 outside a group and a refit."""

    job: str
    protocol: int = PROTOCOL_VERSION
    incarnation: str = ""
    epoch: int = 0
    refit: int = 0


# --- node agent → control ------------------------------------------------------------------------


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself. ``instance`` is new whenever the agent or the engine restarted."""

    name: str
    instance: str
    engine_url: str
    #: "sglang" or "reference".
    engine: str
    engine_version: str
    model: str
    architecture: str
    dtype: str
    tp_size: int
    pp_size: int = 1
    dp_size: int = 1
    #: Weight version the engine shows now.
    label: str = "default"
    #: Generation is paused: the agent before this one died in a refit, or an operator paused it.
    paused: bool = False


class Register(Message, frozen=True, kw_only=True, tag="register"):
    node: NodeInfo


class Waiting(Message, frozen=True, kw_only=True, tag="waiting"):
    """The agent is there, its engine is not (yet): sent instead of `Register`, again with each new reason."""

    name: str
    engine_url: str
    cause: Cause


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent every ``Welcome.heartbeat_seconds``, from a task that never waits behind payload."""

    instance: str
    #: What the agent is doing, as "idle" or "bucket 3 of 49".
    doing: str = "idle"


class LayoutProblem(msgspec.Struct, frozen=True, array_like=True):
    """One tensor the engine cannot take as sent. ``kind``: unknown, missing, shape or dtype."""

    kind: str
    name: str
    sent: str = ""
    expected: str = ""


class LayoutAccepted(Message, frozen=True, kw_only=True, tag="layout_accepted"):
    """``plan`` lists checksums of this engine that can be computed from the trainer's bytes (or none).

    ``checked`` is False where the engine gave no way to learn its names and shapes beforehand.
    """

    plan: ChecksumPlan | None = None
    checked: bool = True


class LayoutRefused(Message, frozen=True, kw_only=True, tag="layout_refused"):
    """The first problems, at most 50 of ``total``."""

    problems: tuple[LayoutProblem, ...]
    total: int


class Joined(Message, frozen=True, kw_only=True, tag="joined"):
    seconds: float


class Prepared(Message, frozen=True, kw_only=True, tag="prepared"):
    """The engine is paused (checked) and its update session is open."""

    pause_seconds: float
    begin_seconds: float


class BucketLoaded(Message, frozen=True, kw_only=True, tag="bucket_loaded"):
    """``seconds`` is the engine's whole call: waiting for the bytes, receiving and loading them."""

    bucket: int
    seconds: float


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine was shown to hold.

    ``compared`` of ``total`` parameters were compared with the trainer's bytes; ``mismatches`` names the
    first that differ. ``fingerprint`` is equal on two nodes of equal ``group`` (same model, same sharding)
    if and only if they hold the same bytes.
    """

    kind: str
    compared: int
    total: int
    mismatches: tuple[str, ...] = ()
    fingerprint: str = ""
    group: str = ""


class Verified(Message, frozen=True, kw_only=True, tag="verified"):
    evidence: Evidence
    end_seconds: float
    flush_seconds: float
    verify_seconds: float


class Released(Message, frozen=True, kw_only=True, tag="released"):
    """The engine shows ``label`` (read back) and generates again, ``paused_seconds`` after its pause."""

    label: str
    resume_seconds: float
    paused_seconds: float


class StageFailed(Message, frozen=True, kw_only=True, tag="stage_failed"):
    """The order in hand failed. ``touched``: bytes of the new version may be in the engine."""

    stage: str
    cause: Cause
    touched: bool


class Aborted(Message, frozen=True, kw_only=True, tag="aborted"):
    """Answer to `Abort`. ``serving``: the engine generates again, with its old, whole version."""

    touched: bool
    serving: bool
    detail: str = ""


class Left(Message, frozen=True, kw_only=True, tag="left"):
    """Answer to `Leave`: the engine is no longer a member of ``group_name``."""

    group_name: str


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """The agent ends in an orderly way; its engine keeps its state."""

    instance: str


# --- control → node agent ------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The node is registered. ``life`` names this broadcaster: a refit begun under another is dead."""

    heartbeat_seconds: float
    life: str = ""


class Rejected(Message, frozen=True, kw_only=True, tag="rejected"):
    """The registration is refused and stays so until something named in ``cause`` changes."""

    cause: Cause


class Propose(Message, frozen=True, kw_only=True, tag="propose"):
    """The refit to come: checked against the engine before anything is paused or joined."""

    version: Version
    layout: Layout
    timeout_seconds: float


class Join(Message, frozen=True, kw_only=True, tag="join"):
    """Become a member of the weights update group: ranks ``rank_offset .. rank_offset + tp_size - 1``."""

    group_name: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str
    timeout_seconds: float


class Prepare(Message, frozen=True, kw_only=True, tag="prepare"):
    pause_mode: PauseMode
    timeout_seconds: float


class Stream(Message, frozen=True, kw_only=True, tag="stream"):
    """All nodes are prepared: take every bucket of the layout in turn.

    ``bucket_timeouts[k]`` is the deadline of bucket k in seconds, from the moment bucket k-1 was loaded.
    """

    bucket_timeouts: tuple[float, ...]


class Finish(Message, frozen=True, kw_only=True, tag="finish"):
    """All buckets are loaded: end the session, flush once, and show what the engine holds.

    ``digests[i]`` is the digest of ``layout.tensors[i]``. ``checksums`` answers the node's own plan:
    for each of its entries, in order, the checksum computed from the trainer's bytes.
    """

    digests: tuple[int, ...]
    checksums: tuple[str, ...] = ()
    timeout_seconds: float


class Release(Message, frozen=True, kw_only=True, tag="release"):
    """The engine is shown to hold the version: label it, read the label back, resume."""

    timeout_seconds: float


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """The refit is off. Close the session; resume if untouched, else stay paused."""

    cause: Cause
    timeout_seconds: float


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    group_name: str
    timeout_seconds: float


# --- trainer → control ---------------------------------------------------------------------------


class TrainerHello(Message, frozen=True, kw_only=True, tag="trainer_hello"):
    """``incarnation`` names this life of the training job; ``slots`` are the sizes it will offer."""

    pid: int
    ranks: int
    slots: dict[int, int]


class RefitBegin(Message, frozen=True, kw_only=True, tag="refit_begin"):
    step: int
    label: str
    layout: Layout


class BucketPacked(Message, frozen=True, kw_only=True, tag="bucket_packed"):
    """Bucket ``bucket`` lies in slot ``slot``; ``digests`` are its tensors' in byte order.

    The slot belongs to the broadcaster until its `Credit`.
    """

    bucket: int
    slot: int
    digests: tuple[int, ...]
    gather_seconds: float
    pack_seconds: float


class RefitCancel(Message, frozen=True, kw_only=True, tag="refit_cancel"):
    """A trainer rank failed: nothing of this refit may be committed."""

    cause: Cause


class SlotRetired(Message, frozen=True, kw_only=True, tag="slot_retired"):
    """The trainer gives a slot up (the outsized one of a refit): unmap it."""

    slot: int


class TrainerGoodbye(Message, frozen=True, kw_only=True, tag="trainer_goodbye"):
    pass


# --- control → trainer ---------------------------------------------------------------------------


class TrainerWelcome(Message, frozen=True, kw_only=True, tag="trainer_welcome"):
    """``slots_path`` is the Unix socket that takes slot descriptors; it stays open as a sign of life.

    ``refit_seconds`` is the broadcaster's deadline for a whole refit.
    """

    slots_path: str
    refit_seconds: float


class TrainerRejected(Message, frozen=True, kw_only=True, tag="trainer_rejected"):
    """The trainer's last message is refused; a refit that it began does not exist."""

    cause: Cause


class RefitAccepted(Message, frozen=True, kw_only=True, tag="refit_accepted"):
    """All nodes took the layout and joined. Buckets may already be packed before this arrives."""

    nodes: tuple[str, ...]


class Credit(Message, frozen=True, kw_only=True, tag="credit"):
    """The slot's bytes have left: it may be refilled."""

    slot: int
    bucket: int


class PhaseSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Where a refit's time went, in seconds. Phases overlap, so they do not add up to ``total``.

    gather: collecting shards on TP rank 0 · pack: digests and copies into slots · join: layout check and
    group set-up · pause: longest time one node did not generate · wire: the source's broadcasts ·
    load: the slowest node's bucket calls beyond the wire · flush, verify, resume: the slowest node's ·
    total: from RefitBegin to the last node's release.
    """

    gather: float = 0.0
    pack: float = 0.0
    join: float = 0.0
    pause: float = 0.0
    wire: float = 0.0
    load: float = 0.0
    flush: float = 0.0
    verify: float = 0.0
    resume: float = 0.0
    total: float = 0.0


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One node's outcome.

    ``outcome``: ready · unchanged (serves its old version) · quarantined (paused) · lost.
    ``digest``: match (compared with the trainer's bytes) · agreed (equal on several nodes, not
    comparable with the trainer's bytes) · mismatch · unproven · none (the refit did not get that far).
    """

    outcome: str
    version: int | None
    digest: str
    evidence: str = ""
    pause_seconds: float = 0.0
    load_seconds: float = 0.0
    cause: Cause | None = None


class RefitReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a refit did. ``ok`` only if every node is ready at the version."""

    ok: bool
    version: int
    label: str
    incarnation: str
    epoch: int
    bytes: int
    tensors: int
    buckets: int
    seconds: PhaseSeconds
    #: Payload bytes per second of ``seconds.wire`` (0 if nothing was sent).
    wire_rate: float
    nodes: dict[str, NodeReport]
    cause: Cause | None = None


class RefitFinished(Message, frozen=True, kw_only=True, tag="refit_finished"):
    report: RefitReport


# --- control ↔ source ----------------------------------------------------------------------------


class SourceReady(Message, frozen=True, kw_only=True, tag="source_ready"):
    """``device`` is "cpu" or "cuda:0"."""

    pid: int
    device: str


class SlotAttached(Message, frozen=True, kw_only=True, tag="slot_attached"):
    slot: int
    nbytes: int


class OpenGroup(Message, frozen=True, kw_only=True, tag="open_group"):
    """Open a store on port 0 of ``host`` (answer: `StoreOpened`), then join as rank 0 (`GroupReady`)."""

    group_name: str
    host: str
    world_size: int
    backend: str
    timeout_seconds: float


class StoreOpened(Message, frozen=True, kw_only=True, tag="store_opened"):
    group_name: str
    port: int


class GroupReady(Message, frozen=True, kw_only=True, tag="group_ready"):
    group_name: str
    seconds: float


class SetChecksumPlans(Message, frozen=True, kw_only=True, tag="set_checksum_plans"):
    """Before the first bucket: compute these checksums over the bytes that pass. Empty: compute none."""

    layout: Layout
    plans: tuple[ChecksumPlan, ...]


class BroadcastBucket(Message, frozen=True, kw_only=True, tag="broadcast_bucket"):
    bucket: int
    slot: int
    nbytes: int
    timeout_seconds: float


class BucketSent(Message, frozen=True, kw_only=True, tag="bucket_sent"):
    """The bytes have left the slot and every checksum over them is taken.

    ``seconds`` is the broadcast alone.
    """

    bucket: int
    slot: int
    seconds: float


class Checksums(Message, frozen=True, kw_only=True, tag="checksums"):
    """After the last bucket: for each plan, in order, the checksum of each of its entries, in order."""

    values: tuple[tuple[str, ...], ...]


class CloseGroup(Message, frozen=True, kw_only=True, tag="close_group"):
    """Leave a healthy group (its nodes are told `Leave` at the same time) and close its store."""

    group_name: str


class ForgetSlot(Message, frozen=True, kw_only=True, tag="forget_slot"):
    slot: int


class SourceFailed(Message, frozen=True, kw_only=True, tag="source_failed"):
    """The source cannot go on with its group. It is then ended and started anew: a new epoch."""

    cause: Cause


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    pass


FromNode = (
    Register
    | Waiting
    | Heartbeat
    | LayoutAccepted
    | LayoutRefused
    | Joined
    | Prepared
    | BucketLoaded
    | Verified
    | Released
    | StageFailed
    | Aborted
    | Left
    | Goodbye
)
ToNode = Welcome | Rejected | Propose | Join | Prepare | Stream | Finish | Release | Abort | Leave
FromTrainer = TrainerHello | RefitBegin | BucketPacked | RefitCancel | SlotRetired | TrainerGoodbye
ToTrainer = TrainerWelcome | TrainerRejected | RefitAccepted | Credit | RefitFinished
FromSource = SourceReady | SlotAttached | StoreOpened | GroupReady | BucketSent | Checksums | SourceFailed
ToSource = OpenGroup | SetChecksumPlans | BroadcastBucket | CloseGroup | ForgetSlot | Shutdown

from_node: Decoder[FromNode] = Decoder(FromNode)
to_node: Decoder[ToNode] = Decoder(ToNode)
from_trainer: Decoder[FromTrainer] = Decoder(FromTrainer)
to_trainer: Decoder[ToTrainer] = Decoder(ToTrainer)
from_source: Decoder[FromSource] = Decoder(FromSource)
to_source: Decoder[ToSource] = Decoder(ToSource)
