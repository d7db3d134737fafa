"""What a broadcaster says of itself at ``/status``: one schema for the server and for its readers."""

from __future__ import annotations

import msgspec

from ..proto.errors import Cause
from ..proto.messages import NodeState, RefitReport
from .fleet import Fleet, Node
from .machine import Machine
from .refit import Refit


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout node. ``version`` is the step it verifiably holds, ``label`` what its engine showed."""

    name: str
    url: str
    engine: str
    tp: int
    state: str
    version: int | None
    label: str
    doing: str
    reason: str


class RefitStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The refit that runs. ``age`` is its seconds; buckets are counted, ``bucket`` being those sent."""

    version: int
    phase: str
    phase_age: float
    age: float
    bucket: int
    buckets: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The whole broadcaster."""

    job: str
    pid: int
    epoch: int
    source: str
    trainer: int | None
    refit: RefitStatus | None
    last_report: RefitReport | None
    nodes: tuple[NodeStatus, ...]


def describe(machine: Machine, *, pid: int, now: float) -> Status:
    """The machine's state at time ``now``."""
    epochs = machine.epochs
    return Status(
        job=machine.config.job,
        pid=pid,
        epoch=epochs.epoch,
        source=epochs.device
        if epochs.ready
        else f"starting ({epochs.last_end})"
        if epochs.last_end
        else "starting",
        trainer=machine.trainer.pid if machine.trainer is not None else None,
        refit=None if machine.refit is None else _describe_refit(machine.refit, now),
        last_report=machine.last_report,
        nodes=_describe_nodes(machine.fleet),
    )


def _describe_refit(refit: Refit, now: float) -> RefitStatus:
    return RefitStatus(
        version=refit.version.step,
        phase=str(refit.phase),
        phase_age=now - refit.phase_since,
        age=now - refit.started,
        bucket=refit.ledger.sent,
        buckets=refit.ledger.total,
    )


def _describe_nodes(fleet: Fleet) -> tuple[NodeStatus, ...]:
    known = {name: _describe_node(node) for name, node in fleet.nodes.items()}
    for name, absent in fleet.expected.items():
        was = known.get(name)
        known[name] = NodeStatus(
            name=name,
            url=absent.engine_url,
            engine="" if was is None else was.engine,
            tp=0 if was is None else was.tp,
            state=str(NodeState.JOINING),
            version=None,
            label="",
            doing="waiting for its engine",
            reason=absent.cause.message,
        )
    return tuple(known[name] for name in sorted(known))


def _describe_node(node: Node) -> NodeStatus:
    cause: Cause | None = node.cause
    return NodeStatus(
        name=node.name,
        url=node.info.engine_url,
        engine=f"{node.info.engine} {node.info.engine_version}".strip(),
        tp=node.info.tp_size,
        state=str(node.state),
        version=None if node.version is None else node.version.step,
        label=node.version.label if node.version is not None else node.info.label,
        doing=node.doing,
        reason="" if cause is None else cause.message,
    )
