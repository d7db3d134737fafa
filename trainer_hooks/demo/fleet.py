"""The demo's processes: a broadcaster, one agent with its engine per node, and the trainer ranks.

Each is started as a user would start it, from its command line, and ended on every path out.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ...proto.errors import WeightcastError
from ...proto.lifeline import end_with_parent
from .prompts import PROMPTS, ask_engine, tokens_of

#: Seconds until the broadcaster announces itself, and until all nodes are registered.
BROADCASTER_SECONDS = 60.0
NODES_SECONDS = 420.0
#: Seconds a process may take to end in good order before it is killed.
GRACE_SECONDS = 10.0
_LOG_LINES = 12


class DemoFailed(WeightcastError):
    """A process of the demo ended or did not come up; the message carries the end of its log."""


class DemoFleet:
    """Starts the demo's processes on `start` and `train`, and ends them all on exit."""

    def __init__(self, *, folder: Path, engine: str, sglang_python: Path | None, tp_sizes: list[int]) -> None:
        self._folder = folder
        self._engine = engine
        self._sglang_python = sglang_python
        self._tp_sizes = tp_sizes
        self._run_dir = folder / "run"
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in tp_sizes]
        #: Everything is on loopback, and several processes share few cores.
        self._env = os.environ | {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }

    def __enter__(self) -> DemoFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Trainers first, servers last: the order in which each still has its peers to say goodbye to.
        children = list(reversed(self._children.values()))
        for child in children:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for child in children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # The whole group: an engine's workers must not outlive a demo that was in a hurry.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        for child in children:
            if child.stdout:
                child.stdout.close()

    def start(self) -> Iterator[str]:
        """Write the first model, start broadcaster and nodes; yields what is being waited for.

        Raises:
            DemoFailed: if a process ends or a deadline passes, with the end of its log.
        """
        model = self._folder / "model"
        yield "writing the first model"
        self._run_once(
            "init", [sys.executable, "-m", "weightcast.trainer_hooks.demo.train", "init", "--out", str(model)]
        )
        config = self._folder / "broadcaster.toml"
        config.write_text(
            f'job = "demo"\ncontrol = "tcp://127.0.0.1:0"\nhttp = "127.0.0.1:0"\nbackend = "gloo"\n'
            f'run_dir = "{self._run_dir}"\nnodes = {len(self.urls)}\n',
            encoding="utf-8",
        )
        yield "starting the broadcaster"
        self._spawn("broadcaster", [sys.executable, "-m", "weightcast.broadcaster", "--config", str(config)])
        announced = json.loads(self._read_line("broadcaster", seconds=BROADCASTER_SECONDS))
        for number, (url, tp) in enumerate(zip(self.urls, self._tp_sizes, strict=True)):
            # SGLang on CPU asks which cores each rank may use; one each is enough for a demo.
            cores = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(tp))
            self._spawn(
                f"node-{number}",
                [
                    sys.executable, "-m", "weightcast.rollout_node",
                    "--name", f"node-{number}", "--job", "demo",
                    "--engine", url, "--broadcaster", announced["control"],
                    "--launch", *self._engine_command(model, url, tp),
                ],
                **({"SGLANG_CPU_OMP_THREADS_BIND": cores} if tp > 1 else {}),
            )  # fmt: skip
        yield from self._wait_for_nodes(announced["http"])

    def train(
        self, *, ranks: int, refits: int, bucket_bytes: int, seconds: float
    ) -> Iterator[dict[str, Any]]:
        """Run the trainer ranks; yields rank 0's event after each refit.

        Raises:
            DemoFailed: if a rank ends early or is silent for ``seconds``.
        """
        port = free_port()
        for rank in range(ranks):
            self._spawn(
                f"trainer-{rank}",
                [
                    sys.executable, "-m", "weightcast.trainer_hooks.demo.train", "train",
                    "--run-dir", str(self._run_dir), "--refits", str(refits),
                    "--bucket-bytes", str(bucket_bytes), "--engines", *self.urls,
                ],
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )  # fmt: skip
        for _ in range(refits):
            yield json.loads(self._read_line("trainer-0", seconds=seconds))
        for rank in range(ranks):
            if (status := self._children[f"trainer-{rank}"].wait(seconds)) != 0:
                raise self._failed(f"trainer-{rank}", f"ended with status {status}")

    def ask_all(self, url: str) -> list[list[int]]:
        """What the engine at ``url`` says to each of the demo's prompts now."""
        return [ask_engine(url, tokens_of(prompt))["output_ids"] for prompt in PROMPTS]

    def _engine_command(self, model: Path, url: str, tp: int) -> list[str]:
        port = url.rsplit(":", 1)[1]
        common = ["--model-path", str(model), "--host", "127.0.0.1", "--port", port, "--tp", str(tp)]
        if self._engine == "reference":
            return [sys.executable, "-m", "weightcast.rollout_node.reference", *common]
        # float32 on both sides: greedy tokens can then be compared with the trainer's, token by token.
        return [
            str(self._sglang_python), "-m", "sglang.launch_server", *common,
            "--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init",
            "--attention-backend", "torch_native", "--max-total-tokens", "4096",
        ]  # fmt: skip

    def _wait_for_nodes(self, http: str) -> Iterator[str]:
        deadline = time.monotonic() + NODES_SECONDS
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            self._check_children()
            try:
                with opener.open(f"http://{http}/status", timeout=5) as answer:
                    nodes = json.load(answer)["nodes"]
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                nodes = []
            registered = sum(node["state"] not in ("joining", "lost") for node in nodes)
            if registered == len(self.urls):
                return
            yield f"servers ready: {registered} of {len(self.urls)}"
            if time.monotonic() > deadline:
                raise self._failed(
                    f"node-{registered}", f"not all nodes registered within {NODES_SECONDS:.0f} s"
                )
            time.sleep(0.2)

    def _run_once(self, name: str, command: list[str]) -> None:
        self._spawn(name, command)
        if (status := self._children[name].wait(BROADCASTER_SECONDS)) != 0:
            raise self._failed(name, f"ended with status {status}")

    def _spawn(self, name: str, command: list[str], **extra: str) -> None:
        with self._log(name).open("wb") as log:
            self._children[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if name in ("broadcaster", "trainer-0") else log,
                stderr=log,
                env=self._env | extra,
                start_new_session=True,
                preexec_fn=functools.partial(end_with_parent, os.getpid(), by=signal.SIGTERM),
            )

    def _read_line(self, name: str, *, seconds: float) -> bytes:
        pipe: IO[bytes] | None = self._children[name].stdout
        if pipe is None:
            raise DemoFailed(f"{name} has no output to read")
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not selector.select(timeout=0.5):
                self._check_children()
                if time.monotonic() > deadline:
                    raise self._failed(name, f"said nothing for {seconds:.0f} s")
        line = pipe.readline()
        if not line:
            status = self._children[name].wait(GRACE_SECONDS)
            raise self._failed(name, f"ended with status {status}")
        return line

    def _check_children(self) -> None:
        for name, child in self._children.items():
            if child.poll() not in (None, 0):
                raise self._failed(name, f"ended with status {child.returncode}")

    def _failed(self, name: str, what: str) -> DemoFailed:
        lines = self._log(name).read_text("utf-8", "replace").splitlines() if self._log(name).exists() else []
        return DemoFailed(f"{name} {what}\n" + "\n".join(f"  {line}" for line in lines[-_LOG_LINES:]))

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def free_port() -> int:
    """A port that was free a moment ago, for a server that cannot tell which one it took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
