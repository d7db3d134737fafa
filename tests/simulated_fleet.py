"""A whole fleet in simulated time: the real machine against simulated nodes, source and trainer.

Everything that can go wrong is drawn from one seeded generator, so a failing seed replays exactly. The
simulated engines hold real (tiny) contents: what a node holds, serves and reports is known here as a fact,
and the invariants of the machine are checked against those facts at every step.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from weightcast.broadcaster import events as ev
from weightcast.broadcaster.machine import Machine
from weightcast.proto import messages as m
from weightcast.proto.config import BroadcasterConfig, Deadlines
from weightcast.proto.errors import Cause
from weightcast.proto.layout import TensorSpec, plan_buckets

DEADLINES = Deadlines(
    nodes=20, propose=10, join=10, pack=30, prepare=10, bucket=10, lowest_rate=1e9, finish=10, release=10,
    heartbeat=5, refit=300,
)  # fmt: skip
#: No refit may take longer than its own deadline and the abort after it.
LONGEST = DEADLINES.refit + 2 * DEADLINES.release


def config(**changes: object) -> BroadcasterConfig:
    return BroadcasterConfig(**{"job": "sim", "nodes": 1, "deadlines": DEADLINES, **changes})  # type: ignore[arg-type]


def layout(tensors: int = 5):
    specs = [TensorSpec(f"w{i}", "float32", (4,)) for i in range(tensors)]
    return plan_buckets(specs, bucket_bytes=16)


@dataclass
class Engine:
    """What one engine really holds and does. ``contents[i]`` is the digest of tensor i."""

    contents: list[int]
    paused: bool = False
    touched: bool = False
    label: str = "default"
    groups: set[str] = field(default_factory=set)


class SimNode:
    """An agent with its engine. ``faults[stage]`` is what happens when that order comes, once:

    fail · drop (the answer is lost) · kill (agent and engine die) · freeze (the agent goes silent) ·
    wrong (bytes are damaged) · late (answers after the deadline)
    """

    def __init__(self, sim: Simulation, name: str, *, tp: int = 1) -> None:
        self.sim, self.name, self.tp = sim, name, tp
        self.life = 0
        self.faults: dict[str, str] = {}
        self.boot()

    def boot(self) -> None:
        self.life += 1
        self.alive, self.frozen = True, False
        self.peer = f"{self.name}-{self.life}".encode()
        self.instance = f"{self.name}/{self.life}"
        self.engine = Engine(contents=[0] * 5)
        self.refit: int | None = None
        self.layout = None
        self.streaming: m.Stream | None = None
        self.next_bucket = 0
        self.version: m.Version | None = None
        self.register()

    def register(self) -> None:
        info = m.NodeInfo(
            name=self.name, instance=self.instance, engine_url=f"http://{self.name}", engine="reference",
            engine_version="1", model="toy", architecture="Toy", dtype="float32", tp_size=self.tp,
            label=self.engine.label, paused=self.engine.paused,
        )  # fmt: skip
        self.say(m.Register(job="sim", node=info))
        self.beat(self.life)

    def beat(self, life: int) -> None:
        if self.alive and life == self.life:
            if not self.frozen:
                self.say(m.Heartbeat(job="sim", instance=self.instance))
            self.sim.after(DEADLINES.heartbeat / 5, lambda: self.beat(life))

    def kill(self) -> None:
        self.alive = False
        self.sim.source.peer_died(self.name)

    def say(self, message: m.FromNode) -> None:
        peer, life = self.peer, self.life

        def deliver() -> None:
            if self.alive and self.life == life:
                self.sim.feed(ev.NodeSaid(peer=peer, message=message))

        self.sim.deliver(f"from {self.instance}", deliver)

    def hear(self, order: m.ToNode) -> None:
        life = self.life
        self.sim.deliver(
            f"to {self.instance}",
            lambda: self.carry_out(order) if self.alive and self.life == life else None,
        )

    def carry_out(self, order: m.ToNode) -> None:
        if self.frozen or isinstance(order, m.Welcome | m.Rejected):
            return
        stage = type(order).__name__.lower()
        fault = self.faults.pop(stage, "")
        if fault == "kill":
            self.kill()
        elif fault == "freeze":
            self.frozen = True
        elif fault == "fail":
            cause = Cause(code=f"{stage}_failed", message=f"injected at {stage}", node=self.name)
            self.answer(
                order, m.StageFailed(job="sim", stage=stage, cause=cause, touched=self.engine.touched)
            )
        else:
            answer = self.obey(order, wrong=fault == "wrong")
            if answer is not None and fault != "drop":
                late = 11.0 if fault == "late" else 0.0
                life = self.life
                self.sim.after(late, lambda: self.answer(order, answer) if self.life == life else None)
                if self.sim.random.random() < self.sim.doubles:
                    self.sim.after(
                        late + 1, lambda: self.answer(order, answer) if self.life == life else None
                    )

    def obey(self, order: m.ToNode, *, wrong: bool) -> m.FromNode | None:
        engine = self.engine
        match order:
            case m.Propose():
                self.refit, self.layout, self.version = order.refit, order.layout, order.version
                return m.LayoutAccepted(job="sim")
            case m.Leave():
                engine.groups.discard(order.group_name)
                return m.Left(job="sim", group_name=order.group_name)
            case m.Join():
                engine.groups.add(order.group_name)
                self.sim.source.joined(order.group_name, self.name)
                return m.Joined(job="sim", seconds=0.1)
            case m.Prepare():
                engine.paused = True
                return m.Prepared(job="sim", pause_seconds=0.1, begin_seconds=0.1)
            case m.Stream():
                self.streaming, self.next_bucket = order, 0
                self.sim.source.push(self)
                return None
            case m.Finish():
                right = sum(held == sent for held, sent in zip(engine.contents, order.digests, strict=True))
                bad = tuple(f"w{i}" for i, d in enumerate(order.digests) if engine.contents[i] != d)
                evidence = m.Evidence(kind="digest", compared=len(order.digests), total=5, mismatches=bad)
                assert right + len(bad) == 5
                self.sim.finished(self.name, not bad)
                return m.Verified(
                    job="sim", evidence=evidence, end_seconds=0, flush_seconds=0, verify_seconds=0
                )
            case m.Release():
                assert self.version is not None
                self.sim.check(
                    engine.contents == self.sim.trainer.contents[self.version.step],
                    f"{self.name} is released with bytes that are not the trainer's",
                )
                engine.paused = engine.touched = False
                engine.label = self.version.label
                self.refit = None
                return m.Released(job="sim", label=engine.label, resume_seconds=0, paused_seconds=1)
            case m.Abort():
                if not engine.touched:
                    engine.paused = False
                self.refit = self.streaming = None
                return m.Aborted(job="sim", touched=engine.touched, serving=not engine.paused)
        raise AssertionError(order)

    def receive(self, bucket: int, digests: list[int], group: str) -> None:
        """The source's bytes reach the engine."""
        if not self.alive or self.frozen or self.streaming is None or bucket != self.next_bucket:
            return
        fault = self.faults.pop(f"bucket{bucket}", "")
        if fault == "kill":
            self.kill()
            return
        self.engine.touched = True
        order = self.streaming
        if fault == "freeze":
            self.frozen = True
            return
        if fault == "fail":
            cause = Cause(code="bucket_failed", message="injected", node=self.name, bucket=bucket)
            self.answer(order, m.StageFailed(job="sim", stage="stream", cause=cause, touched=True))
            self.streaming = None
            return
        assert self.layout is not None
        for index, digest in zip(self.layout.buckets[bucket], digests, strict=True):
            self.engine.contents[index] = digest ^ (1 if fault == "wrong" else 0)
        self.next_bucket += 1
        if fault != "drop":
            self.answer(order, m.BucketLoaded(job="sim", bucket=bucket, seconds=0.1))

    def answer(self, order: m.Message, message: m.FromNode) -> None:
        import msgspec

        stamped = msgspec.structs.replace(
            message, incarnation=order.incarnation, epoch=order.epoch, refit=order.refit
        )
        self.say(stamped)


class SimSource:
    """The source processes, one generation at a time."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.generation = 0
        self.running = False
        self.fault = ""
        self.fail_bucket: int | None = None
        self.starts = 0

    def start(self, generation: int) -> None:
        assert not self.running, "two sources at once"
        self.generation, self.running = generation, True
        self.starts += 1
        self.group: m.OpenGroup | None = None
        self.members: set[str] = set()
        self.wire: list[tuple[m.BroadcastBucket, list[int]]] = []
        self.sent = 0
        self.say(m.SourceReady(job="sim", pid=1, device="cpu"), delay=2.0)
        for slot in self.sim.trainer.slots:
            self.attach(slot, delay=2.1)

    def kill(self) -> None:
        self.running = False

    def crash(self) -> None:
        if self.running:
            self.running = False
            generation = self.generation
            self.sim.after(0, lambda: self.sim.feed(ev.SourceExited(generation=generation, reason="crashed")))

    def attach(self, slot: int, delay: float = 0.0) -> None:
        self.say(m.SlotAttached(job="sim", slot=slot, nbytes=16), delay=delay)

    def say(self, message: m.FromSource, delay: float | None = None) -> None:
        generation = self.generation

        def deliver() -> None:
            if self.running and self.generation == generation:
                self.sim.feed(ev.SourceSaid(generation=generation, message=message))

        self.sim.deliver(f"source {generation}", deliver, delay)

    def echo(self, order: m.Message) -> dict:
        return {"job": "sim", "incarnation": order.incarnation, "epoch": order.epoch, "refit": order.refit}

    def hear(self, order: m.ToSource) -> None:
        if not self.running:
            return
        match order:
            case m.OpenGroup():
                self.group, self.members = order, set()
                if self.fault != "no_store":
                    self.say(m.StoreOpened(**self.echo(order), group_name=order.group_name, port=4000))
            case m.CloseGroup():
                self.group = None
            case m.SetChecksumPlans():
                self.wire, self.sent = [], 0
            case m.BroadcastBucket():
                assert self.group is not None
                self.wire.append((order, self.sim.trainer.read(order.slot, order.bucket)))
                self.step(order)
            case _:
                pass

    def joined(self, group_name: str, node: str) -> None:
        group = self.group
        if self.running and group is not None and group.group_name == group_name:
            self.members.add(node)
            if sum(self.sim.nodes[name].tp for name in self.members) + 1 == group.world_size:
                self.say(m.GroupReady(**self.echo(group), group_name=group_name, seconds=0.1))

    def step(self, order: m.BroadcastBucket) -> None:
        if self.fail_bucket == order.bucket:
            self.fail_bucket = None
            cause = Cause(code="broadcast_failed", message="injected", epoch=order.epoch, bucket=order.bucket)
            self.say(m.SourceFailed(**self.echo(order), cause=cause))
            return
        for name in sorted(self.members):
            self.push(self.sim.nodes[name])
        # Read again at the end of the broadcast: a slot refilled too early would show.
        self.sim.check(
            self.wire[-1][1] == self.sim.trainer.read(order.slot, order.bucket), "a slot changed on the wire"
        )
        sent = m.BucketSent(**self.echo(order), bucket=order.bucket, slot=order.slot, seconds=0.1)
        self.say(sent, delay=self.sim.random.uniform(0.4, 0.8))

    def push(self, node: SimNode) -> None:
        generation = self.generation
        for order, digests in self.wire:

            def land(order: m.BroadcastBucket = order, digests: list[int] = digests) -> None:
                if self.running and self.generation == generation and self.group is not None:
                    node.receive(order.bucket, digests, self.group.group_name)

            self.sim.after(0.5 + 0.01 * order.bucket, land)

    def peer_died(self, name: str) -> None:
        if self.running and name in getattr(self, "members", ()) and self.wire:
            cause = Cause(
                code="broadcast_failed", message="connection closed by peer", bucket=self.wire[-1][0].bucket
            )
            self.say(m.SourceFailed(job="sim", cause=cause))


class SimTrainer:
    """One training job that sends whatever step it is told to. ``contents[step][i]`` is tensor i's digest."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.life = 0
        self.contents: dict[int, list[int]] = {}
        self.slots = (0, 1)
        self.reports: list[m.RefitReport] = []
        self.rejections: list[Cause] = []
        self.accepted = 0
        self.refit = 0
        self.pack_fault: tuple[int, str] | None = None
        self.stalled = 0

    def attach(self) -> None:
        self.life += 1
        self.alive = True
        self.peer = f"trainer-{self.life}".encode()
        self.incarnation = f"run-{self.life}"
        self.free = set(self.slots)
        self.held: dict[int, int] = {}
        self.filled: dict[int, list[int]] = {}
        self.say(m.TrainerHello(**self.stamp(), pid=self.life, ranks=1, slots=dict.fromkeys(self.slots, 16)))

    def stamp(self) -> dict:
        return {"job": "sim", "incarnation": self.incarnation, "refit": self.refit}

    def say(self, message: m.FromTrainer) -> None:
        self.sim.feed(ev.TrainerSaid(peer=self.peer, message=message))

    def die(self) -> None:
        self.alive = False
        peer = self.peer
        self.sim.after(
            0, lambda: self.sim.feed(ev.TrainerLinkClosed(peer=peer, reason="its slot link closed"))
        )

    def begin(self, step: int) -> None:
        self.refit += 1
        self.step, self.layout, self.packed = step, layout(), 0
        self.free, self.held = set(self.slots), {}
        self.contents[step] = [step * 1000 + i * 10 for i in range(5)]
        self.say(m.RefitBegin(**self.stamp(), step=step, label=f"v{step}", layout=self.layout))
        self.pack(self.refit)

    def pack(self, refit: int) -> None:
        while self.alive and refit == self.refit and self.free and self.packed < len(self.layout.buckets):
            bucket = self.packed
            fault = self.pack_fault[1] if self.pack_fault and self.pack_fault[0] == bucket else ""
            if fault:
                self.pack_fault = None
            if fault == "stall":
                self.stalled = refit
            if self.stalled == refit:
                return
            if fault == "die":
                self.die()
                return
            if fault == "cancel":
                cause = Cause(code="trainer_failed", message="rank 3 raised", rank=3)
                self.say(m.RefitCancel(**self.stamp(), cause=cause))
                return
            slot = min(self.free)
            self.free.discard(slot)
            self.held[slot] = bucket
            self.packed += 1
            digests = [self.contents[self.step][i] for i in self.layout.buckets[bucket]]
            self.filled[slot] = digests
            self.say(
                m.BucketPacked(
                    **self.stamp(), bucket=bucket, slot=slot, digests=tuple(digests), gather_seconds=0.1,
                    pack_seconds=0.1,
                )
            )  # fmt: skip

    def read(self, slot: int, bucket: int) -> list[int]:
        return list(self.filled[slot])

    def hear(self, message: m.ToTrainer) -> None:
        if not self.alive:
            return
        match message:
            case m.TrainerWelcome():
                self.sim.feed(ev.TrainerLinked(peer=self.peer))
                for slot in self.slots:
                    self.sim.feed(ev.SlotReceived(peer=self.peer, slot=slot, nbytes=16))
                    if self.sim.source.running:
                        self.sim.source.attach(slot, delay=2.0)
            case m.RefitAccepted():
                self.accepted += 1
            case m.Credit():
                if message.refit == self.refit:
                    self.sim.check(
                        self.held.pop(message.slot, None) == message.bucket, "a credit that was not due"
                    )
                    self.free.add(message.slot)
                    refit = self.refit
                    self.sim.after(self.sim.delay(), lambda: self.pack(refit))
            case m.RefitFinished():
                self.reports.append(message.report)
            case m.TrainerRejected():
                self.rejections.append(message.cause)


class Simulation:
    """Time, the queue of what is to come, and the facts."""

    def __init__(self, *, seed: int = 0, nodes: int = 3, doubles: float = 0.0, **changes: object) -> None:
        self.random = random.Random(seed)
        self.doubles = doubles
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._channels: dict[str, float] = {}
        self._pending: list[ev.Event] = []
        self._feeding = False
        self._ticked = -1.0
        self.orders: list[tuple[str, m.Message]] = []
        self.verified: dict[str, bool] = {}
        self.ended = False
        self.last_report: m.RefitReport | None = None
        self.machine = Machine(config=config(nodes=nodes, **changes), incarnation="life", run_dir="/run")
        self.source = SimSource(self)
        self.trainer = SimTrainer(self)
        self.nodes: dict[str, SimNode] = {}
        self.apply(self.machine.start())
        for number in range(nodes):
            self.nodes[f"n{number}"] = SimNode(self, f"n{number}", tp=1 + number % 2)
        self.trainer.attach()

    def check(self, fact: bool, message: str) -> None:
        assert fact, f"{message} (at {self.now:.2f} s)"

    def delay(self) -> float:
        return self.random.uniform(0.01, 0.3)

    def deliver(self, channel: str, what: Callable[[], None], delay: float | None = None) -> None:
        """Like a socket: some delay, but nothing overtakes what was sent before on the same channel."""
        at = self.now + (self.delay() if delay is None else delay)
        self._channels[channel] = at = max(at, self._channels.get(channel, 0.0))
        self.after(at - self.now, what)

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._counter), what))

    def feed(self, event: ev.Event) -> None:
        self._pending.append(event)
        if self._feeding:
            return
        self._feeding = True
        while self._pending:
            self.apply(self.machine.handle(self._pending.pop(0), self.now))
            self.check_states()
        self._feeding = False

    def apply(self, actions: list[ev.Action]) -> None:
        for action in actions:
            match action:
                case ev.TellNode(peer=peer, message=message):
                    self.orders.append((peer.decode().partition("-")[0], message))
                    self.tell_node(peer, message)
                case ev.TellTrainer(peer=peer, message=message):
                    if peer == self.trainer.peer:
                        self.trainer.hear(message)
                case ev.TellSource(message=message):
                    self.source.hear(message)
                case ev.StartSource(generation=generation):
                    self.source.start(generation)
                case ev.KillSource(generation=generation):
                    if not self.source.running:  # it had ended, and nobody knew yet
                        self.feed(ev.SourceExited(generation=generation, reason="crashed"))
                    self.source.kill()
                case ev.RefitEnded(report=report):
                    self.last_report = report
                    self.check_report(report)
                case ev.Ended():
                    self.ended = True
                case _:
                    pass

    def tell_node(self, peer: bytes, message: m.ToNode) -> None:
        if isinstance(message, m.Finish):
            self.verified.clear()
        for node in self.nodes.values():
            if node.peer == peer:
                if isinstance(message, m.Release):
                    self.check(self.verified.get(node.name, False), f"{node.name} released unverified")
                if node.alive:
                    node.hear(message)
                else:
                    self.feed(ev.NodeUnreachable(peer=peer))

    def finished(self, name: str, good: bool) -> None:
        self.verified[name] = good

    def check_states(self) -> None:
        for name, known in self.machine.fleet.nodes.items():
            node = self.nodes[name]
            if known.state is m.NodeState.READY and known.info.instance == node.instance:
                assert known.version is not None
                self.check(not node.engine.touched, f"{name} is READY and was touched since")
                self.check(
                    node.engine.contents == self.trainer.contents[known.version.step],
                    f"{name} is READY at {known.version.step} and holds {node.engine.contents}",
                )

    def check_report(self, report: m.RefitReport) -> None:
        everyone = bool(report.nodes) and all(n.outcome == "ready" for n in report.nodes.values())
        self.check(report.ok == everyone, "report.ok disagrees with its nodes")
        self.check(report.ok or report.cause is not None, "a failed refit without a cause")
        for name, said in report.nodes.items():
            node = self.nodes[name]
            if said.outcome == "unchanged":
                self.check(not node.engine.touched, f"{name} is reported unchanged and was touched")
            if said.outcome == "ready":
                self.check(
                    node.engine.contents == self.trainer.contents[report.version], f"{name} is not ready"
                )
                self.check(said.version == report.version, f"{name} reports another version")

    def run(self, until: Callable[[], bool], *, longest: float = LONGEST) -> None:
        """Let time pass until ``until()``; fails if that takes longer than ``longest`` simulated seconds."""
        limit = self.now + longest
        while not until():
            due = self.machine.next_deadline()
            first = self._queue[0][0] if self._queue else None
            if due is not None and (first is None or due < first):
                self.check(due > self._ticked, "a tick did not settle its deadline")
                self.now = self._ticked = max(self.now, due)
                self.feed(ev.Tick())
            elif first is not None:
                at, _, what = heapq.heappop(self._queue)
                self.now = max(self.now, at)
                what()
            else:
                raise AssertionError("nothing is left that could happen")
            self.check(self.now <= limit, "it did not end")

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        self.after(seconds, lambda: None)
        self.run(lambda: self.now >= end, longest=seconds + 1)

    def refit(self, step: int) -> m.RefitReport:
        """One refit from its begin to its report."""
        before = len(self.trainer.reports)
        self.trainer.begin(step)
        self.run(lambda: len(self.trainer.reports) > before or bool(self.trainer.rejections))
        assert len(self.trainer.reports) > before, self.trainer.rejections
        return self.trainer.reports[-1]

    def machine_info(self, name: str) -> m.NodeInfo:
        """What the machine knows of a node, once it has registered."""
        self.run(lambda: name in self.machine.fleet.nodes)
        return self.machine.fleet.nodes[name].info

    def told(self, kind: type[m.Message], node: str | None = None) -> list[m.Message]:
        return [
            message for name, message in self.orders if isinstance(message, kind) and node in (None, name)
        ]
