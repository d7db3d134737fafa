"""The HTTP endpoints, with SGLang's bodies and status codes (``sglang/srt/entrypoints/http_server.py``).

Own endpoints, which SGLang does not have: ``POST /weight_digests``, ``GET /weight_layout``,
``GET`` and ``POST /faults``.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from . import wire
from .faults import KINDS, Fault
from .front import EngineFront
from .sharding import expected_tensors, optional_tensors

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
B = TypeVar("B")

#: Bodies name every tensor of a bucket; a 20,000 tensor bucket takes about 2 MB.
_MAX_BODY_BYTES = 64 * 1024 * 1024
#: These need the user key; the rest of what needs a key needs the admin key, where there is one.
_USER_PATHS = frozenset({"/generate", "/model_info", "/get_model_info", "/server_info", "/get_server_info"})
_OPEN_PATHS = ("/health", "/ready")
#: Text prompts are bytes; the first ids are pad, begin and end.
_BYTE_OFFSET = 3


class SamplingParams(msgspec.Struct, kw_only=True):
    """What the engine reads of SGLang's sampling parameters. It always takes the likeliest token."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """Body of ``/generate``: one prompt, as ids or as text (one id a byte)."""

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    stream: bool = False


class FaultsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/faults``: the whole table, replacing the one before."""

    faults: tuple[Fault, ...]


def build_app(
    front: EngineFront, *, tp_size: int, device: str, api_key: str | None, admin_api_key: str | None
) -> web.Application:
    """The aiohttp application of one engine."""
    app = web.Application(
        client_max_size=_MAX_BODY_BYTES, middlewares=[_authorization(api_key, admin_api_key)]
    )
    endpoints = _Endpoints(front, tp_size=tp_size, device=device)
    for path, handler in endpoints.routes().items():
        app.router.add_route("*", path, handler)
    return app


def _authorization(api_key: str | None, admin_api_key: str | None) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _USER_PATHS:
            needed = api_key
        elif request.path.startswith(_OPEN_PATHS):
            needed = None
        else:
            needed = admin_api_key or api_key
        if needed is not None:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), needed.encode()):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return check


async def _read(request: web.Request, body_type: type[B], *, required: bool = True) -> B:
    raw = await request.read()
    if not raw and not required:
        raw = b"{}"
    try:
        return msgspec.json.decode(raw, type=body_type)
    except msgspec.DecodeError as error:
        shown = {"object": "error", "message": str(error), "type": "Bad Request", "param": None, "code": 400}
        raise web.HTTPBadRequest(
            text=msgspec.json.encode(shown).decode(), content_type="application/json"
        ) from error


def _outcome(answer: wire.Answer, **more: Any) -> web.Response:
    return web.json_response(
        {"success": answer.success, "message": answer.message, **more},
        status=200 if answer.success else 400,
    )


def _refusal(message: str, status: int = 400) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


class _Endpoints:
    def __init__(self, front: EngineFront, *, tp_size: int, device: str) -> None:
        self._front, self._tp_size, self._device = front, tp_size, device

    def routes(self) -> dict[str, Handler]:
        return {
            "/health": self.health,
            "/health_generate": self.health,
            "/ready": self.ready,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/generate": self.generate,
            "/init_weights_update_group": self._plain(wire.InitWeightsUpdateGroup),
            "/destroy_weights_update_group": self._plain(wire.DestroyWeightsUpdateGroup),
            "/begin_weight_update": self.begin,
            "/update_weights_from_distributed": self.update,
            "/end_weight_update": self.end,
            "/update_weights_from_disk": self.update_from_disk,
            "/update_weight_version": self.relabel,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/flush_cache": self.flush,
            "/abort_request": self.abort,
            "/weights_checker": self.check_weights,
            "/get_weights_by_name": self.weights_by_name,
            "/weight_digests": self.digests,
            "/weight_layout": self.layout,
            "/faults": self.faults,
        }

    def _plain(
        self, body_type: type[wire.InitWeightsUpdateGroup | wire.DestroyWeightsUpdateGroup]
    ) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            return _outcome(await self._front.ask(await _read(request, body_type)))

        return handler

    # --- what it is ------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if await self._front.check_health() else 503)

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._front.healthy and not self._front.paused else 503)

    async def model_info(self, request: web.Request) -> web.Response:
        front = self._front
        return web.json_response(
            {
                "model_path": front.model_path,
                "served_model_name": front.model_path,
                "is_generation": True,
                "weight_version": front.weight_version,
                "load_format": "auto",
                "model_type": "llama",
                "architectures": [front.config.architecture],
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        state = await self._front.ask(wire.InternalState())
        return web.json_response(
            {
                "engine": "reference",
                "version": version("weightcast"),
                "pid": os.getpid(),
                "model_path": self._front.model_path,
                "tp_size": self._tp_size,
                "pp_size": 1,
                "dp_size": 1,
                "enable_dp_attention": False,
                "dtype": self._front.config.dtype,
                "quantization": None,
                "speculative_algorithm": None,
                "device": self._device,
                "weight_version": self._front.weight_version,
                "internal_states": [state.data],
            }
        )

    # --- generation ------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await _read(request, GenerateBody)
        ids = body.input_ids
        if ids is None and body.text is not None:
            ids = [byte + _BYTE_OFFSET for byte in body.text.encode()]
        if not ids:
            return _refusal("input_ids or text must be given and not empty")
        config, wanted = self._front.config, body.sampling_params.max_new_tokens
        unknown = [token for token in ids if not 0 <= token < config.vocab_size]
        if unknown:
            return _refusal(f"token {unknown[0]} is outside the vocabulary of {config.vocab_size}")
        if wanted < 1 or len(ids) + wanted > config.max_position_embeddings:
            return _refusal(
                f"{len(ids)} prompt and {wanted} new tokens do not fit max_position_embeddings "
                f"{config.max_position_embeddings}"
            )
        stop = list(body.sampling_params.stop_token_ids or [])
        if not body.sampling_params.ignore_eos:
            stop += config.eos_token_ids
        outputs = self._front.generate(
            input_ids=ids,
            max_new_tokens=wanted,
            stop=stop,
            stream=body.stream,
            client_gone=lambda: request.transport is None or request.transport.is_closing(),
        )
        async with aclosing(outputs):
            if body.stream:
                return await self._stream(request, outputs, len(ids))
            async for output in outputs:
                return web.json_response(self._shown(output, len(ids)))
        # Nobody reads this: the sequence was given up because its client is gone.
        return web.Response(status=499)

    async def _stream(
        self, request: web.Request, outputs: AsyncIterator[wire.Output], prompt_tokens: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for output in outputs:
            await response.write(
                b"data: " + msgspec.json.encode(self._shown(output, prompt_tokens)) + b"\n\n"
            )
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _shown(self, output: wire.Output, prompt_tokens: int) -> dict[str, Any]:
        text = bytes(
            token - _BYTE_OFFSET for token in output.output_ids if _BYTE_OFFSET <= token < 256 + _BYTE_OFFSET
        )
        meta: dict[str, Any] = {
            "id": output.rid,
            "finish_reason": output.finish_reason,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(output.output_ids),
            "cached_tokens": output.cached_tokens,
            "num_retractions": output.num_retractions,
            "weight_version": self._front.weight_version,
        }
        # As SGLang: a stream's chunks carry the label shown now; only the end tells which tokens are whose.
        if output.finish_reason is not None:
            meta["weight_versions"] = [msgspec.structs.asdict(span) for span in output.spans]
            meta["weight_version"] = output.spans[-1].version
        return {
            "text": text.decode(errors="replace"),
            "output_ids": output.output_ids,
            "meta_info": meta,
        }

    async def pause(self, request: web.Request) -> web.Response:
        await self._front.pause(await _read(request, wire.PauseGeneration))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        await self._front.resume(await _read(request, wire.ContinueGeneration))
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.AbortRequest)
        await self._front.abort(body)
        return web.Response()

    async def flush(self, request: web.Request) -> web.Response:
        answer = await self._front.ask(wire.FlushCache())
        return web.Response(
            text="Cache flushed.\n" if answer.success else answer.message,
            status=200 if answer.success else 400,
        )

    # --- weights ---------------------------------------------------------------------------------

    async def begin(self, request: web.Request) -> web.Response:
        return _outcome(await self._front.begin(await _read(request, wire.BeginWeightUpdate)))

    async def end(self, request: web.Request) -> web.Response:
        return _outcome(await self._front.end(await _read(request, wire.EndWeightUpdate)))

    async def update(self, request: web.Request) -> web.Response:
        answer = await self._front.update(await _read(request, wire.UpdateWeightsFromDistributed))
        if answer is None:
            return web.Response(text="Internal Server Error", status=500)
        return _outcome(answer)

    async def update_from_disk(self, request: web.Request) -> web.Response:
        answer = await self._front.update_from_disk(await _read(request, wire.UpdateWeightsFromDisk))
        return _outcome(answer, num_paused_requests=0)

    async def relabel(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.UpdateWeightVersion)
        await self._front.relabel(body)
        return web.json_response(
            {
                "success": True,
                "message": f"Weight version updated to {body.new_version}",
                "new_version": body.new_version,
            }
        )

    async def check_weights(self, request: web.Request) -> web.Response:
        answer = await self._front.ask(await _read(request, wire.WeightsChecker, required=False))
        if answer.data is None:
            return _outcome(answer)
        engine = hashlib.sha256("".join(rank["per_gpu_checksum"] for rank in answer.data).encode())
        return _outcome(answer, ranks=answer.data, per_engine_checksum=engine.hexdigest())

    async def weights_by_name(self, request: web.Request) -> web.Response:
        answer = await self._front.ask(await _read(request, wire.GetWeightsByName))
        if answer.data is None:
            return _refusal("Get parameter by name failed")
        return web.json_response(answer.data)

    async def digests(self, request: web.Request) -> web.Response:
        answer = await self._front.ask(wire.WeightDigests())
        return web.json_response({"digests": answer.data})

    async def layout(self, request: web.Request) -> web.Response:
        config = self._front.config
        tensors = [[spec.name, spec.dtype, list(spec.shape)] for spec in expected_tensors(config)]
        return web.json_response({"tensors": tensors, "optional": list(optional_tensors(config))})

    async def faults(self, request: web.Request) -> web.Response:
        table = self._front.faults
        if request.method == "POST":
            table.armed = list((await _read(request, FaultsBody)).faults)
        return web.json_response({"faults": msgspec.to_builtins(table.armed), "kinds": KINDS})
