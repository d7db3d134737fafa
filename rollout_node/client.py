"""A typed client of the engine endpoints that a refit uses, and nothing else.

Every call takes a `Deadline` of ours and either returns what it promises or raises an exception that
carries the endpoint, the HTTP status and the server's own text. A call that ran into its deadline after
the request was sent is ambiguous: the engine may still carry it out.

Keys travel in the ``Authorization`` header only; no exception, log line or ``repr`` holds one.
"""

from __future__ import annotations

import json
import time
from typing import Any, TypedDict, TypeVar

import aiohttp
import msgspec

from ..proto.config import check_engine_url
from ..proto.errors import WeightcastError
from ..proto.layout import TensorSpec

_LONGEST_TEXT = 2000
#: An answer larger than this is no answer of an engine (a checksum list of 20,000 tensors takes 2 MB).
_LONGEST_BODY = 256 * 1024 * 1024

T = TypeVar("T")


class Deadline:
    """A moment on the monotonic clock by which something must have happened."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """A deadline ``seconds`` from now, or this one if that is sooner."""
        return Deadline(min(seconds, self.remaining()))


class _Where(TypedDict):
    url: str
    endpoint: str
    status: int


class EngineError(WeightcastError):
    """An engine call failed. ``endpoint`` is its path; ``status`` 0 means that no answer came."""

    code = "node_down"

    def __init__(self, *, url: str, endpoint: str, status: int, text: str) -> None:
        self.endpoint = endpoint
        self.status = status
        self.text = text
        where = f"{url}{endpoint}" + (f" answered {status}" if status else "")
        super().__init__(f"{where}: {text}")


class EngineUnreachable(EngineError):
    """Nothing listens there, the name does not resolve, or the connection broke."""


class EngineTimedOut(EngineError):
    """No answer within the deadline. What the engine did with the request is unknown."""

    code = "deadline"


class Unauthorized(EngineError):
    """The engine wants another key."""

    code = "unauthorized"


class EndpointMissing(EngineError):
    """The engine does not have this endpoint: an older or another kind of server."""

    code = "incompatible"


class RequestRefused(EngineError):
    """The engine understood the request and says no (400, or ``success: false``)."""


class EngineFault(EngineError):
    """The engine broke while answering (5xx), or its answer is not what the endpoint promises."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``/model_info``, as far as a refit needs it. ``weight_version`` is the label being served."""

    model_path: str = ""
    weight_version: str | None = None
    architectures: list[str] | None = None
    model_type: str | None = None


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``/server_info``, as far as a refit needs it.

    The rest is dropped at once: some servers list their own keys there.
    """

    version: str = ""
    engine: str = "sglang"
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    dtype: str = "auto"
    device: str | None = None
    quantization: str | None = None
    revision: str | None = None
    #: Differ from one start of the server to the next.
    startup_time: Any = None
    random_seed: Any = None
    pid: int | None = None


class RankChecksums(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor-parallel rank's answer to ``/weights_checker``: a checksum per (fused) parameter."""

    checksums: dict[str, str]
    per_gpu_checksum: str = ""
    #: One entry per runner (target, draft) on newer servers, a single one on older.
    parallelism_info: list[dict[str, Any]] | dict[str, Any] = []

    @property
    def tp_rank(self) -> int | None:
        """The rank this answer is of, or None if the server does not say."""
        infos = self.parallelism_info if isinstance(self.parallelism_info, list) else [self.parallelism_info]
        ranks = {info.get("tp_rank") for info in infos}
        rank = ranks.pop() if len(ranks) == 1 else None
        return rank if isinstance(rank, int) else None


class WeightLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The reference engine's ``/weight_layout``: every tensor by its checkpoint name, un-sharded."""

    tensors: tuple[TensorSpec, ...]
    optional: tuple[str, ...] = ()


class _Outcome(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""


class _Checksums(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""
    ranks: tuple[RankChecksums, ...] = ()


class _Digests(msgspec.Struct, frozen=True):
    digests: dict[str, str]


class _Generated(msgspec.Struct, frozen=True):
    text: str
    meta_info: dict[str, Any] = msgspec.field(default_factory=dict)
    output_ids: list[int] | None = None


class EngineClient:
    """One engine over HTTP. Use it as an async context manager, inside one event loop.

    Args:
        url: ``http://HOST:PORT``, optionally with a path prefix.
        admin_key: key of the weight endpoints (``--admin-api-key``).
        user_key: key of the other endpoints (``--api-key``); also used for the weight endpoints of a
            server that has no admin key.
    """

    def __init__(self, url: str, *, admin_key: str | None = None, user_key: str | None = None) -> None:
        self.url = check_engine_url(url)
        self._keys = tuple(key for key in (admin_key, user_key) if key)
        self._admin = _bearer(admin_key or user_key)
        self._user = _bearer(user_key)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        # trust_env=False: a proxy set for the outside world must not swallow calls inside the cluster.
        # force_close: an engine that closes idle connections would otherwise fail the next call at random.
        self._session = aiohttp.ClientSession(
            trust_env=False,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- what the engine is ----------------------------------------------------------------------

    async def model_info(self, deadline: Deadline) -> ModelInfo:
        """Model and served label. Answers even while the engine's scheduler is blocked."""
        raw = await self._info("/model_info", "/get_model_info", deadline)
        return self._convert(raw, ModelInfo, "/model_info")

    async def server_info(self, deadline: Deadline) -> ServerInfo:
        """Server arguments. Goes through the scheduler, so an answer shows that it is not blocked."""
        raw = await self._info("/server_info", "/get_server_info", deadline)
        return self._convert(raw, ServerInfo, "/server_info")

    async def is_ready(self, deadline: Deadline) -> bool | None:
        """``/ready``: False while paused, starting, or after a failed health check.

        None for servers that do not have the endpoint.
        """
        status, _ = await self._send("GET", "/ready", deadline, headers=self._user)
        if status in (404, 405):
            return None
        if status not in (200, 503):
            raise self._fault("/ready", status, "neither ready nor not ready")
        return status == 200

    async def is_healthy(self, deadline: Deadline) -> bool:
        """``/health``: makes one token. False if the engine says no; waits while it is paused."""
        status, _ = await self._send("GET", "/health", deadline, headers=self._user)
        return status == 200

    # --- the weights update group ----------------------------------------------------------------

    async def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        deadline: Deadline,
    ) -> None:
        """Join the group. Blocks the engine until all ``world_size`` ranks have come."""
        await self._order(
            "/init_weights_update_group",
            {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            },
            deadline,
        )

    async def destroy_weights_update_group(self, group_name: str, deadline: Deadline) -> bool:
        """Leave the group. False if the engine was not a member."""
        try:
            await self._order("/destroy_weights_update_group", {"group_name": group_name}, deadline)
        except RequestRefused as refusal:
            if "does not exist" in refusal.text:
                return False
            raise
        return True

    # --- the update session ----------------------------------------------------------------------

    async def begin_weight_update(self, deadline: Deadline) -> bool:
        """Open the session. False for servers that need none (they lack the endpoint)."""
        try:
            await self._order("/begin_weight_update", {"selector": "target"}, deadline)
        except EndpointMissing:
            return False
        return True

    async def end_weight_update(self, deadline: Deadline) -> bool:
        """Close the session. False if none was open, or the server knows no sessions."""
        try:
            await self._order("/end_weight_update", {}, deadline)
        except EndpointMissing:
            return False
        except RequestRefused as refusal:
            if "no weight-update session" in refusal.text:
                return False
            raise
        return True

    async def update_weights_from_distributed(
        self, tensors: tuple[TensorSpec, ...], *, group_name: str, deadline: Deadline
    ) -> None:
        """Receive one flattened bucket from rank 0 and load it. Neither flushes nor labels."""
        await self._order(
            "/update_weights_from_distributed",
            {
                "names": [spec.name for spec in tensors],
                "dtypes": [spec.dtype for spec in tensors],
                "shapes": [spec.shape for spec in tensors],
                "group_name": group_name,
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "abort_all_requests": False,
                "selector": "target",
            },
            deadline,
        )

    # --- serving ---------------------------------------------------------------------------------

    async def pause_generation(self, mode: str, deadline: Deadline) -> None:
        """Pause; ``mode`` is one of SGLang's: abort, retract, in_place."""
        await self._post("/pause_generation", {"mode": mode}, deadline)

    async def continue_generation(self, deadline: Deadline) -> None:
        """Resume. No error if the engine was not paused."""
        await self._post("/continue_generation", {}, deadline)

    async def flush_cache(self, deadline: Deadline) -> None:
        """Empty the prefix cache. Refused while requests run."""
        await self._post("/flush_cache", None, deadline)

    async def update_weight_version(self, label: str, deadline: Deadline) -> None:
        """Show ``label`` as the weight version."""
        # The default would abort every waiting request.
        await self._order(
            "/update_weight_version", {"new_version": label, "abort_all_requests": False}, deadline
        )

    async def generate(
        self, prompt: str | list[int], *, max_new_tokens: int, deadline: Deadline
    ) -> tuple[str, dict[str, Any]]:
        """Greedy generation: the text and the ``meta_info`` that came with it."""
        body: dict[str, Any] = {"sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens}}
        body["text" if isinstance(prompt, str) else "input_ids"] = prompt
        answer = await self._call("POST", "/generate", body, deadline, headers=self._user)
        made = self._convert(answer, _Generated, "/generate")
        return made.text, made.meta_info

    # --- what the engine holds -------------------------------------------------------------------

    async def weight_checksums(self, deadline: Deadline) -> tuple[RankChecksums, ...]:
        """One entry per tensor-parallel rank, in rank order where the server says which is which."""
        answer = await self._post("/weights_checker", {"action": "checksum", "selector": "target"}, deadline)
        outcome = self._convert(answer, _Checksums, "/weights_checker")
        if not outcome.success:
            raise self._refusal("/weights_checker", 200, outcome.message)
        ranks = [entry.tp_rank for entry in outcome.ranks]
        if sorted(rank for rank in ranks if rank is not None) == list(range(len(ranks))):
            return tuple(sorted(outcome.ranks, key=lambda entry: entry.tp_rank or 0))
        return outcome.ranks

    async def weight_digests(self, deadline: Deadline) -> dict[str, str]:
        """The reference engine's digest of every tensor it holds, as 16 hex digits by checkpoint name."""
        answer = await self._post("/weight_digests", {}, deadline)
        return self._convert(answer, _Digests, "/weight_digests").digests

    async def weight_layout(self, deadline: Deadline) -> WeightLayout:
        """The reference engine's names, dtypes and whole shapes."""
        answer = await self._call("GET", "/weight_layout", None, deadline, headers=self._admin)
        return self._convert(answer, WeightLayout, "/weight_layout")

    # --- plumbing --------------------------------------------------------------------------------

    async def _info(self, endpoint: str, older: str, deadline: Deadline) -> dict[str, Any]:
        try:
            answer = await self._call("GET", endpoint, None, deadline, headers=self._user)
        except EndpointMissing:
            answer = await self._call("GET", older, None, deadline, headers=self._user)
        if not isinstance(answer, dict):
            raise self._fault(endpoint, 200, "the answer is no JSON object")
        return answer

    async def _order(self, endpoint: str, body: dict[str, Any], deadline: Deadline) -> None:
        outcome = self._convert(await self._post(endpoint, body, deadline), _Outcome, endpoint)
        if not outcome.success:
            raise self._refusal(endpoint, 200, outcome.message)

    async def _post(self, endpoint: str, body: dict[str, Any] | None, deadline: Deadline) -> Any:
        return await self._call("POST", endpoint, body, deadline, headers=self._admin)

    async def _call(
        self, method: str, endpoint: str, body: Any, deadline: Deadline, *, headers: dict[str, str]
    ) -> Any:
        status, data = await self._send(method, endpoint, deadline, body=body, headers=headers)
        if status == 200:
            try:
                return msgspec.json.decode(data)
            except msgspec.DecodeError:
                return self._shorten(data)
        text = _message_in(data) or self._shorten(data) or "(no text)"
        where = _Where(url=self.url, endpoint=endpoint, status=status)
        if status in (401, 403):
            which = "admin key" if headers is self._admin else "API key"
            raise Unauthorized(**where, text=f"{text}; set the {which} that this server was started with")
        if status in (404, 405):
            raise EndpointMissing(**where, text="the server has no such endpoint")
        if 400 <= status < 500:
            raise self._refusal(endpoint, status, text)
        raise self._fault(endpoint, status, text)

    async def _send(
        self,
        method: str,
        endpoint: str,
        deadline: Deadline,
        *,
        headers: dict[str, str],
        body: Any = None,
    ) -> tuple[int, bytes]:
        if self._session is None:
            raise RuntimeError("the client is used outside its `async with`")
        where = _Where(url=self.url, endpoint=endpoint, status=0)
        try:
            async with self._session.request(
                method,
                self.url + endpoint,
                json=body,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=max(deadline.remaining(), 1e-3)),
            ) as answer:
                data = bytearray()
                async for chunk in answer.content.iter_any():
                    data += chunk
                    if len(data) > _LONGEST_BODY:
                        raise self._fault(endpoint, answer.status, f"over {_LONGEST_BODY} bytes came")
                return answer.status, bytes(data)
        except TimeoutError as error:
            raise EngineTimedOut(**where, text=f"no answer within {deadline.seconds:.1f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            text = self._redact(str(error) or type(error).__name__)
            raise EngineUnreachable(**where, text=text) from error

    def _convert(self, answer: Any, wanted: type[T], endpoint: str) -> T:
        try:
            return msgspec.convert(answer, wanted, strict=False)
        except msgspec.ValidationError as error:
            what = wanted.__name__.strip("_")
            raise self._fault(endpoint, 200, f"the answer is no {what}: {error}") from error

    def _refusal(self, endpoint: str, status: int, text: str) -> RequestRefused:
        return RequestRefused(url=self.url, endpoint=endpoint, status=status, text=self._redact(text))

    def _fault(self, endpoint: str, status: int, text: str) -> EngineFault:
        return EngineFault(url=self.url, endpoint=endpoint, status=status, text=self._redact(text))

    def _shorten(self, data: bytes) -> str:
        return self._redact(data[:_LONGEST_TEXT].decode(errors="replace").strip())

    def _redact(self, text: str) -> str:
        for key in self._keys:
            text = text.replace(key, "***")
        return text[:_LONGEST_TEXT]


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _message_in(data: bytes) -> str:
    """The words in an engine's error body: its ``message``, ``error`` or ``error.message``."""
    try:
        body = json.loads(data)
    except ValueError:
        return ""
    while isinstance(body, dict):
        body = body.get("message") or body.get("error") or body.get("detail")
    return body if isinstance(body, str) else ""
