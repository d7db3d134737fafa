"""The publisher against a broadcaster that reads its slots: bytes, digests, credits, common failures."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_broadcaster import FakeBroadcaster
from torch import nn
from torch.distributed.fsdp import fully_shard
from trainer_ranks import run_ranks
from weightcast.proto.config import BroadcasterConfig, load_config
from weightcast.proto.errors import (
    BroadcasterUnavailable,
    Cause,
    InvalidConfig,
    RefitFailed,
    RefitRejected,
)
from weightcast.trainer_hooks import Publisher
from weightcast.trainer_hooks.launch import to_toml

Tensors = list[tuple[str, torch.Tensor]]


@pytest.fixture
def broadcaster(tmp_path: Path) -> Iterator[FakeBroadcaster]:
    with contextlib.closing(FakeBroadcaster(tmp_path)) as fake:
        yield fake
        assert fake.problems == []


@pytest.fixture
def publisher(broadcaster: FakeBroadcaster) -> Iterator[Publisher]:
    with Publisher(run_dir=broadcaster.run_dir, bucket_bytes=256) as publisher:
        yield publisher


def as_sent(tensors: Tensors) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors
    }


def strange_tensors() -> Tensors:
    torch.manual_seed(1)
    return [
        ("odd", torch.arange(3, dtype=torch.uint8)),
        ("fp32", torch.randn(5)),
        ("scalar", torch.tensor(2.5, dtype=torch.bfloat16)),
        ("empty", torch.empty(0, 4)),
        ("transposed", torch.randn(4, 6).t()),
        ("stepped", torch.arange(20)[::3]),
        ("expanded", torch.randn(1, 3).expand(4, 3)),
        ("conjugate", torch.randn(3, dtype=torch.complex64).conj()),
        ("parameter", nn.Parameter(torch.randn(2, 2))),
        ("fp8", torch.randn(7).to(torch.float8_e4m3fn)),
        ("flags", torch.tensor([True, False, True])),
        ("outsized", torch.randn(100, 10)),
        ("after", torch.randn(3)),
    ]


def test_every_kind_of_tensor_arrives_byte_for_byte(
    broadcaster: FakeBroadcaster, publisher: Publisher
) -> None:
    tensors = strange_tensors()
    report = publisher.refit(3, tensors)
    assert report.ok and report.version == 3
    assert report.label == f"3-{publisher.incarnation}"
    sent = dict(as_sent([(name, tensor.resolve_conj()) for name, tensor in tensors]))
    assert broadcaster.refit.tensors == sent
    specs = {spec.name: spec for spec in broadcaster.refit.begin.layout.tensors}
    assert [specs[name].shape for name, _ in tensors] == [tuple(tensor.shape) for _, tensor in tensors]
    assert broadcaster.hellos[0].slots == {0: 256, 1: 256}
    publisher.close()
    assert broadcaster.said_goodbye.wait(10)
    assert broadcaster.retired == [2], "the outsized slot lives for its bucket only"


def test_module_sends_each_tied_tensor_once_and_persistent_buffers(
    broadcaster: FakeBroadcaster, publisher: Publisher
) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.ones(2))
            self.register_buffer("cache", torch.ones(2), persistent=False)

    module = Tied()
    publisher.refit(0, module)
    assert set(broadcaster.refit.tensors) == {"embed.weight", "scale"}
    assert broadcaster.refit.tensors["embed.weight"] == as_sent([("w", module.embed.weight)])["w"]


@pytest.mark.parametrize("form", ["mapping", "generator", "callable"])
def test_forms_of_named_tensors_are_equal(
    broadcaster: FakeBroadcaster, publisher: Publisher, form: str
) -> None:
    tensors = strange_tensors()[:5]
    forms: dict[str, Any] = {
        "mapping": dict(tensors),
        "generator": (pair for pair in tensors),
        "callable": lambda: iter(tensors),
    }
    publisher.refit(0, forms[form], label="v-0")
    assert broadcaster.refit.tensors == as_sent(tensors)
    assert broadcaster.refit.begin.label == "v-0"


def test_slots_fill_ahead_but_never_before_their_credit(
    broadcaster: FakeBroadcaster, publisher: Publisher
) -> None:
    tensors = [(f"w{number}", torch.full((64,), float(number))) for number in range(9)]
    publisher.refit(0, tensors)
    assert [message.slot for message in broadcaster.refit.buckets[:2]] == [0, 1]
    assert len(broadcaster.refit.buckets) == 9
    assert broadcaster.refit.tensors == as_sent(tensors)


def test_groups_travel_in_one_bucket_though_streamed(broadcaster: FakeBroadcaster) -> None:
    tensors = [(name, torch.randn(40)) for name in ("q", "a", "k", "b", "v")]
    with Publisher(run_dir=broadcaster.run_dir, bucket_bytes=512, together=[{"q", "k", "v"}]) as publisher:
        publisher.refit(0, lambda: iter(tensors))
    layout = broadcaster.refit.begin.layout
    assert sorted(layout.buckets[0]) == [0, 2, 4]
    assert broadcaster.refit.tensors == as_sent(tensors)


def test_streamed_source_is_listed_once_then_checked(
    broadcaster: FakeBroadcaster, publisher: Publisher
) -> None:
    calls: list[Tensors] = []

    def export() -> Tensors:
        calls.append([("a", torch.zeros(4)), ("b", torch.zeros(2, 2))])
        return calls[-1]

    publisher.refit(0, export)
    assert len(calls) == 2
    publisher.refit(1, export)
    assert len(calls) == 3
    with pytest.raises(RefitFailed, match=r"'b' \(float32 \[2, 2\]\).*is now 'b' \(float32 \[4\]\)"):
        publisher.refit(2, lambda: [("a", torch.zeros(4)), ("b", torch.zeros(4))])
    with pytest.raises(RefitFailed, match="'b' did not come"):
        publisher.refit(3, export)
        publisher.refit(3, lambda: [("a", torch.zeros(4))])
    publisher.refit(4, export)
    with pytest.raises(RefitFailed, match="yields 'c'"):
        publisher.refit(5, lambda: [*export(), ("c", torch.zeros(1))])
    assert publisher.refit(6, export).ok, "a failure is followed by a good refit"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "names no tensors"),
        ([("w", torch.ones(1)), ("w", torch.ones(1))], "'w' is named twice"),
        ([("w", torch.ones(1, device="meta"))], "'w' is a torch.strided tensor on meta"),
        ([("w", torch.ones(2).to_sparse())], "'w' is a torch.sparse_coo"),
        ([torch.ones(2, 2)], "got a Tensor where"),
        ([("w", 3)], r"got \(str, int\) named 'w'"),
        (7, "got a int"),
    ],
)
def test_unsendable_tensors_fail_before_anything_is_sent(
    broadcaster: FakeBroadcaster, publisher: Publisher, tensors: Any, message: str
) -> None:
    with pytest.raises(RefitFailed, match=message) as caught:
        publisher.refit(0, tensors)
    assert caught.value.cause.code == "trainer_failed"
    assert caught.value.cause.rank == 0
    assert broadcaster.refits == []
    assert publisher.refit(0, [("w", torch.ones(1))]).ok


def test_failure_of_the_fleet_carries_its_cause_and_report(
    broadcaster: FakeBroadcaster, publisher: Publisher
) -> None:
    tensors = [(f"w{number}", torch.ones(64)) for number in range(6)]
    broadcaster.on_bucket = lambda bucket: "fail" if bucket == 2 else ""
    with pytest.raises(RefitFailed, match="the engine said no") as caught:
        publisher.refit(0, tensors)
    assert caught.value.cause.code == "bucket_failed"
    assert caught.value.report is not None
    broadcaster.on_bucket = lambda bucket: ""
    assert publisher.refit(0, tensors).ok
    assert len(broadcaster.hellos) == 1


def test_refusals_are_told_apart(broadcaster: FakeBroadcaster, publisher: Publisher) -> None:
    broadcaster.on_begin = lambda begin: Cause("stale_version", "step 0 is old")
    with pytest.raises(RefitRejected, match="step 0 is old"):
        publisher.refit(0, strange_tensors())
    broadcaster.on_begin = lambda begin: None
    assert publisher.refit(1, strange_tensors()).ok
    broadcaster.on_hello = lambda hello: Cause("busy", "another trainer is attached")
    with pytest.raises(RefitRejected, match="another trainer"):
        Publisher(run_dir=broadcaster.run_dir)


def test_silent_broadcaster_is_named_after_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightcast.trainer_hooks.conversation.GRACE_SECONDS", 0.3)
    with contextlib.closing(FakeBroadcaster(tmp_path, refit_seconds=0.2)) as fake:
        fake.on_bucket = lambda bucket: "hush"
        with Publisher(run_dir=tmp_path, bucket_bytes=64) as publisher:
            with pytest.raises(RefitFailed, match="no slot back in time") as caught:
                publisher.refit(0, [(f"w{number}", torch.ones(16)) for number in range(4)])
            assert caught.value.cause.code == "deadline"
            fake.on_bucket = lambda bucket: ""
            assert publisher.refit(1, [("w", torch.ones(16))]).ok


def test_broadcaster_that_dies_is_noticed_at_once_and_its_successor_found(tmp_path: Path) -> None:
    first = FakeBroadcaster(tmp_path, refit_seconds=600)
    first.on_bucket = lambda bucket: "die" if bucket == 1 else ""
    tensors = [(f"w{number}", torch.ones(64)) for number in range(6)]
    with Publisher(run_dir=tmp_path, bucket_bytes=256) as publisher:
        with pytest.raises(BroadcasterUnavailable, match="ended in the middle"):
            publisher.refit(0, tensors)
        first.close()
        with contextlib.closing(FakeBroadcaster(tmp_path)) as second:
            assert publisher.refit(0, tensors).ok
            assert second.hellos[0].slots == {0: 256, 1: 256}
            assert second.refit.tensors == as_sent(tensors)
            assert second.problems == []


def test_no_broadcaster_names_the_place_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BroadcasterUnavailable, match=f"{tmp_path}.*weightcast broadcaster --config"):
        Publisher(run_dir=tmp_path)
    with pytest.raises(InvalidConfig, match="slots"):
        Publisher(run_dir=tmp_path, slots=0)
    with pytest.raises(InvalidConfig, match=r"launch\.job"):
        Publisher(job="a", launch=BroadcasterConfig(job="b"))


def test_close_says_goodbye_and_leaks_no_descriptor(tmp_path: Path) -> None:
    with contextlib.closing(FakeBroadcaster(tmp_path)) as fake:
        counts = []
        for step in range(4):
            with Publisher(run_dir=tmp_path, bucket_bytes=64) as publisher:
                publisher.refit(step, strange_tensors())
            assert fake.unlinked.wait(10) and fake.said_goodbye.wait(10)
            counts.append(len(list(Path("/proc/self/fd").iterdir())))
        assert max(counts[1:]) <= counts[0] + 2  # ZeroMQ closes the fake's end in a thread of its own
        assert publisher.close() is None
        with pytest.raises(RefitFailed, match="closed"):
            publisher.refit(9, strange_tensors())
    assert fake.goodbyes == 4


def test_an_interrupt_passes_through_and_leaves_no_refit_behind(
    broadcaster: FakeBroadcaster, publisher: Publisher
) -> None:
    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(6):
            if broadcaster.refits and number == 4:
                raise KeyboardInterrupt
            yield f"w{number}", torch.ones(64)

    with pytest.raises(KeyboardInterrupt):
        publisher.refit(0, export)
    assert publisher.refit(1, [("w", torch.ones(4))]).ok
    assert len(broadcaster.hellos) == 2


def test_configuration_survives_the_file(tmp_path: Path) -> None:
    config = BroadcasterConfig(
        job="a-b", engines=("http://h:1", 'http://h:2/"q"'), allow_unproven=True, nodes=2
    )
    file = tmp_path / "c.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load_config(file) == config


# --- several ranks -------------------------------------------------------------------------------


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.Linear(9, 5))


def say(error: Exception) -> tuple[str, str, int | None]:
    cause = error.cause  # type: ignore[attr-defined]
    return type(error).__name__, f"{cause.code}: {cause.message}", cause.rank


def scenes(rank: int, world: int, run_dir: str) -> list[Any]:
    """One publisher through good and bad refits; what each gave on this rank."""
    found: list[Any] = []
    model = build_model()
    fully_shard(model)
    failing = False

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(model.state_dict().items()):
            whole = tensor.full_tensor()
            if failing and rank == 1 and number == 3:
                raise ValueError("the disk is full")
            yield name, whole

    with Publisher(run_dir=run_dir, bucket_bytes=200, control_timeout=20.0) as publisher:

        def attempt(step: int, tensors: Any) -> None:
            try:
                report = publisher.refit(step, tensors)
                found.append((report.version, report.label, report.ok))
            except (RefitFailed, RefitRejected, BroadcasterUnavailable) as error:
                found.append(say(error))

        attempt(0, model)
        attempt(1, export)
        failing = True
        attempt(2, export)
        failing = False
        attempt(3, export)
        attempt(4, [("a", torch.ones(2)), ("b" if rank == 0 else "c", torch.ones(2))])
        attempt(5 + rank, [("a", torch.ones(2))])
        attempt(6, iter([]) if rank == 1 else [("a", torch.ones(2))])
        attempt(90, model)  # the broadcaster refuses this step
        attempt(91, model)  # and ends this one in its second bucket
        attempt(92, model)
    return found


def test_two_ranks_see_the_same_outcome_of_every_refit(broadcaster: FakeBroadcaster) -> None:
    broadcaster.on_begin = lambda begin: Cause("stale_version", "old") if begin.step == 90 else None
    broadcaster.on_bucket = lambda bucket: (
        "fail" if broadcaster.refit.begin.step == 91 and bucket == 1 else ""
    )
    first, second = run_ranks(scenes, 2, str(broadcaster.run_dir))
    assert first == second
    assert [outcome[0] for outcome in first] == [
        0,
        1,
        "RefitFailed",
        3,
        "RefitFailed",
        "RefitFailed",
        "RefitFailed",
        "RefitRejected",
        "RefitFailed",
        92,
    ]
    assert first[2] == ("RefitFailed", "trainer_failed: ValueError: the disk is full", 1)
    assert "rank 1 has 'c' (float32 [2]) as tensor 1 where rank 0 has 'b'" in first[4][1]
    assert "'6 " in first[5][1] or "6 " in first[5][1]
    assert "names no tensors" in first[6][1] and first[6][2] == 1
    assert "bucket_failed" in first[8][1]
    expected = as_sent(list(build_model().state_dict().items()))
    by_step = {refit.begin.step: refit for refit in broadcaster.refits}
    for step in (0, 1, 3, 92):
        assert by_step[step].tensors == expected
    assert by_step[2].cancelled is not None and by_step[2].cancelled.rank == 1
    assert not {4, 5, 6} & set(by_step), "nothing is sent that the ranks do not agree on"


def loses_a_rank(rank: int, world: int, run_dir: str, how: str) -> Any:
    publisher = Publisher(run_dir=run_dir, bucket_bytes=200, control_timeout=20.0 if how == "dies" else 1.0)
    store = dist.distributed_c10d._get_default_store()
    model = fully_shard(build_model())
    publisher.refit(0, model)
    if rank == 2:
        if how == "dies":
            os._exit(0)
        for other in ("0", "1"):  # leaves the loop without a word and stays alive
            store.wait([other], timedelta(seconds=30))
        return None
    with pytest.raises(RefitFailed) as caught:
        publisher.refit(1, model)
    with pytest.raises(RefitFailed):
        publisher.refit(2, model)
    store.set(str(rank), "done")
    return say(caught.value)


@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_lost_rank_is_named_on_all_others(broadcaster: FakeBroadcaster, how: str) -> None:
    first, second, _ = run_ranks(loses_a_rank, 3, str(broadcaster.run_dir), how)
    assert first == second
    assert first[0] == "RefitFailed" and first[2] == 2
    assert ("is gone" if how == "dies" else "did not come within 1 s") in first[1]


def no_broadcaster(rank: int, world: int, run_dir: str) -> Any:
    with pytest.raises(BroadcasterUnavailable) as caught:
        Publisher(run_dir=run_dir)
    return say(caught.value)


def test_all_ranks_learn_that_no_broadcaster_is_there(tmp_path: Path) -> None:
    first, second = run_ranks(no_broadcaster, 2, str(tmp_path))
    assert first == second and str(tmp_path) in first[1]
