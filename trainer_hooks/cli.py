"""``weightcast push``: refit a fleet from a checkpoint folder, with no trainer."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from ..proto.config import BroadcasterConfig, Deadlines, default_run_dir
from ..proto.errors import (
    BroadcasterUnavailable,
    Cause,
    InvalidConfig,
    RefitFailed,
    RefitRejected,
    WeightcastError,
)
from ..proto.messages import RefitReport
from .checkpoint import Checkpoint
from .push import push_checkpoint
from .rank0 import Rank0
from .sizes import parse_bytes

#: Exit statuses.
OK, FAILED, UNUSABLE = 0, 1, 2


def push(
    checkpoint: Path,
    /,
    *,
    engine: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    admin_key_file: Path | None = None,
    job: str = "weightcast",
    run_dir: Path | None = None,
    wait: float = 60.0,
    step: int = 1,
    label: str | None = None,
    bucket_bytes: str = "256MiB",
    slots: int = 2,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Send a Hugging Face folder of safetensors to running SGLang servers.

    Parameters
    ----------
    checkpoint
        Folder with model.safetensors, or with model.safetensors.index.json and its shards.
    engine
        URL of a plain SGLang server; may be given several times. A broadcaster is then started for them
        and ended afterwards. Without it, the job's running broadcaster is used.
    admin_key_file
        File whose first line is the servers' admin key.
    job
        Job of the running broadcaster.
    run_dir
        Run directory of the running broadcaster, if it is not the job's default.
    wait
        Seconds to wait for the servers named with --engine to answer.
    step
        Version number of these weights.
    label
        What the servers show as their weight version.
    bucket_bytes
        Bytes per bucket, as 268435456 or 256MiB.
    slots
        Buckets in host memory at a time.
    json
        Print the report as one JSON object on stdout.

    Exit status: 0 if every node holds the weights, 1 if the refit failed, 2 if it could not be tried.
    """
    console = Console(stderr=True)
    report: RefitReport | None = None
    cause: Cause | None = None
    status = OK
    try:
        with contextlib.ExitStack() as stack:
            opened = stack.enter_context(Checkpoint(checkpoint))
            launch = None
            if engine:
                run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightcast-")))
                launch = broadcaster_for(engine, admin_key_file=admin_key_file, job=job, wait=wait)
            elif admin_key_file is not None:
                raise InvalidConfig(
                    "--admin-key-file needs --engine; a running broadcaster has keys of its own"
                )
            if slots < 1:
                raise InvalidConfig(f"--slots is {slots}; it must be at least 1")
            root = Rank0(job, run_dir or default_run_dir(job), 1, slots, parse_bytes(bucket_bytes))
            stack.callback(root.close)
            root.connect(launch)
            report = _refit(root, opened, step=step, label=label, console=console)
    except RefitFailed as error:
        status, cause = FAILED, error.cause
        report = error.report if isinstance(error.report, RefitReport) else None
    except (BroadcasterUnavailable, InvalidConfig, RefitRejected, WeightcastError) as error:
        status, cause = UNUSABLE, error.cause
    _show(console, report, cause)
    if json:
        sys.stdout.buffer.write(msgspec.json.encode(as_json(report, cause)) + b"\n")
        sys.stdout.buffer.flush()
    raise SystemExit(status)


def broadcaster_for(
    engines: tuple[str, ...], *, admin_key_file: Path | None, job: str, wait: float
) -> BroadcasterConfig:
    """A broadcaster's configuration for plain servers, on free ports, at the address they can reach."""
    return BroadcasterConfig(
        job=job,
        control="tcp://127.0.0.1:0",
        http="127.0.0.1:0",
        advertise=address_towards(engines[0]),
        engines=engines,
        admin_key_file="" if admin_key_file is None else str(admin_key_file.absolute()),
        deadlines=Deadlines(nodes=wait),
    )


def address_towards(url: str) -> str:
    """This host's address on the route to a URL's host (no packet is sent).

    Raises:
        InvalidConfig: if the URL has no host, or no route leads there.
    """
    host = urlsplit(url).hostname
    if not host:
        raise InvalidConfig(f"--engine {url!r} is no URL; give it as http://HOST:PORT")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidConfig(f"no way leads to --engine {url}: {error}") from error


def as_json(report: RefitReport | None, cause: Cause | None) -> dict[str, Any]:
    """The report as plain values; without one, just ``ok`` and the cause."""
    found: dict[str, Any] = {"ok": False} if report is None else msgspec.to_builtins(report)
    if cause is not None:
        found["cause"] = msgspec.to_builtins(cause)
    return found


def _refit(root: Rank0, opened: Checkpoint, *, step: int, label: str | None, console: Console) -> RefitReport:
    with Progress(
        TextColumn("packed"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task("packed", total=opened.nbytes)
        return push_checkpoint(
            opened,
            root,
            step=step,
            label=label or f"{step}-{root.incarnation}",
            packed=lambda nbytes: progress.advance(bar, nbytes),
        )


def _show(console: Console, report: RefitReport | None, cause: Cause | None) -> None:
    if report is not None and report.nodes:
        table = Table(title=f"version {report.version}, label {report.label}")
        for heading in ("node", "outcome", "digest", "paused s", "evidence"):
            table.add_column(heading)
        for name, node in report.nodes.items():
            said = node.evidence if node.cause is None else node.cause.describe()
            table.add_row(name, node.outcome, node.digest, f"{node.pause_seconds:.2f}", said)
        console.print(table)
        seconds = report.seconds
        console.print(
            f"{decimal(report.bytes)}, {report.tensors} tensors, {report.buckets} buckets in "
            f"{seconds.total:.2f} s (join {seconds.join:.2f}, pack {seconds.pack:.2f}, "
            f"wire {seconds.wire:.2f}, load {seconds.load:.2f}, verify {seconds.verify:.2f}); wire "
            f"{decimal(round(report.wire_rate))}/s",
            soft_wrap=True,
        )
    if cause is not None:
        console.print(f"weightcast push: {cause.describe()}", style="red", markup=False, soft_wrap=True)
