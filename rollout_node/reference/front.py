"""What SGLang's tokenizer manager does: gate requests on pause and update lock, keep the shown label.

    generate: wait while paused → hold the reader lock → rank 0 → answer
    update:   paused: straight to the ranks;  running: wait for the writer lock, i.e. for all sequences

All of it happens before a call reaches the ranks, so `/model_info` answers while they are blocked.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from . import wire
from .faults import Fault, FaultTable
from .ranks import Ranks
from .sharding import DecoderConfig

#: SGLang gives a health check this many seconds.
HEALTH_SECONDS = 20.0
#: SGLang looks this often whether aborted sequences are gone.
_ABORT_POLL_SECONDS = 1.0
#: How often a waiting sequence looks whether its client is still there.
_CLIENT_POLL_SECONDS = 1.0


class UpdateLock:
    """Shared by running sequences, exclusive for an update; a waiting writer keeps new readers out."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0

    @property
    def held(self) -> bool:
        """Whether anybody holds the lock."""
        return self._writing or self._readers > 0

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Hold the lock with others."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._writing and not self._writers_waiting)
            self._readers += 1
        try:
            yield
        finally:
            async with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Hold the lock alone."""
        async with self._changed:
            self._writers_waiting += 1
            try:
                await self._changed.wait_for(lambda: not self.held)
                self._writing = True
            finally:
                self._writers_waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            async with self._changed:
                self._writing = False
                self._changed.notify_all()


class EngineFront:
    """State of one engine that needs no rank to be known."""

    def __init__(self, *, config: DecoderConfig, model_path: str, ranks: Ranks, faults: FaultTable) -> None:
        self.config, self.model_path, self.faults = config, model_path, faults
        self._ranks = ranks
        self.weight_version = "default"
        self.healthy = True
        self._paused = False
        self._pause_changed = asyncio.Condition()
        self._lock = UpdateLock()
        #: Update calls since the session began; what faults count buckets by.
        self._bucket = 0

    @property
    def paused(self) -> bool:
        """Whether generation is paused."""
        return self._paused

    # --- weights ---------------------------------------------------------------------------------

    async def ask(self, body: wire.AnyBody) -> wire.Answer:
        """A call that waits for nothing but the ranks."""
        fault = None
        if isinstance(body, wire.InitWeightsUpdateGroup):
            fault = self.faults.take("init")
        elif isinstance(body, wire.FlushCache):
            fault = self.faults.take("flush")
        return await self._ranks.ask(body, fault)

    async def begin(self, body: wire.BeginWeightUpdate) -> wire.Answer:
        """Open the session."""
        answer = await self._exclusively(body)
        if answer.success:
            self._bucket = 0
        return answer

    async def end(self, body: wire.EndWeightUpdate) -> wire.Answer:
        """Close the session."""
        return await self._exclusively(body)

    async def update(self, body: wire.UpdateWeightsFromDistributed) -> wire.Answer | None:
        """Pass one update call on; None if a fault refuses it."""
        fault = self.faults.take("bucket", self._bucket)
        if fault is None and body.flush_cache:
            fault = self.faults.take("flush")
        self._bucket += 1
        if fault is not None and fault.kind == "refuse":
            return None
        if fault is not None and fault.kind == "die_server":
            os.kill(os.getpid(), signal.SIGKILL)
        if body.abort_all_requests:
            await self._ranks.tell(wire.AbortRequest(abort_all=True))
        return self._relabel_after(body, await self._exclusively(body, fault))

    async def update_from_disk(self, body: wire.UpdateWeightsFromDisk) -> wire.Answer:
        """Load a folder; the model's path moves with it."""
        if body.abort_all_requests:
            await self._ranks.tell(wire.AbortRequest(abort_all=True))
        if self._paused:
            answer = await self._ranks.ask(body)
        else:
            async with self._lock.writing():
                answer = await self._ranks.ask(body)
        if answer.success:
            self.model_path = body.model_path
        return self._relabel_after(body, answer)

    async def _exclusively(self, body: wire.AnyBody, fault: Fault | None = None) -> wire.Answer:
        # Whoever paused the engine keeps its sequences from moving; holding the condition keeps
        # another client from resuming in the middle.
        async with self._pause_changed:
            paused = self._paused
            if paused:
                return await self._ranks.ask(body, fault)
        async with self._lock.writing():
            return await self._ranks.ask(body, fault)

    def _relabel_after(
        self, body: wire.UpdateWeightsFromDistributed | wire.UpdateWeightsFromDisk, answer: wire.Answer
    ) -> wire.Answer:
        if not answer.success or body.weight_version is None:
            return answer
        self.weight_version = body.weight_version
        message = f"{answer.message} Weight version updated to {body.weight_version}."
        return wire.Answer(answer.number, True, message, answer.data)

    async def relabel(self, body: wire.UpdateWeightVersion) -> None:
        """Move the label, and nothing else; aborts everything unless told not to."""
        if body.abort_all_requests:
            await self._ranks.tell(wire.AbortRequest(abort_all=True))
        await self._ranks.ask(body)
        self.weight_version = body.new_version

    # --- pause -----------------------------------------------------------------------------------

    async def pause(self, body: wire.PauseGeneration) -> None:
        """Pause. ``abort`` returns when every sequence has been answered; the others at once."""
        async with self._pause_changed:
            self._paused = True
            if body.mode != "abort":
                await self._ranks.ask(body)
                return
            while True:
                await self._ranks.tell(wire.AbortRequest(abort_all=True))
                if not self._lock.held:
                    return
                await asyncio.sleep(_ABORT_POLL_SECONDS)

    async def resume(self, body: wire.ContinueGeneration) -> None:
        """Let everything that waits go on."""
        async with self._pause_changed:
            self._paused = False
            await self._ranks.ask(body)
            self._pause_changed.notify_all()

    async def abort(self, body: wire.AbortRequest) -> None:
        """End one sequence, or all of them."""
        await self._ranks.tell(body)

    # --- generation ------------------------------------------------------------------------------

    async def generate(
        self,
        *,
        input_ids: list[int],
        max_new_tokens: int,
        stop: list[int],
        stream: bool = False,
        client_gone: Callable[[], bool] = lambda: False,
    ) -> AsyncGenerator[wire.Output, None]:
        """Outputs of one sequence, the last with a finish reason.

        Closing the iterator early, or a client that is gone, aborts the sequence.
        """
        request = wire.Generate(
            rid=uuid.uuid4().hex,
            input_ids=input_ids,
            max_new_tokens=max_new_tokens,
            stop=stop,
            stream=stream,
        )
        async with self._pause_changed:
            await self._pause_changed.wait_for(lambda: not self._paused)
        async with self._lock.reading():
            queue = await self._ranks.open_sequence(request)
            finished = False
            try:
                while not finished and not client_gone():
                    try:
                        output = await asyncio.wait_for(queue.get(), _CLIENT_POLL_SECONDS)
                    except TimeoutError:
                        continue
                    finished = output.finish_reason is not None
                    yield output
            finally:
                self._ranks.close_sequence(request.rid)
                if not finished:
                    await self._ranks.tell(wire.AbortRequest(rid=request.rid))

    async def check_health(self) -> bool:
        """Ask for one token; well if anything at all comes from the ranks within `HEALTH_SECONDS`."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        probe = asyncio.create_task(self._generate_one_token())
        try:
            while not self._ranks.last_heard > since and loop.time() < since + HEALTH_SECONDS:
                await asyncio.wait({probe}, timeout=0.2)
                if probe.done():
                    break
            self.healthy = self._ranks.last_heard > since
            return self.healthy
        finally:
            probe.cancel()

    async def _generate_one_token(self) -> None:
        outputs = self.generate(input_ids=[0], max_new_tokens=1, stop=[])
        async for _ in outputs:
            pass
