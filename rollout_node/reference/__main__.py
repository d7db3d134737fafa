"""Start a reference engine; one JSON line on stdout when it is ready, everything else on stderr.

python -m weightcast.rollout_node.reference --model-path DIR --host 127.0.0.1 --port 0 --tp 1
{"url": "http://127.0.0.1:40173", "pid": 4711, "pids": {"0": 4712}}
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
from aiohttp import web

from ...proto.errors import AddressInUse, WeightcastError
from ...proto.keys import read_key
from .faults import KINDS, Fault, FaultTable
from .front import EngineFront
from .http import build_app
from .ranks import Ranks
from .sharding import check_tp, read_config


class Options(argparse.Namespace):
    """The command line."""

    model_path: Path
    host: str
    port: int
    tp: int
    device: str
    api_key_file: Path | None
    admin_api_key_file: Path | None
    fault: list[Fault]


def parse_options(arguments: list[str]) -> Options:
    """Read the command line; ends the process with a usage message if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m weightcast.rollout_node.reference", description=__doc__)
    parser.add_argument(
        "--model-path", type=Path, required=True, help="Hugging Face folder of a Llama decoder"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, one process each")
    parser.add_argument("--device", default="cpu", help="cpu, cuda (one GPU per rank) or cuda:N (all on one)")
    parser.add_argument("--api-key-file", type=Path, help="first line: the key for /generate and infos")
    parser.add_argument("--admin-api-key-file", type=Path, help="first line: the key for all else")
    parser.add_argument(
        "--fault",
        type=_fault,
        action="append",
        default=[],
        metavar="JSON",
        help=f"arm a fault, as {{'kind': ..., 'bucket': ...}}; kinds: {', '.join(KINDS)}",
    )
    return parser.parse_args(arguments, namespace=Options())


def _fault(text: str) -> Fault:
    try:
        return msgspec.json.decode(text, type=Fault)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


async def serve(options: Options) -> None:
    """Run the engine until SIGTERM or SIGINT, or until a rank dies.

    Raises:
        WeightcastError: if it cannot start, or a rank died.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    config = read_config(options.model_path)
    check_tp(config, options.tp)
    keys = read_key(options.api_key_file), read_key(options.admin_api_key_file)
    with tempfile.TemporaryDirectory(prefix="weightcast-engine-") as run_dir:
        ranks = Ranks(
            model_path=options.model_path, run_dir=Path(run_dir), tp_size=options.tp, device=options.device
        )
        front = EngineFront(
            config=config,
            model_path=str(options.model_path),
            ranks=ranks,
            faults=FaultTable(tuple(options.fault)),
        )
        app = build_app(
            front, tp_size=options.tp, device=options.device, api_key=keys[0], admin_api_key=keys[1]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        waits: set[asyncio.Task[object]] = set()
        try:
            pids = await ranks.start()
            waits = {
                asyncio.create_task(stop.wait()),
                asyncio.create_task(ranks.listen()),
                asyncio.create_task(ranks.wait_for_death()),
            }
            await runner.setup()
            print(msgspec.json.encode(await _listen(runner, options, pids)).decode(), flush=True)  # noqa: T201
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waits:
                task.cancel()
            await runner.cleanup()
            await ranks.end()


async def _listen(runner: web.AppRunner, options: Options, pids: tuple[int, ...]) -> dict[str, object]:
    site = web.TCPSite(runner, options.host, options.port)
    try:
        await site.start()
    except OSError as error:
        raise AddressInUse(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}; choose another port, or 0"
        ) from error
    port = runner.addresses[0][1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    shown = {str(tp_rank): pid for tp_rank, pid in enumerate(pids)}
    return {"url": f"http://{host}:{port}", "pid": os.getpid(), "pids": shown}


def main() -> int:
    """The command; its exit status."""
    try:
        asyncio.run(serve(parse_options(sys.argv[1:])))
    except WeightcastError as error:
        print(f"reference engine: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
