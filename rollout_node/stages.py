"""The stages of a refit on one engine: each order of the broadcaster as a sequence of engine calls.

    Propose   ask who it is → may we? (admin key) → compare the layout
    Join      leave an older group → init
    Prepare   end a leftover session → pause → check it is paused → begin
    Stream    one update call per bucket
    Finish    end → flush once → read back what it holds
    Release   label → read the label back → continue → check it generates
    Abort     end the session → continue, if untouched
    Leave     destroy

Each function takes a `Deadline` and raises `StageFault` with a cause. Between two requests it asks whether
the stage was told to stop; a request that is under way is always waited for, since abandoning it would
leave open what the engine does with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

from ..proto.checksums import ChecksumPlan
from ..proto.errors import Cause, WeightcastError
from ..proto.layout import Layout, check_layout
from ..proto.messages import (
    Abort,
    Aborted,
    Evidence,
    Finish,
    FromNode,
    Join,
    Joined,
    LayoutAccepted,
    LayoutRefused,
    Leave,
    Left,
    NodeInfo,
    Prepare,
    Prepared,
    Propose,
    Release,
    Released,
    Stream,
    Verified,
)
from .checks import build_checksum_plan, judge_checksums, judge_digests, sharding_group
from .client import Deadline, EndpointMissing, EngineClient, EngineError
from .identity import Identity, identify
from .layouts import (
    CheckpointUnreadable,
    ExpectedLayout,
    compare_layout,
    exact_layout,
    read_checkpoint_layout,
)
from .steps import BucketTaken, Carry, Context, Event, Mark, Marked, Order

_MOST_PROBLEMS = 50
#: A name that no group has: asking to destroy it does nothing, but shows whether we would be allowed to.
_NO_GROUP = "weightcast-permission-check"
#: Code of a failure that has no better name of its own, by order.
_CODES: dict[type[Order], str] = {
    Propose: "node_down",
    Join: "join_failed",
    Prepare: "prepare_failed",
    Stream: "bucket_failed",
    Finish: "finish_failed",
    Release: "release_failed",
    Abort: "release_failed",
    Leave: "release_failed",
}


class StageFault(WeightcastError):
    """A stage failed; ``cause`` says how."""


class EngineStages:
    """Carries orders out on one engine, one at a time.

    Args:
        client: the engine.
        name: the node's name.
        nonce: names this life of the agent; part of the node's instance.
        report: takes `Marked` and `BucketTaken` events as they happen, in order.
    """

    def __init__(
        self, client: EngineClient, *, name: str, nonce: str, report: Callable[[Event], None]
    ) -> None:
        self._client = client
        self._name = name
        self._nonce = nonce
        self._report = report
        self._stopped = False
        self._identity: Identity | None = None
        self._sessions = True
        self._expected: tuple[str, ExpectedLayout | None] | None = None
        self._parameters: tuple[str, tuple[tuple[str, ...], ...]] | None = None

    @property
    def identity(self) -> Identity | None:
        """What the engine last said it is."""
        return self._identity

    async def identify(self, deadline: Deadline, *, look_if_paused: bool = True) -> NodeInfo:
        """Ask the engine who it is, and remember it.

        Raises:
            EngineError: if it does not answer.
        """
        self._identity = await identify(
            self._client,
            name=self._name,
            nonce=self._nonce,
            deadline=deadline,
            look_if_paused=look_if_paused,
        )
        return self._identity.info

    def stop(self) -> None:
        """Begin no further request of the stage in hand."""
        self._stopped = True

    async def carry(self, work: Carry) -> FromNode | None:
        """Carry one order out.

        Raises:
            StageFault: with the cause, if it failed, was stopped, or ran into its deadline.
        """
        self._stopped = False
        deadline = Deadline(work.until - time.monotonic())
        try:
            return await self._dispatch(work, deadline)
        except StageFault:
            raise
        except EngineError as error:
            cause = Cause(code=_code_of(error, type(work.order)), message=str(error))
            raise StageFault(str(error), cause=cause) from error
        except WeightcastError as error:
            raise StageFault(str(error), cause=error.cause) from error

    async def _dispatch(self, work: Carry, deadline: Deadline) -> FromNode | None:
        match work.order:
            case Propose() as order:
                return await self._propose(order, deadline)
            case Join() as order:
                return await self._join(order, work.context, deadline)
            case Prepare() as order:
                return await self._prepare(order, work.context, deadline)
            case Stream() as order:
                await self._stream(order, work.context)
                return None
            case Finish() as order:
                return await self._finish(order, work.context, deadline)
            case Release() as order:
                return await self._release(order, work.context, deadline)
            case Abort() as order:
                return await self._abort(order, work.context, deadline)
            case Leave() as order:
                return await self._leave(order, deadline)

    # --- Propose ---------------------------------------------------------------------------------

    async def _propose(self, order: Propose, deadline: Deadline) -> FromNode:
        known = self._identity.info.instance if self._identity else None
        info = await self.identify(deadline, look_if_paused=False)
        if info.instance != known:
            raise _fault("node_down", "the engine restarted since it registered; it registers again")
        if info.pp_size != 1 or info.dp_size != 1:
            raise _fault(
                "incompatible",
                f"pp_size {info.pp_size}, dp_size {info.dp_size}: a weights update group has one rank per "
                "tensor-parallel rank only; start the server without pipeline or data parallelism",
            )
        await self._client.destroy_weights_update_group(_NO_GROUP, deadline)
        check_layout(order.layout)
        self._go_on_unless_stopped()
        expected = await self._expected_layout(deadline)
        if expected is not None:
            problems = compare_layout(order.layout.tensors, expected)
            if problems:
                return LayoutRefused(
                    job=order.job, problems=tuple(problems[:_MOST_PROBLEMS]), total=len(problems)
                )
        plan = await self._checksum_plan(order.layout, expected, deadline)
        return LayoutAccepted(job=order.job, plan=plan, checked=expected is not None)

    async def _expected_layout(self, deadline: Deadline) -> ExpectedLayout | None:
        identity = cast(Identity, self._identity)
        key = f"{identity.info.instance} {identity.info.model}"
        if self._expected is not None and self._expected[0] == key:
            return self._expected[1]
        expected: ExpectedLayout | None
        if identity.info.engine == "reference":
            layout = await self._client.weight_layout(deadline)
            expected = exact_layout(layout.tensors, layout.optional)
        else:
            try:
                expected = await asyncio.to_thread(
                    read_checkpoint_layout,
                    identity.info.model,
                    server_dtype=identity.server_dtype,
                    revision=identity.revision,
                )
            except CheckpointUnreadable:
                expected = None
        self._expected = (key, expected)
        return expected

    async def _checksum_plan(
        self, layout: Layout, expected: ExpectedLayout | None, deadline: Deadline
    ) -> ChecksumPlan | None:
        identity = cast(Identity, self._identity)
        if expected is None or not identity.plain_bytes:
            return None
        parameters = await self._parameter_names(deadline)
        plan = build_checksum_plan(
            architecture=identity.info.architecture,
            parameters=parameters,
            layout=layout,
            dtype=expected.dtype,
            kv_heads=expected.kv_heads,
        )
        return plan if plan.entries else None

    async def _parameter_names(self, deadline: Deadline) -> tuple[tuple[str, ...], ...]:
        """The engine's own (fused) parameter names per rank; asked once, since it hashes the model for it."""
        instance = cast(Identity, self._identity).info.instance
        if self._parameters is None or self._parameters[0] != instance:
            try:
                ranks = await self._client.weight_checksums(deadline)
            except EndpointMissing:
                ranks = ()
            self._parameters = (instance, tuple(tuple(rank.checksums) for rank in ranks))
        return self._parameters[1]

    # --- Join, Leave -----------------------------------------------------------------------------

    async def _join(self, order: Join, context: Context, deadline: Deadline) -> Joined:
        if context.group_name is not None and context.group_name != order.group_name:
            await self._client.destroy_weights_update_group(context.group_name, deadline)
            self._mark(Mark.LEFT)
            self._go_on_unless_stopped()
        started = time.monotonic()
        self._mark(Mark.JOINING)
        await self._client.init_weights_update_group(
            master_address=order.master_address,
            master_port=order.master_port,
            rank_offset=order.rank_offset,
            world_size=order.world_size,
            group_name=order.group_name,
            backend=order.backend,
            deadline=deadline,
        )
        return Joined(job=order.job, seconds=time.monotonic() - started)

    async def _leave(self, order: Leave, deadline: Deadline) -> Left:
        await self._client.destroy_weights_update_group(order.group_name, deadline)
        self._mark(Mark.LEFT)
        return Left(job=order.job, group_name=order.group_name)

    # --- Prepare, Stream -------------------------------------------------------------------------

    async def _prepare(self, order: Prepare, context: Context, deadline: Deadline) -> Prepared:
        started = time.monotonic()
        self._mark(Mark.PAUSING)
        await self._client.pause_generation(order.pause_mode, deadline)
        if await self._client.is_ready(deadline):
            raise _fault("prepare_failed", "the engine still generates after it answered that it is paused")
        paused = time.monotonic()
        self._go_on_unless_stopped()
        # A refit that nobody closed leaves its session behind; ended unpaused, it would wait for requests.
        if await self._client.end_weight_update(deadline):
            self._mark(Mark.SESSION_CLOSED)
            self._go_on_unless_stopped()
        self._mark(Mark.SESSION_OPENING)
        self._sessions = await self._client.begin_weight_update(deadline)
        if not self._sessions:
            self._mark(Mark.SESSION_CLOSED)
        begun = time.monotonic()
        return Prepared(job=order.job, pause_seconds=paused - started, begin_seconds=begun - paused)

    async def _stream(self, order: Stream, context: Context) -> None:
        layout, group_name = cast(Layout, context.layout), cast(str, context.group_name)
        for number, seconds in enumerate(order.bucket_timeouts):
            self._go_on_unless_stopped(bucket=number)
            if number == 0:
                self._mark(Mark.TOUCHING)
            started = time.monotonic()
            tensors = tuple(placed.spec for placed in layout.place(number))
            try:
                await self._client.update_weights_from_distributed(
                    tensors, group_name=group_name, deadline=Deadline(seconds)
                )
            except EngineError as error:
                cause = Cause(
                    code=_code_of(error, Stream),
                    message=str(error),
                    bucket=number,
                    seconds=time.monotonic() - started,
                )
                raise StageFault(str(error), cause=cause) from error
            self._report(BucketTaken(number, time.monotonic() - started))

    # --- Finish, Release -------------------------------------------------------------------------

    async def _finish(self, order: Finish, context: Context, deadline: Deadline) -> Verified:
        started = time.monotonic()
        if not await self._client.end_weight_update(deadline) and self._sessions:
            raise _fault("finish_failed", "the engine's update session was closed by somebody else")
        self._mark(Mark.SESSION_CLOSED)
        ended = time.monotonic()
        self._go_on_unless_stopped()
        try:
            await self._client.flush_cache(deadline)
        except EngineError as error:
            if not error.status:
                raise
            raise _fault(
                "finish_failed",
                f"the prefix cache was not flushed, so old KV could meet new weights: {error.text} "
                '(pause_mode "retract" or "abort" leaves no request running; "in_place" does)',
            ) from error
        flushed = time.monotonic()
        self._go_on_unless_stopped()
        evidence = await self._evidence(order, context, deadline)
        return Verified(
            job=order.job,
            evidence=evidence,
            end_seconds=ended - started,
            flush_seconds=flushed - ended,
            verify_seconds=time.monotonic() - flushed,
        )

    async def _evidence(self, order: Finish, context: Context, deadline: Deadline) -> Evidence:
        identity, layout = cast(Identity, self._identity), cast(Layout, context.layout)
        info = identity.info
        if len(order.digests) != len(layout.tensors):
            raise _fault("protocol", f"{len(order.digests)} digests came for {len(layout.tensors)} tensors")
        entries = context.plan.entries if context.plan else ()
        if len(order.checksums) != len(entries):
            raise _fault("protocol", f"{len(order.checksums)} checksums came for {len(entries)} asked for")
        if info.engine == "reference":
            held = await self._client.weight_digests(deadline)
            group = sharding_group(
                architecture=info.architecture,
                dtype=info.dtype,
                device=identity.device,
                parameters=[list(held)],
            )
            return judge_digests(layout, order.digests, held, group=group)
        try:
            ranks = await self._client.weight_checksums(deadline)
        except EndpointMissing:
            return Evidence(kind="none", compared=0, total=0)
        group = sharding_group(
            architecture=info.architecture,
            dtype=info.dtype,
            device=identity.device,
            parameters=[list(rank.checksums) for rank in ranks],
        )
        return judge_checksums(context.plan, order.checksums, ranks, group=group)

    async def _release(self, order: Release, context: Context, deadline: Deadline) -> Released:
        if context.version is None:
            raise _fault("protocol", "a release came without a version")
        label = context.version.label
        started = time.monotonic()
        await self._client.update_weight_version(label, deadline)
        shown = (await self._client.model_info(deadline)).weight_version
        if shown != label:
            raise _fault("release_failed", f"labelled {label!r}, but the engine shows {shown!r}")
        self._go_on_unless_stopped()
        await self._resume(deadline)
        now = time.monotonic()
        return Released(
            job=order.job,
            label=label,
            resume_seconds=now - started,
            paused_seconds=now - (context.paused_at or started),
        )

    async def _resume(self, deadline: Deadline) -> None:
        await self._client.continue_generation(deadline)
        ready = await self._client.is_ready(deadline)
        if ready is False and await self._client.is_healthy(deadline):
            # A health check that failed during the pause makes a server not ready until the next one.
            ready = await self._client.is_ready(deadline)
        if ready is False:
            raise _fault("release_failed", "the engine does not generate after it was told to continue")
        self._mark(Mark.RESUMED)

    # --- Abort -----------------------------------------------------------------------------------

    async def _abort(self, order: Abort, context: Context, deadline: Deadline) -> Aborted:
        if context.session_open:
            await self._client.end_weight_update(deadline)
            self._mark(Mark.SESSION_CLOSED)
        if context.resume:
            await self._resume(deadline)
            return Aborted(job=order.job, touched=False, serving=True)
        if context.touched or context.paused_at is not None:
            detail = "stays paused until a whole refit"
            return Aborted(job=order.job, touched=context.touched, serving=False, detail=detail)
        # Never paused by us. An engine that is stuck in a rendezvous is found out here.
        await self._client.server_info(deadline)
        serving = await self._client.is_ready(deadline) is not False
        return Aborted(job=order.job, touched=False, serving=serving)

    # --- small things ----------------------------------------------------------------------------

    def _mark(self, mark: Mark) -> None:
        self._report(Marked(mark))

    def _go_on_unless_stopped(self, *, bucket: int | None = None) -> None:
        if self._stopped:
            cause = Cause(code="protocol", message="the refit was called off", bucket=bucket)
            raise StageFault(cause.message, cause=cause)


def _code_of(error: EngineError, order: type[Order]) -> str:
    """The engine's own words decide first; a plain refusal is named for the order that met it."""
    named = error.code in ("unauthorized", "deadline", "incompatible")
    return error.code if named or not error.status else _CODES[order]


def _fault(code: str, message: str) -> StageFault:
    return StageFault(message, cause=Cause(code=code, message=message))
