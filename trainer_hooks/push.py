"""A refit from a checkpoint folder: a training job of one rank without training, and without torch.

    begin → (slot → copy and hash its tensors → packed)… → finish

The twin of `refit.RankRefit` where the bytes lie in mapped files and there is nobody to agree with.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ..proto.digest import digest_bytes
from ..proto.errors import RefitFailed, WeightcastError
from ..proto.layout import Layout, plan_buckets
from ..proto.messages import RefitReport
from ..proto.slots import Slot
from .checkpoint import Checkpoint
from .conversation import RefitConversation, cause_of, check_version
from .rank0 import Rank0


def push_checkpoint(
    checkpoint: Checkpoint,
    root: Rank0,
    *,
    step: int,
    label: str,
    packed: Callable[[int], None],
) -> RefitReport:
    """Install an open checkpoint on the fleet of the broadcaster that ``root`` is connected to.

    Args:
        step: version number, from 0 up.
        label: what the engines show as their weight version.
        packed: told the bytes of each tensor once it is in a slot.

    Raises:
        RefitFailed: with the report, if a node does not hold the weights.
        RefitRejected: if nothing was touched.
        BroadcasterUnavailable: if the broadcaster went away.
    """
    check_version(step, label)
    layout = plan_buckets([entry.spec for entry in checkpoint.entries], bucket_bytes=root.pool.nbytes)
    conversation = RefitConversation(link=root.link, pool=root.pool, refit=1)
    try:
        conversation.begin(step, label, layout)
        for bucket in range(len(layout.buckets)):
            slot = conversation.slot_for(bucket, layout.bucket_nbytes(bucket))
            started = time.monotonic()
            digests = _fill(slot, checkpoint, layout, bucket, root, packed)
            fields = {
                "bucket": bucket,
                "digests": digests,
                "gather_seconds": 0.0,
                "pack_seconds": time.monotonic() - started,
            }
            conversation.packed(fields, slot)
        return conversation.finish()
    except (OSError, WeightcastError) as error:
        # None if the broadcaster has ended the refit itself, or is gone.
        report = conversation.cancel(cause_of(error, rank=0))
        if report is None:
            raise
        raise RefitFailed(str(error), cause=cause_of(error, rank=0), report=report) from error
    finally:
        conversation.drop()


def _fill(
    slot: Slot,
    checkpoint: Checkpoint,
    layout: Layout,
    bucket: int,
    root: Rank0,
    packed: Callable[[int], None],
) -> tuple[int, ...]:
    """Copy one bucket's tensors to their offsets; their digests, in byte order."""
    room = np.frombuffer(slot.view, np.uint8)
    digests = []
    for placed in layout.place(bucket):
        with checkpoint.bytes_of(checkpoint.entries[placed.index]) as source:
            # Over the file's bytes, not the copy's: a packing fault then shows at the engines.
            hashing = root.digests.submit(digest_bytes, source)
            try:
                room[placed.offset : placed.offset + len(source)] = np.frombuffer(source, np.uint8)
            finally:
                digests.append(hashing.result())
        packed(placed.spec.nbytes)
    return tuple(digests)
