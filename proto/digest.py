"""The digest: one position-sensitive 64-bit hash of a tensor's bytes.

Definition, for a tensor of N bytes (contiguous, little-endian, its plain memory):

    chunk j   = bytes [64 Ki * j, min(64 Ki * (j + 1), N))
    d_j       = XXH64(chunk j, seed = 0)
    digest    = XXH64(d_0 || d_1 || ... as little-endian 64-bit words, seed = N)

An empty tensor has no chunks: its digest is XXH64 of nothing with seed 0. Moving, swapping, dropping
or flipping any byte changes some d_j or their order, hence the digest. Chunks are independent, so a
GPU kernel gives the same value with one program per chunk, and the CPU form is one call of the xxhash
library per chunk, which runs at memory speed and lets go of the interpreter lock.

XXH64 is specified in the xxHash project's ``doc/xxhash_spec.md``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

#: Bytes hashed as one chunk. Part of the definition: changing it changes every digest.
CHUNK_BYTES = 64 * 1024


def digest_bytes(data: memoryview | bytes | bytearray) -> int:
    """Digest of a contiguous buffer, as an unsigned 64-bit integer.

    Args:
        data: the tensor's bytes; any contiguous buffer, of any item type and shape.
    """
    view = memoryview(data)
    if view.nbytes == 0:
        return xxhash.xxh64_intdigest(b"", seed=0)
    flat = view.cast("B") if view.format != "B" or view.ndim != 1 else view
    total = flat.nbytes
    chunks: npt.NDArray[np.uint64] = np.empty(-(-total // CHUNK_BYTES), dtype="<u8")
    for number in range(len(chunks)):
        start = number * CHUNK_BYTES
        chunks[number] = xxhash.xxh64_intdigest(flat[start : start + CHUNK_BYTES], seed=0)
    return xxhash.xxh64_intdigest(chunks.tobytes(), seed=total)


def format_digest(digest: int) -> str:
    """The digest as people and JSON see it: 16 hex digits."""
    return f"{digest:016x}"
