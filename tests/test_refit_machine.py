"""The broadcaster's machine: the good path, each failure by itself, and thousands of random interleavings."""

from __future__ import annotations

import pytest
from simulated_fleet import DEADLINES, Simulation, layout
from weightcast.broadcaster import events as ev
from weightcast.broadcaster.buckets import BucketLedger
from weightcast.broadcaster.status import describe
from weightcast.broadcaster.verdict import Proof, judge
from weightcast.proto import messages as m
from weightcast.proto.checksums import ChecksumEntry, ChecksumPlan, Piece
from weightcast.proto.errors import Cause, ProtocolError

# --- the good path -------------------------------------------------------------------------------


def test_a_refit_ends_with_every_node_ready_at_the_version() -> None:
    sim = Simulation()
    report = sim.refit(1)
    assert report.ok and report.cause is None
    assert {name: (n.outcome, n.version, n.digest) for name, n in report.nodes.items()} == {
        f"n{i}": ("ready", 1, "match") for i in range(3)
    }
    assert (report.bytes, report.tensors, report.buckets, report.epoch) == (80, 5, 5, 1)
    assert report.seconds.wire == pytest.approx(0.5) and report.wire_rate == pytest.approx(160)
    assert report.seconds.total > report.seconds.join > 0
    assert sim.trainer.accepted == 1
    assert all(not node.engine.paused and node.engine.label == "v1" for node in sim.nodes.values())
    assert sim.machine.bytes_sent == 80


def test_orders_come_in_the_order_of_the_contract() -> None:
    sim = Simulation()
    sim.refit(1)
    kinds = [type(message).__name__ for name, message in sim.orders if name == "n1"]
    assert kinds == ["Welcome", "Propose", "Join", "Prepare", "Stream", "Finish", "Release"]


def test_the_group_is_kept_while_the_members_stay_the_same() -> None:
    sim = Simulation()
    assert sim.refit(1).epoch == 1 and sim.refit(2).epoch == 1
    assert len(sim.told(m.Join)) == 3 and sim.source.starts == 1


def test_ranks_and_group_names_are_those_of_the_epoch() -> None:
    sim = Simulation()
    sim.refit(1)
    joins = {name: message for name, message in sim.orders if isinstance(message, m.Join)}
    assert {name: join.rank_offset for name, join in joins.items()} == {"n0": 1, "n1": 2, "n2": 4}
    assert {(j.world_size, j.group_name, j.master_port) for j in joins.values()} == {
        (5, "weightcast-sim-life-e1", 4000)
    }


def test_a_new_node_makes_a_new_epoch_and_the_old_group_is_left_first() -> None:
    sim = Simulation(nodes=2)
    sim.refit(1)
    from simulated_fleet import SimNode

    sim.nodes["n9"] = SimNode(sim, "n9")
    sim.run_for(2)
    report = sim.refit(2)
    assert report.ok and report.epoch == 2 and set(report.nodes) == {"n0", "n1", "n9"}
    assert [leave.group_name for leave in sim.told(m.Leave)] == ["weightcast-sim-life-e1"] * 2
    assert all(node.engine.groups == {"weightcast-sim-life-e2"} for node in sim.nodes.values())
    assert sim.source.starts == 1


def test_a_node_that_comes_during_a_refit_waits_for_the_next() -> None:
    from simulated_fleet import SimNode

    sim = Simulation(nodes=2)
    sim.run_for(3)
    sim.trainer.begin(1)
    sim.nodes["n9"] = SimNode(sim, "n9")
    sim.run(lambda: bool(sim.trainer.reports))
    assert set(sim.trainer.reports[0].nodes) == {"n0", "n1"} and sim.trainer.reports[0].ok
    assert sim.machine.fleet.nodes["n9"].state is m.NodeState.IDLE
    assert set(sim.refit(2).nodes) == {"n0", "n1", "n9"}


def test_a_slot_sent_late_is_waited_for() -> None:
    sim = Simulation()
    sim.trainer.begin(1)  # at once: neither nodes, slots nor source are ready
    sim.run(lambda: bool(sim.trainer.reports))
    assert sim.trainer.reports[0].ok


def test_equal_checksum_plans_are_computed_once_and_answered_to_each_node() -> None:
    sim = Simulation()
    plans = {
        "n0": ChecksumPlan((ChecksumEntry(0, "w01", (Piece("w0"), Piece("w1"))),)),
        "n1": ChecksumPlan((ChecksumEntry(0, "w2", (Piece("w2"),)),)),
        "n2": ChecksumPlan((ChecksumEntry(0, "w01", (Piece("w0"), Piece("w1"))),)),
    }
    asked: list[m.SetChecksumPlans] = []
    for node in sim.nodes.values():
        obey = node.obey

        def with_plan(order, *, wrong, node=node, obey=obey):
            answer = obey(order, wrong=wrong)
            if isinstance(answer, m.LayoutAccepted):
                return m.LayoutAccepted(job="sim", plan=plans[node.name])
            return answer

        node.obey = with_plan
    hear = sim.source.hear

    def hear_and_answer(order):
        hear(order)
        if isinstance(order, m.SetChecksumPlans):
            asked.append(order)
        if isinstance(order, m.BroadcastBucket) and order.bucket == 4:
            sim.source.say(m.Checksums(**sim.source.echo(order), values=(("aa",), ("bb",))), delay=9)

    sim.source.hear = hear_and_answer
    assert sim.refit(1).ok
    assert len(asked) == 1 and len(asked[0].plans) == 2
    finishes = {name: message for name, message in sim.orders if isinstance(message, m.Finish)}
    by_plan = {plan: values for plan, values in zip(asked[0].plans, (("aa",), ("bb",)), strict=True)}
    assert {name: f.checksums for name, f in finishes.items()} == {n: by_plan[p] for n, p in plans.items()}


# --- failures before the first byte --------------------------------------------------------------


@pytest.mark.parametrize("stage", ["propose", "join", "prepare"])
@pytest.mark.parametrize("fault", ["fail", "drop", "kill", "freeze", "late"])
def test_a_failure_before_the_first_byte_leaves_every_node_as_it_was(stage: str, fault: str) -> None:
    sim = Simulation()
    assert sim.refit(1).ok
    for node in sim.nodes.values():  # a new epoch is needed, so that join is asked too
        node.kill() if node.name == "n2" else None
    sim.nodes["n2"].boot()
    sim.run_for(1)
    before = {name: list(node.engine.contents) for name, node in sim.nodes.items()}
    sim.nodes["n1"].faults[stage] = fault
    report = sim.refit(2)
    assert not report.ok and report.cause is not None and report.cause.node == "n1"
    assert report.bytes == 0
    for name in ("n0", "n2"):
        assert report.nodes[name].outcome == "unchanged" and not sim.nodes[name].engine.paused
    assert report.nodes["n0"].version == 1 and report.nodes["n2"].version is None
    assert {name: list(node.engine.contents) for name, node in sim.nodes.items()} == before
    expected = "lost" if fault in ("kill", "freeze") else "unchanged"
    assert report.nodes["n1"].outcome == expected
    if fault in ("drop", "late"):
        assert report.cause.seconds == pytest.approx(10, abs=0.5)
    if fault in ("kill", "freeze"):
        sim.nodes["n1"].boot()
    sim.run_for(30)
    assert sim.refit(3).ok


def test_an_engine_that_answers_before_the_bytes_are_sent_is_waited_for() -> None:
    """Under NCCL an update call returns once its receive is queued on the stream."""
    sim = Simulation()
    node = sim.nodes["n1"]
    obey = node.obey

    def answer_at_once(order, *, wrong):
        if isinstance(order, m.Stream):
            for bucket in range(len(order.bucket_timeouts)):
                node.say(
                    m.BucketLoaded(job="sim", refit=order.refit, epoch=order.epoch, bucket=bucket, seconds=0)
                )
        return obey(order, wrong=wrong)

    node.obey = answer_at_once
    report = sim.refit(1)
    assert report.ok and report.bytes > 0
    assert {n.digest for n in report.nodes.values()} == {"match"}


def test_a_refused_layout_names_the_node_and_the_tensors() -> None:
    sim = Simulation()
    node = sim.nodes["n1"]
    obey = node.obey
    problem = m.LayoutProblem("unknown", "w9", sent="float32[4]")

    def refuse(order, *, wrong):
        if isinstance(order, m.Propose):
            return m.LayoutRefused(job="sim", problems=(problem,), total=61)
        return obey(order, wrong=wrong)

    node.obey = refuse
    report = sim.refit(1)
    assert report.cause is not None and (report.cause.code, report.cause.node) == ("layout_mismatch", "n1")
    assert "unknown w9" in report.cause.message and "60 more" in report.cause.message
    assert {n.outcome for n in report.nodes.values()} == {"unchanged"}
    assert not sim.told(m.Prepare) and not sim.told(m.Join)


def test_too_few_nodes_say_what_the_agents_wait_for() -> None:
    sim = Simulation(nodes=2)
    sim.nodes["n1"].kill()
    sim.run_for(8)
    cause = Cause(code="node_down", message="http://e:1 refused the connection")
    late = m.Waiting(job="sim", name="n9", engine_url="http://e:1", cause=cause)
    sim.feed(ev.NodeSaid(peer=b"p9", message=late))
    shown = {node.name: node for node in describe(sim.machine, pid=1, now=sim.now).nodes}["n9"]
    assert (shown.state, shown.url, shown.reason) == ("joining", "http://e:1", cause.message)
    report = sim.refit(1)
    assert report.cause is not None and report.cause.code == "no_nodes"
    assert "n9: http://e:1 refused the connection" in report.cause.message
    sim.feed(ev.NodeUnreachable(peer=b"p9"))
    assert "n9" not in {node.name for node in describe(sim.machine, pid=1, now=sim.now).nodes}


def test_too_few_nodes_are_refused_by_the_deadline() -> None:
    sim = Simulation(nodes=2)
    sim.nodes["n1"].kill()
    sim.run_for(8)
    began = sim.now
    report = sim.refit(1)
    assert report.cause is not None and report.cause.code == "no_nodes" and "n0" in report.cause.message
    assert sim.now - began == pytest.approx(DEADLINES.nodes, abs=0.1)
    assert not report.nodes


def test_a_source_that_opens_no_store_is_replaced() -> None:
    sim = Simulation()
    sim.source.fault = "no_store"
    report = sim.refit(1)
    assert report.cause is not None and report.cause.code == "source_lost"
    assert sim.source.starts == 2 and {n.outcome for n in report.nodes.values()} == {"unchanged"}
    sim.source.fault = ""
    assert sim.refit(2).ok


def test_a_trainer_that_stalls_is_given_up() -> None:
    sim = Simulation()
    sim.trainer.pack_fault = (0, "stall")
    report = sim.refit(1)
    assert report.cause is not None and report.cause.code == "deadline" and report.cause.bucket == 0
    assert {n.outcome for n in report.nodes.values()} == {"unchanged"}
    assert not sim.told(m.Prepare)


# --- failures after the first byte ---------------------------------------------------------------


@pytest.mark.parametrize("fault", ["fail", "drop", "kill", "freeze"])
def test_a_node_that_fails_in_the_middle_poisons_the_epoch(fault: str) -> None:
    sim = Simulation()
    sim.nodes["n1"].faults["bucket2"] = fault
    report = sim.refit(1)
    assert not report.ok and report.cause is not None and report.cause.node == "n1"
    assert report.cause.code == {"fail": "bucket_failed", "drop": "deadline"}.get(fault, "node_down")
    for name in ("n0", "n2"):
        assert report.nodes[name].outcome == "quarantined" and sim.nodes[name].engine.paused
        assert sim.machine.fleet.nodes[name].state is m.NodeState.QUARANTINED
    assert report.nodes["n1"].outcome == ("lost" if fault in ("kill", "freeze") else "quarantined")
    assert sim.source.starts == 2
    if fault in ("kill", "freeze"):
        sim.nodes["n1"].boot()
    sim.run_for(10)
    healed = sim.refit(2)
    assert healed.ok and healed.epoch == 2
    assert all(not node.engine.paused for node in sim.nodes.values())


def test_a_source_that_fails_or_dies_in_the_middle_is_replaced_and_the_next_refit_works() -> None:
    for crash in (False, True):
        sim = Simulation()
        if crash:
            receive = sim.nodes["n0"].receive

            def crash_at_two(bucket, digests, group, receive=receive, sim=sim):
                receive(bucket, digests, group)
                if bucket == 2:
                    sim.source.crash()

            sim.nodes["n0"].receive = crash_at_two
        else:
            sim.source.fail_bucket = 2
        report = sim.refit(1)
        assert report.cause is not None
        assert report.cause.code == ("source_lost" if crash else "broadcast_failed")
        assert {n.outcome for n in report.nodes.values()} == {"quarantined"}
        assert sim.source.starts == 2
        if crash:
            sim.nodes["n0"].receive = receive
        assert sim.refit(2).ok


def test_a_source_whose_death_its_peers_notice_first_is_still_the_cause() -> None:
    sim = Simulation()
    sim.trainer.begin(1)
    sim.run(lambda: bool(sim.told(m.Stream)))
    sim.run_for(0.6)
    sim.source.running = False  # dead; the news of it comes after those of a node
    node = sim.nodes["n1"]
    cause = Cause(code="bucket_failed", message="connection closed by peer", node="n1", bucket=0)
    failed = m.StageFailed(job="sim", stage="stream", cause=cause, touched=True)
    node.answer(sim.told(m.Stream, "n1")[0], failed)
    sim.run(lambda: bool(sim.trainer.reports))
    report = sim.trainer.reports[0]
    assert report.cause is not None and report.cause.code == "source_lost"
    assert report.nodes["n1"].cause is not None and report.nodes["n1"].cause.code == "bucket_failed"
    assert sim.refit(2).ok


@pytest.mark.parametrize("fault", ["die", "cancel", "stall"])
def test_a_trainer_that_fails_in_the_middle_leaves_no_node_serving_a_mix(fault: str) -> None:
    sim = Simulation()
    sim.trainer.pack_fault = (3, fault)
    sim.trainer.begin(1)
    sim.run(lambda: sim.last_report is not None)
    report = sim.last_report
    assert report is not None and report.cause is not None
    assert (
        report.cause.code == {"die": "trainer_lost", "cancel": "trainer_failed", "stall": "deadline"}[fault]
    )
    assert all(n.outcome == "quarantined" for n in report.nodes.values())
    assert all(node.engine.paused for node in sim.nodes.values())
    if fault == "die":
        sim.trainer.attach()
    sim.run_for(5)
    assert sim.refit(2).ok


def test_a_trainer_that_returns_at_once_is_served_after_the_abort() -> None:
    sim = Simulation()
    sim.trainer.pack_fault = (3, "die")
    sim.trainer.begin(1)
    sim.run(lambda: not sim.trainer.alive)
    sim.run(lambda: sim.machine.trainer is None)
    assert sim.machine.refit is not None  # the abort is under way
    sim.trainer.attach()
    assert sim.refit(1).ok


# --- the end of a refit --------------------------------------------------------------------------


def test_wrong_bytes_are_never_served() -> None:
    sim = Simulation()
    sim.nodes["n1"].faults["bucket3"] = "wrong"
    report = sim.refit(1)
    assert not report.ok and report.cause is not None and report.cause.code == "digest_mismatch"
    assert "w3" in report.cause.message
    outcomes = {name: (n.outcome, n.digest) for name, n in report.nodes.items()}
    assert outcomes == {"n0": ("ready", "match"), "n1": ("quarantined", "mismatch"), "n2": ("ready", "match")}
    assert sim.nodes["n1"].engine.paused and not sim.told(m.Release, "n1")
    assert sim.refit(1).ok  # the same step again heals it


@pytest.mark.parametrize("stage", ["finish", "release"])
@pytest.mark.parametrize("fault", ["fail", "drop", "kill", "freeze"])
def test_nodes_that_verified_are_released_though_one_is_not(stage: str, fault: str) -> None:
    sim = Simulation()
    sim.nodes["n1"].faults[stage] = fault
    report = sim.refit(1)
    assert not report.ok and report.cause is not None and report.cause.node == "n1"
    assert (report.nodes["n0"].outcome, report.nodes["n2"].outcome) == ("ready", "ready")
    assert report.nodes["n1"].outcome == ("lost" if fault in ("kill", "freeze") else "quarantined")


def test_a_trainer_that_dies_after_its_last_byte_does_not_undo_the_refit() -> None:
    sim = Simulation()
    sim.trainer.begin(1)
    sim.run(lambda: bool(sim.told(m.Finish)))
    sim.trainer.die()
    sim.run(lambda: sim.last_report is not None)
    assert sim.last_report is not None and sim.last_report.ok


def test_a_wrong_label_is_not_ready() -> None:
    sim = Simulation()
    obey = sim.nodes["n1"].obey

    def forget_label(order, *, wrong):
        answer = obey(order, wrong=wrong)
        if isinstance(answer, m.Released):
            return m.Released(job="sim", label="default", resume_seconds=0, paused_seconds=1)
        return answer

    sim.nodes["n1"].obey = forget_label
    report = sim.refit(1)
    assert report.cause is not None and report.cause.code == "release_failed"
    assert report.nodes["n1"].outcome == "quarantined"


# --- who may do what -----------------------------------------------------------------------------


def test_steps_do_not_go_back_within_one_incarnation() -> None:
    sim = Simulation()
    assert sim.refit(5).ok
    for step in (5, 4):
        sim.trainer.begin(step)
        assert sim.trainer.rejections.pop().code == "stale_version"
    assert sim.refit(6).ok
    sim.trainer.die()
    sim.run_for(1)
    sim.trainer.attach()
    sim.run_for(3)
    assert sim.refit(2).ok  # another life of the job counts for itself


def test_a_second_trainer_is_refused_while_the_first_lives() -> None:
    sim = Simulation()
    sim.run_for(1)
    hello = m.TrainerHello(job="sim", incarnation="other", pid=99, ranks=1, slots={})
    actions = sim.machine.handle(ev.TrainerSaid(peer=b"other", message=hello), sim.now)
    told = [a.message for a in actions if isinstance(a, ev.TellTrainer)]
    assert len(told) == 1 and isinstance(told[0], m.TrainerRejected) and told[0].cause.code == "busy"
    assert sim.refit(1).ok


def test_a_trainer_that_never_links_is_dropped() -> None:
    sim = Simulation()
    sim.run_for(1)
    sim.trainer.die()
    sim.run_for(1)
    hello = m.TrainerHello(job="sim", incarnation="other", pid=99, ranks=1, slots={})
    sim.machine.handle(ev.TrainerSaid(peer=b"other", message=hello), sim.now)
    assert sim.machine.trainer is not None
    sim.run_for(DEADLINES.heartbeat + 0.1)
    assert sim.machine.trainer is None


def test_an_invalid_layout_is_refused() -> None:
    sim = Simulation()
    sim.run_for(1)
    bad = m.Layout(tensors=layout().tensors, buckets=((0, 1),))
    begin = m.RefitBegin(
        job="sim", incarnation=sim.trainer.incarnation, refit=1, step=1, label="v1", layout=bad
    )
    sim.trainer.say(begin)
    assert sim.trainer.rejections[0].code == "invalid_layout"
    assert sim.machine.refit is None


@pytest.mark.parametrize(
    ("change", "code"), [({"pp_size": 2}, "incompatible"), ({"dp_size": 2}, "incompatible")]
)
def test_nodes_that_cannot_join_are_refused_when_they_register(change: dict, code: str) -> None:
    import msgspec

    sim = Simulation(nodes=1)
    info = msgspec.structs.replace(sim.machine_info("n0"), name="odd", **change)
    actions = sim.machine.handle(ev.NodeSaid(peer=b"odd", message=m.Register(job="sim", node=info)), sim.now)
    rejected = next(a.message for a in actions if isinstance(a, ev.TellNode))
    assert (
        isinstance(rejected, m.Rejected) and rejected.cause.code == code and "odd" in rejected.cause.message
    )


def test_another_job_protocol_or_namesake_is_refused() -> None:
    import msgspec

    sim = Simulation(nodes=1)
    info = sim.machine_info("n0")
    namesake = msgspec.structs.replace(info, instance="x", engine_url="http://elsewhere")
    for register, code in (
        (m.Register(job="other", node=info), "incompatible"),
        (m.Register(job="sim", protocol=99, node=info), "protocol"),
        (m.Register(job="sim", node=namesake), "busy"),
    ):
        actions = sim.machine.handle(ev.NodeSaid(peer=b"x", message=register), sim.now)
        rejected = next(a.message for a in actions if isinstance(a, ev.TellNode))
        assert isinstance(rejected, m.Rejected) and rejected.cause.code == code


def test_a_restarted_node_is_nobody_s_ready_node() -> None:
    sim = Simulation()
    sim.refit(1)
    sim.nodes["n1"].boot()  # same URL, new instance
    sim.run_for(1)
    known = sim.machine.fleet.nodes["n1"]
    assert known.state is m.NodeState.IDLE and known.version is None
    assert sim.source.starts == 2  # the group with the old instance is no longer trusted
    assert sim.refit(2).ok


def test_a_silent_node_is_lost_and_comes_back_as_what_it_was() -> None:
    sim = Simulation()
    sim.refit(1)
    sim.nodes["n1"].frozen = True
    sim.run_for(DEADLINES.heartbeat + 0.5)
    assert sim.machine.fleet.nodes["n1"].state is m.NodeState.LOST
    sim.nodes["n1"].frozen = False
    sim.run_for(2)
    assert sim.machine.fleet.nodes["n1"].state is m.NodeState.READY
    assert sim.refit(2).ok


def test_stale_and_repeated_answers_are_counted_and_change_nothing() -> None:
    sim = Simulation(doubles=1.0)
    assert sim.refit(1).ok
    sim.run_for(5)
    assert sim.machine.ignored_messages > 5
    assert sim.refit(2).ok


@pytest.mark.parametrize("stage", ["propose", "prepare", "finish", "release"])
@pytest.mark.parametrize(
    "stale_in", [{"refit": 1, "epoch": 1}, {"refit": 2, "epoch": 9}, {"incarnation": "old"}]
)
def test_an_answer_from_elsewhere_is_not_taken_for_one_of_this_refit(stage: str, stale_in: dict) -> None:
    sim = Simulation()
    assert sim.refit(1).ok
    node = sim.nodes["n1"]
    node.faults[stage] = "drop"  # this refit's own answer never comes
    old = {"job": "sim", "incarnation": "life", "epoch": int(stage != "propose"), "refit": 2, **stale_in}
    held = m.Evidence(kind="digest", compared=5, total=5)
    stale = {
        "propose": m.LayoutAccepted(**old),
        "prepare": m.Prepared(**old, pause_seconds=0, begin_seconds=0),
        "finish": m.Verified(**old, evidence=held, end_seconds=0, flush_seconds=0, verify_seconds=0),
        "release": m.Released(**old, label="v2", resume_seconds=0, paused_seconds=0),
    }[stage]
    sim.trainer.begin(2)
    kind = {"propose": m.Propose, "prepare": m.Prepare, "finish": m.Finish, "release": m.Release}[stage]
    sim.run(lambda: len(sim.told(kind, "n1")) == 2)
    ignored = sim.machine.ignored_messages
    sim.feed(ev.NodeSaid(peer=node.peer, message=stale))
    assert sim.machine.ignored_messages == ignored + 1
    sim.run(lambda: len(sim.trainer.reports) == 2)
    report = sim.trainer.reports[1]
    assert not report.ok and report.cause is not None
    assert (report.cause.code, report.cause.node) == ("deadline", "n1")


def packed(bucket: int, slot: int, digests: int = 1) -> m.BucketPacked:
    return m.BucketPacked(
        job="sim", bucket=bucket, slot=slot, digests=(7,) * digests, gather_seconds=0, pack_seconds=0
    )


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([packed(1, 0)], "bucket 1 where bucket 0 of 5 was due"),
        ([packed(0, 0), packed(1, 0)], "slot 0, which still holds bucket 0"),
        ([packed(0, 0, digests=2)], "has 1 tensors and came with 2 digests"),
    ],
)
def test_a_bucket_that_cannot_be_ends_the_refit_before_it_is_sent(
    messages: list[m.BucketPacked], words: str
) -> None:
    ledger = BucketLedger(layout())
    *good, bad = messages
    for message in good:
        assert ledger.take_packed(message)
        assert not ledger.take_packed(message)  # the same again changes nothing
    with pytest.raises(ProtocolError, match=words):
        ledger.take_packed(bad)


def test_a_bucket_larger_than_its_slot_is_never_ordered() -> None:
    ledger = BucketLedger(layout())
    ledger.take_packed(packed(0, 3))
    assert list(ledger.orders({}, 0.0)) == []  # not mapped yet
    with pytest.raises(ProtocolError, match="bucket 0 of 16 bytes does not fit slot 3 of 15"):
        list(ledger.orders({3: 15}, 0.0))


def test_a_bucket_sent_twice_is_credited_once() -> None:
    ledger = BucketLedger(layout())
    ledger.take_packed(packed(0, 3))
    sent = m.BucketSent(job="sim", bucket=0, slot=3, seconds=1.0)
    assert not ledger.take_sent(sent, 1.0)  # it was not ordered yet
    assert [order.bucket for order in ledger.orders({3: 16}, 1.0)] == [0]
    assert ledger.take_sent(sent, 2.0) and not ledger.take_sent(sent, 3.0)
    assert ledger.take_packed(packed(1, 3))  # the slot is free again


def test_a_trainer_that_breaks_the_rules_is_told_and_no_node_serves_a_mix() -> None:
    sim = Simulation()
    sim.trainer.begin(1)
    sim.run(lambda: bool(sim.told(m.Stream)))
    stamp = sim.trainer.stamp()
    wrong = m.BucketPacked(**stamp, bucket=4, slot=0, digests=(1,), gather_seconds=0, pack_seconds=0)
    sim.trainer.say(wrong)
    sim.run(lambda: bool(sim.trainer.reports))
    report = sim.trainer.reports[0]
    assert report.cause is not None and report.cause.code == "protocol" and report.cause.bucket == 4
    assert sim.refit(2).ok


def test_stopping_in_the_middle_aborts_leaves_and_ends() -> None:
    sim = Simulation()
    sim.trainer.begin(1)
    sim.run(lambda: bool(sim.told(m.Stream)))
    sim.run_for(0.6)
    sim.feed(ev.Stop())
    sim.run(lambda: sim.ended, longest=30)
    assert sim.trainer.reports[0].cause is not None
    assert sim.trainer.reports[0].cause.code == "broadcaster_lost"
    assert all(not node.engine.groups for node in sim.nodes.values())


def test_stopping_with_nothing_to_do_ends_at_once() -> None:
    sim = Simulation()
    sim.run_for(1)
    sim.feed(ev.Stop())
    assert sim.ended


# --- the judgement -------------------------------------------------------------------------------


def evidence(
    compared: int = 0, total: int = 4, fingerprint: str = "", group: str = "g", bad: int = 0
) -> m.Evidence:
    return m.Evidence(
        kind="k", compared=compared, total=total, fingerprint=fingerprint, group=group,
        mismatches=tuple(f"w{i}" for i in range(bad)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("evidences", "expected"),
    [
        ([evidence(4), evidence(4)], ["match", "match"]),
        ([evidence(4, bad=1), evidence(4)], ["mismatch", "match"]),
        ([evidence(0, total=0)], ["unproven"]),
        ([evidence(2, fingerprint="a")], ["unproven"]),
        ([evidence(fingerprint="a"), evidence(fingerprint="a")], ["agreed", "agreed"]),
        ([evidence(fingerprint="a"), evidence(fingerprint="b")], ["mismatch", "mismatch"]),
        ([evidence(fingerprint="a"), evidence(fingerprint="a"), evidence(fingerprint="b")], ["mismatch"] * 3),
        ([evidence(4, fingerprint="a"), evidence(fingerprint="a")], ["match", "agreed"]),
        ([evidence(4, fingerprint="a"), evidence(fingerprint="b")], ["match", "mismatch"]),
        ([evidence(bad=1, fingerprint="a"), evidence(fingerprint="a")], ["mismatch", "mismatch"]),
        ([evidence(bad=1, fingerprint="a"), evidence(fingerprint="b")], ["mismatch", "unproven"]),
        ([evidence(fingerprint="a"), evidence(fingerprint="a", group="h")], ["unproven", "unproven"]),
        ([evidence(group=""), evidence(group="")], ["unproven", "unproven"]),
    ],
)
def test_judgement(evidences: list[m.Evidence], expected: list[str]) -> None:
    named = {f"n{i}": e for i, e in enumerate(evidences)}
    strict = judge(named, digests={}, before={}, allow_unproven=False)
    assert [strict[name].digest for name in named] == expected
    for name, verdict in strict.items():
        assert (verdict.cause is None) == (verdict.digest in ("match", "agreed")), name
    lenient = judge(named, digests={}, before={}, allow_unproven=True)
    assert [lenient[name].digest for name in named] == expected
    assert all((v.cause is None) == (v.digest != "mismatch") for v in lenient.values())


@pytest.mark.parametrize(
    ("sent", "shown", "digest"),
    [
        ({"w": 2, "v": 1}, "a", "mismatch"),  # the trainer's bytes changed, the engine's did not
        ({"w": 2, "v": 1}, "b", "agreed"),
        ({"w": 1, "v": 1}, "a", "agreed"),  # the same bytes again
        ({"v": 1, "new": 7}, "a", "agreed"),  # nothing known to both changed
    ],
)
def test_a_fleet_that_agrees_on_its_old_bytes_is_found_out(
    sent: dict[str, int], shown: str, digest: str
) -> None:
    proof = Proof(digests={"w": 1, "v": 1}, fingerprint="a")
    named = {name: evidence(fingerprint=shown) for name in ("n0", "n1")}
    verdicts = judge(named, digests=sent, before={"n0": proof, "n1": proof}, allow_unproven=True)
    assert {verdict.digest for verdict in verdicts.values()} == {digest}
    for name, verdict in verdicts.items():
        assert (verdict.cause is not None and "'w'" in verdict.cause.message) == (digest == "mismatch"), name


# --- everything at once --------------------------------------------------------------------------

STAGES = [
    "propose",
    "join",
    "leave",
    "prepare",
    "finish",
    "release",
    "abort",
    *(f"bucket{i}" for i in range(5)),
]
FAULTS = ["fail", "drop", "kill", "freeze", "late", "wrong"]


def throw_faults(sim: Simulation) -> None:
    dice = sim.random
    for node in sim.nodes.values():
        if dice.random() < 0.35:
            stage = dice.choice(STAGES)
            fault = dice.choice(FAULTS)
            node.faults[stage] = "drop" if stage == "abort" and fault in ("fail", "wrong") else fault
    if dice.random() < 0.15:
        sim.trainer.pack_fault = (dice.randrange(5), dice.choice(["stall", "die", "cancel"]))
    if dice.random() < 0.1:
        sim.source.fail_bucket = dice.randrange(5)
    if dice.random() < 0.1:
        sim.after(dice.uniform(0, 8), sim.source.crash)
    if dice.random() < 0.1:
        node = dice.choice(list(sim.nodes.values()))
        life = node.life
        sim.after(dice.uniform(0, 8), lambda: node.kill() if node.life == life else None)


def repair(sim: Simulation) -> None:
    for node in sim.nodes.values():
        node.faults.clear()
        if not node.alive or node.frozen:
            node.boot()
    if not sim.trainer.alive:
        sim.trainer.attach()
    sim.trainer.pack_fault = sim.source.fail_bucket = None
    sim.run_for(15)


@pytest.mark.parametrize("block", range(10))
def test_random_faults_never_hang_a_refit_nor_serve_what_is_not_verified(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        sim = Simulation(seed=seed, nodes=1 + seed % 4, doubles=0.1)
        try:
            for step in (1, 2, 3):
                throw_faults(sim)
                sim.last_report = None
                sim.trainer.begin(step)
                sim.run(lambda sim=sim: sim.last_report is not None or bool(sim.trainer.rejections))
                sim.trainer.rejections.clear()
                sim.run_for(10)  # what was thrown late falls now
                repair(sim)
            healed = sim.refit(9)
            assert healed.ok, healed
            assert all(not node.engine.paused for node in sim.nodes.values())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_cause_that_is_an_echo_gives_way_to_the_root() -> None:
    from weightcast.broadcaster.participants import root_cause

    echo = Cause(code="broadcast_failed", message="connection closed")
    root = Cause(code="node_down", message="killed", node="n1")
    assert root_cause([echo, root]) is root
    assert root_cause([echo]) is echo
    assert root_cause([]) is None
