"""What can go wrong, named for the condition. Every message names what failed, where, and what to do."""

from __future__ import annotations

import msgspec


class Cause(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a refit or a node failed, in a form that travels and that every rank raises alike.

    ``code`` is a stable word for metrics and scripts (see `CODES`); the rest says where and when.
    """

    code: str
    message: str
    node: str = ""
    rank: int | None = None
    epoch: int | None = None
    bucket: int | None = None
    seconds: float | None = None

    def describe(self) -> str:
        """One line: the message, then whatever of node, rank, epoch, bucket and seconds is known."""
        places = [
            f"{label} {value}"
            for label, value in (
                ("node", self.node or None),
                ("rank", self.rank),
                ("epoch", self.epoch),
                ("bucket", self.bucket),
                ("after", None if self.seconds is None else f"{self.seconds:.1f} s"),
            )
            if value is not None
        ]
        return f"[{self.code}] {self.message}" + (f" ({', '.join(places)})" if places else "")


#: Every cause code, with its meaning. Metrics use these as label values, so the set is bounded.
CODES: dict[str, str] = {
    "no_nodes": "no rollout node, or too few, registered in time",
    "node_down": "the engine does not answer, or its agent went silent",
    "unauthorized": "the engine refused the admin key",
    "incompatible": "the engine cannot be served by this delivery (pipeline or data parallelism, version)",
    "layout_mismatch": "names, shapes or dtypes differ from what the engine holds",
    "invalid_layout": "the trainer's tensors cannot be sent as given",
    "join_failed": "a member did not join the weights update group",
    "prepare_failed": "pausing or opening the update session failed",
    "bucket_failed": "an engine did not take a bucket",
    "broadcast_failed": "the source could not broadcast a bucket",
    "finish_failed": "ending the session, flushing or checking failed",
    "digest_mismatch": "an engine holds other bytes than the trainer sent",
    "unproven": "nothing could show that the engine holds the trainer's bytes",
    "release_failed": "labelling or resuming the engine failed",
    "deadline": "a step took longer than its deadline",
    "trainer_failed": "a trainer rank raised, or its ranks disagree",
    "trainer_lost": "the trainer went away in the middle of a refit",
    "broadcaster_lost": "the broadcaster went away",
    "source_lost": "the source process ended",
    "stale_version": "the step is not newer than the one already installed",
    "busy": "another trainer or another refit holds the broadcaster",
    "protocol": "a message that this version does not understand, or out of turn",
    "invalid_config": "a configuration field or an option is unknown or has a wrong value",
    "internal": "a fault of weightcast itself",
}


class WeightcastError(Exception):
    """Base of all errors that weightcast raises. ``cause`` says what failed, where and when."""

    code = "internal"

    def __init__(self, message: str, *, cause: Cause | None = None) -> None:
        super().__init__(message if cause is None else cause.describe())
        self.cause = cause or Cause(code=self.code, message=message)


class InvalidLayout(WeightcastError):
    """The trainer's tensors cannot be sent as given: none, a name twice, an unknown dtype."""

    code = "invalid_layout"


class InvalidConfig(WeightcastError):
    """A configuration field is unknown or has a wrong value; the message names it."""

    code = "invalid_config"


class ProtocolError(WeightcastError):
    """A frame that is no message of this protocol, is too large, or comes out of turn."""

    code = "protocol"


class BroadcasterUnavailable(WeightcastError):
    """No broadcaster answers at the address, or it went away."""

    code = "broadcaster_lost"


class AddressInUse(WeightcastError):
    """A port or a run directory already belongs to another process."""

    code = "busy"


class RefitRejected(WeightcastError):
    """The refit was refused before any engine was paused."""


class RefitFailed(WeightcastError):
    """The refit ended with a node that does not hold the new weights, or with no node at all.

    Attributes:
        report: the `RefitReport`, if the refit got as far as having one.
    """

    def __init__(self, message: str, *, cause: Cause | None = None, report: object = None) -> None:
        super().__init__(message, cause=cause)
        self.report = report
