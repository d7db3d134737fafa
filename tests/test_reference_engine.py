"""What only the reference engine has: digests, the layout, faults that really happen, and a clean end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError

import psutil
import pytest
import torch
from engines import Engine, reference_engine
from plain_llama import greedy
from rank_zero import RankZero, describe, rank_zero
from safetensors.torch import save_file
from torch import Tensor
from weightcast.proto.digest import digest_bytes, format_digest
from weightcast.rollout_node.reference.model import TinyLlama, random_weights, write_model

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def shared(bfloat16_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for all tests that leave it alive and sound."""
    with reference_engine(bfloat16_model, tmp_path_factory.mktemp("shared")) as engine:
        yield engine


@pytest.fixture
def steady(shared: Engine) -> Iterator[Engine]:
    """The shared engine, with no fault armed and its first weights."""
    reply = shared.post("/update_weights_from_disk", model_path=str(shared.model), weight_version="default")
    assert reply.status == 200, reply
    yield shared
    shared.post("/end_weight_update")
    assert shared.get("/faults").body["faults"] == []


@pytest.fixture
def small(bfloat16_model: Path, tmp_path: Path) -> Iterator[Engine]:
    """An engine of the test's own, to be broken."""
    with reference_engine(bfloat16_model, tmp_path) as engine:
        yield engine


def digests_of(weights: dict[str, Tensor]) -> dict[str, str]:
    return {
        name: format_digest(digest_bytes(tensor.view(-1).view(torch.uint8).numpy().tobytes()))
        for name, tensor in weights.items()
    }


def held_digests(engine: Engine) -> dict[str, str]:
    return engine.post("/weight_digests").body["digests"]


def update(source: RankZero, weights: dict[str, Tensor]) -> int:
    """One session with one bucket; the status of the update."""
    source.engine.post("/begin_weight_update")
    reply = source.send(weights)
    source.engine.post("/end_weight_update")
    return reply.status


def assert_all_ended(pids: tuple[int, ...]) -> None:
    """Every process is gone, or ends within its deadline."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


# --- what it shows -------------------------------------------------------------------------------


def test_ranks_with_a_tied_head_and_a_shared_kv_head_show_whole_tensors(tmp_path: Path) -> None:
    model = TinyLlama(tie_word_embeddings=True, dtype="float32", num_key_value_heads=1)
    weights = write_model(tmp_path / "model", model, seed=2)
    with reference_engine(tmp_path / "model", tmp_path, tp_size=2) as engine:
        shown = held_digests(engine)
        assert shown.pop("lm_head.weight") == shown["model.embed_tokens.weight"]
        assert shown == digests_of(weights)
        layout = engine.get("/weight_layout").body
        assert layout["optional"] == ["lm_head.weight"]
        sent = {name: ["float32", list(tensor.shape)] for name, tensor in weights.items()}
        listed = {name: [dtype, shape] for name, dtype, shape in layout["tensors"]}
        assert listed.pop("lm_head.weight") == ["float32", [300, 64]]
        assert listed == sent
        other = random_weights(tmp_path / "model", seed=3)
        with rank_zero(engine) as source:
            assert update(source, other) == 200
        shown = held_digests(engine)
        del shown["lm_head.weight"]
        assert shown == digests_of(other)
        assert engine.output_ids(PROMPT, max_new_tokens=8) == greedy(other, model.hf_config(), PROMPT, 8)


def test_another_folder_on_disk_that_does_not_fit_changes_nothing(steady: Engine, tmp_path: Path) -> None:
    before = held_digests(steady)
    write_model(tmp_path / "wide", TinyLlama(hidden_size=128), seed=1)
    reply = steady.post("/update_weights_from_disk", model_path=str(tmp_path / "wide"), weight_version="x")
    assert reply.status == 400
    assert "model.norm.weight has shape [128], expected [64]" in reply.body["message"]
    assert (held_digests(steady), steady.label) == (before, "default")


def test_text_prompts_and_tokens_outside_the_vocabulary(steady: Engine) -> None:
    body = steady.request("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 3}}).body
    assert body["meta_info"]["prompt_tokens"] == 2
    for ids in ([300], [-1], []):
        assert steady.request("/generate", {"input_ids": ids}).status == 400


# --- faults --------------------------------------------------------------------------------------


def arm(engine: Engine, **fault: object) -> None:
    assert engine.post("/faults", faults=[fault]).status == 200


def test_refuse_answers_500_and_receives_nothing(steady: Engine) -> None:
    weights, before = random_weights(steady.model, seed=5), held_digests(steady)
    with rank_zero(steady) as source:
        arm(steady, kind="refuse", bucket=1)
        steady.post("/begin_weight_update")
        assert source.send(weights).status == 200
        assert source.announce(**describe(weights)).status == 500
        assert held_digests(steady) == digests_of(weights) != before
        assert source.send(weights).status == 200


@pytest.mark.parametrize("kind", ["random", "flip"])
def test_wrong_bytes_are_answered_200_and_only_a_digest_tells(steady: Engine, kind: str) -> None:
    weights = random_weights(steady.model, seed=6)
    with rank_zero(steady) as source:
        arm(steady, kind=kind)
        assert update(source, weights) == 200
        shown, sent = held_digests(steady), digests_of(weights)
        wrong = [name for name in sent if shown[name] != sent[name]]
        assert len(wrong) == (1 if kind == "flip" else len(sent))
        assert update(source, weights) == 200
        assert held_digests(steady) == sent


def test_half_loads_half_and_says_so(steady: Engine) -> None:
    weights, before = random_weights(steady.model, seed=7), held_digests(steady)
    with rank_zero(steady) as source:
        arm(steady, kind="half")
        assert update(source, weights) == 400
    shown, sent = held_digests(steady), digests_of(weights)
    names = list(weights)
    assert [shown[name] for name in names[: len(names) // 2]] == [
        sent[name] for name in names[: len(names) // 2]
    ]
    assert shown[names[-1]] == before[names[-1]]


def test_refused_flush_fails_the_update_until_it_has_fired(steady: Engine) -> None:
    weights = random_weights(steady.model, seed=8)
    with rank_zero(steady) as source:
        arm(steady, kind="no_flush", times=2)
        assert update(source, weights) == 400
        assert steady.post("/flush_cache").status == 400
        assert steady.post("/flush_cache").status == 200
    assert held_digests(steady) == digests_of(weights)


def test_freeze_stops_the_ranks_and_the_front_still_answers(small: Engine) -> None:
    weights = random_weights(small.model, seed=9)
    arm(small, kind="freeze")
    small.post("/begin_weight_update")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(small.post, "/update_weights_from_distributed", 60, **describe(weights))
        rank = psutil.Process(small.rank_pids[0])
        for _ in range(1000):
            if rank.status() == psutil.STATUS_STOPPED:
                break
            assert small.get("/model_info").status == 200
        assert rank.status() == psutil.STATUS_STOPPED
        assert not call.done()
        rank.send_signal(signal.SIGCONT)
        assert call.result(30).status == 400


@pytest.mark.parametrize("kind", ["die", "die_server"])
def test_a_death_takes_the_whole_engine_with_it(small: Engine, kind: str) -> None:
    arm(small, kind=kind)
    small.post("/begin_weight_update")
    with pytest.raises((URLError, ConnectionError)):
        small.post("/update_weights_from_distributed", names=[], dtypes=[], shapes=[])
    assert_all_ended((small.pid, *small.rank_pids))


def test_slow_delays_the_load(steady: Engine) -> None:
    arm(steady, kind="slow", seconds=1.0)
    with rank_zero(steady) as source, ThreadPoolExecutor(1) as pool:
        steady.post("/begin_weight_update")
        slow = pool.submit(source.send, random_weights(steady.model, seed=10))
        assert steady.get("/model_info").status == 200
        assert not slow.done()
        assert slow.result(30).status == 200


def test_never_join_leaves_the_call_open(small: Engine) -> None:
    arm(small, kind="never_join")
    with ThreadPoolExecutor(1) as pool:
        source = RankZero(small, pool)
        joining = source.ask_to_join()
        assert small.get("/model_info").status == 200
        assert not joining.done()
        os.kill(small.pid, signal.SIGTERM)
        assert_all_ended((small.pid, *small.rank_pids))
        assert joining.exception(30) is not None


def test_unknown_fault_is_refused(steady: Engine) -> None:
    assert steady.post("/faults", faults=[{"kind": "sulk"}]).status == 400


# --- its end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_front_even_when_frozen(bfloat16_model: Path, tmp_path: Path, number: int) -> None:
    with reference_engine(bfloat16_model, tmp_path, tp_size=2) as engine:
        os.kill(engine.rank_pids[1], signal.SIGSTOP)
        os.kill(engine.pid, number)
        assert_all_ended((engine.pid, *engine.rank_pids))


def test_a_lost_rank_ends_the_engine_and_is_named(bfloat16_model: Path, tmp_path: Path) -> None:
    with reference_engine(bfloat16_model, tmp_path, tp_size=2) as engine:
        os.kill(engine.rank_pids[1], signal.SIGKILL)
        assert_all_ended((engine.pid, *engine.rank_pids))
        log = engine.log
    assert "rank 1 ended with status -9" in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "3"], "--tp is 3; it must divide the 4 attention heads"),
        (["--admin-api-key-file", "/nonexistent/key"], "cannot read the key file"),
        (["--fault", '{"kind": "sulk"}'], "sulk"),
    ],
)
def test_wrong_arguments_are_named(
    bfloat16_model: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    with (
        pytest.raises(AssertionError, match="ended before it was ready") as raised,
        reference_engine(bfloat16_model, tmp_path, arguments=arguments),
    ):
        pass
    assert words in str(raised.value)


def test_the_front_imports_no_torch() -> None:
    code = "import sys, weightcast.rollout_node.reference.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_folder_without_a_tensor_is_named_at_start(tmp_path: Path) -> None:
    weights = write_model(tmp_path / "model", TinyLlama(), seed=1)
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors")
    with (
        pytest.raises(AssertionError, match=r"model\.norm\.weight is missing"),
        reference_engine(tmp_path / "model", tmp_path),
    ):
        pass


def test_copies_that_differ_between_ranks_are_told_by_the_digest(float32_model: Path, tmp_path: Path) -> None:
    weights = random_weights(float32_model, seed=11)
    with reference_engine(float32_model, tmp_path, tp_size=2) as engine, rank_zero(engine) as source:
        arm(engine, kind="flip", rank=1)
        assert update(source, {"model.norm.weight": weights["model.norm.weight"]}) == 200
        held, sent = held_digests(engine), digests_of(weights)
        assert held["model.norm.weight"] != sent["model.norm.weight"]
        assert update(source, weights) == 200
        assert held_digests(engine) == sent
