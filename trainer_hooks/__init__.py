"""The training job's side: gathers weights to rank 0, packs them into slots, and hands them over.

publisher.py     `Publisher`: what a training loop uses
sources.py       what may be handed to it, and in which order its tensors come
agreement.py     common decisions of all ranks
gather.py        shards to rank 0, into the slot
packing.py       one bucket in its slot, with digests
conversation.py  one refit as rank 0 speaks of it with the broadcaster;  link.py the connection
launch.py        a broadcaster as a child
checkpoint.py    a folder of safetensors as a source;  cli.py `weightcast push`
"""

from ..proto.config import BroadcasterConfig
from ..proto.messages import RefitReport
from .publisher import Publisher

__all__ = ["BroadcasterConfig", "Publisher", "RefitReport"]
