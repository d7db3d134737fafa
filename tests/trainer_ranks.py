"""Runs one function on several trainer ranks: real processes, real gloo or NCCL."""

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


def run_ranks(function: Callable[..., Any], world: int, *args: Any, backend: str = "gloo") -> list[Any]:
    """``function(rank, world, *args)`` in ``world`` processes; what each returned, by rank.

    A rank that raises, dies or takes too long fails the test with its traceback. A function may return
    None by ``os._exit(0)`` of its process: that rank's result is then None. With "nccl" all ranks share
    the first GPU.
    """
    context = multiprocessing.get_context("forkserver")
    # Imported once, by the server that the ranks are forked from.
    context.set_forkserver_preload(
        ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "weightcast.trainer_hooks"]
    )
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_run, args=(function, rank, world, f"{folder}/store", results, args, backend)
            )
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
                        assert ranks[rank].exitcode == 0, f"rank {rank} ended with {ranks[rank].exitcode}"
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
    function: Callable[..., Any],
    rank: int,
    world: int,
    store: str,
    results: Any,
    args: tuple[Any, ...],
    backend: str,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        # NCCL refuses two ranks on one GPU of one host; as different hosts they talk over sockets.
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ |= {"NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
        torch.cuda.set_device(0)
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
        value, error = function(rank, world, *args), ""
    except BaseException:
        value, error = None, traceback.format_exc()
    results.put((rank, value, error))
    results.close()
    results.join_thread()
    # Not destroy_process_group: after a test that breaks the group on purpose it may not return.
    os._exit(0)
