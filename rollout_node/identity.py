"""Who an engine is: what it says of itself, and what can be concluded from where it runs."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ..proto.messages import NodeInfo
from .client import Deadline, EngineClient, EngineTimedOut, ModelInfo, ServerInfo
from .layouts import CheckpointUnreadable, find_checkpoint, read_config, resolve_server_dtype

#: A paused SGLang answers a health check only when it gives up (20 s); one that starts says so at once.
_HEALTH_SECONDS = 3.0


class StillStarting(EngineTimedOut):
    """The engine answers, but says that it is not (or no longer) healthy."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as a node: `NodeInfo` and what checking it needs.

    ``plain_bytes``: its checksums are hashes of plain parameter bytes, which can be recomputed.
    """

    info: NodeInfo
    device: str
    server_dtype: str
    revision: str | None
    plain_bytes: bool


async def identify(
    client: EngineClient, *, name: str, nonce: str, deadline: Deadline, look_if_paused: bool = True
) -> Identity:
    """Ask an engine who it is.

    Args:
        nonce: names this life of the agent; the node's instance changes with it and with the engine's start.
        look_if_paused: find out whether generation is paused, which can take seconds if it is.

    Raises:
        EngineError: if it does not answer, or is still starting.
    """
    model = await client.model_info(deadline)
    server = await client.server_info(deadline)
    paused = look_if_paused and await _is_paused(client, deadline)
    device = server.device or "cuda"
    # Files and name resolution may be slow: not in the event loop, where heartbeats live.
    dtype = await asyncio.to_thread(_held_dtype, model, server)
    plain_bytes = (
        server.engine == "sglang"
        and device == "cpu"
        and server.quantization is None
        and await asyncio.to_thread(_runs_here, client.url)
        and not _has_amx()
    )
    return Identity(
        info=NodeInfo(
            name=name,
            instance=_instance(nonce, client.url, server),
            engine_url=client.url,
            engine=server.engine,
            engine_version=server.version,
            model=model.model_path,
            architecture=(model.architectures or ["unknown"])[0],
            dtype=dtype,
            tp_size=server.tp_size,
            pp_size=server.pp_size,
            dp_size=server.dp_size,
            label=model.weight_version or "default",
            paused=paused,
        ),
        device=device,
        server_dtype=server.dtype,
        revision=server.revision,
        plain_bytes=plain_bytes,
    )


async def _is_paused(client: EngineClient, deadline: Deadline) -> bool:
    """Whether generation is paused; False where the engine gives no way to know.

    Raises:
        StillStarting: if the engine is not ready for another reason.
    """
    if await client.is_ready(deadline) is not False:
        return False
    try:
        healthy = await client.is_healthy(deadline.within(_HEALTH_SECONDS))
    except EngineTimedOut:
        return True
    # A check that failed earlier makes a server not ready until one passes; this one may have.
    if healthy and await client.is_ready(deadline):
        return False
    if healthy:
        return True
    raise StillStarting(url=client.url, endpoint="/health", status=503, text="not healthy yet")


def _instance(nonce: str, url: str, server: ServerInfo) -> str:
    start = msgspec.json.encode([nonce, url, server.startup_time, server.random_seed, server.pid])
    return hashlib.sha256(start).hexdigest()[:16]


def _held_dtype(model: ModelInfo, server: ServerInfo) -> str:
    config: dict[str, object] = {}
    if server.dtype == "auto":
        try:
            config = read_config(find_checkpoint(model.model_path, revision=server.revision))
        except CheckpointUnreadable:
            return "auto"
    return resolve_server_dtype(server.dtype, config)


def _runs_here(url: str) -> bool:
    """Whether the URL's host is this one: only then do this processor's features say anything."""
    try:
        addresses = socket.getaddrinfo(urlsplit(url).hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in addresses:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                return False
    return True


def _has_amx() -> bool:
    """Whether SGLang would repack weights for Intel's matrix unit, which changes their bytes."""
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
