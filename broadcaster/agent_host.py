"""Hosts agents for engines that have none: one child process with an agent for each URL of ``engines``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from urllib.parse import urlsplit

from ..proto.config import BroadcasterConfig
from ..proto.errors import Cause
from ..proto.messages import Waiting
from .children import Child

_log = logging.getLogger("weightcast.broadcaster")

#: Seconds before an agent host that ended is started again; doubled up to the last.
_RETRY_SECONDS = (1.0, 30.0)
_END_SECONDS = 5.0


class AgentHost:
    """Keeps the child running until `close`. Without ``engines`` it does nothing.

    ``tell`` takes, for each engine, why its agent is not there while it is not.
    """

    def __init__(self, *, config: BroadcasterConfig, endpoint: str, tell: Callable[[Waiting], None]) -> None:
        self._config = config
        self._tell = tell
        self._arguments = ["-m", "weightcast.rollout_node", "--broadcaster", endpoint, "--job", config.job]
        for url in config.engines:
            self._arguments += ["--engine", url]
        if config.admin_key_file:
            self._arguments += ["--admin-key-file", config.admin_key_file]
        self._child: Child | None = None
        self._failures = 0
        self._retry: asyncio.TimerHandle | None = None
        if config.engines:
            self._start()

    async def close(self) -> None:
        """End the child."""
        if self._retry is not None:
            self._retry.cancel()
        if self._child is not None:
            await self._child.end(seconds=_END_SECONDS)

    def _start(self) -> None:
        self._child = Child(self._arguments, on_exit=self._exited)

    def _exited(self, reason: str) -> None:
        self._child = None
        first, last = _RETRY_SECONDS
        seconds = min(last, first * 2**self._failures)
        self._failures += 1
        _log.error("the agents of `engines` ended (%s); starting them again in %.0f s", reason, seconds)
        cause = Cause(
            code="node_down", message=f"its hosted agent ended: {reason}; see the broadcaster's log"
        )
        for url in self._config.engines:
            self._tell(Waiting(job=self._config.job, name=urlsplit(url).netloc, engine_url=url, cause=cause))
        self._retry = asyncio.get_running_loop().call_later(seconds, self._start)
