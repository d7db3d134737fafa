"""Evidence: what an engine is shown to hold after a refit.

    reference engine     a digest per tensor, compared with the trainer's             tensor-digests
    SGLang on a CPU      a checksum per fused parameter, recomputed by the source     checksums
    SGLang on a GPU      checksums that only nodes can compare with one another       agreement

On a CPU, SGLang's checksum is the SHA-256 of a parameter's bytes as it holds it: q, k and v fused, cut to
one tensor-parallel rank, the vocabulary padded. `build_checksum_plan` says how each is put together from
the trainer's tensors, after ``QKVParallelLinear``, ``MergedColumnParallelLinear``, ``RowParallelLinear``
(``sglang/srt/layers/linear.py``) and ``VocabParallelEmbedding`` (``vocab_parallel_embedding.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from ..proto.checksums import ChecksumEntry, ChecksumPlan, Piece
from ..proto.digest import format_digest
from ..proto.layout import Layout, TensorSpec
from ..proto.messages import Evidence
from .client import RankChecksums
from .layouts import LM_HEAD

#: Architectures whose parameters are put together as below.
PLANNED_ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
_EMBEDDING = "model.embed_tokens.weight"
_VOCABULARY_PADDING = 64
_MOST_NAMED = 20


def build_checksum_plan(
    *,
    architecture: str,
    parameters: Sequence[Sequence[str]],
    layout: Layout,
    dtype: str,
    kv_heads: int | None,
) -> ChecksumPlan:
    """How each parameter of each rank is put together from the tensors of ``layout``.

    Parameters without a rule, or whose tensors are not sent in ``dtype`` (the engine's own, into which it
    would cast them), are left out: they count as not compared.

    Args:
        architecture: the model class, as "LlamaForCausalLM"; one that is not planned gives an empty plan.
        parameters: for each tensor-parallel rank, the names that the engine itself lists.
        layout: the refit.
        dtype: the dtype in which the engine holds its parameters.
        kv_heads: key/value heads of the whole model; None leaves attention out where ranks share heads.
    """
    if architecture not in PLANNED_ARCHITECTURES:
        return ChecksumPlan(entries=())
    sent = {spec.name: spec for spec in layout.tensors if spec.dtype == dtype}
    entries: list[ChecksumEntry] = []
    for rank, names in enumerate(parameters):
        for name in names:
            pieces = _pieces(name, sent, rank=rank, ranks=len(parameters), kv_heads=kv_heads)
            if pieces:
                entries.append(ChecksumEntry(rank, name, pieces))
        if LM_HEAD in sent and LM_HEAD not in names and _EMBEDDING in names:
            # Tied: the engine drops the head it is sent, which is right only if it equals the embedding.
            pieces = _vocabulary(sent[LM_HEAD], rank=rank, ranks=len(parameters))
            entries.append(ChecksumEntry(rank, _EMBEDDING, pieces))
    return ChecksumPlan(entries=tuple(entries))


def _pieces(
    parameter: str, sent: Mapping[str, TensorSpec], *, rank: int, ranks: int, kv_heads: int | None
) -> tuple[Piece, ...]:
    owner, _, kind = parameter.rpartition(".")
    stem, _, module = owner.rpartition(".")
    if module in ("embed_tokens", "lm_head"):
        return _vocabulary(sent[parameter], rank=rank, ranks=ranks) if parameter in sent else ()
    if module == "qkv_proj":
        parts = [sent.get(f"{stem}.{name}.{kind}") for name in ("q_proj", "k_proj", "v_proj")]
        q, k, v = (_rows(part, rank, ranks) for part in parts)
        if ranks > 1:
            if kv_heads is None:
                return ()
            # Fewer heads than ranks: neighbouring ranks hold copies of the same head.
            groups = min(ranks, kv_heads)
            if max(ranks, kv_heads) % groups:
                return ()
            k, v = (_rows(part, rank * groups // ranks, groups) for part in parts[1:])
        return (q, k, v) if q and k and v else ()
    if module == "gate_up_proj":
        gate, up = (
            _rows(sent.get(f"{stem}.{name}.{kind}"), rank, ranks) for name in ("gate_proj", "up_proj")
        )
        return (gate, up) if gate and up else ()
    whole = sent.get(parameter)
    if whole is None:
        return ()
    if module in ("o_proj", "down_proj") and kind == "weight":
        if len(whole.shape) != 2 or whole.shape[1] % ranks:
            return ()
        width = whole.shape[1] // ranks
        return (Piece(parameter, 1, rank * width, (rank + 1) * width),)
    if module.endswith("norm") or (module in ("o_proj", "down_proj") and kind == "bias"):
        return (Piece(parameter),)
    return ()


def _rows(spec: TensorSpec | None, part: int, parts: int) -> Piece | None:
    if spec is None or not spec.shape or spec.shape[0] % parts:
        return None
    height = spec.shape[0] // parts
    return Piece(spec.name, 0, part * height, (part + 1) * height)


def _vocabulary(spec: TensorSpec, *, rank: int, ranks: int) -> tuple[Piece, ...]:
    padded = _round_up(spec.shape[0], _VOCABULARY_PADDING)
    if padded % ranks:
        padded = _round_up(spec.shape[0], _VOCABULARY_PADDING * ranks)
    height = padded // ranks
    return (Piece(spec.name, 0, rank * height, (rank + 1) * height),)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def judge_digests(layout: Layout, sent: Sequence[int], held: Mapping[str, str], *, group: str) -> Evidence:
    """Compare the reference engine's digests with the trainer's, tensor by tensor.

    Args:
        layout: the refit.
        sent: the digest of each of ``layout.tensors``, in order.
        held: what the engine reports, 16 hex digits by name.
        group: the engine's model and sharding, for comparison between nodes.
    """
    mismatches: list[str] = []
    for spec, digest in zip(layout.tensors, sent, strict=True):
        # A tied model holds one table under two names.
        reported = held.get(spec.name, held.get(_EMBEDDING) if spec.name == LM_HEAD else None)
        if reported != format_digest(digest):
            mismatches.append(spec.name)
    return Evidence(
        kind="tensor-digests",
        compared=len(layout.tensors),
        total=len(layout.tensors),
        mismatches=tuple(mismatches[:_MOST_NAMED]),
        fingerprint=_fingerprint(sorted(held.items())),
        group=group,
    )


def judge_checksums(
    plan: ChecksumPlan | None, sent: Sequence[str], held: Sequence[RankChecksums], *, group: str
) -> Evidence:
    """Compare SGLang's checksums with those computed from the trainer's bytes, as far as ``plan`` goes.

    Args:
        plan: what the source was asked to compute; None or empty leaves only agreement between nodes.
        sent: the checksum of each of the plan's entries, in order.
        held: the engine's answer, one per rank.
        group: the engine's model and sharding, for comparison between nodes.
    """
    entries = plan.entries if plan else ()
    mismatches: dict[str, None] = {}
    compared: set[tuple[int, str]] = set()
    for entry, checksum in zip(entries, sent, strict=True):
        holds = held[entry.rank].checksums.get(entry.parameter) if entry.rank < len(held) else None
        compared.add((entry.rank, entry.parameter))
        if holds != checksum:
            mismatches[f"{entry.parameter} (rank {entry.rank})"] = None
    return Evidence(
        kind="checksums" if entries else "agreement",
        compared=len(compared),
        total=sum(len(rank.checksums) for rank in held),
        mismatches=tuple(mismatches)[:_MOST_NAMED],
        fingerprint=_fingerprint(
            (f"{number}/{name}", value)
            for number, rank in enumerate(held)
            for name, value in sorted(rank.checksums.items())
        ),
        group=group,
    )


def sharding_group(*, architecture: str, dtype: str, device: str, parameters: Sequence[Sequence[str]]) -> str:
    """Name of everything two nodes must share for their checksums to be comparable.

    The folder that a model was read from is not part of it: it may differ from host to host.
    """
    names = _fingerprint(
        (str(rank), "\n".join(sorted(rank_names))) for rank, rank_names in enumerate(parameters)
    )
    return f"{architecture}/{dtype}/{device}/tp{len(parameters)}/{names[:16]}"


def _fingerprint(pairs: Iterable[tuple[str, str]]) -> str:
    whole = hashlib.sha256()
    for name, value in pairs:
        whole.update(f"{name}\0{value}\n".encode())
    return whole.hexdigest()
