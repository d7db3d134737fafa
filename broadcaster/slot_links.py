"""The trainer's slots as control keeps them: received once, handed to every source in turn.

A trainer gets a socket path of its own in its welcome, so whoever opens it is that trainer and nobody else.
The link stays open as a sign of life: when the trainer's process ends, however it ends, the kernel closes it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

from ..proto.errors import ProtocolError
from ..proto.slots import Slot, peer_uid, receive_slot, send_slot
from .events import Event, SlotReceived, TrainerLinkClosed, TrainerLinked


class SlotLinks:
    """Listens for, reads and closes slot links; ``tell`` takes the events."""

    def __init__(self, *, tell: Callable[[Event], None]) -> None:
        self.strangers = 0
        self._tell = tell
        self._slots: dict[int, Slot] = {}
        self._sockets: dict[bytes, socket.socket] = {}
        self._paths: dict[bytes, Path] = {}
        self._source: socket.socket | None = None

    def listen(self, *, peer: bytes, path: str) -> None:
        """Accept one link for this trainer at ``path``."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.setblocking(False)
        listener.bind(path)
        listener.listen(4)
        self._sockets[peer], self._paths[peer] = listener, Path(path)
        asyncio.get_running_loop().add_reader(listener, self._accept, peer, listener)

    def connect_source(self) -> socket.socket:
        """Open a link to a new source: everything held is on its way. Returns the source's end."""
        self.disconnect_source()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._source = ours
        try:
            for slot in self._slots.values():
                send_slot(ours, slot)
        except OSError:
            theirs.close()
            self.disconnect_source()
            raise
        return theirs

    def disconnect_source(self) -> None:
        """Close the link to the source; a living source then ends."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def drop_slot(self, number: int) -> None:
        """Close one slot."""
        slot = self._slots.pop(number, None)
        if slot is not None:
            slot.close()

    def drop_trainer(self, peer: bytes) -> None:
        """Close this trainer's link or listener, and every slot (only one trainer has any)."""
        held = self._sockets.pop(peer, None)
        if held is not None:
            asyncio.get_running_loop().remove_reader(held)
            held.close()
        path = self._paths.pop(peer, None)
        if path is not None:
            path.unlink(missing_ok=True)
        for number in list(self._slots):
            self.drop_slot(number)

    def close(self) -> None:
        """Close everything."""
        for peer in list(self._sockets):
            self.drop_trainer(peer)
        self.disconnect_source()

    def _accept(self, peer: bytes, listener: socket.socket) -> None:
        try:
            link, _ = listener.accept()
        except BlockingIOError:
            return
        if peer_uid(link) != os.getuid():
            self.strangers += 1
            link.close()
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        listener.close()
        self._paths.pop(peer).unlink(missing_ok=True)
        link.setblocking(False)
        self._sockets[peer] = link
        loop.add_reader(link, self._read, peer, link)
        self._tell(TrainerLinked(peer=peer))

    def _read(self, peer: bytes, link: socket.socket) -> None:
        try:
            slot = receive_slot(link)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self._tell(TrainerLinkClosed(peer=peer, reason=str(error)))
            return
        if slot is None:
            self._tell(TrainerLinkClosed(peer=peer, reason="its slot link closed"))
            return
        self.drop_slot(slot.number)
        self._slots[slot.number] = slot
        if self._source is not None:
            try:
                send_slot(self._source, slot)
            except OSError:
                # The source is gone or stuck. Its exit, or the wait for the slot, is noticed by the machine.
                self.disconnect_source()
        self._tell(SlotReceived(peer=peer, slot=slot.number, nbytes=slot.nbytes))
