"""The client against servers that misbehave: every failure is named, bounded, and holds no key."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from weightcast.proto.errors import InvalidConfig
from weightcast.proto.layout import TensorSpec
from weightcast.rollout_node.client import (
    Deadline,
    EndpointMissing,
    EngineClient,
    EngineError,
    EngineFault,
    EngineTimedOut,
    EngineUnreachable,
    RequestRefused,
    Unauthorized,
    check_engine_url,
)

KEY = "top-secret"


@asynccontextmanager
async def client_of(
    answer: web.Response | None, seen: list[Any] | None = None
) -> AsyncIterator[EngineClient]:
    """A client of a server that gives one answer to everything; None: it never answers."""

    async def handle(request: web.Request) -> web.Response:
        if seen is not None:
            body = await request.read()
            seen.append((request.method, request.path, dict(request.headers), json.loads(body or b"{}")))
        if answer is None:
            await asyncio.Event().wait()
        return web.Response(status=answer.status, body=answer.body, content_type=answer.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        async with EngineClient(f"http://127.0.0.1:{port}", admin_key=KEY, user_key="user-key") as client:
            yield client
    finally:
        await runner.cleanup()


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=status)


def told(status: int, error: object) -> web.Response:
    return web.json_response({"error": error}, status=status)


@pytest.mark.parametrize(
    ("answer", "error", "code", "words"),
    [
        (refusal(400, "partially updated"), RequestRefused, "node_down", "partially updated"),
        (refusal(200, "nothing loaded"), RequestRefused, "node_down", "nothing loaded"),
        (told(401, "Unauthorized"), Unauthorized, "unauthorized", "set the admin key"),
        (web.Response(status=404, text="Not Found"), EndpointMissing, "incompatible", "no such endpoint"),
        (web.Response(status=500, text="Internal Server Error"), EngineFault, "node_down", "Internal Server"),
        (web.Response(status=503), EngineFault, "node_down", "no text"),
        (web.Response(text="hello"), EngineFault, "node_down", "no Outcome"),
        (web.json_response({"success": "maybe"}), EngineFault, "node_down", "no Outcome"),
        (told(400, {"message": f"bad key {KEY}"}), RequestRefused, "node_down", "***"),
    ],
)  # fmt: skip
async def test_bad_answers_are_named(
    answer: web.Response, error: type[EngineError], code: str, words: str
) -> None:
    async with client_of(answer) as client:
        with pytest.raises(error, match="/update_weights_from_distributed") as caught:
            await client.update_weights_from_distributed(
                (TensorSpec("a", "float32", (1,)),), group_name="g", deadline=Deadline(5)
            )
    assert caught.value.cause.code == code and words in str(caught.value)
    assert caught.value.status in (answer.status, 200)
    assert KEY not in str(caught.value) and KEY not in repr(caught.value)


async def test_no_answer_ends_at_the_deadline() -> None:
    async with client_of(None) as client:
        started = time.monotonic()
        with pytest.raises(EngineTimedOut, match=r"/end_weight_update: no answer within 0\.3 s"):
            await client.end_weight_update(Deadline(0.3))
        assert time.monotonic() - started < 2.0
        with pytest.raises(EngineTimedOut):
            await client.end_weight_update(Deadline(-1))


async def test_nobody_there_is_unreachable() -> None:
    async with EngineClient("http://127.0.0.1:1") as client:
        with pytest.raises(EngineUnreachable) as caught:
            await client.model_info(Deadline(5))
    assert caught.value.cause.code == "node_down" and caught.value.status == 0


async def test_older_servers_without_sessions_and_with_old_names() -> None:
    async with client_of(web.Response(status=404)) as client:
        assert await client.begin_weight_update(Deadline(5)) is False
        assert await client.end_weight_update(Deadline(5)) is False
        assert await client.is_ready(Deadline(5)) is None
        with pytest.raises(EndpointMissing, match="/get_model_info"):
            await client.model_info(Deadline(5))


async def test_a_bucket_neither_flushes_nor_labels_nor_aborts() -> None:
    seen: list[Any] = []
    async with client_of(web.json_response({"success": True, "message": ""}), seen) as client:
        await client.update_weights_from_distributed(
            (TensorSpec("a", "bfloat16", ()),), group_name="g", deadline=Deadline(5)
        )
        await client.update_weight_version("v1", Deadline(5))
    (_, _, headers, bucket), (_, path, _, relabel) = seen
    assert bucket == {
        "names": ["a"],
        "dtypes": ["bfloat16"],
        "shapes": [[]],
        "group_name": "g",
        "load_format": "flattened_bucket",
        "flush_cache": False,
        "abort_all_requests": False,
        "selector": "target",
    }
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert (path, relabel) == ("/update_weight_version", {"new_version": "v1", "abort_all_requests": False})


async def test_each_endpoint_gets_the_key_it_asks_for_and_no_proxy_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    seen: list[Any] = []
    async with client_of(web.json_response({"text": "", "success": True}), seen) as client:
        await client.generate([1], max_new_tokens=1, deadline=Deadline(5))
        await client.model_info(Deadline(5))
        await client.flush_cache(Deadline(5))
    assert [headers["Authorization"] for _, _, headers, _ in seen] == [
        "Bearer user-key",
        "Bearer user-key",
        f"Bearer {KEY}",
    ]


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:30000", "ftp://h:1", "http://", "http://h", "http://h:99999", "http://u:p@h:1", "http://h:1/?a=b"],
)  # fmt: skip
def test_wrong_urls(url: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        check_engine_url(url)
    assert "u:p" not in str(caught.value)


def test_right_urls() -> None:
    assert check_engine_url("http://h:30000/") == "http://h:30000"
    assert check_engine_url("https://h/prefix/") == "https://h/prefix"
    assert check_engine_url("http://[::1]:30000") == "http://[::1]:30000"
