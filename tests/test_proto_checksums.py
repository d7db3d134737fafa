"""Checksums from passing buckets, against a slow twin that builds every fused parameter whole with torch."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weightcast.proto.checksums import ChecksumEntry, ChecksumPlan, ChecksumTaker, Piece
from weightcast.proto.errors import InvalidLayout
from weightcast.proto.layout import Layout, TensorSpec, plan_buckets

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    "float64": torch.float64,
}

Tensors = dict[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def pack(layout: Layout, bucket: int, tensors: Tensors) -> memoryview:
    # Longer than the bucket, as a slot is.
    return memoryview(
        b"".join(raw(tensors[placed.spec.name]) for placed in layout.place(bucket)) + b"\xaa" * 16
    )


def slow_checksum(entry: ChecksumEntry, tensors: Tensors) -> str:
    """What the engine computes: the parameter as it holds it, whole, then one hash."""
    parts = []
    for piece in entry.pieces:
        whole = tensors[piece.name]
        if piece.axis < 0:
            parts.append(raw(whole))
            continue
        stop = min(piece.stop, whole.shape[piece.axis])
        part = whole.narrow(piece.axis, min(piece.start, stop), max(0, stop - piece.start))
        missing = piece.stop - max(whole.shape[piece.axis], piece.start)
        if missing > 0:
            part = torch.cat([part, torch.zeros(missing, *whole.shape[1:], dtype=whole.dtype)])
        parts.append(raw(part))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensors, Layout, ChecksumPlan]:
    torch.manual_seed(draw(st.integers(0, 1000)))
    tensors: Tensors = {}
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        tensors[f"t{number}"] = (torch.randn(shape) * 50).to(dtype)
    specs = [
        TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()
    ]
    layout = plan_buckets(draw(st.permutations(specs)), bucket_bytes=draw(st.integers(1, 600)))
    entries = []
    for number in range(draw(st.integers(1, 5))):
        pieces = []
        for name in draw(st.lists(st.sampled_from(sorted(tensors)), min_size=1, max_size=5)):
            axis = draw(st.integers(-1, tensors[name].dim() - 1))
            extent = tensors[name].shape[axis] if axis >= 0 else 0
            start = draw(st.integers(0, extent))
            # Only the first axis may be padded.
            stop = draw(st.integers(start, extent + (3 if axis == 0 else 0)))
            pieces.append(Piece(name, axis, start, stop) if axis >= 0 else Piece(name))
        entries.append(ChecksumEntry(draw(st.integers(0, 3)), f"p{number}", tuple(pieces)))
    return tensors, layout, ChecksumPlan(tuple(entries))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_any_plan_gives_the_slow_twins_checksums(case: tuple[Tensors, Layout, ChecksumPlan]) -> None:
    tensors, layout, plan = case
    taker = ChecksumTaker(layout, plan)
    for bucket in range(len(layout.buckets)):
        taker.take(bucket, pack(layout, bucket, tensors))
    assert taker.values() == tuple(slow_checksum(entry, tensors) for entry in plan.entries)


def fused_qkv(rank: int, ranks: int) -> ChecksumEntry:
    def rows(name: str, extent: int) -> Piece:
        return Piece(name, 0, rank * extent // ranks, (rank + 1) * extent // ranks)

    return ChecksumEntry(rank, "qkv", (rows("q", 8), rows("k", 4), rows("v", 4)))


@pytest.mark.parametrize("order", ["qkv", "vkq", "kqv"])
def test_fused_and_sharded_parameter_in_any_order_of_arrival(order: str) -> None:
    torch.manual_seed(0)
    tensors = {"q": torch.randn(8, 6), "k": torch.randn(4, 6), "v": torch.randn(4, 6)}
    specs = [TensorSpec(name, "float32", tuple(tensors[name].shape)) for name in order]
    layout = plan_buckets(specs, bucket_bytes=1)
    taker = ChecksumTaker(layout, ChecksumPlan(tuple(fused_qkv(rank, 2) for rank in range(2))))
    for bucket in range(3):
        data = bytearray(pack(layout, bucket, tensors))
        taker.take(bucket, memoryview(data))
        data[:] = b"\x00" * len(data)  # the slot is refilled: nothing may still point into it
    q, k, v = (tensors[name].chunk(2) for name in "qkv")
    for rank, value in enumerate(taker.values()):
        assert value == hashlib.sha256(raw(torch.cat([q[rank], k[rank], v[rank]]))).hexdigest()[:16]


def test_padded_vocabulary() -> None:
    layout = plan_buckets([TensorSpec("embed", "bfloat16", (5, 2))], bucket_bytes=100)
    embed = torch.randn(5, 2).bfloat16()
    plan = ChecksumPlan(
        tuple(ChecksumEntry(rank, "embed", (Piece("embed", 0, 4 * rank, 4 * rank + 4),)) for rank in range(3))
    )
    taker = ChecksumTaker(layout, plan)
    taker.take(0, pack(layout, 0, {"embed": embed}))
    padded = torch.cat([embed, torch.zeros(7, 2, dtype=torch.bfloat16)])
    assert taker.values() == tuple(
        hashlib.sha256(raw(padded[4 * rank : 4 * rank + 4])).hexdigest()[:16] for rank in range(3)
    )


def test_one_flipped_byte_changes_exactly_the_parameters_that_hold_it() -> None:
    layout = plan_buckets([TensorSpec("w", "uint8", (4, 4))], bucket_bytes=100)
    halves = ChecksumPlan(
        tuple(ChecksumEntry(rank, "w", (Piece("w", 1, 2 * rank, 2 * rank + 2),)) for rank in range(2))
    )

    def take(data: bytes) -> tuple[str, ...]:
        taker = ChecksumTaker(layout, halves)
        taker.take(0, memoryview(data))
        return taker.values()

    clean, dirty = bytes(range(16)), bytearray(range(16))
    dirty[7] ^= 1
    assert [a == b for a, b in zip(take(clean), take(bytes(dirty)), strict=True)] == [True, False]


def test_plans_that_do_not_fit_the_layout_are_refused() -> None:
    layout = plan_buckets([TensorSpec("w", "uint8", (4, 4)), TensorSpec("x", "uint8", (1,))], bucket_bytes=16)

    def plan(*pieces: Piece) -> ChecksumPlan:
        return ChecksumPlan((ChecksumEntry(0, "p", pieces),))

    with pytest.raises(InvalidLayout, match="needs 'absent'"):
        ChecksumTaker(layout, plan(Piece("absent")))
    with pytest.raises(InvalidLayout, match="along axis 2"):
        ChecksumTaker(layout, plan(Piece("w", 2, 0, 1)))
    taker = ChecksumTaker(layout, plan(Piece("w"), Piece("x")))
    taker.take(0, memoryview(bytes(16)))
    with pytest.raises(InvalidLayout, match="'x' was never sent"):
        taker.values()
    with pytest.raises(InvalidLayout, match="'w' cannot be padded along axis 1"):
        ChecksumTaker(layout, plan(Piece("w", 1, 0, 5))).take(0, memoryview(bytes(16)))
