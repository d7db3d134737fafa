"""One refit's buckets and slots: packed → broadcast → sent (credit), strictly in order, each exactly once.

A slot is *in use* from the trainer's BucketPacked until its bytes have left; a second bucket in the same
slot before that, a bucket out of turn or one that does not fit is a fault of the sender and ends the refit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..proto.errors import ProtocolError
from ..proto.layout import Layout
from ..proto.messages import BucketPacked, BucketSent


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One bucket to broadcast: ``nbytes`` bytes from the start of ``slot``."""

    bucket: int
    slot: int
    nbytes: int


class BucketLedger:
    """Book of one refit's buckets. ``ordered`` and ``sent`` count buckets; times are machine seconds."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.nbytes = [layout.bucket_nbytes(bucket) for bucket in range(len(layout.buckets))]
        self.packed: list[BucketPacked] = []
        self.ordered = 0
        self.sent = 0
        self.sent_at: list[float] = []
        #: When the oldest bucket that is ordered and not sent became the oldest.
        self.head_since = 0.0
        self.wire_seconds = 0.0
        self._digests: list[int | None] = [None] * len(layout.tensors)
        self._in_use: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Number of buckets of the refit."""
        return len(self.nbytes)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes whose broadcast ended well."""
        return sum(self.nbytes[: self.sent])

    def take_packed(self, message: BucketPacked) -> bool:
        """Note a packed bucket. False for one that was already noted (a repeated message).

        Raises:
            ProtocolError: a bucket out of turn, in a slot still in use, or with digests of another number.
        """
        bucket = message.bucket
        if 0 <= bucket < len(self.packed):
            return False
        if bucket != len(self.packed) or bucket >= self.total:
            raise ProtocolError(
                f"the trainer packed bucket {bucket} where bucket {len(self.packed)} of {self.total} was due"
            )
        if message.slot in self._in_use:
            raise ProtocolError(
                f"the trainer packed bucket {bucket} into slot {message.slot}, which still holds bucket "
                f"{self._in_use[message.slot]} without a credit"
            )
        indices = self.layout.buckets[bucket]
        if len(message.digests) != len(indices):
            raise ProtocolError(
                f"bucket {bucket} has {len(indices)} tensors and came with {len(message.digests)} digests"
            )
        for index, digest in zip(indices, message.digests, strict=True):
            self._digests[index] = digest
        self._in_use[message.slot] = bucket
        self.packed.append(message)
        return True

    def orders(self, attached: Mapping[int, int], now: float) -> Iterator[Order]:
        """Yield, in order, every packed bucket that can be broadcast now, and count it as ordered.

        Raises:
            ProtocolError: a bucket larger than its slot.
        """
        while self.ordered < len(self.packed):
            message = self.packed[self.ordered]
            size = attached.get(message.slot)
            if size is None:
                return
            nbytes = self.nbytes[message.bucket]
            if size < nbytes:
                raise ProtocolError(
                    f"bucket {message.bucket} of {nbytes} bytes does not fit slot {message.slot} of {size}"
                )
            if self.ordered == self.sent:
                self.head_since = now
            self.ordered += 1
            yield Order(bucket=message.bucket, slot=message.slot, nbytes=nbytes)

    def take_sent(self, message: BucketSent, now: float) -> bool:
        """Note that a bucket's bytes have left. False for one that was not due (nothing is credited)."""
        if message.bucket != self.sent or self.sent >= self.ordered:
            return False
        if self._in_use.get(message.slot) != message.bucket:
            return False
        del self._in_use[message.slot]
        self.sent += 1
        self.sent_at.append(now)
        self.head_since = now
        self.wire_seconds += message.seconds
        return True

    def digests_by_name(self) -> dict[str, int]:
        """As `digests`, by tensor name."""
        return {spec.name: digest for spec, digest in zip(self.layout.tensors, self.digests(), strict=True)}

    def digests(self) -> tuple[int, ...]:
        """Digest of each tensor, in the layout's order of tensors.

        Raises:
            ProtocolError: if some bucket was never packed.
        """
        found = tuple(digest for digest in self._digests if digest is not None)
        if len(found) != len(self._digests):
            raise ProtocolError(f"{len(self._digests) - len(found)} tensors were never packed")
        return found
