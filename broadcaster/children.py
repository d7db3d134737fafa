"""Child processes that cannot outlive the broadcaster: the source, and the agent host for plain engines."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from ..proto.lifeline import end_with_parent


class Child:
    """One running child. ``on_exit(reason)`` is called once when it ends, unless it was told to end."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        on_exit: Callable[[str], None],
        pass_fds: Sequence[int] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start ``python arguments``. Its stdout joins our stderr: our stdout carries one ready line only.

        Raises:
            OSError: if the process cannot be started.
        """
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            pass_fds=pass_fds,
            process_group=0,  # Ctrl-C is for control alone: it ends its children in order
            env={**os.environ, **(environment or {})},
            preexec_fn=functools.partial(end_with_parent, os.getpid()),
        )
        self.pid = self._process.pid
        self._on_exit: Callable[[str], None] | None = on_exit
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def kill(self) -> str:
        """SIGKILL, without waiting. `on_exit` is not called.

        Returns how it had ended by itself before this call, or nothing if it had not: what is killed because
        its peers fail may well be what they failed of.
        """
        self._on_exit = None
        if self._process.poll() is not None:
            return self._how_it_ended()
        self._process.kill()
        return ""

    async def end(self, *, seconds: float) -> None:
        """SIGTERM, and SIGKILL after ``seconds``; returns when it is gone. `on_exit` is not called."""
        self._on_exit = None
        if not self._ended.is_set():
            self._process.terminate()
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            self._process.kill()
            await self._ended.wait()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._ended.set()
        if self._on_exit is not None:
            self._on_exit(self._how_it_ended())

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        how = f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        return f"process {self.pid}: {how}"
