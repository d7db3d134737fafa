"""The fault table: what a reference engine can be told to do wrong, for real.

A fault is armed over ``POST /faults`` or ``--fault`` and fires on its call: a freeze stops real
processes, a flip changes a real byte. Nothing here pretends.
"""

from __future__ import annotations

from typing import Literal

import msgspec

#: What each fault does, and in which call it fires.
KINDS: dict[str, str] = {
    "freeze": "bucket: SIGSTOP the ranks before they receive",
    "die": "bucket: SIGKILL the ranks before they receive; the front then ends too",
    "die_server": "bucket: SIGKILL the front before it passes the call on; its ranks end with it",
    "refuse": "bucket: answer 500 and receive nothing",
    "random": "bucket: receive, load random values instead, answer 200",
    "flip": "bucket: flip one byte after receiving, load, answer 200",
    "half": "bucket: load the first half of the tensors, then fail as SGLang does",
    "slow": "bucket: wait `seconds` between receiving and loading",
    "never_join": "init: block without joining, as a rank that cannot reach the store does",
    "no_flush": "flush: refuse, as if requests were running",
}

_CALL_OF_KIND = {"never_join": "init", "no_flush": "flush"}

Kind = Literal[
    "freeze", "die", "die_server", "refuse", "random", "flip", "half", "slow", "never_join", "no_flush"
]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One armed fault.

    ``bucket`` is the number of the update call since the session began, counted from 0 (None: the next
    one). ``rank`` limits it to one tensor-parallel rank (None: all). It fires ``times`` times, 0: always.
    """

    kind: Kind
    bucket: int | None = None
    rank: int | None = None
    seconds: float = 0.0
    times: int = 1

    def hits(self, tp_rank: int) -> bool:
        """Whether the fault concerns this rank."""
        return self.rank is None or self.rank == tp_rank


class FaultTable:
    """The armed faults of one engine, in order."""

    def __init__(self, armed: tuple[Fault, ...] = ()) -> None:
        self.armed: list[Fault] = list(armed)

    def take(self, call: str, bucket: int | None = None) -> Fault | None:
        """The first fault armed for a "bucket", "init" or "flush" call, counted down if it is limited."""
        for index, fault in enumerate(self.armed):
            if _CALL_OF_KIND.get(fault.kind, "bucket") != call or fault.bucket not in (None, bucket):
                continue
            if fault.times == 1:
                del self.armed[index]
            elif fault.times > 1:
                self.armed[index] = msgspec.structs.replace(fault, times=fault.times - 1)
            return fault
        return None
