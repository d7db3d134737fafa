"""Engines shared by all tests of a session: each kind is started once, when its first test asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import LOOPBACK, Engine, reference_engine, sglang_engine
from weightcast.rollout_node.reference.model import TinyLlama, write_model

# Rank 0 of the groups in these tests is the test process itself.
os.environ |= LOOPBACK

ADMIN_KEY = "admin-secret"
USER_KEY = "user-secret"

#: A real server takes 20 to 60 s to start on idle cores, and far longer on busy ones.
_SGLANG_MARKS = [pytest.mark.sglang, pytest.mark.timeout(660)]
BOTH_ENGINES = ["reference", pytest.param("sglang", marks=_SGLANG_MARKS)]


@pytest.fixture(scope="session")
def bfloat16_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny bfloat16 Llama folder."""
    folder = tmp_path_factory.mktemp("bfloat16") / "model"
    write_model(folder, TinyLlama(max_position_embeddings=4096), seed=1)
    return folder


@pytest.fixture(scope="session")
def float32_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny float32 Llama folder: engines agree on its greedy output to the token."""
    folder = tmp_path_factory.mktemp("float32") / "model"
    write_model(folder, TinyLlama(max_position_embeddings=4096, dtype="float32"), seed=1)
    return folder


@pytest.fixture(scope="session", params=BOTH_ENGINES)
def engine(
    request: pytest.FixtureRequest, bfloat16_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """One engine of each kind: one rank, bfloat16, keys. Tests leave it idle, resumed, sessionless."""
    start = reference_engine if request.param == "reference" else sglang_engine
    logs = tmp_path_factory.mktemp(request.param)
    with start(bfloat16_model, logs, admin_key=ADMIN_KEY, user_key=USER_KEY) as started:
        yield started


@pytest.fixture(scope="session", params=BOTH_ENGINES)
def sharded_engine(
    request: pytest.FixtureRequest, float32_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """One engine of each kind, two ranks, float32, without keys."""
    logs = tmp_path_factory.mktemp(f"{request.param}-sharded")
    if request.param == "reference":
        with reference_engine(float32_model, logs, tp_size=2) as started:
            yield started
    else:
        with sglang_engine(float32_model, logs, tp_size=2, dtype="float32") as started:
            yield started
