"""``/metrics``, ``/status`` and ``/healthz``, served from control's own loop: if they answer, it lives."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from ..proto.errors import AddressInUse, InvalidConfig
from .metrics import Metrics
from .status import Status


class HttpServer:
    """The HTTP side of one broadcaster. ``status`` is asked at each request."""

    def __init__(self, *, metrics: Metrics, status: Callable[[], Status]) -> None:
        self._metrics = metrics
        self._status = status
        application = web.Application()
        application.router.add_get("/metrics", self._serve_metrics)
        application.router.add_get("/status", self._serve_status)
        application.router.add_get("/healthz", self._serve_health)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)

    async def start(self, address: str) -> str:
        """Listen on ``host:port`` and return the address really bound.

        Raises:
            InvalidConfig: if it is no ``host:port``.
            AddressInUse: if it is taken.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise InvalidConfig(f"http is {address!r}; it must be HOST:PORT")
        await self._runner.setup()
        site = web.TCPSite(self._runner, host.strip("[]"), int(port))
        try:
            await site.start()
        except OSError as error:
            raise AddressInUse(
                f"cannot serve metrics and status on {address}: {error.strerror}. Another process may hold "
                "it; choose another `http` address, or port 0 for a free one"
            ) from error
        bound = self._runner.addresses[0][1]
        return f"{host}:{bound}"

    async def close(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()

    async def _serve_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.page(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _serve_status(self, _request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._status()), content_type="application/json")

    async def _serve_health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")
