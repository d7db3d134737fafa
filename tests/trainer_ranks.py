"""Runs one function on several trainer ranks: real processes, real gloo."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

LIMIT_SECONDS = 60.0


def run_ranks(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """``function(rank, world, *args)`` in ``world`` processes; what each returned, by rank.

    A rank that raises, dies or takes too long fails the test with its traceback. A function may return
    None by ``os._exit(0)`` of its process: that rank's result is then None.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run, args=(function, rank, world, f"{folder}/store", results, args))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        found: dict[int, Any] = {}
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while len(found) < world and time.monotonic() < deadline:
                try:
                    rank, value, error = results.get(timeout=0.2)
                except queue.Empty:
                    ended = {rank for rank in range(world) if ranks[rank].exitcode is not None} - set(found)
                    for rank in ended if results.empty() else ():
                        found[rank] = None
                    continue
                if error:
                    raise AssertionError(f"rank {rank} raised:\n{error}")
                found[rank] = value
            missing = set(range(world)) - set(found)
            assert not missing, f"ranks {missing} gave no result within {LIMIT_SECONDS} s"
        finally:
            for process in ranks:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
    return [found[rank] for rank in range(world)]


def _run(
    function: Callable[..., Any], rank: int, world: int, store: str, results: Any, args: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        value, error = function(rank, world, *args), ""
    except BaseException:
        value, error = None, traceback.format_exc()
    results.put((rank, value, error))
    results.close()
    results.join_thread()
    # Not destroy_process_group: after a test that breaks the group on purpose it may not return.
    os._exit(0)
