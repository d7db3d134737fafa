"""The source process: rank 0 of the weights update group. It broadcasts straight from the trainer's slots.

    control ──orders (ZeroMQ)──►  orders in turn ──► wire thread: open, broadcast, close
            ──slots (Unix socket)──►  mapped             └► checksum thread, beside the broadcast
            ◄──answers──  BucketSent only when both are done with the slot

It is disposable. After any failure it says so once and takes no further order; control then kills it, which
fails the collectives of all its peers, and starts another. It ends by itself when control's end of the slot
socket closes. Every answer echoes job, incarnation, epoch and refit of the order it answers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import zmq
import zmq.asyncio

from ..proto import messages
from ..proto.checksums import ChecksumTaker
from ..proto.errors import Cause, ProtocolError, WeightcastError
from ..proto.layout import Layout
from ..proto.slots import Slot, receive_slot
from ..proto.sockets import configure, decode, encode
from .group import GroupFailed, OpenStore, SourceGroup

T = TypeVar("T")

#: Longest that leaving a group may take.
_CLOSE_SECONDS = 20.0


class Source:
    """The process's state. ``link`` brings slots; ``control`` is a DEALER socket to the control process."""

    def __init__(self, *, job: str, control: zmq.asyncio.Socket, link: socket.socket) -> None:
        self._job = job
        self._control = control
        self._link = link
        self._slots: dict[int, tuple[Slot, torch.Tensor]] = {}
        self._store: OpenStore | None = None
        self._group: SourceGroup | None = None
        self._layout: Layout | None = None
        self._takers: list[ChecksumTaker] = []
        self._orders: asyncio.Queue[messages.ToSource] = asyncio.Queue()
        self._leaving: asyncio.Queue[tuple[messages.BroadcastBucket, float, Awaitable[None]]] = (
            asyncio.Queue()
        )
        self._wire = ThreadPoolExecutor(1, "wire")
        self._checksums = ThreadPoolExecutor(1, "checksums")

    async def run(self) -> None:
        """Serve until control is gone or says so; a failure is told first."""
        self._link.setblocking(False)
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
        await self._tell(messages.SourceReady(job=self._job, pid=os.getpid(), device=device))
        work = {
            asyncio.create_task(self._receive_slots()),
            asyncio.create_task(self._hear_orders()),
            asyncio.create_task(self._carry_out_orders()),
            asyncio.create_task(self._confirm_sent()),
        }
        done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        failure = next((task.exception() for task in done if task.exception() is not None), None)
        if failure is None:
            return
        cause = failure.cause if isinstance(failure, WeightcastError) else _internal(failure)
        await self._tell(messages.SourceFailed(job=self._job, cause=cause))
        for task in work:
            task.cancel()
        await self._receive_slots()  # until control kills this process, or is gone

    # --- orders ------------------------------------------------------------------------------------

    async def _hear_orders(self) -> None:
        while True:
            order = decode(await self._control.recv(), messages.to_source)
            if isinstance(order, messages.Shutdown):
                return
            self._orders.put_nowait(order)

    async def _carry_out_orders(self) -> None:
        while True:
            order = await self._orders.get()
            match order:
                case messages.OpenGroup():
                    await self._open(order)
                case messages.SetChecksumPlans():
                    self._layout = order.layout
                    self._takers = [ChecksumTaker(order.layout, plan) for plan in order.plans]
                case messages.BroadcastBucket():
                    await self._broadcast(order)
                case messages.CloseGroup():
                    await self._close(order)
                case messages.ForgetSlot(slot=number):
                    self._forget(number)
                case messages.Shutdown():
                    return

    async def _open(self, order: messages.OpenGroup) -> None:
        started = time.perf_counter()
        self._store = OpenStore(host=order.host, timeout_seconds=order.timeout_seconds)
        opened = messages.StoreOpened(**_echo(order), group_name=order.group_name, port=self._store.port)
        await self._tell(opened)
        store = self._store

        def join() -> SourceGroup:
            return SourceGroup(
                store=store,
                name=order.group_name,
                host=order.host,
                world_size=order.world_size,
                backend=order.backend,
                timeout_seconds=order.timeout_seconds,
            )

        late = Cause(
            code="join_failed",
            message=f"not every rank of {order.world_size} joined at {order.host}:{store.port}",
            rank=0,
            epoch=order.epoch,
        )
        self._group = await self._in_time(self._wire, join, order.timeout_seconds, late)
        seconds = time.perf_counter() - started
        await self._tell(messages.GroupReady(**_echo(order), group_name=order.group_name, seconds=seconds))

    async def _broadcast(self, order: messages.BroadcastBucket) -> None:
        group, held = self._group, self._slots.get(order.slot)
        if group is None or held is None or held[0].nbytes < order.nbytes:
            what = "a slot of that size" if group is not None else "a group"
            raise ProtocolError(f"bucket {order.bucket} in slot {order.slot} was ordered without {what}")
        slot, tensor = held
        loop = asyncio.get_running_loop()
        taken = loop.run_in_executor(self._checksums, self._take_checksums, order.bucket, slot, order.nbytes)
        late = Cause(
            code="broadcast_failed",
            message=f"the broadcast of bucket {order.bucket} did not end in time",
            rank=0,
            epoch=order.epoch,
            bucket=order.bucket,
        )

        def send() -> float:
            try:
                return group.broadcast(tensor[: order.nbytes], timeout_seconds=order.timeout_seconds)
            except RuntimeError as error:
                text = str(error).strip().partition("\n")[0]
                message = f"the broadcast of bucket {order.bucket} failed: {text}"
                cause = Cause(
                    code="broadcast_failed", message=message, rank=0, epoch=order.epoch, bucket=order.bucket
                )
                raise WeightcastError(message, cause=cause) from error

        seconds = await self._in_time(self._wire, send, order.timeout_seconds, late)
        self._leaving.put_nowait((order, seconds, taken))

    async def _confirm_sent(self) -> None:
        """Give slots back in order, once their checksums are taken; the next is on the wire meanwhile."""
        while True:
            order, seconds, taken = await self._leaving.get()
            await taken
            await self._tell(
                messages.BucketSent(**_echo(order), bucket=order.bucket, slot=order.slot, seconds=seconds)
            )
            if self._takers and self._layout is not None and order.bucket + 1 == len(self._layout.buckets):
                values = tuple(taker.values() for taker in self._takers)
                await self._tell(messages.Checksums(**_echo(order), values=values))

    def _take_checksums(self, bucket: int, slot: Slot, nbytes: int) -> None:
        if self._takers:
            with slot.view as view, view[:nbytes] as data:
                for taker in self._takers:
                    taker.take(bucket, data)

    async def _close(self, order: messages.CloseGroup) -> None:
        if self._group is not None and self._group.name == order.group_name:
            group, self._group, self._store = self._group, None, None
            late = Cause(
                code="deadline",
                message=f"the group {order.group_name} could not be closed",
                rank=0,
                epoch=order.epoch,
            )
            # The store is closed with the last reference to it, the group's.
            await self._in_time(self._wire, group.close, _CLOSE_SECONDS, late)

    # --- slots -------------------------------------------------------------------------------------

    async def _receive_slots(self) -> None:
        """Map slots as they come; returns when control is gone."""
        while True:
            await _readable(self._link)
            slot = receive_slot(self._link)
            if slot is None:
                return
            self._forget(slot.number)
            self._slots[slot.number] = (slot, torch.frombuffer(slot.map, dtype=torch.uint8))
            await self._tell(messages.SlotAttached(job=self._job, slot=slot.number, nbytes=slot.nbytes))

    def _forget(self, number: int) -> None:
        held = self._slots.pop(number, None)
        if held is not None:
            slot = held[0]
            del held
            slot.close()

    # --- small tools -------------------------------------------------------------------------------

    async def _in_time(
        self, pool: ThreadPoolExecutor, work: Callable[[], T], seconds: float, late: Cause
    ) -> T:
        """Run ``work`` in ``pool``. Past ``seconds`` the source fails (what runs cannot be stopped)."""
        started = time.perf_counter()
        running = asyncio.get_running_loop().run_in_executor(pool, work)
        try:
            return await asyncio.wait_for(asyncio.shield(running), seconds)
        except TimeoutError:
            cause = Cause(
                code=late.code,
                message=late.message,
                rank=late.rank,
                epoch=late.epoch,
                bucket=late.bucket,
                seconds=time.perf_counter() - started,
            )
            raise WeightcastError(late.message, cause=cause) from None
        except GroupFailed as error:
            cause = Cause(
                code=error.code,
                message=str(error),
                rank=0,
                epoch=late.epoch,
                seconds=time.perf_counter() - started,
            )
            raise WeightcastError(str(error), cause=cause) from error

    async def _tell(self, message: messages.FromSource) -> None:
        await self._control.send(encode(message))


def _echo(order: messages.Message) -> dict[str, Any]:
    return {"job": order.job, "incarnation": order.incarnation, "epoch": order.epoch, "refit": order.refit}


async def _readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(link, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(link)


def _internal(error: BaseException) -> Cause:
    return Cause(code="internal", message=f"the source process failed: {type(error).__name__}: {error}")


def main() -> None:
    """Command line: ``--endpoint ipc://... --fd N --job NAME --generation N``, given by control."""
    parser = argparse.ArgumentParser(prog="weightcast-source")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--generation", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    async def serve() -> None:
        context = zmq.asyncio.Context()
        control = context.socket(zmq.DEALER)
        configure(control)
        control.setsockopt(zmq.ROUTING_ID, f"source-{arguments.generation}".encode())
        control.connect(arguments.endpoint)
        link = socket.socket(fileno=arguments.fd)
        await Source(job=arguments.job, control=control, link=link).run()

    try:
        asyncio.run(serve())
    finally:
        # A thread that is stuck in a collective would keep the interpreter from ending.
        os._exit(0)


if __name__ == "__main__":
    main()
