"""Rank 0's connection to the broadcaster: control messages over ZeroMQ, slots over a Unix socket.

    connect → TrainerHello → TrainerWelcome(slots_path) → slot socket → descriptors

The slot socket stays open as a sign of life: the kernel closes it when the other process dies, however it
dies, and both are waited for together. ZeroMQ alone would reconnect in silence to whoever comes next.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import zmq

from ..proto.config import read_announcement
from ..proto.errors import BroadcasterUnavailable, ProtocolError, RefitRejected
from ..proto.messages import (
    FromTrainer,
    TrainerGoodbye,
    TrainerHello,
    TrainerRejected,
    TrainerWelcome,
    to_trainer,
)
from ..proto.slots import Slot, send_slot
from ..proto.sockets import configure, decode, encode

#: How long an answer to the hello and the slot socket may take, seconds.
CONNECT_SECONDS = 15.0
_GOODBYE_MS = 1000


class Link:
    """One connection to the broadcaster of ``run_dir``, made when first needed and made anew when lost."""

    def __init__(self, *, run_dir: Path, job: str, incarnation: str, ranks: int) -> None:
        self.run_dir = run_dir
        self._job = job
        self._incarnation = incarnation
        self._ranks = ranks
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._control: zmq.Socket[bytes] | None = None
        self._slots: socket.socket | None = None
        self._endpoint = ""
        #: The broadcaster's deadline for a whole refit, seconds; known once connected.
        self.refit_seconds = 0.0

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that was not seen to end."""
        return self._slots is not None

    def stamp(self, refit: int) -> dict[str, Any]:
        """The fields that every message of ours carries."""
        return {"job": self._job, "incarnation": self._incarnation, "refit": refit}

    def ensure_open(self, slots: Sequence[Slot]) -> bool:
        """Connect and hand over ``slots``, unless a living connection is there. True if it is a new one.

        Raises:
            BroadcasterUnavailable: if nobody answers; the message says where it looked and what to start.
            RefitRejected: if the broadcaster refuses this trainer, as when it serves another.
        """
        if self._slots is not None and not self._is_over():
            return False
        self.close(goodbye=False)
        try:
            self._connect(slots)
        except BaseException:
            self.close(goodbye=False)
            raise
        return True

    def send(self, message: FromTrainer) -> None:
        """Queue one message.

        Raises:
            BroadcasterUnavailable: if there is no connection or its queue is full.
        """
        if self._control is None:
            raise BroadcasterUnavailable(f"the broadcaster in {self.run_dir} is not connected")
        try:
            self._control.send(encode(message), zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise BroadcasterUnavailable(
                f"the broadcaster at {self._endpoint} takes no messages: {error}"
            ) from error

    def send_slot(self, slot: Slot) -> None:
        """Hand one more slot over.

        Raises:
            BroadcasterUnavailable: if the broadcaster is gone.
        """
        if self._slots is None:
            raise BroadcasterUnavailable(f"the broadcaster in {self.run_dir} is not connected")
        try:
            send_slot(self._slots, slot)
        except OSError as error:
            raise BroadcasterUnavailable(f"slot {slot.number} could not be handed over: {error}") from error

    def receive(self, deadline: float) -> Any | None:
        """The next message, or None when ``deadline`` (monotonic seconds) has passed.

        Raises:
            BroadcasterUnavailable: at once when the broadcaster's process ends.
            ProtocolError: for a frame that is no message to a trainer.
        """
        if self._control is None or self._slots is None:
            raise BroadcasterUnavailable(f"the broadcaster in {self.run_dir} is not connected")
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._slots.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(_milliseconds(deadline)))
        if self._control in ready:  # first: its last words may explain its end
            return decode(self._control.recv(), to_trainer)
        if ready:
            pid = self._describe_peer()
            self.close(goodbye=False)
            raise BroadcasterUnavailable(
                f"the broadcaster{pid} in {self.run_dir} ended in the middle of a refit. "
                "Start it again; the next refit reconnects"
            )
        return None

    def close(self, *, goodbye: bool = True) -> None:
        """Drop the connection, saying goodbye if asked to. Safe to call twice."""
        if self._control is not None:
            if goodbye and self._slots is not None and not self._is_over():
                self._control.setsockopt(zmq.LINGER, _GOODBYE_MS)
                self.send(TrainerGoodbye(**self.stamp(0)))
            self._control.close()
            self._control = None
        if self._context is not None:
            self._context.term()
            self._context = None
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def _connect(self, slots: Iterable[Slot]) -> None:
        announcement = read_announcement(self.run_dir)
        if announcement is None:
            raise BroadcasterUnavailable(
                f"no broadcaster has announced itself in {self.run_dir} (there is no broadcaster.json). "
                f"Start one with `weightcast broadcaster --config FILE` (job = {self._job!r}), give the "
                "Publisher its run_dir, or let the Publisher start one with launch=BroadcasterConfig(...)"
            )
        self._endpoint = announcement.trainer
        offered = list(slots)
        deadline = time.monotonic() + CONNECT_SECONDS
        self._context = context = zmq.Context()
        self._control = control = context.socket(zmq.DEALER)
        configure(control)
        try:
            control.connect(self._endpoint)
        except zmq.ZMQError as error:
            raise BroadcasterUnavailable(f"cannot connect to {self._endpoint!r}: {error}") from error
        self.send(
            TrainerHello(
                **self.stamp(0),
                pid=os.getpid(),
                ranks=self._ranks,
                slots={slot.number: slot.nbytes for slot in offered},
            )
        )
        welcome = self._await_welcome(deadline, announcement.pid)
        self.refit_seconds = welcome.refit_seconds
        self._slots = link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # As a read time-out this would be a library's; we only send on it, and poll before reading.
        link.settimeout(CONNECT_SECONDS)
        try:
            link.connect(welcome.slots_path)
        except OSError as error:
            raise BroadcasterUnavailable(
                f"the broadcaster's slot socket {welcome.slots_path} does not take us: {error}"
            ) from error
        for slot in offered:
            self.send_slot(slot)

    def _await_welcome(self, deadline: float, pid: int) -> TrainerWelcome:
        control = self._control
        if control is None:
            raise BroadcasterUnavailable("not connected")
        if not control.poll(_milliseconds(deadline)):
            raise BroadcasterUnavailable(
                f"the broadcaster at {self._endpoint} (process {pid}, by {self.run_dir}/broadcaster.json) "
                f"did not answer within {CONNECT_SECONDS:.0f} s. If that process has ended, start it again"
            )
        answer = decode(control.recv(), to_trainer)
        if isinstance(answer, TrainerRejected):
            raise RefitRejected(answer.cause.message, cause=answer.cause)
        if not isinstance(answer, TrainerWelcome):
            raise ProtocolError(f"the broadcaster answered the hello with {type(answer).__name__}")
        return answer

    def _is_over(self) -> bool:
        return self._slots is None or bool(_readable(self._slots))

    def _describe_peer(self) -> str:
        announcement = read_announcement(self.run_dir)
        return "" if announcement is None else f" (process {announcement.pid})"


def _readable(link: socket.socket) -> bool:
    poller = zmq.Poller()
    poller.register(link.fileno(), zmq.POLLIN)
    return bool(poller.poll(0))


def _milliseconds(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000))
