"""Bucket layout: which tensors travel together, in which order, at which byte offsets.

A bucket holds the bytes of whole tensors, contiguous, back to back, without padding. The engine
derives every offset from names, dtypes and shapes alone, and refuses a tensor whose offset is not a
multiple of its item size. So inside a bucket tensors are ordered by item size, largest first, then by
arrival: every offset is then aligned by construction, because each item size divides the larger ones.

Planning is pure: `plan_buckets` and `check_layout` are functions from frozen values to frozen values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import msgspec

from .errors import InvalidLayout

#: Bytes of one element, by torch's dtype name without its ``torch.`` prefix (SGLang's spelling).
ITEM_SIZES: dict[str, int] = {
    "complex128": 16,
    "complex64": 8,
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint16": 2,
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, dtype (torch's name, as ``"bfloat16"``) and shape of one whole, un-sharded tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, contiguous. A 0-dim tensor has one element, an empty one none."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """One tensor's place in a bucket: bytes ``[offset, offset + spec.nbytes)``."""

    index: int
    spec: TensorSpec
    offset: int


class Layout(msgspec.Struct, frozen=True):
    """Every tensor of a refit in order of arrival, and the buckets they travel in.

    ``buckets[k]`` lists indices into ``tensors`` in byte order. The layout is sent once per refit and
    both sides derive all offsets from it, so they cannot disagree about a bucket's contents.
    """

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[tuple[int, ...], ...]

    def place(self, bucket: int) -> Iterator[Placed]:
        """Yield the tensors of bucket number ``bucket`` with their byte offsets, in byte order."""
        offset = 0
        for index in self.buckets[bucket]:
            spec = self.tensors[index]
            yield Placed(index, spec, offset)
            offset += spec.nbytes

    def bucket_nbytes(self, bucket: int) -> int:
        """Bytes of bucket number ``bucket``."""
        return sum(self.tensors[index].nbytes for index in self.buckets[bucket])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(spec.nbytes for spec in self.tensors)

    def fingerprint(self) -> str:
        """SHA-256 of the layout, hex: equal on two sides only if every name, dtype, shape and place is."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()


def check_specs(specs: Sequence[TensorSpec]) -> None:
    """Refuse what no engine could be sent: nothing at all, a name twice, an unknown dtype, a bad shape.

    Raises:
        InvalidLayout: with every problem found, one per line.
    """
    if not specs:
        raise InvalidLayout(
            "the refit names no tensors: the iterable was empty, or a filter dropped everything"
        )
    problems: list[str] = []
    seen: set[str] = set()
    for spec in specs:
        if not spec.name:
            problems.append("a tensor has an empty name")
        if spec.name in seen:
            problems.append(f"{spec.name!r} is named twice")
        seen.add(spec.name)
        if spec.dtype not in ITEM_SIZES:
            problems.append(f"{spec.name!r} has dtype {spec.dtype!r}, which cannot be sent")
        if any(extent < 0 for extent in spec.shape):
            problems.append(f"{spec.name!r} has a negative extent in its shape {list(spec.shape)}")
    if problems:
        raise InvalidLayout("; ".join(problems))


def plan_buckets(
    specs: Sequence[TensorSpec],
    *,
    bucket_bytes: int,
    together: Sequence[frozenset[str]] = (),
) -> Layout:
    """Assign tensors to buckets of at most ``bucket_bytes`` bytes, keeping their order of arrival.

    A tensor (or a declared group) larger than ``bucket_bytes`` gets a bucket of its own. Tensors of a
    group in ``together`` travel in one bucket, at the place of the group's first arrival. Names in
    ``together`` that the refit does not have are ignored. Empty tensors take no room but are announced.

    Args:
        specs: all tensors in order of arrival.
        bucket_bytes: bytes a bucket may hold, positive.
        together: disjoint sets of names that the engine must see in one call.

    Raises:
        InvalidLayout: for specs refused by `check_specs`, ``bucket_bytes`` below 1, or a name in two groups.
    """
    if bucket_bytes < 1:
        raise InvalidLayout(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    check_specs(specs)
    buckets: list[tuple[int, ...]] = []
    current: list[int] = []
    current_bytes = 0
    for unit in _indivisible_units(specs, together):
        unit_bytes = sum(specs[index].nbytes for index in unit)
        if current and current_bytes + unit_bytes > bucket_bytes:
            buckets.append(_byte_order(specs, current))
            current, current_bytes = [], 0
        current.extend(unit)
        current_bytes += unit_bytes
    buckets.append(_byte_order(specs, current))
    return Layout(tensors=tuple(specs), buckets=tuple(buckets))


def _indivisible_units(
    specs: Sequence[TensorSpec], together: Sequence[frozenset[str]]
) -> Iterator[list[int]]:
    group_of: dict[str, int] = {}
    for number, names in enumerate(together):
        for name in names:
            if name in group_of:
                raise InvalidLayout(f"{name!r} is declared in two groups of `together`")
            group_of[name] = number
    members: dict[int, list[int]] = {}
    for index, spec in enumerate(specs):
        if spec.name in group_of:
            members.setdefault(group_of[spec.name], []).append(index)
    for index, spec in enumerate(specs):
        if spec.name not in group_of:
            yield [index]
        elif members[group_of[spec.name]][0] == index:
            yield members[group_of[spec.name]]


def _byte_order(specs: Sequence[TensorSpec], indices: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(indices, key=lambda index: (-ITEM_SIZES[specs[index].dtype], index)))


def check_layout(layout: Layout) -> None:
    """Check a layout that came from the other side: every tensor exactly once, every offset aligned.

    Raises:
        InvalidLayout: naming the bucket and the tensor.
    """
    check_specs(layout.tensors)
    seen = [0] * len(layout.tensors)
    for number, bucket in enumerate(layout.buckets):
        if not bucket:
            raise InvalidLayout(f"bucket {number} is empty")
        for index in bucket:
            if not 0 <= index < len(seen):
                raise InvalidLayout(f"bucket {number} names tensor {index} of {len(seen)}")
            seen[index] += 1
        for placed in layout.place(number):
            if placed.offset % ITEM_SIZES[placed.spec.dtype]:
                raise InvalidLayout(
                    f"bucket {number} puts {placed.spec.name!r} ({placed.spec.dtype}) at byte "
                    f"{placed.offset}, which its item size does not divide"
                )
    for index, count in enumerate(seen):
        if count != 1:
            raise InvalidLayout(
                f"{layout.tensors[index].name!r} is in {count} buckets; it must be in exactly one"
            )
