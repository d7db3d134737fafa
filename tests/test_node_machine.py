"""The node's machine: orders in turn and out of turn, what is resumed and what stays paused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weightcast.proto.errors import Cause
from weightcast.proto.layout import Layout, TensorSpec, plan_buckets
from weightcast.proto.messages import (
    Abort,
    Aborted,
    BucketLoaded,
    Evidence,
    Finish,
    FromNode,
    Goodbye,
    Join,
    Joined,
    LayoutAccepted,
    LayoutProblem,
    LayoutRefused,
    Leave,
    Left,
    NodeInfo,
    PauseMode,
    Prepare,
    Prepared,
    Propose,
    Register,
    Rejected,
    Release,
    Released,
    StageFailed,
    Stream,
    ToNode,
    Verified,
    Version,
    Waiting,
    Welcome,
)
from weightcast.rollout_node.machine import REGISTER_AGAIN, NodeMachine, Phase
from weightcast.rollout_node.steps import (
    Action,
    Beat,
    BucketTaken,
    Carry,
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
    Order,
    Said,
    StageBroke,
    StageDone,
    Stop,
    StopStage,
    Tell,
    Tick,
)

T = TypeVar("T")
JOB = "job"
LIFE = "broadcaster-1"
LAYOUT: Layout = plan_buckets(
    [TensorSpec("a", "float32", (4,)), TensorSpec("b", "float32", (4,))], bucket_bytes=16
)
EVIDENCE = Evidence(kind="tensor-digests", compared=2, total=2)


def info(instance: str = "one", *, paused: bool = False) -> NodeInfo:
    return NodeInfo(
        name="n",
        instance=instance,
        engine_url="http://n:1",
        engine="reference",
        engine_version="1",
        model="m",
        architecture="LlamaForCausalLM",
        dtype="float32",
        tp_size=1,
        paused=paused,
    )


class Node:
    """A machine on a clock that only the test moves."""

    def __init__(self, *, paused: bool = False) -> None:
        self.machine = NodeMachine(job=JOB, name="n", engine_url="http://e:1")
        self.now = 100.0
        self.said: list[FromNode] = []
        self.actions: list[Action] = list(self.machine.start())
        self.feed(EngineFound(info(paused=paused)))
        self.feed(LinkUp())
        self.hear(Welcome(job=JOB, heartbeat_seconds=2.0, life=LIFE))

    def feed(self, event: Event) -> list[Action]:
        new = self.machine.feed(event, self.now)
        self.actions += new
        self.said += [action.message for action in new if isinstance(action, Tell)]
        return new

    def hear(self, message: ToNode) -> list[Action]:
        return self.feed(Said(message))

    def pass_time(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.feed(Tick())

    def last(self, kind: type[T]) -> T:
        return [message for message in self.said if isinstance(message, kind)][-1]

    def order(self, order: Order, *marks: Mark, answer: FromNode | None = None) -> Carry:
        """Give an order that must be carried out; the stage marks, then answers if ``answer`` is given."""
        carried = only(self.hear(order), Carry)
        for mark in marks:
            self.feed(Marked(mark))
        if answer is not None:
            self.feed(StageDone(answer))
        return carried

    def to_prepared(self, refit: int = 1, epoch: int = 1) -> None:
        self.order(propose(refit), answer=LayoutAccepted(job=JOB))
        if self.machine.group_name is None:
            self.order(join(refit, epoch), Mark.JOINING, answer=Joined(job=JOB, seconds=1))
        prepared = Prepared(job=JOB, pause_seconds=0, begin_seconds=0)
        self.order(prepare(refit, epoch), Mark.PAUSING, Mark.SESSION_OPENING, answer=prepared)

    def to_loaded(self, refit: int = 1, epoch: int = 1) -> None:
        self.to_prepared(refit, epoch)
        self.order(stream(refit, epoch), Mark.TOUCHING)
        self.feed(BucketTaken(0, 0.5))
        self.feed(BucketTaken(1, 0.5))
        self.feed(StageDone(None))

    def to_verified(self, refit: int = 1, epoch: int = 1) -> None:
        self.to_loaded(refit, epoch)
        verified = Verified(job=JOB, evidence=EVIDENCE, end_seconds=0, flush_seconds=0, verify_seconds=0)
        self.order(finish(refit, epoch), Mark.SESSION_CLOSED, answer=verified)

    def to_released(self, refit: int = 1, epoch: int = 1) -> None:
        self.to_verified(refit, epoch)
        released = Released(job=JOB, label="v", resume_seconds=0, paused_seconds=1)
        self.order(release(refit, epoch), Mark.RESUMED, answer=released)


def stamp(refit: int, epoch: int) -> dict[str, object]:
    return {"job": JOB, "incarnation": "i", "refit": refit, "epoch": epoch}


def propose(refit: int = 1, epoch: int = 0) -> Propose:
    version = Version(incarnation="t", step=refit, label=f"v{refit}")
    return Propose(**stamp(refit, epoch), version=version, layout=LAYOUT, timeout_seconds=10)


def join(refit: int = 1, epoch: int = 1, name: str = "g1") -> Join:
    return Join(
        **stamp(refit, epoch),
        group_name=name,
        master_address="h",
        master_port=1,
        rank_offset=1,
        world_size=2,
        backend="gloo",
        timeout_seconds=10,
    )


def prepare(refit: int = 1, epoch: int = 1) -> Prepare:
    return Prepare(**stamp(refit, epoch), pause_mode=PauseMode.RETRACT, timeout_seconds=10)


def stream(refit: int = 1, epoch: int = 1) -> Stream:
    return Stream(**stamp(refit, epoch), bucket_timeouts=(10.0, 10.0))


def finish(refit: int = 1, epoch: int = 1) -> Finish:
    return Finish(**stamp(refit, epoch), digests=(1, 2), timeout_seconds=10)


def release(refit: int = 1, epoch: int = 1) -> Release:
    return Release(**stamp(refit, epoch), timeout_seconds=10)


def abort(refit: int = 1, epoch: int = 1, seconds: float = 10) -> Abort:
    cause = Cause(code="trainer_failed", message="rank 1 raised")
    return Abort(**stamp(refit, epoch), cause=cause, timeout_seconds=seconds)


def leave(name: str = "g1") -> Leave:
    return Leave(job=JOB, group_name=name, timeout_seconds=10)


def of(actions: Iterable[Action], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def only(actions: Iterable[Action], kind: type[T]) -> T:
    (found,) = of(actions, kind)
    return found


def test_registers_when_both_engine_and_link_are_there_and_again_until_welcomed() -> None:
    machine = NodeMachine(job=JOB, name="n", engine_url="http://e:1")
    assert machine.start() == [FindEngine()]
    assert of(machine.feed(LinkUp(), 0.0), Tell) == []
    assert isinstance(only(machine.feed(EngineFound(info()), 1.0), Tell).message, Register)
    assert machine.wakes_at == 1.0 + REGISTER_AGAIN
    assert of(machine.feed(Tick(), 1.5), Tell) == []
    assert isinstance(only(machine.feed(Tick(), 3.0), Tell).message, Register)
    welcomed = machine.feed(Said(Welcome(job=JOB, heartbeat_seconds=2.0, life=LIFE)), 3.1)
    assert of(welcomed, Beat) == [Beat(2.0)]
    assert machine.registered and machine.wakes_at is None


def test_why_the_engine_is_absent_is_told_when_linked_and_with_each_new_reason() -> None:
    machine = NodeMachine(job=JOB, name="n", engine_url="http://e:1")
    refused, forbidden = Cause(code="node_down", message="refused"), Cause(code="unauthorized", message="no")
    assert of(machine.feed(EngineAbsent(refused), 0.0), Tell) == []

    def told(actions: list[Action]) -> Waiting:
        message = only(actions, Tell).message
        assert isinstance(message, Waiting) and (message.name, message.engine_url) == ("n", "http://e:1")
        return message

    assert told(machine.feed(LinkUp(), 1.0)).cause == refused
    assert told(machine.feed(EngineAbsent(forbidden), 2.0)).cause == forbidden
    assert isinstance(only(machine.feed(EngineFound(info()), 3.0), Tell).message, Register)
    machine.feed(LinkDown(), 4.0)
    assert isinstance(only(machine.feed(LinkUp(), 5.0), Tell).message, Register)


def test_refusal_is_told_once_and_asked_again_slowly() -> None:
    node = Node()
    refusal = Rejected(job=JOB, cause=Cause(code="busy", message="that name is taken"))
    first = node.hear(refusal)
    assert not node.machine.registered and any("taken" in str(action) for action in first)
    assert of(node.pass_time(5), Tell) == []
    assert isinstance(only(node.pass_time(5), Tell).message, Register)
    assert not any("taken" in str(action) for action in node.hear(refusal))


def test_whole_refit_in_order_with_every_answer_stamped() -> None:
    node = Node()
    node.to_released(refit=7, epoch=3)
    answers = [type(message) for message in node.said]
    assert answers == [
        Register, LayoutAccepted, Joined, Prepared, BucketLoaded, BucketLoaded, Verified, Released,
    ]  # fmt: skip
    for message in node.said[2:]:
        assert (message.incarnation, message.refit, message.epoch) == ("i", 7, 3)
    assert not node.machine.touched and node.machine.paused_at is None
    assert node.machine.phase is Phase.IDLE and node.machine.group_name == "g1"
    assert node.machine.info is not None and node.machine.info.label == "v7"
    # The group stays: the next refit of the same epoch joins nobody.
    node.to_released(refit=8, epoch=3)


def test_stages_know_what_they_need() -> None:
    node = Node()
    node.to_prepared()
    carried = node.order(stream())
    assert (carried.context.layout, carried.context.group_name) == (LAYOUT, "g1")
    assert carried.until == node.now + 20.0
    node = Node()
    node.to_verified()
    assert node.order(release()).context.version == propose().version


@pytest.mark.parametrize(
    "order", [join(), prepare(), stream(), finish(), release()], ids=lambda order: type(order).__name__
)
def test_orders_of_no_known_refit_are_ignored(order: Order) -> None:
    node = Node()
    assert of(node.hear(order), Tell) == [] and of(node.actions, Carry) == []


@pytest.mark.parametrize(
    "order",
    [stream(), finish(), release(), prepare(epoch=1)],
    ids=lambda order: type(order).__name__,
)
def test_orders_out_of_turn_are_refused_by_name(order: Order) -> None:
    node = Node()
    node.to_prepared()
    if isinstance(order, Stream):
        node.order(order)
        node.feed(StageDone(None))
    refused = node.hear(order)
    failure = only(refused, Tell).message
    assert isinstance(failure, StageFailed) and failure.cause.code == "protocol"
    assert failure.stage == type(order).__name__.lower() and of(refused, Carry) == []


def test_stale_refit_and_stale_epoch_are_ignored() -> None:
    node = Node()
    node.to_released(refit=5, epoch=4)
    assert of(node.hear(propose(5)), Carry | Tell) == []
    assert of(node.hear(propose(4)), Carry | Tell) == []
    node.order(propose(6), answer=LayoutAccepted(job=JOB))
    assert of(node.hear(prepare(6, epoch=3)), Carry | Tell) == []
    assert of(node.hear(join(6, epoch=3)), Carry | Tell) == []
    node.order(join(6, epoch=5, name="g5"))


def test_messages_of_another_job_or_protocol_are_ignored() -> None:
    node = Node()
    version = propose().version
    other = Propose(job="other", version=version, layout=LAYOUT, timeout_seconds=1, refit=1, incarnation="i")
    future = Propose(
        job=JOB, protocol=99, version=version, layout=LAYOUT, timeout_seconds=1, refit=1, incarnation="i"
    )
    assert of(node.hear(other) + node.hear(future), Carry | Tell) == []


def test_orders_wait_their_turn() -> None:
    node = Node()
    node.order(propose(), answer=LayoutAccepted(job=JOB))
    node.order(join(), Mark.JOINING)
    assert of(node.hear(prepare()), Carry) == []
    begun = node.feed(StageDone(Joined(job=JOB, seconds=1)))
    assert isinstance(only(begun, Carry).order, Prepare)


def test_refused_layout_ends_the_refit_on_this_node() -> None:
    node = Node()
    problems = (LayoutProblem("unknown", "x"),)
    node.order(propose(), answer=LayoutRefused(job=JOB, problems=problems, total=1))
    assert node.last(LayoutRefused).problems == problems
    assert isinstance(only(node.hear(prepare(epoch=0)), Tell).message, StageFailed)


def test_abort_before_the_first_byte_resumes() -> None:
    node = Node()
    node.to_prepared()
    context = node.order(abort()).context
    assert context.resume and context.session_open and not context.touched
    node.feed(Marked(Mark.SESSION_CLOSED))
    node.feed(Marked(Mark.RESUMED))
    node.feed(StageDone(Aborted(job=JOB, touched=False, serving=True)))
    assert node.last(Aborted).serving and node.machine.paused_at is None
    node.to_prepared(refit=2)


def test_abort_after_the_first_byte_stays_paused_until_a_whole_refit() -> None:
    node = Node()
    node.to_loaded()
    context = node.order(abort()).context
    assert context.touched and not context.resume
    node.feed(StageDone(Aborted(job=JOB, touched=True, serving=False)))
    # A second refit that is called off early must not resume it either.
    node.to_prepared(refit=2)
    assert not node.order(abort(2)).context.resume
    node.feed(StageDone(Aborted(job=JOB, touched=True, serving=False)))
    assert node.machine.info is not None and node.machine.info.paused
    node.to_released(refit=3)
    assert not node.machine.touched and not node.machine.info.paused


def test_engine_found_paused_is_not_ours_to_resume() -> None:
    node = Node(paused=True)
    node.to_prepared()
    assert not node.order(abort()).context.resume


def test_abort_lets_the_request_under_way_end_first() -> None:
    node = Node()
    node.to_prepared()
    node.order(stream(), Mark.TOUCHING)
    assert of(node.hear(abort()), StopStage | Carry) == [StopStage()]
    begun = node.feed(StageBroke(Cause(code="bucket_failed", message="peer closed")))
    carried = only(begun, Carry)
    assert isinstance(carried.order, Abort) and carried.context.touched
    assert of(node.said, StageFailed) == []  # the abort speaks for the refit


def test_abort_of_a_stuck_request_fails_at_its_deadline() -> None:
    node = Node()
    node.to_prepared()
    node.order(stream(), Mark.TOUCHING)
    node.hear(abort(seconds=10))
    assert of(node.pass_time(9.9), KillStage) == []
    assert of(node.pass_time(0.1), KillStage) == [KillStage()]
    failure = node.last(StageFailed)
    assert (failure.stage, failure.cause.code, failure.touched) == ("abort", "deadline", True)
    assert "Stream" in failure.cause.message
    node.feed(StageBroke(Cause(code="deadline", message="cut off")))
    assert node.last(StageFailed) is failure
    assert node.machine.info is not None and node.machine.info.paused


def test_abort_drops_queued_orders_but_not_leave() -> None:
    node = Node()
    node.to_prepared()
    node.order(stream(), Mark.TOUCHING)
    node.hear(leave())
    node.hear(finish())
    node.hear(abort())
    node.feed(StageBroke(Cause(code="bucket_failed", message="x")))
    begun = node.feed(StageDone(Aborted(job=JOB, touched=True, serving=False)))
    assert isinstance(only(begun, Carry).order, Leave)
    node.feed(Marked(Mark.LEFT))
    assert of(node.feed(StageDone(Left(job=JOB, group_name="g1"))), Carry) == []
    assert node.machine.group_name is None


def test_abort_of_an_unknown_refit_is_answered_at_once() -> None:
    node = Node()
    actions = node.hear(abort(99))
    assert of(actions, Carry) == []
    assert node.last(Aborted).serving and not node.last(Aborted).touched


def test_failed_stage_is_named_with_its_bucket_and_nothing_follows() -> None:
    node = Node()
    node.to_prepared()
    node.order(stream(), Mark.TOUCHING)
    node.feed(StageBroke(Cause(code="bucket_failed", message="wrong shape", bucket=0)))
    failure = node.last(StageFailed)
    assert (failure.stage, failure.touched) == ("stream", True)
    assert (failure.cause.node, failure.cause.bucket, failure.cause.epoch) == ("n", 0, 1)
    assert isinstance(only(node.hear(finish()), Tell).message, StageFailed)


def test_leave_of_an_older_group_keeps_the_present_one() -> None:
    node = Node()
    node.to_released()
    node.order(leave("old"), Mark.LEFT, answer=Left(job=JOB, group_name="old"))
    assert node.machine.group_name == "g1"


def test_short_break_of_the_link_registers_again_and_keeps_the_refit() -> None:
    node = Node()
    node.to_prepared()
    node.feed(LinkDown())
    assert of(node.pass_time(5), Carry) == []
    assert isinstance(only(node.feed(LinkUp()), Tell).message, Register)
    node.hear(Welcome(job=JOB, heartbeat_seconds=2.0, life=LIFE))
    node.order(stream())


def test_another_broadcaster_ends_the_refit_of_the_one_before() -> None:
    node = Node()
    node.to_prepared()
    node.feed(LinkDown())
    node.feed(LinkUp())
    begun = node.hear(Welcome(job=JOB, heartbeat_seconds=2.0, life="broadcaster-2"))
    carried = only(begun, Carry)
    assert isinstance(carried.order, Abort) and carried.context.resume
    node.feed(Marked(Mark.RESUMED))
    begun = node.feed(StageDone(Aborted(job=JOB, touched=False, serving=True)))
    assert isinstance(only(begun, Carry).order, Leave)
    node.feed(Marked(Mark.LEFT))
    node.feed(StageDone(Left(job=JOB, group_name="g1")))
    # It numbers refits and epochs from one again.
    node.to_prepared(refit=1, epoch=1)


def test_lost_broadcaster_untouched_resumes_and_leaves_the_group() -> None:
    node = Node()
    node.to_prepared()
    node.feed(LinkDown())
    begun = node.pass_time(10.0)
    assert of(begun, Beat) == [Beat(0.0)] and only(begun, Carry).context.resume
    said = len(node.said)
    node.feed(Marked(Mark.RESUMED))
    begun = node.feed(StageDone(Aborted(job=JOB, touched=False, serving=True)))
    assert only(begun, Carry).order == Leave(job=JOB, group_name="g1", timeout_seconds=30.0)
    node.feed(Marked(Mark.LEFT))
    node.feed(StageDone(Left(job=JOB, group_name="g1")))
    assert node.said[said:] == []  # nobody is there to be told
    assert isinstance(only(node.feed(LinkUp()), Tell).message, Register)


def test_lost_broadcaster_touched_stays_paused_and_says_so_when_it_registers() -> None:
    node = Node()
    node.to_loaded()
    node.feed(LinkDown())
    assert not only(node.pass_time(10.0), Carry).context.resume
    node.feed(StageDone(Aborted(job=JOB, touched=True, serving=False)))
    node.feed(StageDone(Left(job=JOB, group_name="g1")))
    node.feed(LinkUp())
    assert node.last(Register).node.paused


def test_restarted_engine_registers_anew_and_owes_nothing() -> None:
    node = Node()
    node.to_loaded()
    node.feed(EngineFound(info("two")))
    assert node.last(Register).node.instance == "two" and not node.last(Register).node.paused
    assert not node.machine.touched and node.machine.group_name is None


def test_engine_gone_while_idle_says_goodbye_and_is_looked_for() -> None:
    node = Node()
    gone = node.feed(EngineGone("connection refused"))
    assert isinstance(only(gone, Tell).message, Goodbye) and FindEngine() in gone
    assert node.machine.info is None and not node.machine.registered


def test_engine_gone_in_a_stage_names_the_exit() -> None:
    node = Node()
    node.to_prepared()
    node.order(stream(), Mark.TOUCHING)
    assert of(node.feed(EngineGone("ended with signal SIGKILL")), Tell) == []
    node.feed(StageBroke(Cause(code="node_down", message="connection reset", bucket=0)))
    failure = node.last(StageFailed)
    assert failure.cause.message == "ended with signal SIGKILL" and failure.cause.bucket == 0
    assert isinstance(node.said[-1], Goodbye)


def test_engine_back_after_a_break_is_still_touched() -> None:
    node = Node()
    node.to_loaded()
    node.feed(EngineGone("connection refused"))
    node.feed(EngineFound(info()))
    assert node.machine.touched
    node.to_prepared(refit=2)
    assert not node.order(abort(2)).context.resume


def test_stop_closes_an_open_refit_then_says_goodbye() -> None:
    node = Node()
    node.to_prepared()
    assert only(node.feed(Stop()), Carry).context.resume
    ended = node.feed(StageDone(Aborted(job=JOB, touched=False, serving=True)))
    assert isinstance(node.said[-1], Goodbye) and Ended() in ended


def test_stop_while_idle_ends_at_once() -> None:
    node = Node()
    assert Ended() in node.feed(Stop())
    assert isinstance(node.said[-1], Goodbye)


MARKS = st.sampled_from([Marked(mark) for mark in Mark])
NUMBERS = st.integers(1, 3)
EVENTS = st.one_of(
    st.builds(lambda r: Said(propose(r)), NUMBERS),
    st.builds(lambda r, e: Said(join(r, e, f"g{e}")), NUMBERS, NUMBERS),
    st.builds(lambda r, e: Said(prepare(r, e)), NUMBERS, NUMBERS),
    st.builds(lambda r, e: Said(stream(r, e)), NUMBERS, NUMBERS),
    st.builds(lambda r, e: Said(finish(r, e)), NUMBERS, NUMBERS),
    st.builds(lambda r, e: Said(release(r, e)), NUMBERS, NUMBERS),
    st.builds(lambda r: Said(abort(r)), NUMBERS),
    st.builds(lambda e: Said(leave(f"g{e}")), NUMBERS),
    st.builds(lambda life: Said(Welcome(job=JOB, heartbeat_seconds=2, life=str(life))), NUMBERS),
    st.sampled_from([LinkUp(), LinkDown(), Tick(), EngineGone("x"), Stop()]),
    st.builds(lambda name: EngineFound(info(name)), st.sampled_from(["one", "two"])),
    st.sampled_from(["good", "good", "good", "bad"]),
    MARKS,
)
_GOOD: dict[type[Order], FromNode | None] = {
    Propose: LayoutAccepted(job=JOB),
    Join: Joined(job=JOB, seconds=0),
    Prepare: Prepared(job=JOB, pause_seconds=0, begin_seconds=0),
    Stream: None,
    Finish: Verified(job=JOB, evidence=EVIDENCE, end_seconds=0, flush_seconds=0, verify_seconds=0),
    Release: Released(job=JOB, label="v", resume_seconds=0, paused_seconds=0),
    Abort: Aborted(job=JOB, touched=True, serving=False),
    Leave: Left(job=JOB, group_name="g"),
}
_MARKS_OF: dict[type[Order], tuple[Mark, ...]] = {
    Join: (Mark.JOINING,),
    Prepare: (Mark.PAUSING, Mark.SESSION_OPENING),
    Stream: (Mark.TOUCHING,),
    Finish: (Mark.SESSION_CLOSED,),
    Release: (Mark.RESUMED,),
}


@settings(max_examples=300, deadline=None)
@given(events=st.lists(EVENTS, max_size=40))
def test_whatever_comes_one_stage_at_a_time_and_no_touched_engine_resumes(events: list[Event | str]) -> None:
    """Touched is tracked here independently: from the first streamed byte to a release that went well."""
    node = Node()
    running: Carry | None = None
    touched = False
    for event in events:
        node.now += 1.0
        if isinstance(event, Marked):
            continue  # marks come from stages, below
        if isinstance(event, str):
            if running is None:
                continue
            order, running = running.order, None
            for mark in _MARKS_OF.get(type(order), ()):
                node.feed(Marked(mark))
            touched = touched or isinstance(order, Stream)
            if event == "good" and isinstance(order, Release):
                touched = False
            broken = StageBroke(Cause(code="bucket_failed", message="x"))
            new = node.feed(StageDone(_GOOD[type(order)]) if event == "good" else broken)
        else:
            if isinstance(event, EngineFound):
                known = node.machine._info
                if running is not None:
                    continue  # an engine is only looked for between stages
                touched = touched and known is not None and known.instance == event.info.instance
            new = node.feed(event)
        started = of(new, Carry)
        assert len(started) <= 1 and not (started and running is not None)
        if started:
            running = started[0]
            assert not (running.context.resume and touched)
            assert not (isinstance(running.order, Release) and node.machine.phase is not Phase.VERIFIED)
        if Ended() in new:
            break
