"""Checkpoint folders: what is read, in which order, what is refused; and `weightcast push` around it."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fake_broadcaster import FakeBroadcaster
from safetensors.torch import save_file
from weightcast.proto.errors import Cause, InvalidConfig
from weightcast.trainer_hooks.checkpoint import Checkpoint, CheckpointInvalid, arrival_key
from weightcast.trainer_hooks.cli import address_towards, push
from weightcast.trainer_hooks.sizes import parse_bytes


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    found = {"model.embed_tokens.weight": torch.randn(10, 4).bfloat16(), "lm_head.weight": torch.randn(10, 4)}
    for layer in (0, 1, 2, 10):
        for name in ("k_proj", "o_proj", "q_proj", "v_proj"):
            found[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.randn(4, 4).half()
        for name in ("down_proj", "gate_proj", "up_proj"):
            found[f"model.layers.{layer}.mlp.{name}.weight"] = torch.randn(8, 4).bfloat16()
    found["model.odd"] = torch.arange(3, dtype=torch.uint8)
    found["model.scale"] = torch.tensor(1.5)
    found["model.none"] = torch.empty(0, 3)
    found["model.fp8"] = torch.randn(2, 3).to(torch.float8_e4m3fn)
    return found


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def save_sharded(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 3) -> dict[str, Any]:
    names = sorted(tensors)
    files: dict[str, dict[str, torch.Tensor]] = {}
    weight_map: dict[str, str] = {}
    for number, name in enumerate(names):
        weight_map[name] = f"model-{number % shards}.safetensors"
        files.setdefault(weight_map[name], {})[name] = tensors[name]
    for file, content in files.items():
        save_file(content, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


@pytest.mark.parametrize("sharded", [False, True])
def test_every_tensor_is_read_bit_exactly(tmp_path: Path, sharded: bool) -> None:
    tensors = model()
    if sharded:
        save_sharded(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert {entry.spec.name for entry in checkpoint.entries} == set(tensors)
        assert checkpoint.nbytes == sum(tensor.nbytes for tensor in tensors.values())
        for entry in [*checkpoint.entries, *checkpoint.entries]:  # pages given back are read again
            tensor = tensors[entry.spec.name]
            assert entry.spec.dtype == str(tensor.dtype).removeprefix("torch.")
            assert entry.spec.shape == tuple(tensor.shape)
            with checkpoint.bytes_of(entry) as data:
                assert bytes(data) == as_bytes(tensor), entry.spec.name


def test_order_is_by_layer_with_fused_parts_together(tmp_path: Path) -> None:
    save_sharded(tmp_path, model())
    with Checkpoint(tmp_path) as checkpoint:
        names = [entry.spec.name for entry in checkpoint.entries]
    layers = [name for name in names if ".layers." in name]
    assert [int(name.split(".")[2]) for name in layers] == [0] * 7 + [1] * 7 + [2] * 7 + [10] * 7
    short = [name.split(".")[-2] for name in layers[:7]]
    assert short == ["gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
    assert arrival_key("experts.9.w") < arrival_key("experts.10.w")


def test_pages_are_given_back_while_streaming(tmp_path: Path) -> None:
    size = 8 << 20
    save_file(
        {f"w{number}": torch.full((size,), number, dtype=torch.uint8) for number in range(6)},
        tmp_path / "model.safetensors",
    )

    def mapped_resident() -> int:
        """Resident bytes of the mapped file."""
        text = Path("/proc/self/smaps").read_text().split("model.safetensors", 1)[1]
        line = next(line for line in text.splitlines() if line.startswith("Rss:"))
        return int(line.split()[1]) * 1024

    with Checkpoint(tmp_path) as checkpoint:
        highest = 0
        for number, entry in enumerate(checkpoint.entries):
            with checkpoint.bytes_of(entry) as data:
                assert data.tobytes().count(number) == size
                highest = max(highest, mapped_resident())
    assert size <= highest < 2 * size


def write_raw(folder: Path, header: bytes, data: bytes = b"") -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "no JSON"),
        (b"[]", "no JSON object"),
        (json.dumps({"w": entry(dtype="F4")}).encode(), "'w' in dtype 'F4'"),
        (json.dumps({"w": entry(offsets=(0, 9))}).encode(), "beyond its 8"),
        (json.dumps({"w": entry(shape=(3,))}).encode(), r"'w' of F32 \[3\] in 8 bytes"),
        (json.dumps({"w": entry(offsets=(-4, 4))}).encode(), "'w' at bytes -4"),
        (json.dumps({"w": {"dtype": "F32"}}).encode(), "describes 'w' as"),
        (b'{"w": %b, "w": %b}' % ((json.dumps(entry()).encode(),) * 2), "names 'w' twice"),
    ],
)
def test_corrupt_header_names_the_file_and_the_tensor(tmp_path: Path, header: bytes, message: str) -> None:
    write_raw(tmp_path, header, bytes(8))
    with pytest.raises(CheckpointInvalid, match=message) as caught:
        Checkpoint(tmp_path)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 1 << 40) + b"{}"])
def test_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors"):
        Checkpoint(tmp_path)


def test_folder_and_index_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="is not a folder"):
        Checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointInvalid, match="neither"):
        Checkpoint(tmp_path)
    index = save_sharded(tmp_path, model())
    file = tmp_path / "model.safetensors.index.json"

    def promise(weight_map: dict[str, str]) -> None:
        file.write_text(json.dumps({"weight_map": weight_map}))

    promise(index["weight_map"] | {"ghost": "model-0.safetensors"})
    with pytest.raises(CheckpointInvalid, match="promises 'ghost'"):
        Checkpoint(tmp_path)
    promise(index["weight_map"] | {"model.odd": "model-9.safetensors", "x": "model-7.safetensors"})
    with pytest.raises(CheckpointInvalid, match=r"lacks 2 of 5 shards: model-7\.safetensors, model-9"):
        Checkpoint(tmp_path)
    promise({name: where for name, where in index["weight_map"].items() if name != "model.odd"})
    with pytest.raises(CheckpointInvalid, match=r"1 tensors that the index does not: model\.odd"):
        Checkpoint(tmp_path)
    promise(index["weight_map"] | {"a": "../elsewhere.safetensors"})
    with pytest.raises(CheckpointInvalid, match="outside the folder"):
        Checkpoint(tmp_path)
    file.write_text("{}")
    with pytest.raises(CheckpointInvalid, match="no index"):
        Checkpoint(tmp_path)
    save_file({"model.odd": torch.zeros(1)}, tmp_path / "model-0.safetensors")
    save_file({"model.odd": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    promise({"model.odd": "model-0.safetensors", "x": "model-1.safetensors"})
    with pytest.raises(CheckpointInvalid, match=r"in both model-0\.safetensors and model-1\.safetensors"):
        Checkpoint(tmp_path)


def run_push(
    capfd: pytest.CaptureFixture[str], folder: Path, **options: Any
) -> tuple[int, dict[str, Any], str]:
    with pytest.raises(SystemExit) as caught:
        push(folder, json=True, **options)
    out, err = capfd.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, msgspec.json.decode(out), err


def test_push_sends_the_folder_and_prints_one_json_object(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    tensors = model()
    save_sharded(folder, tensors)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with contextlib.closing(FakeBroadcaster(run_dir)) as fake:
        status, report, err = run_push(
            capfd, folder, run_dir=run_dir, step=7, label="base", bucket_bytes="512", slots=3
        )
        assert (status, report["ok"], report["version"], report["label"]) == (0, True, 7, "base")
        assert fake.refit.tensors == {name: as_bytes(tensor) for name, tensor in tensors.items()}
        assert sorted(fake.hellos[0].slots) == [0, 1, 2]
        assert "version 7" in err
        fake.on_bucket = lambda bucket: "fail"
        status, report, err = run_push(capfd, folder, run_dir=run_dir)
        assert (status, report["ok"], report["cause"]["code"]) == (1, False, "bucket_failed")
        assert "the engine said no" in err
        fake.on_begin = lambda begin: Cause("stale_version", "step 1 is old")
        status, report, _ = run_push(capfd, folder, run_dir=run_dir)
        assert (status, report) == (
            2,
            {"ok": False, "cause": {"code": "stale_version", "message": "step 1 is old"}},
        )
        assert fake.problems == []


def test_push_says_what_it_cannot_reach_or_use(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, report, err = run_push(capfd, tmp_path / "absent", run_dir=tmp_path)
    assert status == 2 and "absent is not a folder" in report["cause"]["message"] and "absent" in err
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    status, report, _ = run_push(capfd, tmp_path, run_dir=tmp_path / "nobody")
    assert status == 2 and report["cause"]["code"] == "broadcaster_lost"
    status, report, _ = run_push(capfd, tmp_path, run_dir=tmp_path, bucket_bytes="lots")
    assert status == 2 and "'lots'" in report["cause"]["message"]
    status, report, _ = run_push(capfd, tmp_path, run_dir=tmp_path, bucket_bytes="0")
    assert status == 2 and "--bucket-bytes '0'" in report["cause"]["message"]
    status, report, _ = run_push(capfd, tmp_path, run_dir=tmp_path, slots=0)
    assert status == 2 and "--slots is 0" in report["cause"]["message"]
    status, report, _ = run_push(capfd, tmp_path, engine=("nonsense",))
    assert status == 2 and "'nonsense' is no URL" in report["cause"]["message"]
    status, report, _ = run_push(capfd, tmp_path, admin_key_file=tmp_path / "key")
    assert status == 2 and "needs --engine" in report["cause"]["message"]


def test_sizes_and_addresses() -> None:
    assert [parse_bytes(text) for text in ("12", "256MiB", "1.5k", "2 GB", "3gi")] == [
        12,
        256 << 20,
        1500,
        2 * 10**9,
        3 << 30,
    ]
    with pytest.raises(InvalidConfig):
        parse_bytes("-1")
    assert address_towards("http://127.0.0.1:30000") == "127.0.0.1"
