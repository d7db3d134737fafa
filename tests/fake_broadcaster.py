"""A broadcaster for tests of the trainer's side: real sockets, real slots, no nodes.

It reads every bucket out of the slot that the trainer named, checks digests, looks at the slot again right
before it gives the credit, and reports success when all buckets came.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
from weightcast.proto.config import Announcement
from weightcast.proto.digest import digest_bytes
from weightcast.proto.errors import Cause
from weightcast.proto.layout import Layout, check_layout
from weightcast.proto.messages import (
    BucketPacked,
    Credit,
    NodeReport,
    PhaseSeconds,
    RefitAccepted,
    RefitBegin,
    RefitCancel,
    RefitFinished,
    RefitReport,
    SlotRetired,
    TrainerGoodbye,
    TrainerHello,
    TrainerRejected,
    TrainerWelcome,
    from_trainer,
)
from weightcast.proto.slots import Slot, receive_slot
from weightcast.proto.sockets import bind, configure, decode, encode

#: Credits wait this long for another bucket, so that the trainer fills every slot it may, seconds.
_LINGER = 0.03


@dataclass
class Received:
    """One refit as it came."""

    begin: RefitBegin
    tensors: dict[str, bytes] = field(default_factory=dict)
    buckets: list[BucketPacked] = field(default_factory=list)
    cancelled: Cause | None = None


class FakeBroadcaster:
    """Serves until closed. ``on_bucket(bucket)`` may return "die", "fail" or "hush"; ``on_begin`` a Cause."""

    def __init__(self, run_dir: Path, *, refit_seconds: float = 30.0) -> None:
        self.run_dir = run_dir
        self.refits: list[Received] = []
        self.slots: dict[int, Slot] = {}
        self.retired: list[int] = []
        self.hellos: list[TrainerHello] = []
        self.goodbyes = 0
        self.problems: list[str] = []
        self.on_bucket: Callable[[int], str] = lambda bucket: ""
        self.on_begin: Callable[[RefitBegin], Cause | None] = lambda begin: None
        self.on_hello: Callable[[TrainerHello], Cause | None] = lambda hello: None
        self._refit_seconds = refit_seconds
        self._uncredited: list[tuple[BucketPacked, bytes]] = []
        self._peer = b""
        #: The trainer's number of the refit that is running; buckets of others are ignored.
        self._running = 0
        self._link: socket.socket | None = None
        #: The trainer's link ended and its slots are closed.
        self.unlinked = threading.Event()
        self.said_goodbye = threading.Event()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def refit(self) -> Received:
        return self.refits[-1]

    def _serve(self) -> None:
        context = zmq.Context()
        self._control = context.socket(zmq.ROUTER)
        configure(self._control)
        endpoint = bind(self._control, f"ipc://{self.run_dir}/trainer.ipc")
        path = f"{self.run_dir}/slots.sock"
        Path(path).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path)
        listener.listen()
        (self.run_dir / "broadcaster.json").write_bytes(
            msgspec.json.encode(
                Announcement(pid=os.getpid(), job="weightcast", control="", http="", trainer=endpoint)
            )
        )
        self._ready.set()
        try:
            while not self._stop.is_set():
                poller = zmq.Poller()
                poller.register(self._control, zmq.POLLIN)
                poller.register(listener, zmq.POLLIN)
                if self._link is not None:
                    poller.register(self._link, zmq.POLLIN)
                ready = dict(poller.poll(int(_LINGER * 1000)))
                if listener.fileno() in ready:
                    self._link, _ = listener.accept()
                    self.unlinked.clear()
                    self._link.settimeout(5)
                if self._link is not None and self._link.fileno() in ready:
                    slot = receive_slot(self._link)
                    if slot is None:
                        self._drop_link()
                    else:
                        self.slots[slot.number] = slot
                elif self._control in ready:
                    peer, frame = self._control.recv_multipart()
                    self._peer = peer
                    self._take(decode(frame, from_trainer), path)
                elif not ready:
                    self._give_credits()
        finally:
            self._control.close()
            context.term()
            listener.close()
            self._drop_link()

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        for slot in self.slots.values():
            slot.close()
        self.slots.clear()
        self._uncredited.clear()
        self.unlinked.set()

    def _take(self, message: Any, path: str) -> None:
        match message:
            case TrainerHello():
                self.hellos.append(message)
                self.said_goodbye.clear()
                cause = self.on_hello(message)
                if cause is not None:
                    self._tell(message, TrainerRejected, cause=cause)
                else:
                    self._tell(message, TrainerWelcome, slots_path=path, refit_seconds=self._refit_seconds)
            case RefitBegin(layout=layout):
                cause = self.on_begin(message)
                if cause is not None:
                    self._tell(message, TrainerRejected, cause=cause)
                    return
                check_layout(layout)
                self.refits.append(Received(message))
                self._running = message.refit
                self._tell(message, RefitAccepted, nodes=("n0",))
            case BucketPacked() if message.refit == self._running:
                self._bucket(message)
            case RefitCancel(cause=cause) if message.refit == self._running:
                self.refit.cancelled = cause
                self._finish(message, ok=False, cause=cause)
            case SlotRetired(slot=slot):
                self.retired.append(slot)
                retired = self.slots.pop(slot, None)
                if retired is not None:
                    retired.close()
            case TrainerGoodbye():
                self.goodbyes += 1
                self.said_goodbye.set()

    def _bucket(self, message: BucketPacked) -> None:
        word = self.on_bucket(message.bucket)
        layout = self.refit.begin.layout
        if word == "die":
            self._stop.set()
            return
        if word == "fail":
            self._finish(message, ok=False, cause=Cause("bucket_failed", "the engine said no", node="n0"))
            return
        while message.slot not in self.slots:
            assert self._link is not None
            slot = receive_slot(self._link)
            assert slot is not None
            self.slots[slot.number] = slot
        size = layout.bucket_nbytes(message.bucket)
        data = bytes(self.slots[message.slot].view[:size])
        for placed, digest in zip(layout.place(message.bucket), message.digests, strict=True):
            raw = data[placed.offset : placed.offset + placed.spec.nbytes]
            if digest_bytes(raw) != digest:
                self.problems.append(f"digest of {placed.spec.name}")
            self.refit.tensors[placed.spec.name] = raw
        if any(other.slot == message.slot for other, _ in self._uncredited):
            self.problems.append(f"slot {message.slot} refilled before its credit")
        self.refit.buckets.append(message)
        self._uncredited.append((message, data))
        if word == "hush":
            self._uncredited.clear()
            return
        if len(self.refit.buckets) == len(layout.buckets):
            self._give_credits()
            self._finish(message, ok=True)

    def _give_credits(self) -> None:
        for message, data in self._uncredited:
            if bytes(self.slots[message.slot].view[: len(data)]) != data:
                self.problems.append(f"slot {message.slot} changed before its credit")
            self._tell(message, Credit, slot=message.slot, bucket=message.bucket)
        self._uncredited.clear()

    def _finish(self, message: Any, *, ok: bool, cause: Cause | None = None) -> None:
        layout: Layout = self.refit.begin.layout
        self._uncredited.clear()
        self._running = 0
        report = RefitReport(
            ok=ok,
            version=self.refit.begin.step,
            label=self.refit.begin.label,
            incarnation=message.incarnation,
            epoch=1,
            bytes=layout.nbytes,
            tensors=len(layout.tensors),
            buckets=len(layout.buckets),
            seconds=PhaseSeconds(total=0.1),
            wire_rate=1.0,
            nodes={"n0": NodeReport(outcome="ready" if ok else "unchanged", version=None, digest="match")},
            cause=cause,
        )
        self._tell(message, RefitFinished, report=report)

    def _tell(self, asked: Any, kind: Any, **fields: Any) -> None:
        answer = kind(job=asked.job, incarnation=asked.incarnation, refit=asked.refit, **fields)
        try:
            self._control.send_multipart([self._peer, encode(answer)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the trainer may have left meanwhile
                raise
