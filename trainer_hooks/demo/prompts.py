"""What the demo asks, how it spells text as tokens, and how it asks an engine. Imports no torch."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

#: Byte b is token b + 3: ids 0 to 2 are padding, begin and end, as in the engines' vocabularies.
FIRST_BYTE_TOKEN = 3
#: Of equal length, so that the trainer can continue them as one batch.
PROMPTS = ("A trainer le", "A bucket is ", "The wire may")
NEW_TOKENS = 24
GENERATE_SECONDS = 120.0


def tokens_of(text: str) -> list[int]:
    """Byte-level tokens of ``text``."""
    return [byte + FIRST_BYTE_TOKEN for byte in text.encode()]


def text_of(tokens: list[int]) -> str:
    """Text of byte-level tokens; tokens that are no bytes are left out."""
    kept = bytes(t - FIRST_BYTE_TOKEN for t in tokens if 0 <= t - FIRST_BYTE_TOKEN < 256)
    return kept.decode(errors="replace")


def ask_engine(url: str, prompt: list[int]) -> dict[str, Any]:
    """Greedy continuation of ``prompt`` by the engine at ``url``: its whole ``/generate`` answer."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    request = urllib.request.Request(  # noqa: S310 - the demo's own http URL
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=GENERATE_SECONDS) as answer:
        result: dict[str, Any] = json.load(answer)
        return result
