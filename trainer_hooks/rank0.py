"""What only rank 0 of the training job has. Imports no torch: `weightcast push` is a job of this alone."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ..proto.config import BroadcasterConfig
from .conversation import SlotPool
from .launch import ChildBroadcaster
from .link import Link

_DIGEST_THREADS = 2


class Rank0:
    """What only rank 0 has: the connection, the slots, and perhaps the broadcaster itself."""

    def __init__(self, job: str, run_path: Path, ranks: int, slots: int, bucket_bytes: int) -> None:
        self.incarnation = secrets.token_hex(4)
        self.link = Link(run_dir=run_path, job=job, incarnation=self.incarnation, ranks=ranks)
        self.pool = SlotPool(count=slots, nbytes=bucket_bytes)
        self.digests = ThreadPoolExecutor(_DIGEST_THREADS, thread_name_prefix="weightcast-digest")
        self._child: ChildBroadcaster | None = None

    def connect(self, launch: BroadcasterConfig | None = None) -> None:
        """Reach the broadcaster (after starting it, if asked to), unless it is connected already."""
        if launch is not None:
            self._child = ChildBroadcaster(msgspec.structs.replace(launch, run_dir=str(self.link.run_dir)))
        if self.link.ensure_open(self.pool.open()):
            self.pool.all_free()

    def close(self) -> None:
        self.link.close()
        self.pool.close()
        self.digests.shutdown(wait=True)
        if self._child is not None:
            self._child.close()
