"""The source process against real gloo peers that join the way SGLang does."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
import zmq.asyncio
from fake_fleet import ENVIRONMENT, SECONDS, Peer
from weightcast.proto import messages
from weightcast.proto.checksums import ChecksumEntry, ChecksumPlan, Piece
from weightcast.proto.layout import Layout, TensorSpec, plan_buckets
from weightcast.proto.slots import Slot, send_slot
from weightcast.proto.sockets import bind, configure, decode, encode


class Harness:
    """The control side of one source process, by hand."""

    def __init__(self, router: zmq.asyncio.Socket, link: socket.socket, process: asyncio.subprocess.Process):
        self.router, self.link, self.process = router, link, process

    @classmethod
    async def start(cls, directory: Path) -> Harness:
        router = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        configure(router)
        endpoint = bind(router, f"ipc://{directory}/source.ipc")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = ["--endpoint", endpoint, "--fd", str(theirs.fileno()), "--job", "j", "--generation", "1"]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "weightcast.broadcaster.source",
            *arguments,
            pass_fds=[theirs.fileno()],
            env=ENVIRONMENT,
        )
        theirs.close()
        harness = cls(router, ours, process)
        ready = await harness.hear()
        assert isinstance(ready, messages.SourceReady) and ready.pid == process.pid
        return harness

    async def tell(self, message: messages.ToSource) -> None:
        await self.router.send_multipart([b"source-1", encode(message)])

    async def hear(self) -> messages.FromSource:
        peer, frame = await asyncio.wait_for(self.router.recv_multipart(), SECONDS)
        assert peer == b"source-1"
        return decode(frame, messages.from_source)

    async def attach(self, number: int, data: bytes) -> Slot:
        slot = Slot.create(number, len(data))
        slot.view[:] = data
        send_slot(self.link, slot)
        assert await self.hear() == messages.SlotAttached(job="j", slot=number, nbytes=len(data))
        return slot

    async def end(self) -> None:
        self.link.close()
        self.router.close()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[Harness]:
    harness = await Harness.start(tmp_path)
    yield harness
    await harness.end()


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    """Two ranks for all tests that leave them alive; every group has a name of its own."""
    yield from two_peers()


@pytest.fixture
def doomed_peers() -> Iterator[list[Peer]]:
    """Two ranks for one test that kills them."""
    yield from two_peers()


def two_peers() -> Iterator[list[Peer]]:
    found = [Peer(), Peer()]
    yield found
    for peer in found:
        peer.end()


STAMP = {"job": "j", "incarnation": "life", "epoch": 1, "refit": 3}


def open_order(*, host: str, epoch: int = 1, world: int = 3, seconds: float = SECONDS) -> messages.OpenGroup:
    return messages.OpenGroup(
        **{**STAMP, "epoch": epoch},
        group_name=f"weightcast-j-{secrets.token_hex(4)}-e{epoch}",
        host=host,
        world_size=world,
        backend="gloo",
        timeout_seconds=seconds,
    )


async def form_group(source: Harness, peers: list[Peer], *, host: str = "127.0.0.1", epoch: int = 1) -> str:
    order = open_order(host=host, epoch=epoch)
    await source.tell(order)
    opened = await source.hear()
    assert isinstance(opened, messages.StoreOpened)
    bracketed = f"[{host}]" if ":" in host else host
    for rank, peer in enumerate(peers, start=1):
        url = f"tcp://{bracketed}:{opened.port}"
        peer.order(
            {"join": {"url": url, "name": order.group_name, "rank": rank, "world": 3, "seconds": SECONDS}}
        )
    for peer in peers:
        assert await peer.answer() == {"joined": order.group_name}
    ready = await source.hear()
    assert isinstance(ready, messages.GroupReady) and ready.group_name == order.group_name
    assert (ready.job, ready.incarnation, ready.epoch, ready.refit) == ("j", "life", epoch, 3)
    return order.group_name


def bucket_order(bucket: int, slot: int, nbytes: int, seconds: float = SECONDS) -> messages.BroadcastBucket:
    return messages.BroadcastBucket(**STAMP, bucket=bucket, slot=slot, nbytes=nbytes, timeout_seconds=seconds)


def two_bucket_layout() -> Layout:
    specs = [TensorSpec("q", "float32", (100, 10)), TensorSpec("k", "float32", (50, 10))]
    return plan_buckets(specs, bucket_bytes=4000)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_broadcasts_slots_in_order_to_peers_that_join_as_sglang_does(
    source: Harness, peers: list[Peer], host: str
) -> None:
    layout = two_bucket_layout()
    data = [os.urandom(layout.bucket_nbytes(0)), os.urandom(layout.bucket_nbytes(1))]
    await form_group(source, peers, host=host)
    await source.attach(0, data[0])
    await source.attach(7, data[1] + b"beyond the bucket")
    plan = ChecksumPlan(
        entries=(
            ChecksumEntry(0, "qk", (Piece("q", 0, 0, 60), Piece("k"))),
            ChecksumEntry(0, "k", (Piece("k"),)),
        )
    )
    await source.tell(messages.SetChecksumPlans(**STAMP, layout=layout, plans=(plan,)))
    await source.tell(bucket_order(0, 0, len(data[0])))
    await source.tell(bucket_order(1, 7, len(data[1])))
    for peer in peers:
        for chunk in data:
            peer.order({"receive": len(chunk)})
    for peer in peers:
        for chunk in data:
            assert await peer.answer() == {"sha256": hashlib.sha256(chunk).hexdigest()}
    for bucket, slot in ((0, 0), (1, 7)):
        sent = await source.hear()
        assert isinstance(sent, messages.BucketSent) and (sent.bucket, sent.slot) == (bucket, slot)
        assert 0 < sent.seconds < SECONDS
    sums = await source.hear()
    q = np.frombuffer(data[0], np.uint8).reshape(100, 40)[:60].tobytes()
    expected = (hashlib.sha256(q + data[1]).hexdigest()[:16], hashlib.sha256(data[1]).hexdigest()[:16])
    assert sums == messages.Checksums(**STAMP, values=(expected,))


async def test_a_slot_refilled_after_its_credit_carries_the_new_bytes(
    source: Harness, peers: list[Peer]
) -> None:
    await form_group(source, peers)
    slot = await source.attach(0, b"a" * 1000)
    for bucket, fill in enumerate((b"a", b"b", b"c")):
        slot.view[:] = fill * 1000
        await source.tell(bucket_order(bucket, 0, 1000))
        for peer in peers:
            peer.order({"receive": 1000})
        for peer in peers:
            assert await peer.answer() == {"sha256": hashlib.sha256(fill * 1000).hexdigest()}
        assert isinstance(await source.hear(), messages.BucketSent)


async def test_leaves_a_group_and_forms_the_next_with_the_same_peers(
    source: Harness, peers: list[Peer]
) -> None:
    first = await form_group(source, peers)
    await source.tell(messages.CloseGroup(**STAMP, group_name=first))
    for peer in peers:
        peer.order({"leave": first})
    for peer in peers:
        assert await peer.answer() == {"left": first}
    await form_group(source, peers, epoch=2)
    await source.attach(0, b"x" * 10)
    await source.tell(bucket_order(0, 0, 10))
    for peer in peers:
        peer.order({"receive": 10})
    for peer in peers:
        assert await peer.answer() == {"sha256": hashlib.sha256(b"x" * 10).hexdigest()}


async def test_a_peer_killed_in_a_broadcast_is_told_at_once(
    source: Harness, doomed_peers: list[Peer]
) -> None:
    await form_group(source, doomed_peers)
    nbytes = 64 << 20
    await source.attach(0, bytes(nbytes))
    await source.tell(bucket_order(0, 0, nbytes))
    doomed_peers[1].process.kill()
    failed = await source.hear()
    assert isinstance(failed, messages.SourceFailed)
    assert (failed.cause.code, failed.cause.epoch, failed.cause.bucket) == ("broadcast_failed", 1, 0)


async def test_a_peer_that_never_joins_is_given_up_in_time(source: Harness) -> None:
    await source.tell(open_order(host="127.0.0.1", seconds=1.0))
    assert isinstance(await source.hear(), messages.StoreOpened)
    failed = await source.hear()
    assert isinstance(failed, messages.SourceFailed)
    assert failed.cause.code == "join_failed" and failed.cause.epoch == 1
    assert failed.cause.seconds is not None and 0.9 < failed.cause.seconds < 5.0


async def test_a_peer_that_never_receives_is_given_up_in_time(source: Harness, peers: list[Peer]) -> None:
    await form_group(source, peers)
    nbytes = 64 << 20
    await source.attach(0, bytes(nbytes))
    await source.tell(bucket_order(0, 0, nbytes, seconds=1.0))
    failed = await source.hear()
    assert isinstance(failed, messages.SourceFailed)
    assert (failed.cause.code, failed.cause.bucket) == ("broadcast_failed", 0)


async def test_killing_the_source_fails_its_peers_at_once(source: Harness, peers: list[Peer]) -> None:
    await form_group(source, peers)
    for peer in peers:
        peer.order({"receive": 1000})
    source.process.kill()
    for peer in peers:
        assert "error" in await peer.answer()


async def test_an_address_that_is_not_of_this_machine_is_named(source: Harness) -> None:
    await source.tell(open_order(host="192.0.2.1"))
    failed = await source.hear()
    assert isinstance(failed, messages.SourceFailed)
    assert "192.0.2.1" in failed.cause.message and "advertise" in failed.cause.message


async def test_ends_when_control_is_gone(source: Harness) -> None:
    source.link.close()
    assert await asyncio.wait_for(source.process.wait(), SECONDS) == 0
