"""What travels between the HTTP front and the ranks: the request bodies themselves, and the answers.

Each body is one struct, read from HTTP as JSON with SGLang's field names and defaults
(``sglang/srt/managers/io_struct.py``) and passed on to the ranks as msgpack.

    front ── Call ──► rank 0 ── Round ──► ranks 1, 2, …         (ZeroMQ, ipc)
          ◄── Ready | Answer | Output ──
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Union

import msgspec

from .faults import Fault


def front_endpoint(run_dir: Path) -> str:
    """Where rank 0 reaches the front."""
    return f"ipc://{run_dir}/front"


def rounds_endpoint(run_dir: Path, tp_rank: int) -> str:
    """Where rank 0 sends rounds to another rank."""
    return f"ipc://{run_dir}/rank{tp_rank}"


Selector = Literal["target", "draft", "all"]


class Body(msgspec.Struct, frozen=True, kw_only=True, tag_field="call"):
    """A request body. Unknown fields are ignored, as SGLang ignores them."""


class InitWeightsUpdateGroup(Body, frozen=True, kw_only=True, tag="init"):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyWeightsUpdateGroup(Body, frozen=True, kw_only=True, tag="destroy"):
    group_name: str = "weight_update_group"


class BeginWeightUpdate(Body, frozen=True, kw_only=True, tag="begin"):
    selector: Selector = "all"


class EndWeightUpdate(Body, frozen=True, kw_only=True, tag="end"):
    pass


class UpdateWeightsFromDistributed(Body, frozen=True, kw_only=True, tag="update"):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None
    selector: Selector = "all"


class UpdateWeightsFromDisk(Body, frozen=True, kw_only=True, tag="disk"):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class PauseGeneration(Body, frozen=True, kw_only=True, tag="pause"):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGeneration(Body, frozen=True, kw_only=True, tag="continue"):
    pass


class UpdateWeightVersion(Body, frozen=True, kw_only=True, tag="version"):
    new_version: str
    abort_all_requests: bool = True


class FlushCache(Body, frozen=True, kw_only=True, tag="flush"):
    pass


class WeightsChecker(Body, frozen=True, kw_only=True, tag="check"):
    action: str = "checksum"
    skip_tensor_list: list[str] | None = None


class GetWeightsByName(Body, frozen=True, kw_only=True, tag="get"):
    name: str
    truncate_size: int = 100


class WeightDigests(Body, frozen=True, kw_only=True, tag="digests"):
    """Of this engine alone: the digest of every tensor as the ranks hold it."""


class InternalState(Body, frozen=True, kw_only=True, tag="state"):
    """What only the ranks know; asked by ``/server_info``."""


class AbortRequest(Body, frozen=True, kw_only=True, tag="abort"):
    rid: str = ""
    abort_all: bool = False


class Generate(Body, frozen=True, kw_only=True, tag="generate"):
    """One sequence. ``stop`` are the token ids that end it."""

    rid: str
    input_ids: list[int]
    max_new_tokens: int
    stop: list[int]
    stream: bool


AnyBody = Union[  # noqa: UP007
    InitWeightsUpdateGroup, DestroyWeightsUpdateGroup, BeginWeightUpdate, EndWeightUpdate,
    UpdateWeightsFromDistributed, UpdateWeightsFromDisk, PauseGeneration, ContinueGeneration,
    UpdateWeightVersion, FlushCache, WeightsChecker, GetWeightsByName, WeightDigests, InternalState,
    AbortRequest, Generate,
]  # fmt: skip


class Call(msgspec.Struct, frozen=True, tag="call"):
    """One request, numbered; `Answer` carries the number back. ``fault``: what is to go wrong with it."""

    number: int
    body: AnyBody
    fault: Fault | None = None


class Round(msgspec.Struct, frozen=True):
    """What all ranks do next, in lockstep: these calls, then one generation step if there is work."""

    calls: tuple[Call, ...]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """All ranks have loaded the model and joined their default group."""

    pids: tuple[int, ...]


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """``data`` is what the endpoint shows beside success and message."""

    number: int
    success: bool = True
    message: str = "Success"
    data: Any = None


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens ``[start, end)`` were made with the weights of ``version``."""

    version: str
    start: int
    end: int


class Output(msgspec.Struct, frozen=True, kw_only=True, tag="output"):
    """A sequence so far (``finish_reason`` None) or at its end."""

    rid: str
    output_ids: list[int]
    finish_reason: dict[str, Any] | None
    spans: list[VersionSpan]
    cached_tokens: int
    num_retractions: int


call_decoder = msgspec.msgpack.Decoder(Call)
round_decoder = msgspec.msgpack.Decoder(Round)
from_ranks: msgspec.msgpack.Decoder[Ready | Answer | Output] = msgspec.msgpack.Decoder(
    Union[Ready, Answer, Output]  # noqa: UP007
)
