"""The engine as the agent's child: started, watched, and ended with the agent.

agent ends in any way, SIGKILL too → the kernel kills the child (see proto.lifeline)
child ends                         → exit status and the last lines it wrote become the cause
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence

from ..proto.errors import InvalidConfig, WeightcastError
from ..proto.lifeline import end_with_parent

#: Lines of the child's output that an exit's cause repeats.
_LAST_LINES = 5
_LONGEST_LINE = 64 * 1024


class EngineExited(WeightcastError):
    """The launched engine ended by itself."""

    code = "node_down"


class EngineChild:
    """A launched engine. Its output is passed on to our standard error."""

    def __init__(self, process: asyncio.subprocess.Process, command: Sequence[str]) -> None:
        self._process = process
        self._command = command
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._reader = asyncio.create_task(self._pass_output_on())

    @classmethod
    async def start(cls, command: Sequence[str]) -> EngineChild:
        """Start ``command`` in a process group of its own.

        Raises:
            InvalidConfig: if it cannot be started at all.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=functools.partial(end_with_parent, os.getpid()),
                limit=_LONGEST_LINE,
            )
        except OSError as error:
            raise InvalidConfig(f"cannot launch {command[0]!r}: {error.strerror}") from error
        return cls(process, command)

    @property
    def pid(self) -> int:
        """Process id, which is also its process group."""
        return self._process.pid

    async def wait(self) -> str:
        """Wait until the child has ended; says how, and what it wrote last."""
        status = await self._process.wait()
        await self._reader
        how = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        last = " | ".join(self._last)
        return f"the launched engine ({self._command[0]}, pid {self.pid}) ended with {how}" + (
            f"; its last lines: {last}" if last else ""
        )

    async def end(self, *, grace_seconds: float) -> None:
        """End the child and everything it started: SIGTERM, then SIGKILL after ``grace_seconds``."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_seconds)
        # An engine blocked in a rendezvous ignores SIGTERM, and workers may outlive their parent.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        # The pipe stays open while any grandchild holds it; all of them were just killed.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._reader, 5.0)

    async def _pass_output_on(self) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line longer than the limit; the stream dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text:
                self._last.append(text[:500])
            sys.stderr.write(text + "\n")
