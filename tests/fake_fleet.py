"""For tests of the real broadcaster: a trainer and agents on real sockets, gloo ranks as processes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
import zmq.asyncio
from weightcast.proto import messages as m
from weightcast.proto.config import Announcement
from weightcast.proto.digest import digest_bytes
from weightcast.proto.layout import Layout, TensorSpec, plan_buckets
from weightcast.proto.slots import Slot, send_slot
from weightcast.proto.sockets import configure, decode, encode

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PEER = Path(__file__).parent / "gloo_peer.py"
#: Longest wait for anything here, seconds.
SECONDS = 100.0


class Peer:
    """One gloo rank that joins as an SGLang worker does, in a process of its own (gloo_peer.py)."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"},
        )
        self._ready = False

    def order(self, order: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), SECONDS)
        answer = json.loads(line)
        if answer == {"ready": True} and not self._ready:
            self._ready = True
            return await self.answer()
        return answer

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        self.order(order)
        return await self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Broadcaster:
    """The real control process."""

    def __init__(self, process: asyncio.subprocess.Process, announcement: Announcement) -> None:
        self.process, self.announcement = process, announcement

    @classmethod
    async def start(cls, run_dir: Path, **options: Any) -> Broadcaster:
        process = await cls.spawn(run_dir, **options)
        assert process.stdout
        line = await asyncio.wait_for(process.stdout.readline(), SECONDS)
        assert line, "the broadcaster ended before it was ready"
        return cls(process, msgspec.json.decode(line, type=Announcement))

    @staticmethod
    async def spawn(
        run_dir: Path,
        *,
        nodes: int = 2,
        control: str = "tcp://127.0.0.1:0",
        http: str = "127.0.0.1:0",
        engines: tuple[str, ...] = (),
        **deadlines: float,
    ) -> asyncio.subprocess.Process:
        path = run_dir.parent / f"{run_dir.name[:20]}.toml"
        limits = {
            "nodes": 60.0,
            "join": 90.0,
            "pack": 60.0,
            "bucket": 30.0,
            "release": 30.0,
            "heartbeat": 30.0,
            **deadlines,
        }
        path.write_text(
            f'job = "test"\nnodes = {nodes}\ncontrol = "{control}"\nhttp = "{http}"\nrun_dir = "{run_dir}"\n'
            f"engines = {json.dumps(list(engines))}\n[deadlines]\n"
            + "".join(f"{name} = {value}\n" for name, value in limits.items())
        )
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "weightcast.broadcaster",
            "--config",
            str(path),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=ENVIRONMENT,
        )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.announcement.http}{path}", timeout=10) as answer:
            return answer.read().decode()

    async def fetch(self, path: str) -> str:
        return await asyncio.to_thread(self.get, path)

    async def source_pid(self) -> int:
        """Process id of the source, once it is ready."""
        for _ in range(400):
            status = json.loads(await self.fetch("/status"))
            if status["source"] == "cpu":
                for child in psutil.Process(self.process.pid).children():
                    if "weightcast.broadcaster.source" in child.cmdline():
                        return child.pid
            await asyncio.sleep(0.1)
        raise AssertionError("no source got ready")

    async def end_killed(self) -> None:
        """Reap it after SIGKILL."""
        await asyncio.wait_for(self.process.communicate(), SECONDS)

    async def end(self) -> tuple[int, str]:
        """SIGTERM; returns exit status and stderr."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(self.process.communicate(), SECONDS)
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


class FakeTrainer:
    """A trainer that packs as it is told. ``data[k]`` are bucket k's bytes."""

    def __init__(
        self, endpoint: str, *, incarnation: str = "run-1", buckets: int = 4, nbytes: int = 1000
    ) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        configure(self.socket)
        self.socket.connect(endpoint)
        self.incarnation, self.refit = incarnation, 0
        self.layout = plan_buckets(
            [TensorSpec(f"w{i}", "uint8", (nbytes,)) for i in range(buckets)], bucket_bytes=nbytes
        )
        self.slots = [Slot.create(number, nbytes) for number in range(2)]
        self.data: list[bytes] = []
        self.free: set[int] = set()
        self.link: socket.socket | None = None
        self.heard: list[m.ToTrainer] = []

    def stamp(self) -> dict[str, Any]:
        return {"job": "test", "incarnation": self.incarnation, "refit": self.refit}

    async def tell(self, message: m.FromTrainer) -> None:
        await self.socket.send(encode(message))

    async def hear(self, kind: type[m.Message]) -> Any:
        """The next message of this kind; credits and what else comes before are taken note of."""
        while True:
            message = decode(await asyncio.wait_for(self.socket.recv(), SECONDS), m.to_trainer)
            self.heard.append(message)
            if isinstance(message, m.Credit):
                assert message.slot not in self.free, "two credits for one use"
                self.free.add(message.slot)
            if isinstance(message, kind):
                return message
            assert not isinstance(message, m.TrainerRejected), message.cause

    async def attach(self) -> None:
        sizes = {slot.number: slot.nbytes for slot in self.slots}
        await self.tell(m.TrainerHello(**self.stamp(), pid=os.getpid(), ranks=1, slots=sizes))
        welcome = await self.hear(m.TrainerWelcome)
        self.link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.connect(welcome.slots_path)
        for slot in self.slots:
            send_slot(self.link, slot)

    async def begin(self, step: int) -> None:
        self.refit += 1
        self.free = {slot.number for slot in self.slots}
        self.data = [os.urandom(self.layout.bucket_nbytes(k)) for k in range(len(self.layout.buckets))]
        begin = m.RefitBegin(**self.stamp(), step=step, label=f"v{step}", layout=self.layout)
        await self.tell(begin)

    async def pack(self, buckets: Iterable[int], *, slot: Slot | None = None) -> None:
        for bucket in buckets:
            while not self.free and slot is None:
                await self.hear(m.Credit)
            used = slot if slot is not None else self.slots[self.free.pop()]
            used.view[: len(self.data[bucket])] = self.data[bucket]
            await self.tell(
                m.BucketPacked(
                    **self.stamp(),
                    bucket=bucket,
                    slot=used.number,
                    digests=(digest_bytes(self.data[bucket]),),
                    gather_seconds=0.01,
                    pack_seconds=0.01,
                )
            )

    async def refit_whole(self, step: int) -> m.RefitReport:
        await self.begin(step)
        await self.pack(range(len(self.layout.buckets)))
        return (await self.hear(m.RefitFinished)).report

    def die(self) -> None:
        """Everything that the kernel closes when a process ends."""
        if self.link is not None:
            self.link.close()
        self.socket.close()
        for slot in self.slots:
            slot.close()


class FakeNode:
    """An agent on a real DEALER socket whose engine is one gloo rank. Records what it was told."""

    def __init__(self, name: str, endpoint: str, peer: Peer) -> None:
        self.name, self.peer = name, peer
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        configure(self.socket)
        self.socket.connect(endpoint)
        self.told: list[m.ToNode] = []
        self.contents: list[str] = []
        self.touched = self.paused = False
        self.label = "default"
        self.layout: Layout | None = None
        self.version: m.Version | None = None
        self.welcomed = asyncio.Event()
        self.receiving = asyncio.Event()
        self._stream: asyncio.Task[None] | None = None
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    async def register(self) -> None:
        info = m.NodeInfo(
            name=self.name,
            instance=f"{self.name}/1",
            engine_url=f"http://127.0.0.1/{self.name}",
            engine="reference",
            engine_version="1",
            model="toy",
            architecture="Toy",
            dtype="uint8",
            tp_size=1,
        )
        await self.socket.send(encode(m.Register(job="test", node=info)))
        await asyncio.wait_for(self.welcomed.wait(), SECONDS)

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._stream] if self._stream else [])]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        self.socket.close()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def wait_told(self, kind: type[m.Message]) -> Any:
        async with asyncio.timeout(SECONDS):
            while True:
                for message in self.told:
                    if isinstance(message, kind):
                        return message
                await asyncio.sleep(0.01)

    async def _beat(self) -> None:
        while True:
            await self.socket.send(encode(m.Heartbeat(job="test", instance=f"{self.name}/1")))
            await asyncio.sleep(0.5)

    async def _listen(self) -> None:
        while True:
            order = decode(await self.socket.recv(), m.to_node)
            self.told.append(order)
            if isinstance(order, m.Welcome):
                self.welcomed.set()
            elif isinstance(order, m.Stream):
                self._stream = asyncio.create_task(self._take_buckets(order))
            else:
                await self._answer(order, await self._obey(order))

    async def _answer(self, order: m.Message, answer: m.FromNode) -> None:
        stamped = msgspec.structs.replace(
            answer, incarnation=order.incarnation, epoch=order.epoch, refit=order.refit
        )
        await self.socket.send(encode(stamped))

    async def _take_buckets(self, order: m.Stream) -> None:
        assert self.layout is not None
        self.contents = []
        for bucket in range(len(self.layout.buckets)):
            self.touched = True
            self.receiving.set()
            got = await self.peer.ask({"receive": self.layout.bucket_nbytes(bucket)})
            if "error" in got:
                cause = m.Cause(code="bucket_failed", message=got["error"], node=self.name, bucket=bucket)
                await self._answer(
                    order, m.StageFailed(job="test", stage="stream", cause=cause, touched=True)
                )
                return
            self.contents.append(got["sha256"])
            await self._answer(order, m.BucketLoaded(job="test", bucket=bucket, seconds=0.01))

    async def _obey(self, order: m.ToNode) -> m.FromNode:
        match order:
            case m.Propose():
                self.layout, self.version = order.layout, order.version
                return m.LayoutAccepted(job="test")
            case m.Leave():
                await self.peer.ask({"leave": order.group_name})
                return m.Left(job="test", group_name=order.group_name)
            case m.Join():
                answer = await self.peer.ask(
                    {
                        "join": {
                            "url": f"tcp://{order.master_address}:{order.master_port}",
                            "name": order.group_name,
                            "rank": order.rank_offset,
                            "world": order.world_size,
                            "seconds": order.timeout_seconds,
                        }
                    }
                )
                if "error" in answer:
                    cause = m.Cause(code="join_failed", message=answer["error"], node=self.name)
                    return m.StageFailed(job="test", stage="join", cause=cause, touched=False)
                return m.Joined(job="test", seconds=0.1)
            case m.Prepare():
                self.paused = True
                return m.Prepared(job="test", pause_seconds=0.01, begin_seconds=0.01)
            case m.Finish():
                # The fake's engine can only hash whole buckets; the test compares those with the trainer's.
                evidence = m.Evidence(kind="digest", compared=len(order.digests), total=len(order.digests))
                return m.Verified(
                    job="test", evidence=evidence, end_seconds=0, flush_seconds=0, verify_seconds=0
                )
            case m.Release():
                assert self.version is not None
                self.touched = self.paused = False
                self.label = self.version.label
                return m.Released(job="test", label=self.label, resume_seconds=0.01, paused_seconds=0.1)
            case m.Abort():
                if self._stream is not None:
                    await self._stream
                if not self.touched:
                    self.paused = False
                return m.Aborted(job="test", touched=self.touched, serving=not self.paused)
        raise AssertionError(order)


def hashes(data: list[bytes]) -> list[str]:
    """What a node holds after these buckets."""
    return [hashlib.sha256(chunk).hexdigest() for chunk in data]
