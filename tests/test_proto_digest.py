"""The digest against a second one written from the xxHash specification, and what it must notice."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weightcast.proto.digest import CHUNK_BYTES, digest_bytes, format_digest

P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
MASK = (1 << 64) - 1


def rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & MASK


def mix(accumulator: int, lane: int) -> int:
    return rotate((accumulator + lane * P2) & MASK, 31) * P1 & MASK


def xxh64(data: bytes, seed: int) -> int:
    """XXH64, step by step as in the specification."""
    position = 0
    if len(data) < 32:
        found = seed + P5
    else:
        lanes = [seed + P1 + P2, seed + P2, seed, seed - P1]
        lanes = [lane & MASK for lane in lanes]
        while len(data) - position >= 32:
            words = struct.unpack_from("<4Q", data, position)
            lanes = [mix(lane, word) for lane, word in zip(lanes, words, strict=True)]
            position += 32
        found = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            found = ((found ^ mix(0, lane)) * P1 + P4) & MASK
    found = (found + len(data)) & MASK
    while len(data) - position >= 8:
        (word,) = struct.unpack_from("<Q", data, position)
        found = (rotate(found ^ mix(0, word), 27) * P1 + P4) & MASK
        position += 8
    if len(data) - position >= 4:
        (half,) = struct.unpack_from("<I", data, position)
        found = (rotate(found ^ (half * P1 & MASK), 23) * P2 + P3) & MASK
        position += 4
    for byte in data[position:]:
        found = rotate(found ^ (byte * P5 & MASK), 11) * P1 & MASK
    found = (found ^ (found >> 33)) * P2 & MASK
    found = (found ^ (found >> 29)) * P3 & MASK
    return found ^ (found >> 32)


def slow_digest(data: bytes) -> int:
    if not data:
        return xxh64(b"", 0)
    words = [xxh64(data[start : start + CHUNK_BYTES], 0) for start in range(0, len(data), CHUNK_BYTES)]
    return xxh64(struct.pack(f"<{len(words)}Q", *words), len(data))


def noise(size: int) -> bytes:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()


def test_known_values_of_the_specification() -> None:
    assert xxh64(b"", 0) == 0xEF46DB3751D8E999
    assert xxh64(b"abc", 0) == 0x44BC2CF5AD770999


@pytest.mark.parametrize(
    "size", [0, 1, 3, 4, 7, 8, 31, 32, 33, 1000, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1]
)
def test_equals_the_slow_twin(size: int) -> None:
    assert digest_bytes(noise(size)) == slow_digest(noise(size))


@settings(max_examples=50)
@given(st.binary(max_size=300))
def test_equals_the_slow_twin_on_any_bytes(data: bytes) -> None:
    assert digest_bytes(data) == slow_digest(data)


def test_any_buffer_gives_the_digest_of_its_bytes() -> None:
    values = np.arange(50_000, dtype=np.float32).reshape(100, 500)
    expected = digest_bytes(values.tobytes())
    assert digest_bytes(values.data) == expected
    assert digest_bytes(bytearray(values.tobytes())) == expected
    assert digest_bytes(values.view(np.uint16).data) == expected


@settings(max_examples=60)
@given(st.integers(0, 3 * CHUNK_BYTES - 1), st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_noticed(position: int, bit: int) -> None:
    data = bytearray(noise(3 * CHUNK_BYTES))
    before = digest_bytes(data)
    data[position] ^= 1 << bit
    assert digest_bytes(data) != before


def test_moves_swaps_and_lengths_are_noticed() -> None:
    first, second = noise(CHUNK_BYTES), bytes(reversed(noise(CHUNK_BYTES)))
    assert digest_bytes(first + second) != digest_bytes(second + first)
    assert digest_bytes(first[1:] + first[:1]) != digest_bytes(first)
    zeros = [digest_bytes(bytes(size)) for size in (0, 1, 2, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES)]
    assert len(set(zeros)) == len(zeros)
    swapped = bytearray(first + second)
    swapped[10], swapped[CHUNK_BYTES + 10] = swapped[CHUNK_BYTES + 10], swapped[10]
    assert digest_bytes(swapped) != digest_bytes(first + second)


def test_is_shown_as_16_hex_digits() -> None:
    assert format_digest(digest_bytes(b"")) == "ef46db3751d8e999"
    assert format_digest(1) == "0000000000000001"
