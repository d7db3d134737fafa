"""The configuration: every wrong value is named with its field before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from weightcast.proto.config import load_config
from weightcast.proto.errors import InvalidConfig


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    file = tmp_path / "b.toml"
    file.write_text(
        'job = "qwen-rl.1"\ncontrol = "tcp://0.0.0.0:7410"\nadvertise = "10.0.0.5"\nnodes = 2\n'
        f'engines = ["http://a:30000", "http://b:30000/"]\nadmin_key_file = "{tmp_path / "key"}"\n'
        'pause_mode = "abort"\n[deadlines]\njoin = 5\n'
    )
    config = load_config(file)
    assert (config.job, config.nodes_needed, config.deadlines.join) == ("qwen-rl.1", 2, 5.0)
    assert config.deadlines.bucket_seconds(100_000_000) == 62.0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('jobb = "x"', "jobb"),
        ('nodes = "two"', "nodes"),
        ("nodes = -1", "nodes is -1"),
        ('job = ".."', "job is '..'"),
        ('job = "a/b"', "job is 'a/b'"),
        ('job = ""', "job is ''"),
        ('backend = "mpi"', "backend is 'mpi'"),
        ('control = "ipc:///x"', "control is 'ipc:///x'"),
        ('pause_mode = "gently"', "pause_mode"),
        ('engines = ["10.0.0.1:30000"]', "10.0.0.1:30000"),
        ('engines = ["http://a:1", "http://a:1/"]', "a:1 twice"),
        ('admin_key_file = "/nowhere/key"', "/nowhere/key"),
        ("[deadlines]\njoin = 0", "deadlines.join is 0"),
        ("[deadlines]\njion = 1", "jion"),
        ("job = ", "TOML"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "b.toml"
    file.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        load_config(file)
    assert named in str(caught.value) and str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")
