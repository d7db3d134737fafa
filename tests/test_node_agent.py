"""The agent on real sockets, against real reference engines that really receive over gloo.

The broadcaster here is only its two ends: a ROUTER that gives orders one by one, and rank 0 of the group.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch.distributed as dist
import zmq
import zmq.asyncio
from engines import Engine, reference_engine
from rank_zero import RankZero, flatten
from safetensors.torch import load_file
from torch import Tensor

from weightcast.proto.digest import digest_bytes
from weightcast.proto.errors import Cause, InvalidConfig
from weightcast.proto.layout import Layout, TensorSpec, plan_buckets
from weightcast.proto.messages import (
    Abort,
    Aborted,
    BucketLoaded,
    Finish,
    FromNode,
    Goodbye,
    Heartbeat,
    Join,
    Joined,
    LayoutAccepted,
    LayoutRefused,
    Leave,
    Left,
    PauseMode,
    Prepare,
    Prepared,
    Propose,
    Register,
    Release,
    Released,
    StageFailed,
    Stream,
    ToNode,
    Verified,
    Version,
    Welcome,
    from_node,
)
from weightcast.proto.sockets import configure, decode, encode
from weightcast.rollout_node.agent import run_agents
from weightcast.rollout_node.cli import name_engines, read_key
from weightcast.rollout_node.reference.model import TinyLlama, write_model

T = TypeVar("T")
JOB = "job"
ADMIN_KEY = "admin-secret"
SECONDS = 30.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of one architecture: the engine starts from the first and is refitted to the second."""
    folders = []
    for seed in (1, 2):
        folders.append(tmp_path_factory.mktemp(f"seed{seed}") / "model")
        write_model(folders[-1], TinyLlama(dtype="float32"), seed=seed)
    return folders[0], folders[1]


@pytest.fixture(scope="module")
def shared_engine(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine that every test leaves serving, resumed and in no group."""
    logs = tmp_path_factory.mktemp("engine")
    with reference_engine(models[0], logs, tp_size=2, admin_key=ADMIN_KEY) as engine:
        yield engine


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def layout_of(weights: Mapping[str, Tensor], *, bucket_bytes: int = 200_000) -> Layout:
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in weights.items()
    ]
    return plan_buckets(specs, bucket_bytes=bucket_bytes)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Broadcaster:
    """Gives orders to one node and waits for what it says."""

    def __init__(self, port: int, *, life: str = "life-1") -> None:
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.life = life
        self.node = b""
        self.heard: list[FromNode] = []
        self.beats: list[tuple[float, Heartbeat]] = []
        self._news = asyncio.Condition()
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        configure(self.socket)
        self.socket.bind(self.endpoint)
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while True:
            peer, frame = await self.socket.recv_multipart()
            self.node = peer
            message = decode(frame, from_node)
            if isinstance(message, Register):
                await self.tell(Welcome(job=JOB, heartbeat_seconds=0.2, life=self.life))
            async with self._news:
                if isinstance(message, Heartbeat):
                    self.beats.append((time.monotonic(), message))
                else:
                    self.heard.append(message)
                self._news.notify_all()

    async def tell(self, message: ToNode) -> None:
        await self.socket.send_multipart([self.node, encode(message)])

    async def expect(self, *kinds: type[T], seconds: float = SECONDS) -> T:
        """The next message that is no heartbeat; it must be of one of these kinds."""
        async with self._news:
            async with asyncio.timeout(seconds):
                await self._news.wait_for(lambda: self.heard)
            message = self.heard.pop(0)
        assert isinstance(message, kinds), message
        return message

    async def until(self, kind: type[T]) -> T:
        """The next message of this kind; what comes before it was meant for the broadcaster before."""
        while not isinstance(message := await self.expect(object), kind):
            pass
        return message

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.socket.close(linger=0)
        self._context.term()


class Refit:
    """One refit led by hand: the control side over ZeroMQ, rank 0 over gloo."""

    def __init__(
        self, broadcaster: Broadcaster, engine: Engine, weights: Mapping[str, Tensor], number: int = 1
    ) -> None:
        self.broadcaster, self.engine, self.weights = broadcaster, engine, weights
        self.layout = layout_of(weights)
        self.stamp: dict[str, Any] = {"job": JOB, "incarnation": "i", "refit": number, "epoch": number}
        self.label = f"v{number}"
        self.pool = ThreadPoolExecutor(2)
        self.source = RankZero(engine, self.pool)

    async def propose(self) -> LayoutAccepted:
        await self.broadcaster.tell(self.proposal())
        return await self.broadcaster.expect(LayoutAccepted)

    def proposal(self) -> Propose:
        version = Version(incarnation="t", step=self.stamp["refit"], label=self.label)
        return Propose(**self.stamp, version=version, layout=self.layout, timeout_seconds=SECONDS)

    async def join(self) -> None:
        await self.broadcaster.tell(
            Join(
                **self.stamp,
                group_name=self.source.name,
                master_address="127.0.0.1",
                master_port=self.source.store.port,
                rank_offset=1,
                world_size=1 + self.engine.tp_size,
                backend="gloo",
                timeout_seconds=SECONDS,
            )
        )
        await asyncio.to_thread(self.source.join)
        await self.broadcaster.expect(Joined)

    async def prepare(self) -> Prepared:
        await self.broadcaster.tell(
            Prepare(**self.stamp, pause_mode=PauseMode.RETRACT, timeout_seconds=SECONDS)
        )
        return await self.broadcaster.expect(Prepared)

    async def begin_stream(self, *, seconds: float = SECONDS) -> None:
        timeouts = (seconds,) * len(self.layout.buckets)
        await self.broadcaster.tell(Stream(**self.stamp, bucket_timeouts=timeouts))

    async def send(self, bucket: int) -> None:
        tensors = {placed.spec.name: self.weights[placed.spec.name] for placed in self.layout.place(bucket)}
        await asyncio.to_thread(dist.broadcast, flatten(tensors), src=0, group=self.source.group)

    async def stream(self) -> None:
        await self.begin_stream()
        for bucket in range(len(self.layout.buckets)):
            await self.send(bucket)
            assert (await self.broadcaster.expect(BucketLoaded)).bucket == bucket

    async def finish(self) -> Verified:
        digests = tuple(
            digest_bytes(self.weights[spec.name].contiguous().numpy()) for spec in self.layout.tensors
        )
        await self.broadcaster.tell(Finish(**self.stamp, digests=digests, timeout_seconds=SECONDS))
        return await self.broadcaster.expect(Verified)

    async def release(self) -> Released:
        await self.broadcaster.tell(Release(**self.stamp, timeout_seconds=SECONDS))
        return await self.broadcaster.expect(Released)

    async def abort(self, *, seconds: float = SECONDS) -> Aborted | StageFailed:
        cause = Cause(code="trainer_failed", message="rank 1 raised")
        await self.broadcaster.tell(Abort(**self.stamp, cause=cause, timeout_seconds=seconds))
        return await self.broadcaster.expect(Aborted, StageFailed, seconds=seconds + 5)

    async def leave(self) -> None:
        await self.broadcaster.tell(Leave(**self.stamp, group_name=self.source.name, timeout_seconds=SECONDS))
        await self.part()
        await self.broadcaster.expect(Left)

    async def part(self) -> None:
        """Rank 0 leaves; its connections close, as when its process ends."""
        group, self.source.group = self.source.group, None
        await asyncio.to_thread(dist.destroy_process_group, group)

    async def whole(self) -> Verified:
        await self.propose()
        await self.join()
        await self.prepare()
        await self.stream()
        verified = await self.finish()
        assert (await self.release()).label == self.label
        await self.leave()
        return verified


@asynccontextmanager
async def agent_for(url: str, endpoint: str, *, admin_key: str | None = ADMIN_KEY) -> AsyncIterator[None]:
    """The agent, in this event loop, under the name "n"."""
    stop = asyncio.Event()
    task = asyncio.create_task(
        run_agents(engines={"n": url}, broadcaster=endpoint, job=JOB, stop=stop, admin_key=admin_key)
    )
    try:
        yield
    finally:
        stop.set()
        async with asyncio.timeout(SECONDS):
            await task


@asynccontextmanager
async def connected(engine: Engine, **how: Any) -> AsyncIterator[Broadcaster]:
    """A broadcaster and an agent that has registered with it."""
    broadcaster = Broadcaster(free_port())
    try:
        async with agent_for(engine.url, broadcaster.endpoint, **how):
            await broadcaster.expect(Register)
            yield broadcaster
    finally:
        await broadcaster.close()


@contextmanager
def own_engine(models: Sequence[Path], logs: Path, *faults: dict[str, Any]) -> Iterator[Engine]:
    """An engine that a test may break."""
    arguments = [word for fault in faults for word in ("--fault", json.dumps(fault))]
    with reference_engine(models[0], logs, arguments=arguments) as engine:
        yield engine


async def generates(engine: Engine) -> list[int]:
    return await asyncio.to_thread(engine.output_ids, [5, 6, 7])


def is_paused(engine: Engine) -> bool:
    return engine.request("/ready", method="GET").status == 503


async def test_whole_refits_change_what_the_engine_says(
    shared_engine: Engine, models: tuple[Path, Path]
) -> None:
    old, new = weights_of(models[0]), weights_of(models[1])
    first = await generates(shared_engine)
    async with connected(shared_engine) as broadcaster:
        verified = await Refit(broadcaster, shared_engine, new, 1).whole()
        evidence = verified.evidence
        assert (evidence.kind, evidence.mismatches) == ("tensor-digests", ())
        assert evidence.compared == evidence.total == len(new)
        assert shared_engine.label == "v1" and await generates(shared_engine) != first
        back = await Refit(broadcaster, shared_engine, old, 2).whole()
        assert back.evidence.group == evidence.group and back.evidence.fingerprint != evidence.fingerprint
        assert shared_engine.label == "v2" and await generates(shared_engine) == first
    assert isinstance(broadcaster.heard[-1], Goodbye)


async def test_layout_refused_before_anything_is_paused(
    shared_engine: Engine, models: tuple[Path, Path]
) -> None:
    weights = weights_of(models[1])
    weights["model.visual.weight"] = weights["model.norm.weight"]
    del weights["model.layers.0.mlp.up_proj.weight"]
    weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()
    async with connected(shared_engine) as broadcaster:
        await broadcaster.tell(Refit(broadcaster, shared_engine, weights).proposal())
        refused = await broadcaster.expect(LayoutRefused)
        assert refused.total == 3
        assert {(problem.kind, problem.name) for problem in refused.problems} == {
            ("unknown", "model.visual.weight"),
            ("missing", "model.layers.0.mlp.up_proj.weight"),
            ("dtype", "model.norm.weight"),
        }
        assert not is_paused(shared_engine)


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_wrong_admin_key_fails_before_anybody_joins(
    shared_engine: Engine, models: tuple[Path, Path], key: str | None
) -> None:
    async with connected(shared_engine, admin_key=key) as broadcaster:
        await broadcaster.tell(Refit(broadcaster, shared_engine, weights_of(models[1])).proposal())
        failure = await broadcaster.expect(StageFailed)
        assert (failure.stage, failure.cause.code, failure.touched) == ("propose", "unauthorized", False)
        assert "set the admin key" in failure.cause.message
        assert key is None or key not in failure.cause.message


async def test_abort_before_the_first_byte_serves_the_old_version(
    shared_engine: Engine, models: tuple[Path, Path]
) -> None:
    before, label = await generates(shared_engine), shared_engine.label
    async with connected(shared_engine) as broadcaster:
        refit = Refit(broadcaster, shared_engine, weights_of(models[1]))
        await refit.propose()
        await refit.join()
        await refit.prepare()
        assert is_paused(shared_engine)
        aborted = await refit.abort()
        assert isinstance(aborted, Aborted) and aborted.serving and not aborted.touched
        assert await generates(shared_engine) == before and shared_engine.label == label
        await refit.leave()
        end = await asyncio.to_thread(shared_engine.post, "/end_weight_update")
        assert end.status == 400, "the session was left open"


async def test_broadcaster_gone_before_the_first_byte_resumes_then_registers_with_the_next(
    shared_engine: Engine, models: tuple[Path, Path]
) -> None:
    port = free_port()
    broadcaster = Broadcaster(port)
    async with agent_for(shared_engine.url, broadcaster.endpoint):
        await broadcaster.expect(Register)
        refit = Refit(broadcaster, shared_engine, weights_of(models[1]))
        await refit.propose()
        await refit.join()
        await refit.prepare()
        await broadcaster.close()
        async with asyncio.timeout(SECONDS):
            while await asyncio.to_thread(is_paused, shared_engine):
                await asyncio.sleep(0.05)
        successor = Broadcaster(port, life="life-2")
        try:
            registered = await successor.expect(Register)
            assert not registered.node.paused
            await Refit(successor, shared_engine, weights_of(models[0]), 1).whole()
        finally:
            await successor.close()


async def test_junk_from_the_broadcaster_is_rejected_and_the_node_goes_on(
    shared_engine: Engine, models: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(shared_engine) as broadcaster:
        for junk in ([b"\x80\x04K\x01."], [b""], [b"a", b"b"], [os.urandom(100_000)]):
            await broadcaster.socket.send_multipart([broadcaster.node, *junk])
        await Refit(broadcaster, shared_engine, weights_of(models[0])).propose()
    assert sum("rejected what came" in record.message for record in caplog.records) == 4


async def test_wrong_bytes_are_seen_and_a_later_whole_refit_heals(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    with own_engine(models, tmp_path, {"kind": "flip", "bucket": 1}) as engine:
        async with connected(engine) as broadcaster:
            refit = Refit(broadcaster, engine, weights_of(models[1]), 1)
            await refit.propose()
            await refit.join()
            await refit.prepare()
            await refit.stream()
            verified = await refit.finish()
            in_bucket = {placed.spec.name for placed in refit.layout.place(1)}
            assert len(verified.evidence.mismatches) == 1
            assert set(verified.evidence.mismatches) <= in_bucket
            aborted = await refit.abort()
            assert isinstance(aborted, Aborted) and aborted.touched and not aborted.serving
            assert is_paused(engine) and engine.label == "default"
            await refit.leave()
            healed = await Refit(broadcaster, engine, weights_of(models[1]), 2).whole()
            assert healed.evidence.mismatches == () and not is_paused(engine) and engine.label == "v2"


async def test_broadcaster_gone_after_the_first_byte_stays_paused(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    with own_engine(models, tmp_path) as engine:
        port = free_port()
        broadcaster = Broadcaster(port)
        async with agent_for(engine.url, broadcaster.endpoint):
            await broadcaster.expect(Register)
            refit = Refit(broadcaster, engine, weights_of(models[1]))
            await refit.propose()
            await refit.join()
            await refit.prepare()
            await refit.begin_stream()
            await refit.send(0)
            await broadcaster.expect(BucketLoaded)
            await broadcaster.close()
            # The source dies with its broadcaster; the engine's receive of bucket 1 then fails.
            await refit.part()
            successor = Broadcaster(port, life="life-2")
            try:
                assert (await successor.until(Register)).node.paused
                assert (await successor.until(Left)).group_name == refit.source.name
                assert is_paused(engine)
                await Refit(successor, engine, weights_of(models[1]), 1).whole()
                assert not is_paused(engine)
            finally:
                await successor.close()


async def test_frozen_engine_misses_its_deadline_by_name_while_heartbeats_go_on(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    with own_engine(models, tmp_path, {"kind": "freeze", "bucket": 1}) as engine:
        async with connected(engine) as broadcaster:
            refit = Refit(broadcaster, engine, weights_of(models[1]))
            await refit.propose()
            await refit.join()
            await refit.prepare()
            await refit.begin_stream(seconds=2.0)
            await refit.send(0)
            await broadcaster.expect(BucketLoaded)
            failure = await broadcaster.expect(StageFailed, seconds=4.0)
            assert (failure.stage, failure.cause.code, failure.touched) == ("stream", "deadline", True)
            assert failure.cause.bucket == 1
            answer = await refit.abort(seconds=1.0)
            assert isinstance(answer, StageFailed) and answer.cause.code == "deadline"
            times = [at for at, _ in broadcaster.beats]
            assert max(b - a for a, b in zip(times, times[1:], strict=False)) < 1.0
            assert any(beat.doing.startswith("bucket 1 of") for _, beat in broadcaster.beats)


async def test_engine_that_dies_is_reported_and_registered_again_when_it_is_back(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    port = free_port()
    first = ["--port", str(port)]
    broadcaster = Broadcaster(free_port())
    try:
        async with agent_for(f"http://127.0.0.1:{port}", broadcaster.endpoint):
            # Nothing listens there yet: the agent waits.
            with reference_engine(
                models[0], tmp_path, arguments=[*first, "--fault", '{"kind": "die_server"}']
            ) as engine:
                registered = await broadcaster.expect(Register)
                refit = Refit(broadcaster, engine, weights_of(models[1]))
                await refit.propose()
                await refit.join()
                await refit.prepare()
                await refit.begin_stream()
                failure = await broadcaster.expect(StageFailed)
                assert (failure.cause.code, failure.touched) == ("node_down", True)
                await broadcaster.expect(Goodbye)
            with reference_engine(models[0], tmp_path, arguments=first):
                again = await broadcaster.expect(Register)
                assert again.node.instance != registered.node.instance and not again.node.paused
    finally:
        await broadcaster.close()


class Command:
    """``python -m weightcast.rollout_node`` as users run it."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weightcast.rollout_node", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as output:
            self.lines += output

    def wait(self) -> tuple[int, str]:
        status = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        return status, "".join(self.lines)


def launched(endpoint: str, port: int, *engine: str) -> Command:
    url = f"http://127.0.0.1:{port}"
    return Command("--engine", url, "--broadcaster", endpoint, "--job", JOB, "--launch", *engine)


def engine_command(model: Path, port: int) -> list[str]:
    module = "weightcast.rollout_node.reference"
    return [sys.executable, "-m", module, "--model-path", str(model), "--port", str(port)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
async def test_launched_engine_ends_with_its_agent(models: tuple[Path, Path], number: signal.Signals) -> None:
    broadcaster, port = Broadcaster(free_port()), free_port()
    command = await asyncio.to_thread(launched, broadcaster.endpoint, port, *engine_command(models[0], port))
    try:
        registered = await broadcaster.expect(Register)
        assert registered.node.name == f"127.0.0.1:{port}"
        family = psutil.Process(command.process.pid).children(recursive=True)
        assert len(family) >= 2
        command.process.send_signal(number)
        status, _ = await asyncio.to_thread(command.wait)
        if number is signal.SIGTERM:
            assert status == 0
            assert (await broadcaster.expect(Goodbye)).instance == registered.node.instance
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=SECONDS)
        assert alive == []
    finally:
        command.process.kill()
        await broadcaster.close()


async def test_launched_engine_that_ends_takes_the_agent_with_it_and_says_why(tmp_path: Path) -> None:
    broadcaster, port = Broadcaster(free_port()), free_port()
    command = await asyncio.to_thread(
        launched, broadcaster.endpoint, port, *engine_command(tmp_path / "nothing", port)
    )
    try:
        status, words = await asyncio.to_thread(command.wait)
        last = words.splitlines()[-1]
        assert status == 2 and "ended with exit status 1" in last and str(tmp_path / "nothing") in last
    finally:
        command.process.kill()
        await broadcaster.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "localhost:30000", "--broadcaster", "tcp://h:1"], "must look like http://HOST:PORT"),
        (["--engine", "http://h", "--broadcaster", "tcp://h:1"], "has no port"),
        (["--engine", "http://h:1", "--broadcaster", "h:7410"], "must look like tcp://HOST:PORT"),
        (["--engine", "http://h:1", "--broadcaster", "tcp://0.0.0.0:7410"], "give the address"),
        (["--engine", "http://h:1", "--broadcaster", "tcp://h:1", "--admin-key-file", "/nope"], "/nope"),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], words: str) -> None:
    status, said = Command(*arguments).wait()
    assert status == 2 and words in said and len(said.splitlines()) == 1


def test_engines_are_named_by_host_and_port_and_never_twice() -> None:
    assert name_engines(["http://a:1/", "http://b:2"]) == {"a:1": "http://a:1", "b:2": "http://b:2"}
    assert name_engines(["http://a:1"], name="left") == {"left": "http://a:1"}
    for urls, name in ((["http://a:1", "http://a:1/"], ""), (["http://a:1", "http://b:2"], "x")):
        with pytest.raises(InvalidConfig):
            name_engines(urls, name=name)


def test_empty_key_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\nmore\n")
    assert read_key(tmp_path / "key") == "secret" and read_key(None) is None
    (tmp_path / "key").write_text("\n")
    with pytest.raises(InvalidConfig, match="is empty"):
        read_key(tmp_path / "key")
