"""Starting a broadcaster as a child of trainer rank 0, and ending it with it.

The child is a process of its own (`python -m weightcast.broadcaster --config FILE`), never an import: its
control loop must not share an interpreter lock with the training. It is told by the kernel when its
parent dies, however the parent dies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec

from ..proto.config import BroadcasterConfig, check_config, read_announcement
from ..proto.errors import BroadcasterUnavailable

#: How long a broadcaster may take until it announces itself, seconds. Its source imports torch meanwhile.
START_SECONDS = 60.0
#: How long it may take to end after SIGTERM before it is killed, seconds.
END_SECONDS = 20.0
_LOOK_SECONDS = 0.02
_LOG_TAIL_BYTES = 2000

# Not between fork and exec: a training process has threads that may hold any lock at that moment.
_CHILD = (
    "import runpy, signal, sys; "
    "from weightcast.proto.lifeline import end_with_parent; "
    "end_with_parent(int(sys.argv.pop(1)), by=signal.SIGTERM); "
    "runpy.run_module('weightcast.broadcaster', run_name='__main__', alter_sys=True)"
)


class ChildBroadcaster:
    """A broadcaster that runs as long as this object is open.

    Its configuration, its log (``broadcaster.log``) and its sockets are in the run directory.

    Raises:
        InvalidConfig: for a configuration that no broadcaster would take.
        BroadcasterUnavailable: if it ends at once (with the end of its log) or does not announce itself.
    """

    def __init__(self, config: BroadcasterConfig) -> None:
        check_config(config)
        self.run_dir = config.run_path
        self.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self.run_dir / f"config-{os.getpid()}.toml"
        file.write_text(to_toml(msgspec.structs.replace(config, run_dir=str(self.run_dir))), encoding="utf-8")
        self._file = file
        self._log = self.run_dir / "broadcaster.log"
        self._child = self._start()
        try:
            self._await_announcement()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the child: politely, then for good. Safe to call twice."""
        if self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait(END_SECONDS)
        self._file.unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        started = threading.Event()
        children: list[subprocess.Popen[bytes]] = []
        failures: list[OSError] = []

        # The parent-death signal follows the *thread* that forked. This one lives as long as the child.
        def run() -> None:
            try:
                with self._log.open("ab") as log:
                    child = subprocess.Popen(
                        [sys.executable, "-c", _CHILD, str(os.getpid()), "--config", str(self._file)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
            except OSError as error:
                failures.append(error)
                started.set()
                return
            children.append(child)
            started.set()
            child.wait()

        threading.Thread(target=run, name="weightcast-broadcaster", daemon=True).start()
        if not started.wait(START_SECONDS) or not children:
            reason = failures[0] if failures else f"no process within {START_SECONDS:.0f} s"
            raise BroadcasterUnavailable(f"the broadcaster could not be started: {reason}")
        return children[0]

    def _await_announcement(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            announcement = read_announcement(self.run_dir)
            if announcement is not None and announcement.pid == self._child.pid:
                return
            try:
                status = self._child.wait(_LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                status = None
            if status is not None:
                raise BroadcasterUnavailable(
                    f"the broadcaster ended at its start with {_say_status(status)}. "
                    f"The end of {self._log}:\n{self._log_tail()}"
                )
            if time.monotonic() > deadline:
                raise BroadcasterUnavailable(
                    f"the broadcaster did not announce itself in {self.run_dir} within "
                    f"{START_SECONDS:.0f} s. The end of {self._log}:\n{self._log_tail()}"
                )

    def _log_tail(self) -> str:
        data = self._log.read_bytes() if self._log.exists() else b""
        return data[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty)"


def _say_status(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def to_toml(config: BroadcasterConfig) -> str:
    """The configuration as the TOML that `load_config` reads. Fields at their defaults are left out."""
    lines, tables = [], []
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        if isinstance(value, msgspec.Struct):
            inner = [f"{name} = {_toml_value(item)}" for name, item in msgspec.structs.asdict(value).items()]
            tables.append("\n".join([f"[{field.name}]", *inner]))
        else:
            lines.append(f"{field.name} = {_toml_value(value)}")
    return "\n".join([*lines, *tables, ""])


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    # A JSON string is a TOML basic string, as long as characters stand for themselves.
    return json.dumps(str(value), ensure_ascii=False)
