"""The broadcaster as real processes, with a trainer and agents on real sockets and real gloo ranks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import zmq
import zmq.asyncio
from fake_fleet import SECONDS, Broadcaster, FakeNode, FakeTrainer, Peer, hashes
from weightcast.broadcaster.cli import ask_status
from weightcast.proto import messages as m
from weightcast.proto.config import read_announcement
from weightcast.proto.errors import BroadcasterUnavailable
from weightcast.proto.slots import Slot, send_slot


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    """Two gloo ranks; every broadcaster's groups have names of their own, so they serve all tests."""
    found = [Peer(), Peer()]
    yield found
    for peer in found:
        peer.end()


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r") / "run"


def left_in(run_dir: Path) -> list[str]:
    return [path.name for path in run_dir.iterdir()]


def mode_of(run_dir: Path) -> int:
    return run_dir.stat().st_mode & 0o777


@contextlib.asynccontextmanager
async def whole_fleet(
    run_dir: Path, peers: list[Peer], **options: float
) -> AsyncIterator[tuple[Broadcaster, FakeTrainer, list[FakeNode]]]:
    broadcaster = await Broadcaster.start(run_dir, **options)
    nodes = [FakeNode(f"n{i}", broadcaster.announcement.control, peer) for i, peer in enumerate(peers)]
    trainer = FakeTrainer(broadcaster.announcement.trainer)
    try:
        for node in nodes:
            await node.register()
        await trainer.attach()
        yield broadcaster, trainer, nodes
    finally:
        trainer.die()
        status, errors = await broadcaster.end()
        for node in nodes:
            await node.close()
        assert "Traceback" not in errors, errors
        assert status == 0, errors


async def test_whole_refits_reach_every_node_and_are_reported(run_dir: Path, peers: list[Peer]) -> None:
    async with whole_fleet(run_dir, peers) as (broadcaster, trainer, nodes):
        for step in (1, 2):
            report = await trainer.refit_whole(step)
            assert report.ok, report
            assert [node.contents for node in nodes] == [hashes(trainer.data)] * 2
            assert [node.label for node in nodes] == [f"v{step}"] * 2
            assert (report.bytes, report.buckets, report.epoch) == (4000, 4, 1)
            assert report.seconds.total > report.seconds.wire > 0
        assert [type(order).__name__ for order in nodes[0].told] == [
            "Welcome", "Propose", "Join", "Prepare", "Stream", "Finish", "Release",
            "Propose", "Prepare", "Stream", "Finish", "Release",
        ]  # fmt: skip
        status = await asyncio.to_thread(ask_status, job="test", run_dir=run_dir, url=None)
        assert (status.job, status.epoch, status.refit, status.trainer) == ("test", 1, None, os.getpid())
        assert [(n.name, n.state, n.version, n.label) for n in status.nodes] == [
            ("n0", "ready", 2, "v2"),
            ("n1", "ready", 2, "v2"),
        ]
        assert status.last_report is not None and status.last_report.version == 2
        metrics = await broadcaster.fetch("/metrics")
        for line in (
            'weightcast_refits_total{outcome="ok"} 2.0',
            "weightcast_bytes_total 8000.0",
            'weightcast_node_version{node="n1"} 2.0',
            'weightcast_node_state{node="n0",state="ready"} 1.0',
            'weightcast_refit_seconds_count{phase="wire"} 2.0',
        ):
            assert line in metrics.splitlines(), line
        assert await broadcaster.fetch("/healthz") == "ok\n"


async def test_an_outsized_slot_comes_and_goes_in_the_middle_of_a_refit(
    run_dir: Path, peers: list[Peer]
) -> None:
    async with whole_fleet(run_dir, peers) as (_, trainer, nodes):
        await trainer.begin(1)
        await trainer.pack(range(2))
        big = Slot.create(7, 5000)
        assert trainer.link is not None
        send_slot(trainer.link, big)
        await trainer.pack([2], slot=big)
        while 7 not in trainer.free:
            await trainer.hear(m.Credit)
        trainer.free.discard(7)
        await trainer.tell(m.SlotRetired(**trainer.stamp(), slot=7))
        big.close()
        await trainer.pack([3])
        assert (await trainer.hear(m.RefitFinished)).report.ok
        assert [node.contents for node in nodes] == [hashes(trainer.data)] * 2


async def test_junk_on_every_socket_is_counted_and_the_service_goes_on(
    run_dir: Path, peers: list[Peer]
) -> None:
    async with whole_fleet(run_dir, peers) as (broadcaster, trainer, nodes):
        endpoints = {
            "node": broadcaster.announcement.control,
            "trainer": broadcaster.announcement.trainer,
            "source": broadcaster.announcement.trainer.replace("trainer.ipc", "source.ipc"),
        }
        junk = [
            [b""],
            [b"\x80\x04\x95pickle"],
            [b"\xc1" * 1000],
            [b"\x81\xa4type\xa3foo"],
            [b"two", b"frames"],
        ]
        for endpoint in endpoints.values():
            with zmq.Context.instance().socket(zmq.DEALER) as stranger:
                stranger.connect(endpoint)
                for frames in junk:
                    stranger.send_multipart(frames)
                stranger.close(linger=1000)
        host, port = broadcaster.announcement.control.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        assert (await trainer.refit_whole(1)).ok
        assert [node.contents for node in nodes] == [hashes(trainer.data)] * 2
        lines = (await broadcaster.fetch("/metrics")).splitlines()
        for name in endpoints:
            assert f'weightcast_junk_frames_total{{socket="{name}"}} {float(len(junk))}' in lines


async def test_a_trainer_that_dies_leaves_no_mix_and_the_next_heals_the_fleet(
    run_dir: Path, peers: list[Peer]
) -> None:
    async with whole_fleet(run_dir, peers) as (broadcaster, trainer, nodes):
        await trainer.begin(1)
        await trainer.pack(range(2))
        await trainer.hear(m.Credit)
        trainer.die()
        for node in nodes:
            abort = await node.wait_told(m.Abort)
            assert abort.cause.code == "trainer_lost"
        heir = FakeTrainer(broadcaster.announcement.trainer, incarnation="run-2")
        await heir.attach()
        report = await heir.refit_whole(1)
        assert report.ok and report.epoch == 2
        assert [node.contents for node in nodes] == [hashes(heir.data)] * 2
        assert not any(node.paused for node in nodes)
        heir.die()


async def test_a_source_killed_in_the_middle_is_named_and_the_next_refit_works(
    run_dir: Path, peers: list[Peer]
) -> None:
    async with whole_fleet(run_dir, peers) as (broadcaster, trainer, nodes):
        pid = await broadcaster.source_pid()
        await trainer.begin(1)
        await trainer.pack(range(2))
        await trainer.hear(m.Credit)
        os.kill(pid, signal.SIGKILL)
        report = (await trainer.hear(m.RefitFinished)).report
        assert report.cause is not None and report.cause.code == "source_lost"
        assert {n.outcome for n in report.nodes.values()} == {"quarantined"}
        assert all(node.paused for node in nodes)
        report = await trainer.refit_whole(2)
        assert report.ok and report.epoch == 2
        assert [node.contents for node in nodes] == [hashes(trainer.data)] * 2
        lines = (await broadcaster.fetch("/metrics")).splitlines()
        assert 'weightcast_failures_total{cause="source_lost"} 1.0' in lines


async def test_a_second_trainer_is_refused_and_a_step_does_not_go_back(
    run_dir: Path, peers: list[Peer]
) -> None:
    async with whole_fleet(run_dir, peers) as (broadcaster, trainer, _):
        second = FakeTrainer(broadcaster.announcement.trainer, incarnation="run-2")
        await second.tell(m.TrainerHello(**second.stamp(), pid=1, ranks=1, slots={}))
        assert (await second.hear(m.TrainerRejected)).cause.code == "busy"
        second.die()
        assert (await trainer.refit_whole(5)).ok
        await trainer.begin(5)
        assert (await trainer.hear(m.TrainerRejected)).cause.code == "stale_version"


async def test_what_is_no_slot_ends_the_trainer_and_nothing_else(run_dir: Path, peers: list[Peer]) -> None:
    async with whole_fleet(run_dir, peers) as (broadcaster, trainer, _):
        assert trainer.link is not None
        trainer.link.send(b"no slot at all")
        trainer.link.settimeout(SECONDS)
        assert await asyncio.to_thread(trainer.link.recv, 1) == b""  # it was cut off
        heir = FakeTrainer(broadcaster.announcement.trainer, incarnation="run-2")
        await heir.attach()
        assert (await heir.refit_whole(1)).ok
        heir.die()


async def test_sigterm_in_the_middle_tells_everybody_and_leaves_nothing(
    run_dir: Path, peers: list[Peer]
) -> None:
    broadcaster = await Broadcaster.start(run_dir)
    nodes = [FakeNode(f"n{i}", broadcaster.announcement.control, peer) for i, peer in enumerate(peers)]
    trainer = FakeTrainer(broadcaster.announcement.trainer)
    for node in nodes:
        await node.register()
    await trainer.attach()
    pid = await broadcaster.source_pid()
    await trainer.begin(1)
    await trainer.pack(range(2))
    await trainer.hear(m.Credit)
    broadcaster.process.send_signal(signal.SIGTERM)
    report = (await trainer.hear(m.RefitFinished)).report
    assert report.cause is not None and report.cause.code == "broadcaster_lost"
    for node in nodes:
        assert (await node.wait_told(m.Abort)).cause.code == "broadcaster_lost"
        await node.wait_told(m.Leave)
    status, errors = await broadcaster.end()
    assert status == 0 and "Traceback" not in errors, errors
    assert not psutil.pid_exists(pid)
    assert left_in(run_dir) == ["broadcaster.lock"]
    trainer.die()
    for node in nodes:
        await node.close()


async def test_a_killed_broadcaster_takes_its_source_along_and_can_be_started_again(run_dir: Path) -> None:
    broadcaster = await Broadcaster.start(run_dir)
    source = psutil.Process(await broadcaster.source_pid())
    broadcaster.process.kill()
    await broadcaster.end_killed()
    await asyncio.to_thread(source.wait, SECONDS)
    assert read_announcement(run_dir) is not None  # a leftover, which the next one replaces
    again = await Broadcaster.start(run_dir)
    assert read_announcement(run_dir) == again.announcement
    assert (await again.end())[0] == 0


async def test_a_run_directory_in_use_is_refused_naming_the_process(run_dir: Path) -> None:
    broadcaster = await Broadcaster.start(run_dir)
    second = await Broadcaster.spawn(run_dir)
    _, errors = await asyncio.wait_for(second.communicate(), SECONDS)
    assert second.returncode == 2
    assert f"process {broadcaster.process.pid} is the broadcaster of {run_dir}" in errors.decode()
    assert read_announcement(run_dir) == broadcaster.announcement
    assert (await broadcaster.end())[0] == 0


@pytest.mark.parametrize("which", ["control", "http"])
async def test_a_port_in_use_is_named(run_dir: Path, which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}" if which == "control" else f"127.0.0.1:{port}"
        process = await Broadcaster.spawn(run_dir, **{which: address})
        out, errors = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode == 2 and not out
    assert address in errors.decode() and "Traceback" not in errors.decode()
    assert left_in(run_dir) == ["broadcaster.lock"]


async def test_a_run_directory_too_long_for_sockets_is_named(tmp_path: Path) -> None:
    process = await Broadcaster.spawn(tmp_path / ("x" * 100))
    _, errors = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode == 2
    assert "107" in errors.decode() and "Traceback" not in errors.decode()


async def test_the_control_process_loads_no_torch() -> None:
    code = "import sys, weightcast.broadcaster.control; sys.exit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await asyncio.wait_for(process.wait(), SECONDS) == 0


async def test_status_without_a_broadcaster_says_so(run_dir: Path) -> None:
    with pytest.raises(BroadcasterUnavailable, match="no broadcaster of job 'test' is announced"):
        ask_status(job="test", run_dir=run_dir, url=None)
    with pytest.raises(BroadcasterUnavailable, match=r"no broadcaster answers at http://127.0.0.1:9"):
        ask_status(job="test", run_dir=None, url="http://127.0.0.1:9")


async def test_the_run_directory_is_its_owner_s_alone(run_dir: Path) -> None:
    broadcaster = await Broadcaster.start(run_dir)
    assert mode_of(run_dir) == 0o700
    assert json.loads((run_dir / "broadcaster.json").read_text())["pid"] == broadcaster.process.pid
    assert (await broadcaster.end())[0] == 0
