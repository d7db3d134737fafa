"""The control process: an asyncio shell around the machine. It moves messages, descriptors and signals.

    agents ──ROUTER tcp──┐                         ┌──► source process (SIGKILL is its abort)
    trainer ─ROUTER ipc──┤► decode ► machine ► act ─┼──► agent host for plain engines
    source ──ROUTER ipc──┤                         └──► answers, slots, metrics
    slot link ───────────┘

All sockets are drained before the clock is read for deadlines: a control process that was stopped for a while
must not take the heartbeats waiting in its queues for silence.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from ..proto import messages
from ..proto.config import Announcement, BroadcasterConfig, check_config
from ..proto.errors import InvalidConfig, ProtocolError
from ..proto.sockets import bind, configure, decode, encode
from .agent_host import AgentHost
from .children import Child
from .events import (
    Action,
    DropSlot,
    DropTrainer,
    Ended,
    Event,
    KillSource,
    ListenForSlots,
    NodeSaid,
    NodeUnreachable,
    RefitEnded,
    SourceExited,
    SourceSaid,
    StartSource,
    Stop,
    TellNode,
    TellSource,
    TellTrainer,
    Tick,
    TrainerSaid,
)
from .http import HttpServer
from .machine import Machine
from .metrics import Metrics
from .run_directory import RunDirectory
from .slot_links import SlotLinks
from .status import describe

_log = logging.getLogger("weightcast.broadcaster")

#: Messages taken from the sockets before other tasks get a turn.
_BATCH = 1000
_WILDCARDS = ("0.0.0.0", "[::]", "*")  # noqa: S104 - compared with, not bound


class Control:
    """One broadcaster. `run` returns when it was told to end, with everything released."""

    def __init__(self, config: BroadcasterConfig) -> None:
        """Check the configuration and lock the run directory.

        Raises:
            InvalidConfig: naming the field.
            AddressInUse: another broadcaster holds the run directory.
        """
        self._config = check_config(config)
        if config.advertise in (*_WILDCARDS, "::", ""):
            raise InvalidConfig(
                f"advertise is {config.advertise!r}; rollout hosts connect to it, so it must be one address "
                "of this machine that they can reach"
            )
        self._directory = RunDirectory(config.run_path)
        self._machine = Machine(
            config=config, incarnation=secrets.token_hex(4), run_dir=str(self._directory.path)
        )
        self._events: deque[Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._source: Child | None = None
        self._encoded: tuple[msgspec.Struct | None, bytes] = (None, b"")
        self._inlets: list[tuple[Any, Callable[[list[bytes]], None]]] = []

    async def run(self, *, on_ready: Callable[[Announcement], None]) -> None:
        """Serve until SIGTERM or SIGINT. ``on_ready`` is called once everything is bound.

        Raises:
            AddressInUse: a port is taken.
        """
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._links = SlotLinks(tell=self._post)
        self._metrics = Metrics(machine=self._machine, clock=self._loop.time)
        self._http = HttpServer(
            metrics=self._metrics,
            status=lambda: describe(self._machine, pid=os.getpid(), now=self._loop.time()),
        )
        context = zmq.Context()
        agents: AgentHost | None = None
        try:
            self._nodes, control = _listen(context, self._config.control)
            self._trainers, trainer = _listen(context, self._directory.trainer_endpoint)
            self._sources, _ = _listen(context, self._directory.source_endpoint)
            self._inlets = [
                (self._nodes, self._hear_node),
                (self._trainers, self._hear_trainer),
                (self._sources, self._hear_source),
            ]
            http = await self._http.start(self._config.http)
            for socket, _ in self._inlets:
                self._loop.add_reader(socket.FD, self._pump)
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._post, Stop())
            announcement = Announcement(
                pid=os.getpid(),
                job=self._config.job,
                control=_reachable(control, self._config.advertise),
                http=http,
                trainer=trainer,
            )
            self._act(self._machine.start())
            agents = AgentHost(
                config=self._config,
                endpoint=_reachable(control, "127.0.0.1"),
                tell=lambda waiting: self._post(NodeSaid(peer=b"agent host", message=waiting)),
            )
            self._directory.announce(announcement)
            on_ready(announcement)
            self._post(Tick())
            await self._ended.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if agents is not None:
                await agents.close()
            if self._source is not None:
                await self._source.end(seconds=0.0)
            await self._http.close()
            for socket, _ in self._inlets:
                self._loop.remove_reader(socket.FD)
            self._links.close()
            context.destroy(linger=200)
            self._directory.close()

    # --- events ------------------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        """Give the machine one event and carry out what it orders; what follows from that comes after."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                self._act(self._machine.handle(self._events.popleft(), self._loop.time()))
        finally:
            self._handling = False
        self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Take what waits on the sockets: their descriptors signal edges only, so they are emptied."""
        if self._ended.is_set():
            return
        for _ in range(_BATCH):
            busy = False
            for socket, hear in self._inlets:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    continue
                busy = True
                hear(frames)
            if not busy:
                break
        else:
            self._loop.call_soon(self._pump)
            return
        self._set_timer()

    def _set_timer(self) -> None:
        due = self._machine.next_deadline()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        self._pump()
        due = self._machine.next_deadline()
        if due is not None and due <= self._loop.time():
            self._post(Tick())

    def _decode(self, frames: list[bytes], decoder: Any, socket: str) -> Any:
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a message of {len(frames) - 1} frames where one is due")
            return decode(frames[1], decoder)
        except ProtocolError as error:
            self._metrics.junk_frame(socket)
            _log.warning("junk on the %s socket from %s: %s", socket, frames[0].hex(), error)
            return None

    def _hear_node(self, frames: list[bytes]) -> None:
        message = self._decode(frames, messages.from_node, "node")
        if message is not None:
            self._post(NodeSaid(peer=frames[0], message=message))

    def _hear_trainer(self, frames: list[bytes]) -> None:
        message = self._decode(frames, messages.from_trainer, "trainer")
        if message is not None:
            self._post(TrainerSaid(peer=frames[0], message=message))

    def _hear_source(self, frames: list[bytes]) -> None:
        message = self._decode(frames, messages.from_source, "source")
        if message is None:
            return
        kind, _, number = frames[0].partition(b"-")
        generation = int(number) if kind == b"source" and number.isdigit() else 0
        self._post(SourceSaid(generation=generation, message=message))

    # --- actions -----------------------------------------------------------------------------------

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case TellNode(peer=peer, message=message):
                    if not self._send(self._nodes, peer, message):
                        self._events.append(NodeUnreachable(peer=peer))
                case TellTrainer(peer=peer, message=message):
                    if not self._send(self._trainers, peer, message):
                        _log.info("trainer %s is gone before its %s", peer.hex(), type(message).__name__)
                case TellSource(message=message):
                    if not self._send(
                        self._sources, f"source-{self._machine.epochs.generation}".encode(), message
                    ):
                        _log.warning("the source is gone before its %s", type(message).__name__)
                case StartSource(generation=generation):
                    self._start_source(generation)
                case KillSource(generation=generation):
                    if self._source is not None:
                        _log.warning(
                            "killing source process %d: %s", self._source.pid, self._machine.epochs.last_end
                        )
                        ended = self._source.kill()
                        self._source = None
                        if ended:
                            self._events.append(SourceExited(generation=generation, reason=ended))
                case ListenForSlots(peer=peer, path=path):
                    self._links.listen(peer=peer, path=path)
                case DropSlot(slot=slot):
                    self._links.drop_slot(slot)
                case DropTrainer(peer=peer):
                    self._links.drop_trainer(peer)
                case RefitEnded(report=report):
                    self._report(report)
                case Ended():
                    self._ended.set()

    def _send(self, socket: Any, peer: bytes, message: msgspec.Struct) -> bool:
        """Hand one message to a peer's queue; False if it has no connection or its queue is full."""
        if self._encoded[0] is not message:  # one order to all nodes is encoded once
            self._encoded = (message, encode(message))
        try:
            socket.send_multipart([peer, self._encoded[1]], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def _start_source(self, generation: int) -> None:
        def exited(reason: str) -> None:
            self._source = None
            self._post(SourceExited(generation=generation, reason=reason))

        try:
            with self._links.connect_source() as link:
                self._source = Child(
                    [
                        "-m",
                        "weightcast.broadcaster.source",
                        "--endpoint",
                        self._directory.source_endpoint,
                        "--fd",
                        str(link.fileno()),
                        "--job",
                        self._config.job,
                        "--generation",
                        str(generation),
                    ],
                    on_exit=exited,
                    pass_fds=[link.fileno()],
                    environment={"OMP_NUM_THREADS": "1"},
                )
        except OSError as error:
            self._events.append(SourceExited(generation=generation, reason=f"it cannot be started: {error}"))

    def _report(self, report: messages.RefitReport) -> None:
        self._metrics.refit_ended(report)
        outcomes = ", ".join(f"{name} {node.outcome} ({node.digest})" for name, node in report.nodes.items())
        if report.ok:
            _log.info("version %d is live in %.2f s: %s", report.version, report.seconds.total, outcomes)
        else:
            cause = report.cause.describe() if report.cause is not None else "unknown"
            _log.error("version %d failed: %s; nodes: %s", report.version, cause, outcomes or "none")


def _listen(context: zmq.Context[Any], endpoint: str) -> tuple[Any, str]:
    socket = context.socket(zmq.ROUTER)
    configure(socket)
    return socket, bind(socket, endpoint)


def _reachable(endpoint: str, address: str) -> str:
    """``endpoint`` as peers can use it: ``address`` in place of a wildcard, IPv4 in its own notation."""
    scheme, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    if host.startswith("[::ffff:"):
        host = host.removeprefix("[::ffff:").removesuffix("]")
    if host in _WILDCARDS:
        host = f"[{address}]" if ":" in address else address
    return f"{scheme}://{host}:{port}"


def serve(config: BroadcasterConfig) -> None:
    """Run a broadcaster in this process until it is told to end.

    Prints its `Announcement` as one JSON line on stdout once it can be used.

    Raises:
        InvalidConfig: naming the field.
        AddressInUse: a port or the run directory is taken.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s broadcaster %(levelname)s %(message)s"
    )

    def say_ready(announcement: Announcement) -> None:
        sys.stdout.write(msgspec.json.encode(announcement).decode() + "\n")
        sys.stdout.flush()

    control = Control(config)
    asyncio.run(control.run(on_ready=say_ready))
