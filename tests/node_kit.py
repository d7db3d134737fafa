"""The broadcaster's two ends, led by hand: a ROUTER that gives orders one by one, and rank 0 of the group."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import zmq
import zmq.asyncio
from engines import Engine
from rank_zero import RankZero, flatten
from safetensors.torch import load_file
from torch import Tensor
from weightcast.proto.checksums import ChecksumPlan, ChecksumTaker
from weightcast.proto.digest import digest_bytes
from weightcast.proto.errors import Cause
from weightcast.proto.layout import Layout, TensorSpec, plan_buckets
from weightcast.proto.messages import (
    Abort,
    Aborted,
    BucketLoaded,
    Finish,
    FromNode,
    Goodbye,
    Heartbeat,
    Join,
    Joined,
    LayoutAccepted,
    Leave,
    Left,
    PauseMode,
    Prepare,
    Prepared,
    Propose,
    Register,
    Release,
    Released,
    StageFailed,
    Stream,
    ToNode,
    Verified,
    Version,
    Waiting,
    Welcome,
    from_node,
)
from weightcast.proto.sockets import configure, decode, encode
from weightcast.rollout_node.agent import run_agents

T = TypeVar("T")
JOB = "job"
SECONDS = 30.0


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def layout_of(weights: Mapping[str, Tensor], *, bucket_bytes: int = 200_000) -> Layout:
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in weights.items()
    ]
    return plan_buckets(specs, bucket_bytes=bucket_bytes)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Broadcaster:
    """Gives orders to one node and waits for what it says."""

    def __init__(self, port: int, *, life: str = "life-1") -> None:
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.life = life
        self.node = b""
        self.heard: list[FromNode] = []
        self.beats: list[tuple[float, Heartbeat]] = []
        self.waits: list[Waiting] = []
        self._news = asyncio.Condition()
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        configure(self.socket)
        self.socket.bind(self.endpoint)
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while True:
            peer, frame = await self.socket.recv_multipart()
            self.node = peer
            message = decode(frame, from_node)
            if isinstance(message, Register):
                await self.tell(Welcome(job=JOB, heartbeat_seconds=0.2, life=self.life))
            async with self._news:
                if isinstance(message, Heartbeat):
                    self.beats.append((time.monotonic(), message))
                elif isinstance(message, Waiting):
                    self.waits.append(message)
                else:
                    self.heard.append(message)
                self._news.notify_all()

    async def tell(self, message: ToNode) -> None:
        await self.socket.send_multipart([self.node, encode(message)])

    async def expect(self, *kinds: type[T], seconds: float = SECONDS) -> T:
        """The next message that is no heartbeat and no word of waiting; it must be of one of these kinds."""
        async with self._news:
            async with asyncio.timeout(seconds):
                await self._news.wait_for(lambda: self.heard)
            message = self.heard.pop(0)
        assert isinstance(message, kinds), message
        return message

    async def until(self, kind: type[T]) -> T:
        """The next message of this kind; what comes before it was meant for the broadcaster before."""
        while not isinstance(message := await self.expect(object), kind):
            pass
        return message

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.socket.close(linger=0)
        self._context.term()


class Refit:
    """One refit led by hand: the control side over ZeroMQ, rank 0 over gloo."""

    def __init__(
        self, broadcaster: Broadcaster, engine: Engine, weights: Mapping[str, Tensor], number: int = 1
    ) -> None:
        self.broadcaster, self.engine, self.weights = broadcaster, engine, weights
        self.layout = layout_of(weights)
        self.stamp: dict[str, Any] = {"job": JOB, "incarnation": "i", "refit": number, "epoch": number}
        self.label = f"v{number}"
        self.plan: ChecksumPlan | None = None
        self.pool = ThreadPoolExecutor(2)
        self.source = RankZero(engine, self.pool)

    async def propose(self) -> LayoutAccepted:
        await self.broadcaster.tell(self.proposal())
        accepted = await self.broadcaster.expect(LayoutAccepted)
        self.plan = accepted.plan
        return accepted

    def proposal(self) -> Propose:
        version = Version(incarnation="t", step=self.stamp["refit"], label=self.label)
        return Propose(**self.stamp, version=version, layout=self.layout, timeout_seconds=SECONDS)

    async def join(self) -> None:
        await self.broadcaster.tell(
            Join(
                **self.stamp,
                group_name=self.source.name,
                master_address="127.0.0.1",
                master_port=self.source.store.port,
                rank_offset=1,
                world_size=1 + self.engine.tp_size,
                backend="gloo",
                timeout_seconds=SECONDS,
            )
        )
        await asyncio.to_thread(self.source.join)
        await self.broadcaster.expect(Joined)

    async def prepare(self) -> Prepared:
        await self.broadcaster.tell(
            Prepare(**self.stamp, pause_mode=PauseMode.RETRACT, timeout_seconds=SECONDS)
        )
        return await self.broadcaster.expect(Prepared)

    async def begin_stream(self, *, seconds: float = SECONDS) -> None:
        timeouts = (seconds,) * len(self.layout.buckets)
        await self.broadcaster.tell(Stream(**self.stamp, bucket_timeouts=timeouts))

    async def send(self, bucket: int) -> None:
        tensors = {placed.spec.name: self.weights[placed.spec.name] for placed in self.layout.place(bucket)}
        await asyncio.to_thread(dist.broadcast, flatten(tensors), src=0, group=self.source.group)

    async def stream(self) -> None:
        await self.begin_stream()
        for bucket in range(len(self.layout.buckets)):
            await self.send(bucket)
            assert (await self.broadcaster.expect(BucketLoaded)).bucket == bucket

    async def finish(self, claimed: Mapping[str, Tensor] | None = None) -> Verified:
        """``claimed``: the tensors whose digests and checksums are told, if not those that were sent."""
        weights = claimed or self.weights
        digests = tuple(digest_bytes(_bytes_of(weights[spec.name])) for spec in self.layout.tensors)
        checksums: tuple[str, ...] = ()
        if self.plan is not None:
            taker = ChecksumTaker(self.layout, self.plan)
            for bucket in range(len(self.layout.buckets)):
                parts = [_bytes_of(weights[placed.spec.name]) for placed in self.layout.place(bucket)]
                taker.take(bucket, memoryview(b"".join(parts)))
            checksums = taker.values()
        await self.broadcaster.tell(
            Finish(**self.stamp, digests=digests, checksums=checksums, timeout_seconds=SECONDS)
        )
        return await self.broadcaster.expect(Verified)

    async def release(self) -> Released:
        await self.broadcaster.tell(Release(**self.stamp, timeout_seconds=SECONDS))
        return await self.broadcaster.expect(Released)

    async def abort(self, *, seconds: float = SECONDS) -> Aborted | StageFailed:
        cause = Cause(code="trainer_failed", message="rank 1 raised")
        await self.broadcaster.tell(Abort(**self.stamp, cause=cause, timeout_seconds=seconds))
        return await self.broadcaster.expect(Aborted, StageFailed, seconds=seconds + 5)

    async def leave(self) -> None:
        await self.broadcaster.tell(Leave(**self.stamp, group_name=self.source.name, timeout_seconds=SECONDS))
        await self.part()
        await self.broadcaster.expect(Left)

    async def part(self) -> None:
        """Rank 0 leaves; its connections close, as when its process ends."""
        group, self.source.group = self.source.group, None
        await asyncio.to_thread(dist.destroy_process_group, group)

    async def whole(self) -> Verified:
        await self.propose()
        await self.join()
        await self.prepare()
        await self.stream()
        verified = await self.finish()
        assert (await self.release()).label == self.label
        await self.leave()
        return verified


@asynccontextmanager
async def agent_for(
    url: str, endpoint: str, *, admin_key: str | None = None, user_key: str | None = None
) -> AsyncIterator[None]:
    """The agent, in this event loop, under the name "n"."""
    stop = asyncio.Event()
    task = asyncio.create_task(
        run_agents(
            engines={"n": url},
            broadcaster=endpoint,
            job=JOB,
            stop=stop,
            admin_key=admin_key,
            user_key=user_key,
        )
    )
    try:
        yield
    finally:
        stop.set()
        async with asyncio.timeout(SECONDS):
            await task


@asynccontextmanager
async def connected(engine: Engine, **keys: str | None) -> AsyncIterator[Broadcaster]:
    """A broadcaster and an agent that has registered with it."""
    broadcaster = Broadcaster(free_port())
    try:
        given = {"admin_key": engine.admin_key, "user_key": engine.user_key, **keys}
        async with agent_for(engine.url, broadcaster.endpoint, **given):
            await broadcaster.expect(Register)
            yield broadcaster
        await broadcaster.until(Goodbye)
    finally:
        await broadcaster.close()


async def generates(engine: Engine) -> list[int]:
    return await asyncio.to_thread(engine.output_ids, [5, 6, 7])


def is_paused(engine: Engine) -> bool:
    return engine.request("/ready", method="GET").status == 503


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
