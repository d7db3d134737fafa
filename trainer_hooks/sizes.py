"""Sizes as people type them."""

from __future__ import annotations

import re

from ..proto.errors import InvalidConfig

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes from ``"268435456"``, ``"256MiB"`` or ``"1.5G"``.

    Raises:
        InvalidConfig: for anything else.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise InvalidConfig(f"--bucket-bytes {text!r} is no size; write it as 268435456 or 256MiB")
    size = int(float(match[1]) * _UNITS[match[2] or ""])
    if size < 1:
        raise InvalidConfig(f"--bucket-bytes {text!r} holds nothing; give at least 1")
    return size
