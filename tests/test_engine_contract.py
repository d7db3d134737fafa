"""What the weight endpoints really do: one suite over the reference engine and the real SGLang.

The reference engine is only worth what this suite shows: that it answers as the real server answers,
traps included. Where the two differ, the real server is right.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import USER_KEY
from engines import Engine, Reply
from plain_llama import greedy
from rank_zero import RankZero, rank_zero
from sglang_layout import expected_checksums
from torch import Tensor
from weightcast.rollout_node.reference.model import random_weights

PROMPT = [5, 6, 7, 8, 9, 10]
QUERY = "model.layers.0.self_attn.q_proj.weight"
Weights = dict[str, Tensor]


@pytest.fixture
def source(engine: Engine) -> Iterator[RankZero]:
    """A joined group; the engine is sessionless and resumed afterwards, whatever the test did."""
    with rank_zero(engine) as joined:
        yield joined
        engine.post("/end_weight_update")
        engine.post("/pause_generation", mode="abort")
        engine.post("/continue_generation")


def weights_of(engine: Engine, seed: int) -> Weights:
    """Random weights of the engine's model."""
    return random_weights(engine.model, seed=seed)


def config_of(engine: Engine) -> dict[str, Any]:
    """The engine's model configuration."""
    return json.loads((engine.model / "config.json").read_text())


def refit(source: RankZero, weights: Weights, **fields: Any) -> None:
    """All weights in two buckets, in a session."""
    items = list(weights.items())
    assert source.engine.post("/begin_weight_update").status == 200
    for part in (items[: len(items) // 2], items[len(items) // 2 :]):
        reply = source.send(dict(part), **fields)
        assert reply.status == 200, reply
    assert source.engine.post("/end_weight_update").status == 200


def refuses(reply: Reply, words: str) -> bool:
    """Whether it is SGLang's refusal, with these words in it."""
    return reply.status == 400 and reply.body["success"] is False and words in reply.body["message"]


# --- content -------------------------------------------------------------------------------------


def test_refit_changes_greedy_output_and_every_checksum(source: RankZero) -> None:
    engine = source.engine
    refit(source, weights_of(engine, 10))
    before = engine.output_ids(PROMPT)
    refit(source, weights_of(engine, 11))
    assert engine.output_ids(PROMPT) != before
    assert engine.checksums() == expected_checksums(weights_of(engine, 11), config_of(engine), 1)
    refit(source, weights_of(engine, 10))
    assert engine.output_ids(PROMPT) == before


def test_sharded_engine_holds_its_slices_and_generates_what_the_plain_model_does(
    sharded_engine: Engine,
) -> None:
    weights = weights_of(sharded_engine, 12)
    with rank_zero(sharded_engine) as source:
        refit(source, weights)
    config = config_of(sharded_engine)
    assert sharded_engine.checksums() == expected_checksums(weights, config, 2)
    assert sharded_engine.output_ids(PROMPT, max_new_tokens=24) == greedy(weights, config, PROMPT, 24)


def test_plain_format_loads_the_same(source: RankZero) -> None:
    engine, weights = source.engine, weights_of(source.engine, 13)
    refit(source, weights, load_format=None)
    assert engine.checksums() == expected_checksums(weights, config_of(engine), 1)


def test_unknown_name_is_answered_200_and_loads_nothing(source: RankZero) -> None:
    engine, before = source.engine, source.engine.checksums()
    engine.post("/begin_weight_update")
    reply = source.send(
        {"model.layers.0.self_attn.z_proj.weight": torch.ones(64, 64)}, weight_version="moved"
    )
    assert reply.status == 200 and reply.body["success"] is True
    assert engine.checksums() == before
    assert engine.label == "moved"


def test_another_dtype_is_cast(source: RankZero) -> None:
    engine, weights = source.engine, weights_of(source.engine, 14)
    refit(source, weights)
    wide = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    engine.post("/begin_weight_update")
    assert source.send({QUERY: wide}).status == 200
    held = weights | {QUERY: wide.to(torch.bfloat16)}
    assert engine.checksums() == expected_checksums(held, config_of(engine), 1)


def test_wrong_shape_fails_and_leaves_what_came_before_it_loaded(source: RankZero) -> None:
    engine, weights = source.engine, weights_of(source.engine, 15)
    refit(source, weights)
    norm = torch.full((64,), 3.0, dtype=torch.bfloat16)
    engine.post("/begin_weight_update")
    reply = source.send(
        {"model.norm.weight": norm, QUERY: torch.ones(64, 32, dtype=torch.bfloat16)}, weight_version="never"
    )
    assert refuses(reply, "Please discard the whole weights.")
    held = weights | {"model.norm.weight": norm}
    assert engine.checksums() == expected_checksums(held, config_of(engine), 1)
    assert engine.label != "never"


def test_rows_beyond_the_parameter_are_cut_off_without_a_word(source: RankZero) -> None:
    engine, weights = source.engine, weights_of(source.engine, 16)
    refit(source, weights)
    tall = torch.randn(96, 64, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    engine.post("/begin_weight_update")
    assert source.send({QUERY: tall}).status == 200
    held = weights | {QUERY: tall[:64].clone()}
    assert engine.checksums() == expected_checksums(held, config_of(engine), 1)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_another_vocabulary_is_refused(source: RankZero, name: str) -> None:
    source.engine.post("/begin_weight_update")
    reply = source.send({name: torch.ones(301, 64, dtype=torch.bfloat16)})
    assert refuses(reply, "partially updated")


def test_get_weights_by_name_shows_unfused_rows(source: RankZero) -> None:
    engine, weights = source.engine, weights_of(source.engine, 17)
    refit(source, weights)
    name = "model.layers.1.self_attn.v_proj.weight"
    reply = engine.post("/get_weights_by_name", name=name, truncate_size=2)
    assert reply.body == weights[name][:2].float().tolist()
    assert engine.post("/get_weights_by_name", name="model.nothing.weight").status == 400


def test_disk_update_loads_a_folder_and_moves_the_label(engine: Engine) -> None:
    reply = engine.post("/update_weights_from_disk", model_path=str(engine.model), weight_version="disk-1")
    assert reply.status == 200, reply
    assert (reply.body["success"], reply.body["num_paused_requests"]) == (True, 0)
    assert engine.label == "disk-1"
    assert engine.checksums() == expected_checksums(weights_of(engine, 1), config_of(engine), 1)


# --- session and group ---------------------------------------------------------------------------


def test_updates_need_a_session_and_sessions_do_not_nest(source: RankZero) -> None:
    engine = source.engine
    outside = "must run between begin_weight_update() and end_weight_update()"
    assert refuses(source.announce(), outside)
    assert refuses(engine.post("/end_weight_update"), "no weight-update session is open")
    assert engine.post("/begin_weight_update").body == {"success": True, "message": "Success"}
    assert refuses(engine.post("/begin_weight_update"), "a weight-update session is already open")
    assert engine.post("/end_weight_update").body == {"success": True, "message": "Success"}
    assert refuses(source.announce(), outside)


def test_group_that_does_not_exist(source: RankZero) -> None:
    engine = source.engine
    engine.post("/begin_weight_update")
    assert refuses(source.announce(group_name="nobody"), "Group nobody not in")
    reply = engine.post("/destroy_weights_update_group", group_name="nobody")
    assert refuses(reply, "The group to be destroyed does not exist.")


def test_empty_lists(source: RankZero) -> None:
    source.engine.post("/begin_weight_update")
    assert source.announce().status == 200
    assert refuses(source.announce(load_format="flattened_bucket"), "Cannot create empty tensor bucket")


def test_names_without_dtypes_and_shapes_load_nothing_in_plain_format(source: RankZero) -> None:
    before = source.engine.checksums()
    source.engine.post("/begin_weight_update")
    assert source.announce(names=[QUERY]).status == 200
    assert source.engine.checksums() == before
    assert source.announce(names=[QUERY], load_format="flattened_bucket").status == 400


def test_unaligned_bucket_is_refused_before_it_is_received(source: RankZero) -> None:
    source.engine.post("/begin_weight_update")
    reply = source.announce(
        names=["a", "b"], dtypes=["uint8", "float32"], shapes=[[3], [1]], load_format="flattened_bucket"
    )
    assert refuses(reply, "Unaligned received tensor b")


def test_a_group_name_can_be_used_again_after_leaving(engine: Engine) -> None:
    with rank_zero(engine, name="again") as first:
        refit(first, weights_of(engine, 18))
    with rank_zero(engine, name="again") as second:
        refit(second, weights_of(engine, 26))
    assert engine.checksums() == expected_checksums(weights_of(engine, 26), config_of(engine), 1)


def test_joining_under_a_live_name_fails_and_the_live_group_still_works(source: RankZero) -> None:
    engine = source.engine
    with ThreadPoolExecutor(2) as pool:
        second = RankZero(engine, pool, name=source.name)
        reply = second.ask_to_join().result(30)
    assert refuses(reply, "Failed to initialize custom process group")
    refit(source, weights_of(engine, 19))
    assert engine.checksums() == expected_checksums(weights_of(engine, 19), config_of(engine), 1)


def test_infos_answer_while_the_ranks_wait_for_their_peer_and_health_does_not(engine: Engine) -> None:
    with ThreadPoolExecutor(4) as pool:
        source = RankZero(engine, pool)
        joined = source.ask_to_join()
        health = pool.submit(engine.request, "/health", method="GET", timeout=60)
        assert engine.get("/model_info", 10).status == 200
        assert not health.done() and not joined.done()
        source.join()
        assert joined.result(30).status == 200
        assert health.result(30).status == 200
        assert source.leave().status == 200


# --- label, flush, prefix cache ------------------------------------------------------------------


def test_label_moves_with_the_bucket_that_carries_it(source: RankZero) -> None:
    engine, (first, *rest) = source.engine, weights_of(source.engine, 20).items()
    engine.post("/begin_weight_update")
    source.send(dict([first]), weight_version="step-1")
    assert engine.label == "step-1"
    source.send(dict(rest))
    assert engine.label == "step-1"
    engine.post("/end_weight_update")
    reply = engine.post("/update_weight_version", new_version="step-2", abort_all_requests=False)
    assert reply.body == {
        "success": True,
        "message": "Weight version updated to step-2",
        "new_version": "step-2",
    }
    meta = engine.generate(PROMPT)["meta_info"]
    assert (engine.label, meta["weight_version"]) == ("step-2", "step-2")
    assert meta["weight_versions"] == [{"version": "step-2", "start": 0, "end": 12}]
    assert meta["finish_reason"] == {"type": "length", "length": 12}


def test_prefix_cache_is_stale_until_it_is_flushed(source: RankZero) -> None:
    engine, prompt = source.engine, list(range(20, 60))
    refit(source, weights_of(engine, 21))
    engine.generate(prompt)
    refit(source, weights_of(engine, 22), flush_cache=False)
    stale = engine.generate(prompt)
    assert stale["meta_info"]["cached_tokens"] > 0
    assert engine.post("/flush_cache").status == 200
    fresh = engine.generate(prompt)
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert fresh["output_ids"] != stale["output_ids"]


# --- pause ---------------------------------------------------------------------------------------


class Sequence:
    """A long streaming request. A thread reads it as it comes, so that `last` is never old news."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._told = threading.Condition()
        self.last: dict[str, Any] | None = None
        sampling = {"max_new_tokens": 3500, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
        self._response = engine.open("/generate", body, key=engine.user_key)
        self._socket = self._response.fp.raw._sock
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.wait_for_tokens(1)

    def _read(self) -> None:
        try:
            for line in self._response:
                if line.startswith(b"data: {"):
                    with self._told:
                        self.last = json.loads(line[6:])
                        self._told.notify_all()
        except http.client.HTTPException:
            pass  # `hang_up` cut the stream short.

    @property
    def tokens(self) -> int:
        """Tokens told of so far."""
        return 0 if self.last is None else self.last["meta_info"]["completion_tokens"]

    @property
    def finished(self) -> bool:
        """Whether the end was told."""
        return self.last is not None and self.last["meta_info"]["finish_reason"] is not None

    def wait_for_tokens(self, more: int) -> None:
        """Wait until ``more`` tokens have come than had when this was called."""
        with self._told:
            wanted = self.tokens + more
            assert self._told.wait_for(lambda: self.tokens >= wanted, timeout=60), self.last

    def end(self) -> dict[str, Any]:
        """What is told at the end."""
        with self._told:
            assert self._told.wait_for(lambda: self.finished, timeout=60), self.last
            assert self.last is not None
            return self.last

    def finish_after_a_few_more(self) -> dict[str, Any]:
        """Let some more tokens come, then have the sequence aborted; its end."""
        assert self.last is not None and "weight_versions" not in self.last["meta_info"]
        self.wait_for_tokens(5)
        assert self._engine.post("/pause_generation", mode="abort").status == 200
        return self.end()

    def hang_up(self) -> None:
        """Go away as a client does that is no longer interested."""
        if self._reader.is_alive():
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(30)
        self._response.close()


@pytest.fixture
def running(source: RankZero) -> Iterator[Sequence]:
    """A sequence that generates, on an engine with a known label."""
    source.engine.post("/update_weight_version", new_version="old")
    sequence = Sequence(source.engine)
    yield sequence
    sequence.hang_up()


def test_abort_pause_ends_sequences_with_what_they_have(source: RankZero, running: Sequence) -> None:
    reply = source.engine.post("/pause_generation", mode="abort")
    assert reply.body == {"message": "Generation paused successfully.", "status": "ok"}
    told = running.end()
    assert told["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < told["meta_info"]["completion_tokens"] < 3500


def test_retract_pause_continues_a_sequence_under_the_new_weights(
    source: RankZero, running: Sequence
) -> None:
    engine = source.engine
    engine.post("/pause_generation", mode="retract")
    refit(source, weights_of(engine, 23), weight_version="new")
    engine.post("/continue_generation")
    told = running.finish_after_a_few_more()
    old, new = told["meta_info"]["weight_versions"]
    assert (old["version"], old["start"], new["version"], new["start"]) == ("old", 0, "new", old["end"])
    assert new["end"] == told["meta_info"]["completion_tokens"]
    assert told["meta_info"]["weight_version"] == "new"
    assert told["meta_info"]["num_retractions"] == 1


def test_in_place_pause_refuses_the_flush_though_the_weights_changed(
    source: RankZero, running: Sequence
) -> None:
    engine, weights = source.engine, weights_of(source.engine, 24)
    engine.post("/pause_generation", mode="in_place")
    assert engine.post("/flush_cache").status == 400
    engine.post("/begin_weight_update")
    reply = source.send(weights, weight_version="new")
    assert refuses(reply, "Weights were updated, but the cache was not flushed")
    engine.post("/end_weight_update")
    assert engine.checksums() == expected_checksums(weights, config_of(engine), 1)
    assert engine.label == "old"
    engine.post("/continue_generation")
    spans = running.finish_after_a_few_more()["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["old", "new"]


def test_flush_is_refused_while_a_sequence_runs(source: RankZero, running: Sequence) -> None:
    assert source.engine.post("/flush_cache").status == 400


def test_begin_waits_for_running_sequences_unless_paused(source: RankZero, running: Sequence) -> None:
    engine = source.engine
    with ThreadPoolExecutor(1) as pool:
        begun: Future[Reply] = pool.submit(engine.post, "/begin_weight_update")
        running.wait_for_tokens(5)
        assert not begun.done()
        assert not running.finished
        running.hang_up()
        assert begun.result(30).status == 200


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_requests_sent_while_paused_wait_for_the_new_weights(source: RankZero, mode: str) -> None:
    engine = source.engine
    engine.post("/pause_generation", mode=mode)
    assert engine.request("/ready", method="GET").status == 503
    engine.post("/pause_generation", mode=mode)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.generate, PROMPT)
        refit(source, weights_of(engine, 25), weight_version=f"after-{mode}")
        assert not waiting.done()
        reply = engine.post("/continue_generation")
        assert reply.body == {"message": "Generation continued successfully.", "status": "ok"}
        spans = waiting.result(30)["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [f"after-{mode}"]
    assert engine.post("/continue_generation").status == 200


# --- requests that are wrong, keys ---------------------------------------------------------------


def test_bodies_are_checked(engine: Engine) -> None:
    assert engine.request("/begin_weight_update", key=engine.admin_key).status == 400
    assert engine.post("/pause_generation", mode="sideways").status == 400
    assert engine.post("/update_weights_from_distributed", names=["a"]).status == 400
    assert engine.post("/weights_checker", action="dance").status == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/begin_weight_update", {}),
        ("/flush_cache", {}),
        ("/pause_generation", {}),
        ("/weights_checker", {}),
        ("/destroy_weights_update_group", {"group_name": "nobody"}),
    ],
)
def test_weight_endpoints_take_the_admin_key_only(engine: Engine, path: str, body: dict[str, Any]) -> None:
    for key in (None, USER_KEY, "wrong"):
        assert engine.request(path, body, key=key).status == 401


def test_generation_and_infos_take_the_user_key_only(engine: Engine) -> None:
    for path in ("/model_info", "/server_info"):
        assert engine.request(path, key=engine.admin_key, method="GET").status == 401
        assert engine.get(path).status == 200
    assert engine.request("/generate", {"input_ids": [1]}, key=engine.admin_key).status == 401
    assert engine.request("/ready", method="GET").status == 200


def test_infos_say_what_an_agent_needs(engine: Engine) -> None:
    model, server = engine.get("/model_info").body, engine.get("/server_info").body
    assert model["architectures"] == ["LlamaForCausalLM"]
    assert [server[size] for size in ("tp_size", "pp_size", "dp_size")] == [1, 1, 1]
    assert server.get("engine", "sglang") == engine.kind
    assert server["version"]
