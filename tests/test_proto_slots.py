"""Slots over a real Unix socket: shared bytes, and everything that must be refused without a leak."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from weightcast.proto.errors import ProtocolError
from weightcast.proto.slots import Slot, SlotOffer, peer_uid, receive_slot, send_slot

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.settimeout(5)
    right.settimeout(5)
    with left, right:
        yield left, right


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def memory_file(size: int, *, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def offer(slot: int, nbytes: int) -> bytes:
    return msgspec.msgpack.encode(SlotOffer(slot, nbytes))


def test_both_sides_see_the_same_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    before = open_descriptors()
    with contextlib.closing(Slot.create(4, 10_000)) as mine:
        mine.view[:3] = b"abc"
        send_slot(left, mine)
        theirs = receive_slot(right)
        assert theirs is not None
        with contextlib.closing(theirs):
            assert (theirs.number, theirs.nbytes, bytes(theirs.view[:3])) == (4, 10_000, b"abc")
            theirs.view[9_999] = 7
            assert mine.view[9_999] == 7
            with pytest.raises(PermissionError):
                os.ftruncate(mine.fd, 1)
    assert open_descriptors() == before


def test_a_view_outlives_its_slot(pair: tuple[socket.socket, socket.socket]) -> None:
    slot = Slot.create(0, 4096)
    view = slot.view
    slot.close()
    slot.close()
    view[0] = 1
    assert view[0] == 1


def test_end_of_the_link_is_none(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    left.close()
    assert receive_slot(right) is None


def test_no_slot_of_no_bytes() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        Slot.create(0, 0)


def test_what_is_no_sound_slot_is_refused_and_its_descriptors_closed(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    left, right = pair
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, 4096)
    read_end, write_end = os.pipe()
    unsealed = memory_file(4096, seals=0)
    half_sealed = memory_file(4096, seals=fcntl.F_SEAL_SHRINK)
    good = memory_file(4096)
    mine = [plain, read_end, write_end, unsealed, half_sealed, good]
    try:
        before = open_descriptors()
        cases: list[tuple[bytes, list[int], str]] = [
            (offer(1, 4096), [unsealed], "seals 0x0"),
            (offer(1, 4096), [half_sealed], "seals"),
            (offer(1, 8192), [good], "announces 8192 bytes, has 4096"),
            (offer(1, 0), [good], "announces 0 bytes"),
            (offer(1, -5), [good], "announces -5"),
            (offer(1, 4096), [good, good], "2 descriptors"),
            (offer(1, 4096), [good] * 5, "descriptors"),
            (offer(1, 4096), [], "0 descriptors"),
            (b"\xff\x00junk", [good], "header that is none"),
            (msgspec.msgpack.encode({"slot": "one"}), [good], "header that is none"),
            (b"x" * 5000, [good], "cut short"),
            (offer(1, 4096), [plain], "not a memory file"),
            (offer(1, 4096), [read_end], "not a memory file"),
        ]
        for header, fds, message in cases:
            socket.send_fds(left, [header], fds)
            with pytest.raises(ProtocolError, match=message):
                receive_slot(right)
            assert open_descriptors() == before, f"a descriptor of {message!r} leaked"
        socket.send_fds(left, [offer(1, 4096)], [good])
        slot = receive_slot(right)
        assert slot is not None, "a good slot is still taken afterwards"
        slot.close()
    finally:
        for fd in mine:
            os.close(fd)


def test_peer_is_known_by_its_user(pair: tuple[socket.socket, socket.socket]) -> None:
    assert peer_uid(pair[0]) == os.getuid()
