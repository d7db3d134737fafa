"""The agent on real sockets, against real reference engines that really receive over gloo.

The broadcaster here is only its two ends: a ROUTER that gives orders one by one, and rank 0 of the group.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import Engine, reference_engine
from node_kit import (
    JOB,
    SECONDS,
    Broadcaster,
    Refit,
    agent_for,
    connected,
    free_port,
    generates,
    is_paused,
    weights_of,
)
from weightcast.proto.errors import InvalidConfig
from weightcast.proto.keys import read_key
from weightcast.proto.messages import (
    Aborted,
    BucketLoaded,
    Goodbye,
    LayoutRefused,
    Left,
    Register,
    StageFailed,
)
from weightcast.rollout_node.cli import name_engines
from weightcast.rollout_node.reference.model import TinyLlama, write_model

ADMIN_KEY = "admin-secret"


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


@contextmanager
def own_engine(models: Sequence[Path], logs: Path, *faults: dict[str, Any]) -> Iterator[Engine]:
    """An engine that a test may break."""
    arguments = [word for fault in faults for word in ("--fault", json.dumps(fault))]
    with reference_engine(models[0], logs, arguments=arguments) as engine:
        yield engine


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
    before, port = await generates(shared_engine), free_port()
    broadcaster = Broadcaster(port)
    async with agent_for(shared_engine.url, broadcaster.endpoint, admin_key=ADMIN_KEY):
        await broadcaster.expect(Register)
        refit = Refit(broadcaster, shared_engine, weights_of(models[1]))
        await refit.propose()
        await refit.join()
        await refit.prepare()
        await broadcaster.close()
        assert await generates(shared_engine) == before  # waits for as long as it is paused
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
            assert max(b - a for a, b in itertools.pairwise(times)) < 1.0
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
