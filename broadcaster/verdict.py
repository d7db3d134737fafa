"""The judgement over what the nodes were shown to hold. Pure: evidence in, one verdict per node out.

some parameter differs from the trainer's bytes            → mismatch
its bytes did not change although the trainer's did        → mismatch
every parameter was compared with the trainer's bytes      → match
equal to a matched node of its group                       → agreed
equal to a mismatched node of its group                    → mismatch
all nodes of its group equal, two or more                  → agreed
nodes of its group differ, and none of them matched        → mismatch (all: nobody knows which is right)
alone                                                      → unproven
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ..proto.errors import Cause
from ..proto.messages import Evidence

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``digest`` is match, agreed, mismatch or unproven. A node with a ``cause`` must not serve."""

    digest: str
    cause: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was sent to a node, and what it then showed: digest by tensor name, and its fingerprint."""

    digests: Mapping[str, int]
    fingerprint: str


def judge(
    evidences: Mapping[str, Evidence],
    *,
    digests: Mapping[str, int],
    before: Mapping[str, Proof],
    allow_unproven: bool,
) -> dict[str, Verdict]:
    """Judge every node of one refit together.

    Args:
        evidences: what each node was shown to hold, by node name.
        digests: what the trainer sent: digest by tensor name.
        before: what each node showed at its last verified version, where it has one. A whole fleet that
            took nothing in agrees with itself; only its own past tells.
        allow_unproven: let a node serve that nothing could prove right (nor wrong).
    """
    verdicts = {
        name: _judge_alone(name, evidence) or _judge_by_past(name, evidence, before.get(name), digests)
        for name, evidence in evidences.items()
    }
    by_group: dict[str, list[str]] = defaultdict(list)
    for name, evidence in evidences.items():
        if evidence.group and evidence.fingerprint:
            by_group[evidence.group].append(name)
    result: dict[str, Verdict] = {}
    for name, evidence in evidences.items():
        verdict = verdicts[name]
        if verdict is None:
            peers = [peer for peer in by_group.get(evidence.group, ()) if peer != name]
            verdict = _judge_among(name, evidences, {peer: verdicts[peer] for peer in peers}, allow_unproven)
        result[name] = verdict
    return result


def _judge_alone(name: str, evidence: Evidence) -> Verdict | None:
    if evidence.mismatches:
        shown = ", ".join(evidence.mismatches[:_SHOWN])
        more = "" if len(evidence.mismatches) <= _SHOWN else ", …"
        message = (
            f"{shown}{more}: the engine holds other bytes than the trainer sent "
            f"({evidence.kind}, {evidence.compared} of {evidence.total} parameters compared)"
        )
        return Verdict(digest="mismatch", cause=Cause(code="digest_mismatch", message=message, node=name))
    if evidence.total > 0 and evidence.compared >= evidence.total:
        return Verdict(digest="match")
    return None


def _judge_by_past(
    name: str, evidence: Evidence, proof: Proof | None, digests: Mapping[str, int]
) -> Verdict | None:
    if proof is None or not evidence.fingerprint or proof.fingerprint != evidence.fingerprint:
        return None
    changed = next(
        (tensor for tensor in digests if proof.digests.get(tensor) not in (None, digests[tensor])), None
    )
    if changed is None:
        return None
    message = (
        f"the engine holds the bytes of its last version: nothing in it changed, although {changed!r} did"
    )
    return Verdict(digest="mismatch", cause=Cause(code="digest_mismatch", message=message, node=name))


def _judge_among(
    name: str,
    evidences: Mapping[str, Evidence],
    peers: Mapping[str, Verdict | None],
    allow_unproven: bool,
) -> Verdict:
    own = evidences[name]
    equal = {peer for peer in peers if evidences[peer].fingerprint == own.fingerprint}
    matched = {peer for peer, verdict in peers.items() if verdict and verdict.digest == "match"}
    wrong = {peer for peer, verdict in peers.items() if verdict and verdict.digest == "mismatch"}
    if equal & matched:
        return Verdict(digest="agreed")
    if matched or equal & wrong:
        witness = sorted(matched or equal & wrong)[0]
        how = "not the bytes of" if matched else "the same wrong bytes as"
        message = f"the engine holds {how} {witness!r}, a node of the same layout"
        return Verdict(digest="mismatch", cause=Cause(code="digest_mismatch", message=message, node=name))
    undecided = set(peers) - wrong
    if undecided - equal:
        message = (
            f"nodes of the same layout hold different bytes ({name!r} and {sorted(undecided - equal)[0]!r}), "
            "and nothing tells which are right"
        )
        return Verdict(digest="mismatch", cause=Cause(code="digest_mismatch", message=message, node=name))
    if undecided:
        return Verdict(digest="agreed")
    if allow_unproven:
        return Verdict(digest="unproven")
    message = (
        f"{own.compared} of {own.total} parameters could be compared with the trainer's bytes, and no other "
        "node has the same layout. Add a second node like it, or set allow_unproven = true"
    )
    return Verdict(digest="unproven", cause=Cause(code="unproven", message=message, node=name))
