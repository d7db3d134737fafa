"""One tensor-parallel rank as a process. Started by the front, ends with it.

Rank 0 takes calls from the front, passes each round on to the other ranks, and answers: as in SGLang,
what a client is told is what rank 0 saw. All ranks then do the same things in the same order.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import zmq

from ...proto import sockets
from ...proto.errors import InvalidConfig
from ...proto.lifeline import end_with_parent
from . import wire
from .decoder import Decoder, check_checkpoint, read_checkpoint
from .faults import Fault
from .generation import Generation
from .group import gather_bytes, open_default_group
from .sharding import check_tp, read_config
from .updates import WeightUpdates


class Rank:
    """The model, its updates and its sequences; carries out one call at a time."""

    def __init__(
        self, *, model_path: Path, run_dir: Path, tp_rank: int, tp_size: int, device: torch.device
    ) -> None:
        config = read_config(model_path)
        check_tp(config, tp_size)
        check_checkpoint(model_path, config)
        self.tp_rank, self.tp_size = tp_rank, tp_size
        open_default_group(run_dir=run_dir, tp_rank=tp_rank, tp_size=tp_size, device=device)
        decoder = Decoder(config, tp_rank=tp_rank, tp_size=tp_size, device=device)
        decoder.load_weights(read_checkpoint(model_path))
        self.generation = Generation(decoder)
        self._updates = WeightUpdates(decoder)

    def pids(self) -> tuple[int, ...] | None:
        """Process ids of all ranks, on rank 0."""
        gathered = gather_bytes(str(os.getpid()).encode(), tp_rank=self.tp_rank, tp_size=self.tp_size)
        return None if gathered is None else tuple(int(pid) for pid in gathered)

    def carry_out(self, call: wire.Call) -> list[wire.Answer | wire.Output]:
        """Do one call; what rank 0 is to tell the front."""
        body, fault = call.body, call.fault
        if fault is not None and fault.hits(self.tp_rank):
            _befall(fault)
        else:
            fault = None
        if isinstance(body, wire.Generate):
            self.generation.add(body)
            return []
        if isinstance(body, wire.AbortRequest):
            return [*self.generation.abort(body.rid, everything=body.abort_all)]
        success, message, data = self._answer(body, fault)
        return [wire.Answer(call.number, success, message, data)]

    def _answer(self, body: wire.AnyBody, fault: Fault | None) -> tuple[bool, str, Any]:
        data: Any = None
        success, message = True, "Success"
        match body:
            case wire.InitWeightsUpdateGroup():
                success, message = self._updates.join(body)
            case wire.DestroyWeightsUpdateGroup():
                success, message = self._updates.leave(body.group_name)
            case wire.BeginWeightUpdate():
                success, message = self._updates.begin()
            case wire.EndWeightUpdate():
                success, message = self._updates.end()
            case wire.UpdateWeightsFromDistributed():
                success, message = self._after_update(body, *self._updates.update(body, fault), fault)
            case wire.UpdateWeightsFromDisk():
                success, message = self._after_update(body, *self._updates.load_from_disk(body), fault)
            case wire.PauseGeneration():
                self.generation.pause(body.mode)
            case wire.ContinueGeneration():
                self.generation.resume()
            case wire.UpdateWeightVersion():
                self.generation.relabel(body.new_version)
            case wire.FlushCache():
                success = self._flush(fault)
                message = "" if success else "Flush cache failed.\n"
            case wire.WeightsChecker():
                success, message, data = self._updates.checksums(body)
            case wire.GetWeightsByName():
                data = self._updates.weights_by_name(body)
            case wire.WeightDigests():
                data = self._updates.digests()
            case wire.InternalState():
                running, waiting = self.generation.counts()
                data = {"weight_version": self.generation.version, "running": running, "waiting": waiting}
            case _:
                raise TypeError(f"{type(body).__name__} is no call with an answer")
        return success, message, data

    def _flush(self, fault: Fault | None) -> bool:
        return not (fault is not None and fault.kind == "no_flush") and self.generation.flush()

    def _after_update(
        self,
        body: wire.UpdateWeightsFromDistributed | wire.UpdateWeightsFromDisk,
        success: bool,
        message: str,
        fault: Fault | None,
    ) -> tuple[bool, str]:
        if not success:
            return False, message
        self.generation.relabel(body.weight_version)
        if body.flush_cache and not self._flush(fault):
            return False, (
                "Weights were updated, but the cache was not flushed because requests are still running "
                "or queued. Retract or finish them, then call /flush_cache."
            )
        return True, message


def _befall(fault: Fault) -> None:
    """The faults that happen to a whole process."""
    if fault.kind == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "never_join":
        threading.Event().wait()


def serve_front(rank: Rank, run_dir: Path) -> None:
    """Rank 0's life: take calls, lead the rounds, answer. Never returns; ended from outside."""
    context = zmq.Context()
    front = context.socket(zmq.PAIR)
    sockets.configure(front)
    followers = []
    for other in range(1, rank.tp_size):
        follower = context.socket(zmq.PUSH)
        sockets.configure(follower)
        sockets.bind(follower, wire.rounds_endpoint(run_dir, other))
        followers.append(follower)
    front.connect(wire.front_endpoint(run_dir))
    pids = rank.pids()
    if pids is not None:
        front.send(sockets.encode(wire.Ready(pids)))
    while True:
        calls: list[wire.Call] = []
        wait_ms = 0 if rank.generation.has_work else None
        while front.poll(wait_ms):
            calls.append(sockets.decode(front.recv(), wire.call_decoder))
            wait_ms = 0
        for follower in followers:
            follower.send(sockets.encode(wire.Round(tuple(calls))))
        for told in _play(rank, calls):
            front.send(sockets.encode(told))


def follow(rank: Rank, run_dir: Path) -> None:
    """The life of the other ranks: play every round that rank 0 leads."""
    context = zmq.Context()
    rounds = context.socket(zmq.PULL)
    sockets.configure(rounds)
    rounds.connect(wire.rounds_endpoint(run_dir, rank.tp_rank))
    rank.pids()
    while True:
        for _ in _play(rank, sockets.decode(rounds.recv(), wire.round_decoder).calls):
            pass


def _play(rank: Rank, calls: list[wire.Call] | tuple[wire.Call, ...]) -> Any:
    for call in calls:
        yield from rank.carry_out(call)
    if rank.generation.has_work:
        yield from rank.generation.step()


def main(arguments: list[str]) -> None:
    """Run one rank; ``arguments`` are the front's, see `launch`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--tp-rank", type=int, required=True)
    parser.add_argument("--tp-size", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(arguments)
    end_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        rank = Rank(
            model_path=options.model_path,
            run_dir=options.run_dir,
            tp_rank=options.tp_rank,
            tp_size=options.tp_size,
            device=device,
        )
    except InvalidConfig as error:
        sys.exit(f"reference engine, rank {options.tp_rank}: {error}")
    if options.tp_rank:
        follow(rank, options.run_dir)
    else:
        serve_front(rank, options.run_dir)


if __name__ == "__main__":
    main(sys.argv[1:])
