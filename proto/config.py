"""The broadcaster's configuration: one schema, read from TOML, shared by those who start one.

job = "qwen-rl"
control = "tcp://0.0.0.0:7410"       # where agents connect
advertise = "10.0.0.5"               # the address by which rollout hosts reach this one
http = "127.0.0.1:7411"              # /metrics and /status
engines = ["http://10.0.1.1:30000"]  # plain SGLang servers without an agent

[deadlines]
join = 120.0
"""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from .errors import InvalidConfig
from .keys import read_key
from .messages import PauseMode

#: Default TCP port of the broadcaster's control socket.
DEFAULT_CONTROL_PORT = 7410
#: Default TCP port of its metrics and status.
DEFAULT_HTTP_PORT = 7411


class Deadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every wait of a refit, in seconds. Library time-outs are never trusted with any of them."""

    #: Registering enough nodes before a refit is refused.
    nodes: float = 60.0
    #: Checking the layout against one engine.
    propose: float = 60.0
    #: Everybody joining a new weights update group.
    join: float = 120.0
    #: From the trainer's RefitBegin to its first bucket, and from a credit to the next bucket.
    pack: float = 300.0
    #: Pausing one engine and opening its session.
    prepare: float = 60.0
    #: One bucket: this plus its bytes / `lowest_rate`.
    bucket: float = 60.0
    #: Lowest wire rate accepted, bytes per second.
    lowest_rate: float = 50e6
    #: Ending the session, flushing and checking.
    finish: float = 300.0
    #: Labelling and resuming; also aborting and leaving.
    release: float = 60.0
    #: Silence after which an agent is lost. Agents send five times as often.
    heartbeat: float = 10.0
    #: The whole refit.
    refit: float = 1800.0

    def bucket_seconds(self, nbytes: int) -> float:
        """Deadline of one bucket of ``nbytes`` bytes."""
        return self.bucket + nbytes / self.lowest_rate


class BroadcasterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a broadcaster runs. Every field has a default that works on one machine."""

    #: Name of the training job; part of every message and group name.
    job: str = "weightcast"
    #: ZeroMQ endpoint for node agents. Port 0 takes a free one.
    control: str = f"tcp://127.0.0.1:{DEFAULT_CONTROL_PORT}"
    #: host:port of /metrics and /status. Port 0 takes a free one.
    http: str = f"127.0.0.1:{DEFAULT_HTTP_PORT}"
    #: Address by which rollout hosts reach this one (the rendezvous store listens there).
    advertise: str = "127.0.0.1"
    #: Directory of local sockets; default: one per user and job.
    run_dir: str = ""
    #: "nccl", "gloo" or "auto" (nccl where the source has a GPU).
    backend: str = "auto"
    #: Rollout nodes that must be registered before a refit starts. 0: as many as `engines`, at least 1.
    nodes: int = 0
    #: SGLang servers without an agent of their own; the broadcaster hosts one for each.
    engines: tuple[str, ...] = ()
    #: File whose first line is the admin key of those servers.
    admin_key_file: str = ""
    pause_mode: PauseMode = PauseMode.RETRACT
    #: Accept a node that nothing can prove to hold the trainer's bytes (a lone GPU server).
    allow_unproven: bool = False
    deadlines: Deadlines = Deadlines()

    @property
    def run_path(self) -> Path:
        """The run directory as a path."""
        return Path(self.run_dir) if self.run_dir else default_run_dir(self.job)

    @property
    def nodes_needed(self) -> int:
        """Nodes that must be registered before a refit starts."""
        return self.nodes or max(1, len(self.engines))


def check_engine_url(url: str) -> str:
    """Return ``url`` without a trailing slash if it can name an engine.

    Raises:
        InvalidConfig: naming the URL and what is wrong with it.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidConfig(f"engine URL {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidConfig(f"engine URL {url!r} must look like http://HOST:PORT")
    if parts.username or parts.password:
        raise InvalidConfig("an engine URL must not hold a password; give keys in a file")
    if port is None and parts.scheme == "http":
        raise InvalidConfig(f"engine URL {url!r} has no port; SGLang's default is 30000")
    if parts.query or parts.fragment:
        raise InvalidConfig(f"engine URL {url!r} must end after its host, port and path prefix")
    return url.rstrip("/")


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What a running broadcaster writes to ``broadcaster.json`` in its run directory."""

    pid: int
    job: str
    control: str
    http: str
    trainer: str


def default_run_dir(job: str) -> Path:
    """Where a job's broadcaster keeps its local sockets when nothing else is said."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"{tempfile.gettempdir()}/weightcast-{os.getuid()}"
    return Path(base) / "weightcast" / job


def read_announcement(run_dir: Path) -> Announcement | None:
    """The announcement of the broadcaster in ``run_dir``, or None if there is none."""
    try:
        return msgspec.json.decode((run_dir / "broadcaster.json").read_bytes(), type=Announcement)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def load_config(path: Path) -> BroadcasterConfig:
    """Read a configuration file.

    Raises:
        InvalidConfig: naming the file and the field.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"{path} is not TOML: {error}") from error
    try:
        return check_config(msgspec.convert(raw, BroadcasterConfig))
    except (msgspec.ValidationError, InvalidConfig) as error:
        raise InvalidConfig(f"{path}: {error}") from error


def check_config(config: BroadcasterConfig) -> BroadcasterConfig:
    """Return ``config`` if its values make sense together.

    Raises:
        InvalidConfig: naming the field, its value and the consequence.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.job):
        raise InvalidConfig(
            f"job is {config.job!r}; it becomes part of group and file names: begin with a letter or digit "
            "and use letters, digits, '-', '_' and '.'"
        )
    if config.backend not in ("auto", "nccl", "gloo"):
        raise InvalidConfig(f"backend is {config.backend!r}; it must be auto, nccl or gloo")
    if not config.control.startswith("tcp://"):
        raise InvalidConfig(f"control is {config.control!r}; it must be tcp://HOST:PORT")
    for name in Deadlines.__struct_fields__:
        if getattr(config.deadlines, name) <= 0:
            raise InvalidConfig(f"deadlines.{name} is {getattr(config.deadlines, name)}; it must be above 0")
    if config.nodes < 0:
        raise InvalidConfig(f"nodes is {config.nodes}; it must not be negative")
    hosts = [urlsplit(check_engine_url(url)).netloc for url in config.engines]
    if twice := next((host for host in hosts if hosts.count(host) > 1), None):
        raise InvalidConfig(f"engines names {twice} twice")
    read_key(Path(config.admin_key_file) if config.admin_key_file else None)
    return config
