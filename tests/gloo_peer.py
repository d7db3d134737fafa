"""A rank that joins the way an SGLang worker does, as a process of its own: `gloo_peer.py [gloo|nccl]`.

``init_custom_process_group`` of sglang/srt/utils/common.py, 0.5.23, step by step: a default group is there
already, the store comes from a ``tcp://`` URL, one PrefixStore, then torch's own helper.

Orders come as JSON lines on stdin, answers go as JSON lines to stdout:
    {"join": {"url", "name", "rank", "world", "seconds"}} · {"receive": nbytes} · {"leave": name}
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world, rendezvous

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "gloo"
DEVICE = "cuda" if BACKEND == "nccl" else "cpu"


def join(*, url: str, name: str, rank: int, world: int, seconds: float) -> dist.ProcessGroup:
    timeout = datetime.timedelta(seconds=seconds)
    store, rank, world = next(rendezvous(url, rank, world, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world,
        rank,
        [],
        dist.Backend(BACKEND),
        PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=timeout,
        device_id=None,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group


def serve() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups: dict[str, dist.ProcessGroup] = {}
    current = ""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "join" in order:
                current = order["join"]["name"]
                groups[current] = join(**order["join"])
                answer = {"joined": current}
            elif "receive" in order:
                buffer = torch.empty(order["receive"], dtype=torch.uint8, device=DEVICE)
                dist.broadcast(buffer, src=0, group=groups[current])
                answer = {"sha256": hashlib.sha256(buffer.cpu().numpy().tobytes()).hexdigest()}
            else:
                dist.destroy_process_group(groups.pop(order["leave"]))
                answer = {"left": order["leave"]}
        except Exception as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
