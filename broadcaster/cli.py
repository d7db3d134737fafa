"""``weightcast broadcaster`` and ``weightcast status``."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from ..proto.config import BroadcasterConfig, default_run_dir, load_config, read_announcement
from ..proto.errors import BroadcasterUnavailable
from .status import Status

_STATUS_SECONDS = 5.0
_COLOURS = {"ready": "green", "quarantined": "red", "lost": "red", "refitting": "yellow"}


def broadcaster(
    config: Path | None = None,
    *,
    job: str | None = None,
    control: str | None = None,
    http: str | None = None,
    advertise: str | None = None,
    run_dir: str | None = None,
    engine: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    nodes: int | None = None,
) -> None:
    """Run the broadcaster of one training job, on the trainer's host.

    Parameters
    ----------
    config
        TOML file; see README. The options below override it.
    job
        Name of the training job.
    control
        Where node agents connect, as tcp://HOST:PORT.
    http
        HOST:PORT of /metrics and /status.
    advertise
        Address by which rollout hosts reach this one.
    run_dir
        Directory of the local sockets.
    engine
        URL of an SGLang server that has no agent; may be given again.
    nodes
        Rollout nodes that must be there before a refit starts.
    """
    from .control import serve  # the command line root imports this module for `status` too

    base = load_config(config) if config is not None else BroadcasterConfig()
    given = {
        "job": job,
        "control": control,
        "http": http,
        "advertise": advertise,
        "run_dir": run_dir,
        "engines": engine or None,
        "nodes": nodes,
    }
    serve(
        msgspec.structs.replace(base, **{name: value for name, value in given.items() if value is not None})
    )


def status(
    *,
    job: str = "weightcast",
    run_dir: Path | None = None,
    url: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Show the nodes of a running broadcaster, their versions and states.

    Parameters
    ----------
    job
        Name of the training job, to find its broadcaster on this machine.
    run_dir
        Its run directory, if not the default one.
    url
        Address of its HTTP port, as http://HOST:PORT, for one on another machine.
    json
        Print JSON.
    """
    found = ask_status(job=job, run_dir=run_dir, url=url)
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        _print_table(found)


def ask_status(*, job: str, run_dir: Path | None, url: str | None) -> Status:
    """Fetch the status of a broadcaster.

    Raises:
        BroadcasterUnavailable: none is announced, or it does not answer.
    """
    if url is None:
        directory = run_dir if run_dir is not None else default_run_dir(job)
        announcement = read_announcement(directory)
        if announcement is None:
            raise BroadcasterUnavailable(
                f"no broadcaster of job {job!r} is announced in {directory}; start one with "
                "`weightcast broadcaster`, or name it with --job, --run-dir or --url"
            )
        host, _, port = announcement.http.rpartition(":")
        url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"  # noqa: S104 - compared, not bound
    try:
        # No proxy: one set for the outside world would swallow a call to a host of our own.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url.rstrip('/')}/status", timeout=_STATUS_SECONDS) as answer:
            return msgspec.json.decode(answer.read(), type=Status)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise BroadcasterUnavailable(f"no broadcaster answers at {url}: {error}") from error


def _print_table(found: Status) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    trainer = f"trainer process {found.trainer}" if found.trainer is not None else "no trainer"
    console.print(f"[bold]{found.job}[/bold]  broadcaster {found.pid}, epoch {found.epoch}, {trainer}")
    if found.refit is not None:
        refit = found.refit
        console.print(
            f"refitting to version {refit.version}: {refit.phase} for {refit.phase_age:.1f} s, "
            f"bucket {refit.bucket} of {refit.buckets}, {refit.age:.1f} s in all"
        )
    elif found.last_report is not None:
        report = found.last_report
        cause = "" if report.cause is None else f": {report.cause.describe()}"
        outcome = "live" if report.ok else "failed"
        console.print(
            f"version {report.version} {outcome} after {report.seconds.total:.2f} s{cause}", markup=False
        )
    table = Table("node", "state", "version", "label", "engine", "tp")
    for column in table.columns:
        column.overflow = "fold"  # two nodes of one host differ at the end of their names
    for node in found.nodes:
        colour = _COLOURS.get(node.state, "default")
        version = "-" if node.version is None else str(node.version)
        table.add_row(
            node.name,
            f"[{colour}]{node.state}[/]",
            version,
            node.label,
            node.engine,
            str(node.tp),
        )
    console.print(table)
    for node in found.nodes:
        console.print(f"{node.name}: {node.url}, {node.doing}", markup=False, soft_wrap=True)
        if node.reason:
            console.print(f"  {node.reason}", markup=False, soft_wrap=True)
