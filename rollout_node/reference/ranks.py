"""The front's side of the ranks: starting them, talking to them, noticing a death, ending them."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import zmq
import zmq.asyncio

from ...proto import sockets
from ...proto.errors import WeightcastError
from . import wire
from .faults import Fault

#: Seconds a rank may take to load the model and find its peers.
START_SECONDS = 300.0
#: Seconds between SIGTERM and SIGKILL when ranks are ended.
GRACE_SECONDS = 1.0


class RankLost(WeightcastError):
    """A rank process ended although nobody told it to."""

    code = "node_down"


class Ranks:
    """All rank processes of one engine. Use `start`, then `ask`; `end` on every path."""

    def __init__(self, *, model_path: Path, run_dir: Path, tp_size: int, device: str) -> None:
        self._model_path, self._run_dir = model_path, run_dir
        self._tp_size, self._device = tp_size, device
        self._processes: list[asyncio.subprocess.Process] = []
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._answers: dict[int, asyncio.Future[wire.Answer]] = {}
        self._outputs: dict[str, asyncio.Queue[wire.Output]] = {}
        self._number = 0
        #: Event loop time of the last word from rank 0.
        self.last_heard = 0.0

    async def start(self) -> tuple[int, ...]:
        """Start every rank and wait until all are ready; their process ids.

        Raises:
            RankLost: if one ends, or the ranks are not ready in `START_SECONDS`.
        """
        sockets.configure(self._socket)
        sockets.bind(self._socket, wire.front_endpoint(self._run_dir))
        for tp_rank in range(self._tp_size):
            self._processes.append(await self._spawn(tp_rank))
        hearing = asyncio.ensure_future(self._socket.recv())
        death = asyncio.create_task(self.wait_for_death())
        try:
            await asyncio.wait({hearing, death}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                death.result()
            if not hearing.done():
                raise RankLost(f"the ranks were not ready after {START_SECONDS:.0f} s")
            ready = sockets.decode(hearing.result(), wire.from_ranks)
        finally:
            death.cancel()
            hearing.cancel()
        if not isinstance(ready, wire.Ready):
            raise RankLost(f"rank 0 began with {type(ready).__name__}, not Ready")
        return ready.pids

    async def _spawn(self, tp_rank: int) -> asyncio.subprocess.Process:
        device = self._device
        if device == "cuda":
            device = f"cuda:{tp_rank}"
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"{__package__}.rank",
            *("--model-path", str(self._model_path), "--run-dir", str(self._run_dir)),
            *("--tp-rank", str(tp_rank), "--tp-size", str(self._tp_size)),
            *("--device", device, "--parent", str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,
        )

    async def listen(self) -> None:
        """Hand out what rank 0 says; runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            told = sockets.decode(await self._socket.recv(), wire.from_ranks)
            self.last_heard = loop.time()
            if isinstance(told, wire.Answer):
                waiting = self._answers.pop(told.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(told)
            elif isinstance(told, wire.Output) and told.rid in self._outputs:
                self._outputs[told.rid].put_nowait(told)

    async def wait_for_death(self) -> None:
        """Wait until a rank ends by itself.

        Raises:
            RankLost: then; always.
        """
        waits = {
            asyncio.create_task(process.wait()): tp_rank for tp_rank, process in enumerate(self._processes)
        }
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            first = done.pop()
            raise RankLost(f"rank {waits[first]} ended with status {first.result()}; so does the engine")
        finally:
            for wait in waits:
                wait.cancel()

    async def ask(self, body: wire.AnyBody, fault: Fault | None = None) -> wire.Answer:
        """Have the ranks carry out a call; what rank 0 answers. Waits as long as they take, as SGLang."""
        future: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        number = self._next_number()
        self._answers[number] = future
        try:
            await self._socket.send(sockets.encode(wire.Call(number, body, fault)))
            return await future
        finally:
            self._answers.pop(number, None)

    async def tell(self, body: wire.AbortRequest) -> None:
        """Send a call that has no answer."""
        await self._socket.send(sockets.encode(wire.Call(self._next_number(), body)))

    async def open_sequence(self, request: wire.Generate) -> asyncio.Queue[wire.Output]:
        """Queue a sequence; its outputs arrive in the queue. Follow with `close_sequence`."""
        queue: asyncio.Queue[wire.Output] = asyncio.Queue()
        self._outputs[request.rid] = queue
        await self._socket.send(sockets.encode(wire.Call(self._next_number(), request)))
        return queue

    def close_sequence(self, rid: str) -> None:
        """No more outputs of this sequence are wanted."""
        self._outputs.pop(rid, None)

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    async def end(self) -> None:
        """End every rank, frozen or blocked ones too, and close the socket."""
        alive = [process for process in self._processes if process.returncode is None]
        for process in alive:
            process.terminate()
        if alive:
            await asyncio.wait(
                [asyncio.create_task(process.wait()) for process in alive], timeout=GRACE_SECONDS
            )
        for process in alive:
            if process.returncode is None:
                process.kill()
                await process.wait()
        self._socket.close()
        self._context.term()
