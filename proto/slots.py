"""Slots: shared buffers that hold one bucket each, passed between processes as file descriptors.

A slot is an anonymous memory file (`memfd_create`), so it needs no room in ``/dev/shm`` and no name
that another process could open. Its descriptor travels once, over a Unix socket. The creator seals its
size: a receiver that maps it can never be killed by the other side shrinking it (SIGBUS).

    creator                                  receiver
    slot = Slot.create(0, nbytes)
    send_slot(socket, slot)      ──fd──►     slot = receive_slot(socket)
    slot.view[:] = ...                       slot.view        the same bytes
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct

import msgspec

from .errors import ProtocolError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAX_HEADER = 256


class SlotOffer(msgspec.Struct, frozen=True):
    """What travels beside a slot's descriptor: its number and its size in bytes."""

    slot: int
    nbytes: int


class Slot:
    """One shared buffer of ``nbytes`` bytes, mapped read-write. Close it to unmap and drop the descriptor."""

    def __init__(self, number: int, nbytes: int, fd: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd = fd
        self.map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)

    @classmethod
    def create(cls, number: int, nbytes: int) -> Slot:
        """Make a new slot. Its pages are allocated when first written, not before.

        Raises:
            OSError: if the system has no memory files or refuses the size.
        """
        if nbytes < 1:
            raise ValueError(f"a slot of {nbytes} bytes cannot be mapped")
        fd = os.memfd_create(f"weightcast-slot-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(number, nbytes, fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def view(self) -> memoryview:
        """The slot's bytes, writable. Release the view (or drop it) before `close`."""
        return memoryview(self.map)

    def close(self) -> None:
        """Drop the descriptor and unmap. Safe to call twice.

        A view or tensor that still points into the slot keeps the mapping alive until it is dropped.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        # If somebody still holds a view, the mapping goes with the last of them, not under it.
        with contextlib.suppress(BufferError):
            self.map.close()


def send_slot(link: socket.socket, slot: Slot) -> None:
    """Send one slot's descriptor over a connected Unix ``SOCK_SEQPACKET`` socket.

    Raises:
        OSError: if the peer is gone or the socket's own timeout passes.
    """
    header = msgspec.msgpack.encode(SlotOffer(slot.number, slot.nbytes))
    socket.send_fds(link, [header], [slot.fd])


def receive_slot(link: socket.socket) -> Slot | None:
    """Receive one slot, checked: exactly one descriptor, sealed, of the announced size.

    Returns None when the peer closed the link.

    Raises:
        ProtocolError: for anything that is no sound slot; all descriptors received are closed.
        OSError: on the socket's own timeout or a broken link.
    """
    header, fds, flags, _ = socket.recv_fds(link, _MAX_HEADER, 4, socket.MSG_CMSG_CLOEXEC)
    try:
        if not header and not fds:
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) != 1:
            raise ProtocolError(f"a slot came with {len(fds)} descriptors or was cut short")
        try:
            offer = msgspec.msgpack.decode(header, type=SlotOffer)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a slot came with a header that is none: {error}") from error
        try:
            seals = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)
        except OSError as error:
            raise ProtocolError(f"slot {offer.slot} is not a memory file: {error}") from error
        size = os.fstat(fds[0]).st_size
        if offer.nbytes < 1 or size != offer.nbytes or seals & _SEALS != _SEALS:
            raise ProtocolError(
                f"slot {offer.slot} announces {offer.nbytes} bytes, has {size} and seals {seals:#x}"
            )
        slot = Slot(offer.slot, offer.nbytes, fds[0])
        fds = []
        return slot
    finally:
        for fd in fds:
            os.close(fd)


def peer_uid(link: socket.socket) -> int:
    """User id of the process at the other end of a Unix socket (`SO_PEERCRED`)."""
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", data)
    return int(uid)
