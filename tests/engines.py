"""Engines for tests: start a reference engine or a real SGLang server, wait until it serves, always end it.

SGLang runs from another environment (see ``tests/sglang_cpu``): its Python is named by the environment
variable ``WEIGHTCAST_SGLANG_PYTHON``.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from weightcast.proto.lifeline import end_with_parent

#: Where CPU processes on one machine find each other, whatever the host's name resolves to.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
REFERENCE_START_SECONDS = 60.0
SGLANG_START_SECONDS = 600.0
_SGLANG_READY = "The server is fired up and ready to roll!"


@dataclass(frozen=True)
class Reply:
    """An HTTP answer: status, and the body as JSON where it is JSON, else as text."""

    status: int
    body: Any


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A running server. ``pid`` is the HTTP process; ``rank_pids`` are known for reference engines."""

    kind: str
    url: str
    model: Path
    tp_size: int
    pid: int
    log: Path
    rank_pids: tuple[int, ...] = ()
    admin_key: str | None = None
    user_key: str | None = None

    def open(
        self,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        method: str = "POST",
        timeout: float = 60,
    ) -> Any:
        """The raw response, to be closed by the caller; raises `urllib.error.HTTPError` above 399."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, method=method)
        request.add_header("Content-Type", "application/json")
        if key is not None:
            request.add_header("Authorization", f"Bearer {key}")
        return urllib.request.urlopen(request, timeout=timeout)

    def request(self, path: str, body: Any = None, **how: Any) -> Reply:
        """One whole exchange."""
        try:
            with self.open(path, body, **how) as response:
                return Reply(response.status, _decoded(response.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, _decoded(error.read()))

    def post(self, path: str, timeout: float = 60, /, **body: Any) -> Reply:
        """An administrative call."""
        return self.request(path, body, key=self.admin_key, timeout=timeout)

    def get(self, path: str, timeout: float = 60) -> Reply:
        """A question that the user key answers."""
        return self.request(path, key=self.user_key, method="GET", timeout=timeout)

    def generate(
        self, input_ids: Sequence[int], *, max_new_tokens: int = 12, timeout: float = 60
    ) -> dict[str, Any]:
        """Greedy output, whatever ends a text ignored; the whole body."""
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(input_ids), "sampling_params": sampling}
        reply = self.request("/generate", body, key=self.user_key, timeout=timeout)
        assert reply.status == 200, reply
        return reply.body

    def output_ids(self, input_ids: Sequence[int], *, max_new_tokens: int = 12) -> list[int]:
        """Greedy output tokens."""
        return self.generate(input_ids, max_new_tokens=max_new_tokens)["output_ids"]

    @property
    def label(self) -> str:
        """The weight version that the engine shows."""
        return self.get("/model_info").body["weight_version"]

    def checksums(self) -> list[dict[str, str]]:
        """Per rank, the checksum of every parameter."""
        reply = self.post("/weights_checker", action="checksum")
        assert reply.status == 200, reply
        return [rank["checksums"] for rank in reply.body["ranks"]]


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode()


@dataclass
class _Started:
    process: subprocess.Popen[str]
    log: Path
    lines: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)

    def drain(self) -> None:
        """Copy output to the log and to whoever waits for a line; runs in a thread until the output ends."""
        assert self.process.stdout is not None
        with self.log.open("a") as log, self.process.stdout as output:
            for line in output:
                log.write(line)
                log.flush()
                self.lines.put(line)
        self.lines.put(None)

    def wait_for_line(self, part: str, seconds: float) -> str:
        """The first line that contains ``part``."""
        deadline = threading.Event()
        timer = threading.Timer(seconds, lambda: (deadline.set(), self.lines.put("")))
        timer.start()
        try:
            while not deadline.is_set():
                line = self.lines.get()
                if line is None:
                    raise AssertionError(
                        f"the engine ended before it was ready:\n{self.log.read_text()[-4000:]}"
                    )
                if part in line:
                    return line
            raise AssertionError(f"not ready after {seconds:.0f} s:\n{self.log.read_text()[-4000:]}")
        finally:
            timer.cancel()


@contextmanager
def _started(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[_Started]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **LOOPBACK, **environment},
        start_new_session=True,
        # A test run that is killed must not leave servers behind.
        preexec_fn=functools.partial(end_with_parent, os.getpid()),
    )
    started = _Started(process, log)
    reader = threading.Thread(target=started.drain, daemon=True)
    reader.start()
    try:
        yield started
    finally:
        end_process_tree(process.pid)
        process.wait(timeout=30)
        reader.join(timeout=30)


def end_process_tree(pid: int) -> None:
    """Kill a process and all that descend from it, frozen and blocked ones too."""
    try:
        root = psutil.Process(pid)
        family = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs([process for process in family if process.pid != pid], timeout=30)


@contextmanager
def reference_engine(
    model: Path,
    log_dir: Path,
    *,
    tp_size: int = 1,
    admin_key: str | None = None,
    user_key: str | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """A reference engine on a free port of the loopback interface."""
    command = [sys.executable, "-m", "weightcast.rollout_node.reference", "--model-path", str(model)]
    command += ["--port", "0", "--tp", str(tp_size), *arguments]
    for option, key in (("admin-api-key", admin_key), ("api-key", user_key)):
        if key is not None:
            path = log_dir / f"{option}.txt"
            path.write_text(f"{key}\n")
            command += [f"--{option}-file", str(path)]
    with _started(command, environment or {}, log_dir / f"reference-tp{tp_size}.log") as started:
        ready = json.loads(started.wait_for_line('{"url":', REFERENCE_START_SECONDS))
        yield Engine(
            kind="reference",
            url=ready["url"],
            model=model,
            tp_size=tp_size,
            pid=ready["pid"],
            log=started.log,
            rank_pids=tuple(ready["pids"].values()),
            admin_key=admin_key,
            user_key=user_key,
        )


def sglang_python() -> str:
    """The Python that has SGLang; an error that says how to get one if there is none."""
    path = os.environ.get("WEIGHTCAST_SGLANG_PYTHON")
    if not path or not Path(path).exists():
        raise RuntimeError(
            f"WEIGHTCAST_SGLANG_PYTHON is {path!r}; `make test-sglang` installs SGLang and sets it"
        )
    return path


@contextmanager
def sglang_engine(
    model: Path,
    log_dir: Path,
    *,
    tp_size: int = 1,
    dtype: str = "auto",
    admin_key: str | None = None,
    user_key: str | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[Engine]:
    """A real SGLang server on the CPU, on a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sglang_python(), "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port), "--tp", str(tp_size)]
    command += ["--attention-backend", "torch_native", "--max-total-tokens", "4096"]
    command += ["--skip-tokenizer-init", "--dtype", dtype, *arguments]
    for option, key in (("--admin-api-key", admin_key), ("--api-key", user_key)):
        command += [] if key is None else [option, key]
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if tp_size > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(tp_size))
    with _started(command, environment, log_dir / f"sglang-tp{tp_size}.log") as started:
        started.wait_for_line(_SGLANG_READY, SGLANG_START_SECONDS)
        yield Engine(
            kind="sglang",
            url=f"http://127.0.0.1:{port}",
            model=model,
            tp_size=tp_size,
            pid=started.process.pid,
            log=started.log,
            admin_key=admin_key,
            user_key=user_key,
        )
