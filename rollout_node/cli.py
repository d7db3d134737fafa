"""``weightcast rollout-node``: the agent beside one or more engines."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Parameter

from ..proto.config import check_engine_url
from ..proto.errors import InvalidConfig
from ..proto.keys import read_key
from .agent import check_broadcaster_endpoint, run_agents


def rollout_node(
    *,
    engine: Annotated[list[str], Parameter(negative="")],
    broadcaster: str,
    job: str = "weightcast",
    name: str = "",
    admin_key_file: Path | None = None,
    api_key_file: Path | None = None,
    launch: Annotated[
        tuple[str, ...], Parameter(consume_multiple=True, allow_leading_hyphen=True, negative="")
    ] = (),
) -> None:
    """Register an engine with the broadcaster and drive it through refits.

    The order of starting does not matter: engine and broadcaster are waited for.

    Parameters
    ----------
    engine
        URL of an SGLang server, as http://127.0.0.1:30000. Give it again for more servers.
    broadcaster
        The broadcaster's control endpoint, as tcp://10.0.0.5:7410.
    job
        Name of the training job; must be the broadcaster's.
    name
        The node's name, unique in the job. Default: host:port of the engine.
    admin_key_file
        File whose first line is the server's --admin-api-key.
    api_key_file
        File whose first line is the server's --api-key.
    launch
        Everything after it is the command that starts the server, as our child.
    """
    engines = name_engines(engine, name=name)
    if launch and len(engines) > 1:
        raise InvalidConfig("--launch starts one server; give --engine once, with that server's URL")
    check_broadcaster_endpoint(broadcaster)
    admin_key, user_key = read_key(admin_key_file), read_key(api_key_file)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await run_agents(
            engines=engines,
            broadcaster=broadcaster,
            job=job,
            stop=stop,
            admin_key=admin_key,
            user_key=user_key,
            launch=launch,
        )

    asyncio.run(run())


def name_engines(urls: list[str], *, name: str = "") -> dict[str, str]:
    """Each engine's URL by its node's name.

    Raises:
        InvalidConfig: for a bad URL, one given twice, or one name for several engines.
    """
    if name and len(urls) > 1:
        raise InvalidConfig(f"--name {name!r} cannot name {len(urls)} engines; start one agent for each")
    engines: dict[str, str] = {}
    for url in map(check_engine_url, urls):
        node = name or urlsplit(url).netloc
        if node in engines:
            raise InvalidConfig(f"--engine {url} is given twice")
        engines[node] = url
    return engines
