"""The asyncio shell around a node's machine: one DEALER socket, one engine, one stage at a time.

    receive ─┐                          ┌─► send
    link ────┤                          ├─► stage task ──► engine (HTTP)
    timer ───┼──► machine ──► actions ──┤
    engine ──┤                          ├─► heartbeat interval
    stop ────┘                          └─► engine finder

Heartbeats have a task of their own, and everything that takes time is in another one, so they are never
late because of payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from ..proto.errors import Cause, InvalidConfig, ProtocolError, WeightcastError
from ..proto.messages import FromNode, Heartbeat, to_node
from ..proto.sockets import configure, decode, encode
from .client import Deadline, EngineClient, EngineError, EngineUnreachable, Unauthorized
from .identity import identify
from .launch import EngineChild, EngineExited
from .machine import NodeMachine
from .stages import EngineStages, StageFault
from .steps import (
    Action,
    Beat,
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
    Note,
    Said,
    StageBroke,
    StageDone,
    Stop,
    StopStage,
    Tell,
    Tick,
)

_log = logging.getLogger("weightcast.rollout_node")

#: ZeroMQ's own ping, milliseconds: a frozen or cut-off broadcaster host is noticed after the time-out.
_PING_INTERVAL_MS = 2000
_PING_TIMEOUT_MS = 6000
#: Seconds between two looks at an engine that does not answer (yet), and at one that is idle.
_LOOK_AGAIN = 1.0
_WATCH = 5.0
#: Seconds one look may take. SGLang answers its infos within milliseconds unless it is blocked.
_LOOK_SECONDS = 30.0
#: A launched engine that does not answer after this long has failed to start.
_LAUNCH_SECONDS = 1800.0
#: A stage's calls have deadlines of their own; this is how much later the stage as a whole is cut off.
_STAGE_SLACK = 2.0
#: Seconds for closing an open refit when the agent is told to end, before it ends anyway.
_STOP_SECONDS = 12.0
#: Milliseconds for a goodbye to leave.
_GOODBYE_MS = 500


def check_broadcaster_endpoint(endpoint: str) -> str:
    """Return ``endpoint`` if agents can connect to it.

    Raises:
        InvalidConfig: naming it and what is wrong.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidConfig(f"broadcaster endpoint {endpoint!r} must look like tcp://HOST:PORT")
    if host.strip("[]") in ("0.0.0.0", "*", "::"):  # noqa: S104
        raise InvalidConfig(f"broadcaster endpoint {endpoint!r}: give the address of the broadcaster's host")
    return endpoint


class NodeAgent:
    """One rollout node: registers, heartbeats, and drives its engine through refits.

    Args:
        job: the training job; must be the broadcaster's.
        name: the node's name, unique in the job.
        engine: the engine's client, already entered.
        broadcaster: ``tcp://HOST:PORT`` of the broadcaster's control socket.
        child: the engine's process, if this agent launched it.
    """

    def __init__(
        self, *, job: str, name: str, engine: EngineClient, broadcaster: str, child: EngineChild | None = None
    ) -> None:
        self.name = name
        self._job = job
        self._engine = engine
        self._broadcaster = check_broadcaster_endpoint(broadcaster)
        self._child = child
        self._nonce = uuid.uuid4().hex
        self._machine = NodeMachine(job=job, name=name, engine_url=engine.url)
        self._stages = EngineStages(engine, name=name, nonce=self._nonce, report=self._feed)
        self._socket: zmq.asyncio.Socket | None = None
        self._stage: asyncio.Task[None] | None = None
        self._finder: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._beat = asyncio.Event()
        self._beat_seconds = 0.0
        self._look_now = asyncio.Event()
        self._ended = asyncio.Event()
        self._fault: BaseException | None = None

    async def run(self, context: zmq.asyncio.Context, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set.

        Raises:
            EngineExited: if the launched engine ended, or never answered.
        """
        socket = self._socket = context.socket(zmq.DEALER)
        try:
            configure(socket)
            socket.setsockopt(zmq.IDENTITY, self.name.encode())
            socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_INTERVAL_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PING_TIMEOUT_MS)
            link = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            try:
                socket.connect(self._broadcaster)
                await self._serve(socket, link, stop)
            finally:
                socket.disable_monitor()
                link.close(linger=0)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            socket.close(linger=_GOODBYE_MS)

    async def _serve(self, socket: zmq.asyncio.Socket, link: zmq.asyncio.Socket, stop: asyncio.Event) -> None:
        loops = [
            self._receive(socket),
            self._watch_link(link),
            self._send_heartbeats(),
            self._watch_engine(),
            self._end_on(stop),
        ]
        if self._child is not None:
            loops.append(self._watch_child(self._child))
        tasks = [asyncio.create_task(self._guard(loop)) for loop in loops]
        try:
            self._perform(self._machine.start())
            await self._ended.wait()
        finally:
            tasks += [task for task in (self._stage, self._finder) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._fault is not None:
            raise self._fault

    async def _guard(self, loop: Coroutine[Any, Any, None]) -> None:
        """A loop that breaks ends the agent with its error, never half of it in silence."""
        try:
            await loop
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fault = self._fault or error
            self._ended.set()
            raise

    # --- events ----------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        self._perform(self._machine.feed(event, time.monotonic()))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self._machine.wakes_at) is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, at - time.monotonic()), self._feed, Tick())

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"a message of {len(frames)} frames is none of ours")
                message = decode(frames[0], to_node)
            except ProtocolError as error:
                self._say(f"rejected what came from the broadcaster: {error}", warning=True)
                continue
            self._feed(Said(message))

    async def _watch_link(self, link: zmq.asyncio.Socket) -> None:
        self._say(f"connecting to the broadcaster at {self._broadcaster}")
        while True:
            event = await recv_monitor_message(link)
            up = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._feed(LinkUp() if up else LinkDown())

    async def _watch_engine(self) -> None:
        """Notice that an idle engine ended or was restarted; a slow one is neither."""
        misses = 0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), _LOOK_AGAIN if misses else _WATCH)
            self._look_now.clear()
            info = self._machine.info
            if info is None or self._stage is not None:
                misses = 0
                continue
            try:
                seen = await self._identify(look_if_paused=False)
            except EngineUnreachable as error:
                misses += 1
                if misses > 1 and self._stage is None:
                    misses = 0
                    self._feed(EngineGone(str(error)))
                continue
            except EngineError:
                continue
            misses = 0
            if seen != info.instance and self._stage is None:
                self._feed(EngineGone("another process answers at its address"))

    async def _identify(self, *, look_if_paused: bool) -> str:
        seen = await identify(
            self._engine,
            name=self.name,
            nonce=self._nonce,
            deadline=Deadline(_LOOK_SECONDS),
            look_if_paused=look_if_paused,
        )
        return seen.info.instance

    async def _watch_child(self, child: EngineChild) -> None:
        reason = await child.wait()
        self._fault = EngineExited(reason)
        self._feed(EngineGone(reason))
        await self._end()

    async def _end_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._say("ending")
        await self._end()

    async def _end(self) -> None:
        self._feed(Stop())
        await asyncio.sleep(_STOP_SECONDS)
        self._say(f"the engine did not finish its last call within {_STOP_SECONDS:.0f} s", warning=True)
        self._ended.set()

    # --- actions ---------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Tell(message):
                    self._send(message)
                case Carry():
                    self._stage = asyncio.create_task(self._carry(action))
                case StopStage():
                    self._stages.stop()
                case KillStage():
                    if self._stage is not None:
                        self._stage.cancel()
                case FindEngine():
                    if self._finder is None or self._finder.done():
                        self._finder = asyncio.create_task(self._guard(self._find_engine()))
                case Beat(seconds):
                    self._beat_seconds = seconds
                    self._beat.set()
                case Note(text, warning):
                    self._say(text, warning=warning)
                case Ended():
                    self._ended.set()

    async def _carry(self, work: Carry) -> None:
        order = type(work.order).__name__
        event: Event
        seconds = max(0.0, work.until - time.monotonic())
        try:
            async with asyncio.timeout(seconds + _STAGE_SLACK):
                event = StageDone(await self._stages.carry(work))
        except StageFault as fault:
            event = StageBroke(fault.cause)
        except TimeoutError:
            message = f"{order} did not end within {seconds:.1f} s"
            event = StageBroke(Cause(code="deadline", message=message, seconds=seconds))
        except asyncio.CancelledError:
            if self._ended.is_set():
                raise
            event = StageBroke(Cause(code="deadline", message=f"{order} was cut off"))
        except Exception as error:  # noqa: BLE001  a fault of ours must reach the broadcaster, which waits
            _log.exception("%s: %s failed inside the agent", self.name, order)
            event = StageBroke(Cause(code="internal", message=f"{order}: {error!r}"))
        self._stage = None
        known = self._machine.info
        self._feed(event)
        seen = self._stages.identity
        if seen is not None and known is not None and seen.info.instance != known.instance:
            self._feed(EngineFound(seen.info))
        if isinstance(event, StageBroke) and event.cause.code == "node_down":
            self._look_now.set()

    async def _find_engine(self) -> None:
        """Look for the engine until it answers; each new reason for waiting is logged once."""
        told = ""
        started = time.monotonic()
        while True:
            try:
                info = await self._stages.identify(Deadline(_LOOK_SECONDS))
                break
            except EngineError as error:
                if error.text != told:
                    wrong_key = isinstance(error, Unauthorized)
                    self._say(f"waiting for the engine: {error}", warning=wrong_key)
                    self._feed(EngineAbsent(Cause(code=error.code, message=str(error), node=self.name)))
                told = error.text
            if self._child is not None and time.monotonic() - started > _LAUNCH_SECONDS:
                raise EngineExited(
                    f"the launched engine does not answer after {_LAUNCH_SECONDS:.0f} s: {told}"
                )
            await asyncio.sleep(_LOOK_AGAIN)
        self._say(
            f"engine at {info.engine_url}: {info.engine} {info.engine_version}, {info.architecture} "
            f"{info.dtype}, tp {info.tp_size}, version {info.label!r}" + (", paused" if info.paused else "")
        )
        self._finder = None
        self._feed(EngineFound(info))

    async def _send_heartbeats(self) -> None:
        while True:
            if self._beat_seconds <= 0:
                self._beat.clear()
                await self._beat.wait()
                continue
            info = self._machine.info
            if info is not None and self._machine.registered:
                self._send(Heartbeat(job=self._job, instance=info.instance, doing=self._machine.doing))
            await asyncio.sleep(self._beat_seconds)

    def _send(self, message: FromNode) -> None:
        if self._socket is None:
            return
        # Done at once, or not at all: with the queue full the broadcaster is not there.
        sending = self._socket.send(encode(message), flags=zmq.DONTWAIT)
        if isinstance(sending, asyncio.Future) and sending.done() and sending.exception() is not None:
            self._say(f"could not send a {type(message).__name__}: {sending.exception()}", warning=True)

    def _say(self, text: str, *, warning: bool = False) -> None:
        _log.log(logging.WARNING if warning else logging.INFO, "%s: %s", self.name, text)


async def run_agents(
    *,
    engines: dict[str, str],
    broadcaster: str,
    job: str,
    stop: asyncio.Event,
    admin_key: str | None = None,
    user_key: str | None = None,
    launch: tuple[str, ...] = (),
) -> None:
    """Run one agent per engine in this process until ``stop`` is set; one that breaks ends them all.

    Args:
        engines: URL by node name.
        launch: command that starts the one engine as our child; empty to start none.

    Raises:
        WeightcastError: if an agent breaks or an option makes no sense.
    """
    context = zmq.asyncio.Context()
    child: EngineChild | None = None
    try:
        async with contextlib.AsyncExitStack() as stack:
            clients = {
                name: await stack.enter_async_context(
                    EngineClient(url, admin_key=admin_key, user_key=user_key)
                )
                for name, url in engines.items()
            }
            if launch:
                child = await EngineChild.start(launch)
            try:
                async with asyncio.TaskGroup() as group:
                    for name, client in clients.items():
                        agent = NodeAgent(
                            job=job, name=name, engine=client, broadcaster=broadcaster, child=child
                        )
                        group.create_task(agent.run(context, stop))
            finally:
                if child is not None:
                    await child.end(grace_seconds=10.0)
    except* WeightcastError as errors:
        raise errors.exceptions[0] from None
    finally:
        context.term()
