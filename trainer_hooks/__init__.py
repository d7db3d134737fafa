"""The training job's side: gathers weights to rank 0, packs them into slots, and hands them over.

publisher.py     `Publisher`: what a training loop uses
sources.py       what may be handed to it, and in which order its tensors come
agreement.py     common decisions of all ranks
gather.py        shards to rank 0, into the slot
packing.py       one bucket in its slot, with digests
conversation.py  one refit as rank 0 speaks of it with the broadcaster;  link.py the connection
rank0.py         what only rank 0 has;  launch.py a broadcaster as its child
checkpoint.py    a folder of safetensors;  push.py a refit from it, without torch;  cli.py `weightcast push`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..proto.config import BroadcasterConfig
from ..proto.messages import RefitReport

if TYPE_CHECKING:
    from .publisher import Publisher

__all__ = ["BroadcasterConfig", "Publisher", "RefitReport"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: the publisher needs torch, `weightcast push` beside it does not.
    if name == "Publisher":
        from .publisher import Publisher

        return Publisher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
