"""The fleet: every rollout node the broadcaster knows, and where each stands.

    joining → idle → refitting → ready | quarantined;  any → lost (agent silent) → what it was (comes back)

A node is the same node only while its ``instance`` is: an agent or engine that restarted on the same URL
holds weights that nobody has verified (an engine at version "default" that looked alive has served stale
tokens for hours elsewhere), so it starts over as idle, or quarantined if it is paused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..proto.errors import Cause
from ..proto.messages import NodeInfo, NodeState, Version
from .ranks import InvalidRanks, Member, refuse_unsupported_parallelism
from .verdict import Proof


@dataclass(slots=True, kw_only=True)
class Node:
    """One rollout node, as last heard of."""

    info: NodeInfo
    peer: bytes
    last_seen: float
    state: NodeState
    #: The verified version it holds; None if it holds none that was verified.
    version: Version | None = None
    #: What it showed when it was verified; None if it holds nothing verified.
    proof: Proof | None = None
    #: Why it is quarantined or lost.
    cause: Cause | None = None
    #: What the agent says it is doing.
    doing: str = "idle"
    #: Names of weights update groups that its engine may be a member of.
    holds: set[str] = field(default_factory=set)
    #: What it was when it went silent.
    before_lost: NodeState = NodeState.IDLE

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def alive(self) -> bool:
        return self.state not in (NodeState.LOST, NodeState.JOINING)

    def as_member(self) -> Member:
        """The node as a weights update group sees it."""
        info = self.info
        return Member(
            name=info.name,
            instance=info.instance,
            tp_size=info.tp_size,
            pp_size=info.pp_size,
            dp_size=info.dp_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What a registration led to: the node, or the reason it was refused.

    ``restarted``: the name is now another instance, so the one before is gone.
    """

    node: Node | None = None
    refusal: Cause | None = None
    restarted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A node whose agent is there and whose engine is not (yet): where it should be, and why it is not."""

    engine_url: str
    cause: Cause
    peer: bytes


class Fleet:
    """All nodes by name. Silence longer than ``silence_seconds`` makes a node lost."""

    def __init__(self, *, silence_seconds: float) -> None:
        self.nodes: dict[str, Node] = {}
        #: Nodes that never registered or whose engine went away, by name.
        self.expected: dict[str, Expected] = {}
        self._by_peer: dict[bytes, Node] = {}
        self._silence_seconds = silence_seconds

    def alive(self) -> list[Node]:
        """Registered nodes that are not silent, in order of their names."""
        return sorted((node for node in self.nodes.values() if node.alive), key=lambda node: node.name)

    def by_peer(self, peer: bytes) -> Node | None:
        """The node that last registered over this connection."""
        return self._by_peer.get(peer)

    def expect(self, *, peer: bytes, name: str, engine_url: str, cause: Cause) -> None:
        """An agent says why its engine is not there. A living node of that name is another's: ignored."""
        known = self.nodes.get(name)
        if known is None or not known.alive:
            self.expected[name] = Expected(engine_url=engine_url, cause=cause, peer=peer)

    def forget_expected(self, peer: bytes) -> None:
        """The agent behind this connection is gone, and with it whom it waited for."""
        self.expected = {name: node for name, node in self.expected.items() if node.peer != peer}

    def register(self, *, peer: bytes, info: NodeInfo, now: float) -> Registered:
        """Take a node in, again or for the first time, or say why not."""
        try:
            refuse_unsupported_parallelism(
                name=info.name, tp_size=info.tp_size, pp_size=info.pp_size, dp_size=info.dp_size
            )
        except InvalidRanks as error:
            return Registered(refusal=Cause(code="incompatible", message=str(error), node=info.name))
        known = self.nodes.get(info.name)
        if known is None:
            return Registered(node=self._put(info=info, peer=peer, now=now, holds=set()))
        if known.info.instance == info.instance:
            self._by_peer.pop(known.peer, None)
            self._by_peer[peer] = known
            known.peer, known.info = peer, info
            self._revive(known, now)
            return Registered(node=known)
        if known.alive and known.info.engine_url != info.engine_url:
            message = (
                f"a living node at {known.info.engine_url} is already named {info.name!r}; "
                f"give the one at {info.engine_url} another name"
            )
            return Registered(refusal=Cause(code="busy", message=message, node=info.name))
        self._by_peer.pop(known.peer, None)
        # Only the agent may have restarted: its engine can still be a member of the old groups.
        holds = known.holds if known.info.engine_url == info.engine_url else set()
        return Registered(node=self._put(info=info, peer=peer, now=now, holds=holds), restarted=True)

    def heard(self, *, peer: bytes, instance: str, doing: str | None, now: float) -> Node | None:
        """Note a sign of life. None if this connection belongs to no such instance."""
        node = self._by_peer.get(peer)
        if node is None or node.info.instance != instance or node.state is NodeState.JOINING:
            return None
        if doing is not None:
            node.doing = doing
        self._revive(node, now)
        return node

    def leave(self, node: Node) -> None:
        """The agent took the node out in an orderly way: it ends, or its engine is gone."""
        node.state, node.version, node.proof = NodeState.JOINING, None, None
        node.cause = Cause(
            code="node_down",
            message="its agent took it out: the agent ends, or its engine is gone",
            node=node.name,
        )
        self._by_peer.pop(node.peer, None)

    def lose(self, node: Node, reason: str, *, seconds: float | None = None) -> None:
        """The node is silent or cut off. It comes back as what it was, or quarantined if it was mid-refit."""
        mid_refit = node.state is NodeState.REFITTING
        node.before_lost = NodeState.QUARANTINED if mid_refit else node.state
        node.state = NodeState.LOST
        node.cause = Cause(code="node_down", message=reason, node=node.name, seconds=seconds)

    def lose_silent(self, now: float) -> list[Node]:
        """Mark every node lost that has been silent too long; returns them."""
        lost = [node for node in self.alive() if node.last_seen + self._silence_seconds <= now]
        for node in lost:
            reason = f"its agent has been silent for {now - node.last_seen:.1f} s"
            self.lose(node, reason, seconds=now - node.last_seen)
        return lost

    def next_loss(self) -> float | None:
        """When the next node would be lost if nothing more is heard."""
        seen = [node.last_seen for node in self.nodes.values() if node.alive]
        return min(seen) + self._silence_seconds if seen else None

    def newest_step(self, incarnation: str) -> int | None:
        """Highest step of ``incarnation`` that some node holds verified."""
        steps = [
            node.version.step
            for node in self.nodes.values()
            if node.version is not None and node.version.incarnation == incarnation
        ]
        return max(steps, default=None)

    def _put(self, *, info: NodeInfo, peer: bytes, now: float, holds: set[str]) -> Node:
        node = Node(info=info, peer=peer, last_seen=now, state=NodeState.IDLE, holds=holds)
        if info.paused:
            node.state = NodeState.QUARANTINED
            node.cause = Cause(
                code="node_down",
                message="its engine was found paused and may hold part of a version; the next refit heals it",
                node=info.name,
            )
        self.nodes[info.name] = node
        self.expected.pop(info.name, None)
        self._by_peer[peer] = node
        return node

    def _revive(self, node: Node, now: float) -> None:
        self.expected.pop(node.name, None)
        node.last_seen = now
        if node.state is NodeState.JOINING:
            # It said goodbye and came back: nobody watched its engine meanwhile.
            node.state, node.version, node.proof, node.cause = NodeState.IDLE, None, None, None
            if node.info.paused:
                node.state = NodeState.QUARANTINED
        elif node.state is NodeState.LOST:
            node.state = node.before_lost
            if node.state is not NodeState.QUARANTINED:
                node.cause = None
