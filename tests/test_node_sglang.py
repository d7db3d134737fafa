"""The agent on both engines: the same refits, the reference engine in every run, SGLang where it is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping

import pytest
import torch
from engines import Engine, sglang_engine
from node_kit import Refit, connected, generates, is_paused, weights_of
from safetensors.torch import save_file
from torch import Tensor
from weightcast.proto.messages import Aborted, LayoutAccepted, LayoutRefused, StageFailed
from weightcast.rollout_node.client import Deadline, EngineClient, Unauthorized
from weightcast.rollout_node.identity import identify
from weightcast.rollout_node.reference.model import TinyLlama, write_model


def changed(weights: Mapping[str, Tensor], seed: int = 7) -> dict[str, Tensor]:
    """Other values of the same names, dtypes and shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.float() + 0.1 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in weights.items()
    }


async def prove_refits(engine: Engine) -> None:
    """There and back: every parameter is compared with the bytes sent, and generation follows."""
    old = weights_of(engine.model)
    new = changed(old)
    async with connected(engine) as broadcaster:
        await Refit(broadcaster, engine, old, 1).whole()  # whatever it held before
        first = await generates(engine)
        there = (await Refit(broadcaster, engine, new, 2).whole()).evidence
        assert there.kind == ("tensor-digests" if engine.kind == "reference" else "checksums")
        assert there.mismatches == () and there.compared == there.total > 0
        assert engine.label == "v2" and await generates(engine) != first
        back = (await Refit(broadcaster, engine, old, 3).whole()).evidence
        assert back.group == there.group and back.fingerprint != there.fingerprint
        assert engine.label == "v3" and await generates(engine) == first


@pytest.mark.timeout(400)
async def test_refits_are_proven_on_one_rank(engine: Engine) -> None:
    await prove_refits(engine)


@pytest.mark.timeout(400)
async def test_refits_are_proven_on_two_ranks(sharded_engine: Engine) -> None:
    await prove_refits(sharded_engine)


@pytest.fixture(scope="module")
def qwen2_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """SGLang with a tiny Qwen2: biases on q, k and v, and a head tied to the embedding."""
    folder = tmp_path_factory.mktemp("qwen2") / "model"
    write_model(folder, TinyLlama(tie_word_embeddings=True), seed=3)
    weights = weights_of(folder)
    for name in [
        name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    ]:
        weights[name.replace("weight", "bias")] = torch.randn(weights[name].shape[0]).bfloat16()
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps(config))
    with sglang_engine(folder, tmp_path_factory.mktemp("qwen2-log")) as started:
        yield started


@pytest.mark.sglang
@pytest.mark.timeout(400)
async def test_refits_are_proven_with_biases_and_a_tied_head(qwen2_engine: Engine) -> None:
    await prove_refits(qwen2_engine)
    weights = changed(weights_of(qwen2_engine.model))
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    async with connected(qwen2_engine) as broadcaster:
        evidence = (await Refit(broadcaster, qwen2_engine, weights | head, 1).whole()).evidence
        assert evidence.mismatches == () and evidence.compared == evidence.total


@pytest.mark.timeout(400)
async def test_other_bytes_than_claimed_are_named_and_never_served(engine: Engine) -> None:
    weights = weights_of(engine.model)
    name = "model.layers.1.self_attn.k_proj.weight"
    claimed = {**weights, name: weights[name].clone()}
    claimed[name].view(-1).view(torch.uint8)[-1] ^= 1
    async with connected(engine) as broadcaster:
        refit = Refit(broadcaster, engine, weights, 1)
        await refit.propose()
        await refit.join()
        await refit.prepare()
        await refit.stream()
        (mismatch,) = (await refit.finish(claimed)).evidence.mismatches
        assert mismatch.startswith("model.layers.1.self_attn.")
        aborted = await refit.abort()
        assert isinstance(aborted, Aborted) and aborted.touched and not aborted.serving and is_paused(engine)
        await refit.leave()
        await Refit(broadcaster, engine, weights, 2).whole()
        assert not is_paused(engine)


@pytest.mark.timeout(400)
async def test_layout_is_checked_against_what_the_engine_was_started_from(engine: Engine) -> None:
    weights = weights_of(engine.model)
    wrong = dict(weights)
    wrong["model.norm.weight"] = weights["model.norm.weight"].float()
    wrong["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:100]
    wrong["lm_head.lora_A"] = wrong.pop("lm_head.weight")
    async with connected(engine) as broadcaster:
        await broadcaster.tell(Refit(broadcaster, engine, wrong, 1).proposal())
        refused = await broadcaster.expect(LayoutRefused)
        assert {(problem.kind, problem.name) for problem in refused.problems} == {
            ("unknown", "lm_head.lora_A"),
            ("missing", "lm_head.weight"),
            ("shape", "model.embed_tokens.weight"),
            ("dtype", "model.norm.weight"),
        }
        await broadcaster.tell(Refit(broadcaster, engine, weights, 2).proposal())
        assert (await broadcaster.expect(LayoutAccepted)).checked
        assert not is_paused(engine)


@pytest.mark.timeout(400)
async def test_wrong_admin_key_names_the_remedy(engine: Engine) -> None:
    async with connected(engine, admin_key="wrong-secret") as broadcaster:
        await broadcaster.tell(Refit(broadcaster, engine, weights_of(engine.model), 1).proposal())
        failure = await broadcaster.expect(StageFailed)
        assert failure.cause.code == "unauthorized" and "wrong-secret" not in failure.cause.message


@pytest.mark.timeout(400)
async def test_pause_can_be_seen_and_flushed_while_requests_wait(engine: Engine) -> None:
    keys = {"admin_key": engine.admin_key, "user_key": engine.user_key}
    async with EngineClient(engine.url, **keys) as client:
        assert await client.is_ready(Deadline(10))
        for mode in ("retract", "abort"):
            await client.pause_generation(mode, Deadline(10))
            try:
                assert await client.is_ready(Deadline(10)) is False
                found = await identify(client, name="n", nonce="x", deadline=Deadline(20))
                assert found.info.paused
                waiting = asyncio.create_task(generates(engine))
                await asyncio.sleep(0.2)  # lets the request reach the engine; it must not be answered
                await client.flush_cache(Deadline(10))
                assert not waiting.done()
            finally:
                await client.continue_generation(Deadline(10))
            assert await client.is_ready(Deadline(10))
            assert len(await waiting) > 0
        assert not (await identify(client, name="n", nonce="x", deadline=Deadline(20))).info.paused


@pytest.mark.timeout(400)
async def test_answers_a_refit_relies_on(engine: Engine) -> None:
    keys = {"admin_key": engine.admin_key, "user_key": engine.user_key}
    async with EngineClient(engine.url, **keys) as client:
        assert await client.destroy_weights_update_group("nobody", Deadline(10)) is False
        assert await client.end_weight_update(Deadline(10)) is False
        assert await client.begin_weight_update(Deadline(10)) is True
        assert await client.end_weight_update(Deadline(10)) is True
        (rank,) = await client.weight_checksums(Deadline(30))
        assert rank.tp_rank == 0 and "model.layers.0.self_attn.qkv_proj.weight" in rank.checksums
        server = await client.server_info(Deadline(10))
        assert (server.tp_size, server.pp_size, server.dp_size, server.device) == (1, 1, 1, "cpu")
        again = await client.server_info(Deadline(10))
        assert (server.pid, server.startup_time) == (again.pid, again.startup_time) != (None, None)
    async with EngineClient(engine.url, admin_key=engine.admin_key) as client:
        with pytest.raises(Unauthorized, match="set the API key"):
            await client.model_info(Deadline(10))
