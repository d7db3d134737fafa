"""Engine checksums that can be computed from the trainer's bytes.

Some engines report a checksum per parameter as they hold it: fused (q, k and v in one matrix), cut to
one tensor-parallel rank, perhaps padded. A `ChecksumPlan` says how each such parameter is put together
from the tensors the trainer sends, so that the source can compute the same checksum from the bytes
that pass through its slots, and a node can show that it holds exactly those.

SGLang on CPU: the first 16 hex digits of SHA-256 over the parameter's contiguous bytes
(``sglang/srt/managers/mm_utils.py``, ``tensor_hash``).

`ChecksumTaker` feeds the hashes bucket by bucket. Pieces that come before their turn (v before k) are
kept as copies until it comes; senders that keep fused tensors together pay for none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec
import numpy as np

from .errors import InvalidLayout
from .layout import ITEM_SIZES, Layout


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A slice ``[start, stop)`` along ``axis`` of the tensor ``name``; the whole tensor if ``axis`` < 0.

    A slice reaching past the tensor's end is padded with zero bytes, as padded vocabularies are.
    """

    name: str
    axis: int = -1
    start: int = 0
    stop: int = 0


class ChecksumEntry(msgspec.Struct, frozen=True, array_like=True):
    """One parameter on one tensor-parallel rank, as its pieces in memory order."""

    rank: int
    parameter: str
    pieces: tuple[Piece, ...]


class ChecksumPlan(msgspec.Struct, frozen=True):
    """All checksums of one engine layout. Nodes of the same model and sharding have equal plans."""

    entries: tuple[ChecksumEntry, ...]


class ChecksumTaker:
    """Computes one plan's checksums from buckets as they pass.

    Raises:
        InvalidLayout: on construction, if the plan names a tensor the layout lacks or a bad axis.
    """

    def __init__(self, layout: Layout, plan: ChecksumPlan) -> None:
        self._layout = layout
        self._hashes = [hashlib.sha256() for _ in plan.entries]
        self._waiting: list[dict[int, bytes]] = [{} for _ in plan.entries]
        self._next = [0] * len(plan.entries)
        self._pieces = [entry.pieces for entry in plan.entries]
        self._uses: dict[str, list[tuple[int, int]]] = {}
        specs = {spec.name: spec for spec in layout.tensors}
        for number, entry in enumerate(plan.entries):
            for turn, piece in enumerate(entry.pieces):
                spec = specs.get(piece.name)
                if spec is None or piece.axis >= len(spec.shape):
                    raise InvalidLayout(
                        f"the checksum of {entry.parameter!r} needs {piece.name!r} along axis "
                        f"{piece.axis}, which the refit does not have"
                    )
                self._uses.setdefault(piece.name, []).append((number, turn))

    def take(self, bucket: int, data: memoryview) -> None:
        """Feed bucket number ``bucket``, whose bytes are ``data`` (at least its size, uint8)."""
        for placed in self._layout.place(bucket):
            uses = self._uses.get(placed.spec.name)
            if not uses:
                continue
            item = ITEM_SIZES[placed.spec.dtype]
            raw = np.frombuffer(data, np.uint8, placed.spec.nbytes, placed.offset)
            # Bytes of one element as a trailing axis: slicing then works for dtypes NumPy lacks.
            whole = raw.reshape(*placed.spec.shape, item)
            for number, turn in uses:
                self._feed(number, turn, _cut(whole, self._pieces[number][turn]))

    def values(self) -> tuple[str, ...]:
        """Each entry's checksum, in the plan's order: 16 hex digits.

        Raises:
            InvalidLayout: if a piece never came.
        """
        for number, pieces in enumerate(self._pieces):
            if self._next[number] != len(pieces):
                raise InvalidLayout(f"{pieces[self._next[number]].name!r} was never sent")
        return tuple(digest.hexdigest()[:16] for digest in self._hashes)

    def _feed(self, number: int, turn: int, parts: Iterable[np.ndarray]) -> None:
        if turn != self._next[number]:
            self._waiting[number][turn] = b"".join(part.tobytes() for part in parts)
            return
        for part in parts:
            self._hashes[number].update(part.data if part.size else b"")
        self._next[number] += 1
        waiting = self._waiting[number]
        while (early := waiting.pop(self._next[number], None)) is not None:
            self._hashes[number].update(early)
            self._next[number] += 1


def _cut(whole: np.ndarray, piece: Piece) -> list[np.ndarray]:
    if piece.axis < 0:
        return [whole]
    extent = whole.shape[piece.axis]
    index = (slice(None),) * piece.axis + (slice(piece.start, min(piece.stop, extent)),)
    part = np.ascontiguousarray(whole[index])
    missing = piece.stop - max(extent, piece.start)
    if missing <= 0:
        return [part]
    if piece.axis:
        raise InvalidLayout(f"{piece.name!r} cannot be padded along axis {piece.axis}")
    return [part, np.zeros((missing, *whole.shape[1:]), np.uint8)]
