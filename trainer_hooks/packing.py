"""Packing one bucket into its slot on rank 0, with the digest of every tensor.

A tensor that this rank has whole is hashed over its *own* bytes, not over the copy in the slot: a packing
fault then shows as a digest that no engine can match. A gathered tensor exists nowhere else than in the
slot, so it is hashed there, and so is a CUDA tensor, whose first copy on the host is the slot.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..proto.digest import digest_bytes
from ..proto.layout import Layout, Placed
from ..proto.slots import Slot

#: Below this a digest is done before a thread could be woken, bytes.
_WORTH_A_THREAD = 1 << 20


class BucketWriter:
    """Writes one bucket's tensors at the offsets that the layout says. Rank 0 only.

    Args:
        slot: at least as large as the bucket.
        pool: hashes large tensors while they are copied.
    """

    def __init__(self, slot: Slot, layout: Layout, bucket: int, pool: ThreadPoolExecutor) -> None:
        self._bytes = torch.frombuffer(slot.view, dtype=torch.uint8)
        self._placed = {placed.index: placed for placed in layout.place(bucket)}
        self._pool = pool
        self._digests: dict[int, int | Future[int]] = {}

    def place_of(self, index: int) -> torch.Tensor:
        """The place of one tensor in the slot: its dtype and whole shape, contiguous, on the CPU."""
        placed = self._placed[index]
        dtype = getattr(torch, placed.spec.dtype)
        return self._region(placed).view(dtype).view(placed.spec.shape)

    def put(self, index: int, tensor: torch.Tensor) -> None:
        """Copy a whole tensor to its place and take its digest. ``tensor`` may be dropped afterwards."""
        plain = tensor.detach().resolve_conj().resolve_neg()
        if plain.device.type != "cpu":
            self.place_of(index).copy_(plain)
            return
        own = plain.contiguous().reshape(-1).view(torch.uint8)
        hashing = self._hash(own)
        self._region(self._placed[index]).copy_(own)
        # Waited for here: the caller may free or change the tensor as soon as this returns.
        self._digests[index] = hashing if isinstance(hashing, int) else hashing.result()

    def finish(self) -> tuple[int, ...]:
        """Hash what was gathered into the slot; all digests of the bucket, in byte order."""
        for index, placed in self._placed.items():
            if index not in self._digests:
                self._digests[index] = self._hash(self._region(placed))
        found = (self._digests[index] for index in self._placed)
        return tuple(digest if isinstance(digest, int) else digest.result() for digest in found)

    def _region(self, placed: Placed) -> torch.Tensor:
        return self._bytes[placed.offset : placed.offset + placed.spec.nbytes]

    def _hash(self, data: torch.Tensor) -> int | Future[int]:
        view = data.numpy().data if data.numel() else b""
        if data.numel() < _WORTH_A_THREAD:
            return digest_bytes(view)
        return self._pool.submit(digest_bytes, view)
