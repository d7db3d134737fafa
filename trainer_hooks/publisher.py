"""The publisher: what a training loop uses, on every rank in lockstep.

with Publisher(job="qwen-rl") as publisher:          # on every rank, after init_process_group
    for step in range(steps):
        train(...)
        report = publisher.refit(step, model)        # on every rank; the same report on every rank
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from ..proto.config import BroadcasterConfig, default_run_dir
from ..proto.errors import (
    InvalidConfig,
    RefitFailed,
    WeightcastError,
)
from ..proto.messages import RefitReport
from .agreement import Agreement, Ballot, Verdict
from .conversation import cause_of
from .gather import Gatherer
from .rank0 import Rank0
from .refit import RankRefit, RankSeat, first_cause, kind_of, raise_common
from .sources import NamedTensors


class Publisher:
    """Sends a training job's weights to its broadcaster. Build and use it on every rank, in lockstep.

    Without ``torch.distributed`` it is a job of one rank. Rank 0 holds the slots and the connection.

    Args:
        job: name of the job; the broadcaster serves one job.
        run_dir: the broadcaster's run directory; default: the one its configuration defaults to for the job.
        launch: start a broadcaster with this configuration as a child of rank 0, and end it at `close`.
            Without it a running one is looked for.
        bucket_bytes: size of a slot. Host memory used on rank 0: ``slots`` of these, plus a slot for
            a single larger tensor while it is on its way.
        slots: 2 pack one bucket while another is on the wire.
        together: sets of names that the engine must get in one call.
        control_timeout: seconds that ranks wait for one another before a missing one is named.

    Raises:
        BroadcasterUnavailable: on every rank, if no broadcaster can be reached or started.
        RefitRejected: on every rank, if the broadcaster serves another trainer.
        InvalidConfig: for arguments that contradict each other.
    """

    def __init__(
        self,
        *,
        job: str = "weightcast",
        run_dir: str | os.PathLike[str] | None = None,
        launch: BroadcasterConfig | None = None,
        bucket_bytes: int = 256 << 20,
        slots: int = 2,
        together: Collection[Collection[str]] = (),
        control_timeout: float = 300.0,
    ) -> None:
        if bucket_bytes < 1 or slots < 1 or control_timeout <= 0:
            raise InvalidConfig(
                f"bucket_bytes ({bucket_bytes}), slots ({slots}) and control_timeout ({control_timeout}) "
                "must be above 0"
            )
        job, run_path = _where(job, run_dir, launch)
        self.incarnation = ""
        self._refits = 0
        self._closed = False
        self._agreement = Agreement(patience=control_timeout)
        self.rank, self.world = self._agreement.rank, self._agreement.world
        self._root = Rank0(job, run_path, self.world, slots, bucket_bytes) if self.rank == 0 else None
        self._seat = RankSeat(
            agreement=self._agreement,
            gatherer=Gatherer(rank=self.rank, group=self._agreement.group),
            root=self._root,
            bucket_bytes=bucket_bytes,
            together=tuple(frozenset(names) for names in together),
            patience=control_timeout,
        )
        try:
            raise_common(self._settle_connection(launch))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def refit(self, step: int, named_tensors: NamedTensors, *, label: str | None = None) -> RefitReport:
        """Install these tensors on the whole fleet as version ``step``. Call it on every rank.

        Args:
            step: must grow within one life of the job (the same step may be sent again after a failure).
            named_tensors: see `sources`. Names, dtypes and whole shapes are equal on all ranks; DTensors
                are gathered, of plain tensors rank 0's are sent.
            label: what the engines show as their weight version; default ``"{step}-{incarnation}"``.

        Returns:
            the broadcaster's report, equal on every rank; its ``ok`` is True.

        Raises:
            RefitFailed: on every rank, with the same cause; ``report`` says what became of each node.
            RefitRejected: on every rank; nothing was touched.
            BroadcasterUnavailable: on every rank; the next refit connects again.
        """
        if self._closed:
            raise RefitFailed("this publisher is closed")
        self._refits += 1
        label = label or f"{step}-{self.incarnation}"
        refit = RankRefit(self._seat, number=self._refits, step=step, label=label, source=named_tensors)
        done = False
        try:
            report = refit.run()
            done = True
            return report
        finally:
            refit.close()
            if not done:
                self._seat.gatherer.abandon()
                self._seat.learned = None

    def close(self) -> None:
        """Say goodbye, free the slots, and end a launched broadcaster. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._root is not None:
            self._root.close()
        self._agreement.close()

    def _settle_connection(self, launch: BroadcasterConfig | None) -> Verdict:
        cause = kind = None
        if self._root is not None:
            try:
                self._root.connect(launch)
                self.incarnation = self._root.incarnation
            except (WeightcastError, OSError) as error:
                cause, kind = cause_of(error, rank=0), kind_of(error)
        verdict = self._agreement.settle(
            Ballot(cause=cause),
            lambda ballots: first_cause(ballots, kind) or Verdict(incarnation=self.incarnation),
            rank0_seconds=120.0,
        )
        self.incarnation = verdict.incarnation
        return verdict


def _where(
    job: str, run_dir: str | os.PathLike[str] | None, launch: BroadcasterConfig | None
) -> tuple[str, Path]:
    if launch is None:
        return job, Path(run_dir) if run_dir is not None else default_run_dir(job)
    if job not in ("weightcast", launch.job):
        raise InvalidConfig(f"job is {job!r} and launch.job is {launch.job!r}; leave one of them out")
    return launch.job, Path(run_dir) if run_dir is not None else launch.run_path
