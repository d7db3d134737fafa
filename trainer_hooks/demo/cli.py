"""`weightcast demo`: 2 trainer ranks, a broadcaster and 3 rollout nodes on this machine, 5 refits.

Nothing in it is a mock: the trainer really trains (FSDP2 on gloo), the servers really serve, and after
each refit every server's greedy output must equal the trainer's own and differ from the one before.
"""

from __future__ import annotations

import json as jsonlib
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column, Table

from ...proto.errors import InvalidConfig, WeightcastError
from ..sizes import parse_bytes
from .fleet import DemoFleet

#: Seconds one training round with its refit may take before the demo gives up on the trainer.
ROUND_SECONDS = 180.0
#: Refits side by side in one table.
_COLUMNS = 5


def demo(
    *,
    engine: Literal["reference", "sglang"] = "reference",
    sglang_python: Path | None = None,
    nodes: int = 3,
    tp: str = "1",
    trainer_ranks: int = 2,
    refits: int = 5,
    bucket_bytes: str = "512KiB",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Train a small decoder and refit a fleet of servers with it, on this machine.

    Args:
        engine: What serves: the reference engine, or SGLang itself.
        sglang_python: The Python interpreter that has sglang installed (for ``--engine sglang``).
        nodes: How many rollout nodes.
        tp: Tensor-parallel size of the servers: one number for all, or one each, as ``1,1,2``.
        trainer_ranks: How many trainer processes share the model.
        refits: How many refits.
        bucket_bytes: Bytes in one bucket, as 524288 or 512KiB; small, so that the small model takes several.
        json: Print one JSON object on stdout at the end; everything else goes to stderr.
    """
    for name, value in (("nodes", nodes), ("trainer-ranks", trainer_ranks), ("refits", refits)):
        if value < 1:
            raise InvalidConfig(f"--{name} is {value}; it must be at least 1")
    bucket_size = parse_bytes(bucket_bytes)
    sizes = parse_tp(tp, nodes=nodes)
    if engine == "sglang" and (sglang_python is None or not sglang_python.exists()):
        raise InvalidConfig(
            f"--engine sglang needs --sglang-python, a Python that has sglang; it is {sglang_python}"
        )
    # Ended from outside, it must still end what it started: SIGTERM unwinds like any other exit.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    console = Console(stderr=True)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weightcast-demo-") as folder:
        try:
            with DemoFleet(
                folder=Path(folder), engine=engine, sglang_python=sglang_python, tp_sizes=sizes
            ) as fleet:
                rounds = run_rounds(
                    fleet, console, ranks=trainer_ranks, refits=refits, bucket_bytes=bucket_size
                )
        except WeightcastError as error:
            console.print(f"weightcast demo: {error}", style="bold red", markup=False, soft_wrap=True)
            if json:
                sys.stdout.write(jsonlib.dumps(summarise(rounds, engine, nodes, error=str(error))) + "\n")
            sys.exit(1)
    summary = summarise(rounds, engine, nodes)
    show(console, rounds, summary)
    if json:
        sys.stdout.write(jsonlib.dumps(summary) + "\n")
    sys.exit(0 if summary["ok"] else 1)


def parse_tp(text: str, *, nodes: int) -> list[int]:
    """``"1"`` or ``"1,1,2"`` as one tensor-parallel size per node.

    Raises:
        InvalidConfig: if it is neither one number nor one per node, or a number is below 1.
    """
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) == 1:
        sizes *= nodes
    if len(sizes) != nodes or min(sizes) < 1:
        raise InvalidConfig(f"--tp is {text!r}; it must be one number, or {nodes} as in 1,1,2")
    return sizes


def run_rounds(
    fleet: DemoFleet, console: Console, *, ranks: int, refits: int, bucket_bytes: int
) -> list[dict[str, Any]]:
    """Start everything, then collect one event per refit from the trainer, judged."""
    rounds: list[dict[str, Any]] = []
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        bar = progress.add_task("starting servers", total=refits)
        for waiting in fleet.start():
            progress.update(bar, description=waiting)
        before = {url: fleet.ask_all(url) for url in fleet.urls}
        progress.update(bar, description="training")
        for event in fleet.train(
            ranks=ranks, refits=refits, bucket_bytes=bucket_bytes, seconds=ROUND_SECONDS
        ):
            event["matches"] = all(said == event["trainer"] for said in event["engines"].values())
            event["changed"] = all(said != before[url] for url, said in event["engines"].items())
            event["labelled"] = all(label == event["report"]["label"] for label in event["labels"].values())
            before = event["engines"]
            rounds.append(event)
            progress.update(bar, advance=1, description=f"loss {event['loss']:.2f}  {event['text'][:28]!r}")
    return rounds


def summarise(
    rounds: list[dict[str, Any]], engine: str, nodes: int, *, error: str | None = None
) -> dict[str, Any]:
    """The demo's JSON object: `ok` only if every refit was verified and every output was right."""
    summary: dict[str, Any] = {
        "ok": error is None
        and bool(rounds)
        and all(
            event["report"]["ok"] and event["matches"] and event["changed"] and event["labelled"]
            for event in rounds
        ),
        "engine": engine,
        "nodes": nodes,
        "refits": [
            {
                "version": event["report"]["version"],
                "label": event["report"]["label"],
                "bytes": event["report"]["bytes"],
                "buckets": event["report"]["buckets"],
                "seconds": {name: round(s, 6) for name, s in event["report"]["seconds"].items()},
                "wire_rate": event["report"]["wire_rate"],
                "output": {"matches_trainer": event["matches"], "changed": event["changed"]},
                "nodes": {
                    name: {key: node[key] for key in ("outcome", "version", "digest")}
                    for name, node in event["report"]["nodes"].items()
                },
            }
            for event in rounds
        ],
    }
    if error is not None:
        summary["error"] = error
    return summary


def show(console: Console, rounds: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """A table of phases and rates, and the verdict."""
    phases = ("gather", "pack", "join", "pause", "wire", "load", "flush", "verify", "resume", "total")
    for start in range(0, len(rounds), _COLUMNS):
        shown = rounds[start : start + _COLUMNS]
        reports = [event["report"] for event in shown]
        title = f"{len(rounds)} refits of {summary['nodes']} {summary['engine']} nodes"
        table = Table(Column("version", no_wrap=True), title=title)
        for report in reports:
            table.add_column(str(report["version"]), justify="right")
        table.add_row("bytes", *(f"{report['bytes']:,}" for report in reports))
        table.add_row("buckets", *(str(report["buckets"]) for report in reports), end_section=True)
        for phase in phases:
            table.add_row(f"{phase} (ms)", *(f"{report['seconds'][phase] * 1e3:.0f}" for report in reports))
        rates = (f"{report['wire_rate'] / 1e6:.0f}" for report in reports)
        table.add_row("wire (MB/s)", *rates, end_section=True)
        table.add_row("nodes ready", *(_say_ready(report["nodes"]) for report in reports))
        table.add_row("output", *(_say_output(event) for event in shown))
        console.print(table)
    if summary["ok"]:
        console.print(
            "every server holds the trainer's bytes and says what the trainer says", style="bold green"
        )
    else:
        console.print("the demo did not show what it should; see the table", style="bold red")


def _say_ready(nodes: dict[str, Any]) -> str:
    ready = [node for node in nodes.values() if node["outcome"] == "ready"]
    return f"{len(ready)}/{len(nodes)} " + "/".join(sorted({node["digest"] for node in ready}))


def _say_output(event: dict[str, Any]) -> str:
    new = "new" if event["changed"] else "UNCHANGED"
    return f"{new}, " + ("= trainer" if event["matches"] else "DIFFERS")
