"""Peak memory of `weightcast push`: what the trainer side and the broadcaster take beyond the model.

    python bench/push_memory.py [--gigabytes 2] [--nodes 3] [--bucket-mib 256] [--slots 2]

Makes two random Llama folders of the given size, serves one from reference engines, pushes the other to
them, and samples the proportional memory (PSS, from /proc/PID/smaps) of the push process and of the
broadcaster's processes, control and source. Pages of the checkpoint's own files are the model and are left
out; everything else counts: interpreters, torch, shared libraries. The agents that the broadcaster hosts for
plain servers are the rollout side: they are shown but not counted. Engines are neither.

Prints one JSON object. The bound is slots + 300 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

ALLOWANCE = 300e6
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB = 2048, 5632, 16, 4, 32000


def write_model(folder: Path, *, nbytes: float, seed: int) -> int:
    """A Llama folder of about ``nbytes`` bytes in bfloat16, in shards of about 1 GB; returns its bytes."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)

    head = HIDDEN // HEADS
    layer_bytes = 2 * HIDDEN * (HIDDEN * 2 + KV_HEADS * head * 2 + INTERMEDIATE * 3)
    layers = max(1, round((nbytes - 4 * VOCAB * HIDDEN) / layer_bytes))
    shards: list[dict[str, torch.Tensor]] = [{"model.embed_tokens.weight": tensor(VOCAB, HIDDEN)}]
    weight_map: dict[str, str] = {}
    total = 0

    def flush() -> None:
        nonlocal total
        name = f"model-{len(list(folder.glob('*.safetensors'))):05d}.safetensors"
        save_file(shards[0], folder / name)
        weight_map.update(dict.fromkeys(shards[0], name))
        total += sum(t.nbytes for t in shards[0].values())
        shards[0] = {}

    folder.mkdir(parents=True)
    for number in range(layers):
        prefix = f"model.layers.{number}."
        shards[0] |= {
            f"{prefix}input_layernorm.weight": tensor(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": tensor(HIDDEN),
            f"{prefix}self_attn.q_proj.weight": tensor(HIDDEN, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": tensor(KV_HEADS * head, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": tensor(KV_HEADS * head, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": tensor(HIDDEN, HIDDEN),
            f"{prefix}mlp.gate_proj.weight": tensor(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": tensor(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": tensor(HIDDEN, INTERMEDIATE),
        }
        if sum(t.nbytes for t in shards[0].values()) > 1e9:
            flush()
    shards[0] |= {"model.norm.weight": tensor(HIDDEN), "lm_head.weight": tensor(VOCAB, HIDDEN)}
    flush()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": HIDDEN,
                "intermediate_size": INTERMEDIATE,
                "num_hidden_layers": layers,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS,
                "vocab_size": VOCAB,
                "max_position_embeddings": 512,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
                "torch_dtype": "bfloat16",
            }
        )
    )
    return total


def role_of(command: list[str]) -> str:
    """Which of weightcast's processes a command line is."""
    text = " ".join(command)
    roles = {"broadcaster.source": "source", "weightcast.broadcaster": "control", "rollout_node": "agents"}
    return next((role for part, role in roles.items() if part in text), "push")


class MemorySampler(threading.Thread):
    """Samples the PSS of a process and its descendants until stopped; keeps the largest counted sum."""

    def __init__(self, pid: int, *, model: Path) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._model = str(model)
        self._stopped = threading.Event()
        self.total = 0.0
        self.peak: dict[str, dict[str, float]] = {}
        self.samples = 0

    def run(self) -> None:
        while not self._stopped.wait(0.05):
            roles: dict[str, dict[str, float]] = {}
            try:
                processes = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in processes:
                try:
                    role = role_of(process.cmdline())
                    self._add(process.pid, roles.setdefault(role, {"anonymous": 0, "slots": 0, "files": 0}))
                except (FileNotFoundError, ProcessLookupError, psutil.Error):
                    continue
            self.samples += 1
            total = sum(sum(kinds.values()) for role, kinds in roles.items() if role != "agents")
            if total > self.total:
                self.total, self.peak = total, roles

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def _add(self, pid: int, kinds: dict[str, float]) -> None:
        kind = "anonymous"
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if line.startswith("Pss:"):
                if kind:
                    kinds[kind] += int(line.split()[1]) * 1024
            elif "-" in line.split(" ", 1)[0]:
                path = line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) == 6 else ""
                if "memfd:" in path:
                    kind = "slots"
                elif path.startswith(self._model):
                    kind = ""
                else:
                    kind = "files" if path.startswith("/") else "anonymous"


def main() -> None:
    """Build, serve, push, sample, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--slots", type=int, default=2)
    options = parser.parse_args()
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    engines: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="weightcast-bench-") as name:
        folder = Path(name)
        try:
            nbytes = write_model(folder / "new", nbytes=options.gigabytes * 1e9, seed=1)
            write_model(folder / "old", nbytes=options.gigabytes * 1e9, seed=2)
            engines = [
                subprocess.Popen(
                    [
                        sys.executable, "-m", "weightcast.rollout_node.reference",
                        "--model-path", str(folder / "old"), "--host", "127.0.0.1", "--port", "0",
                    ],
                    stdout=subprocess.PIPE, text=True, env=environment,
                )
                for _ in range(options.nodes)
            ]  # fmt: skip
            urls = [json.loads((engine.stdout or sys.stdin).readline())["url"] for engine in engines]
            command = [
                sys.executable, "-m", "weightcast.proto.cli", "push", str(folder / "new"), "--json",
                "--bucket-bytes", str(options.bucket_mib << 20), "--slots", str(options.slots),
            ]  # fmt: skip
            for url in urls:
                command += ["--engine", url]
            started = time.monotonic()
            push = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            sampler = MemorySampler(push.pid, model=folder / "new")
            sampler.start()
            output, _ = push.communicate()
            sampler.stop()
            if push.returncode:
                sys.exit(f"push ended with status {push.returncode}")
            report = json.loads(output)
            slots = options.slots * (options.bucket_mib << 20)
            print(
                json.dumps(
                    {
                        "model_bytes": nbytes,
                        "slot_bytes": slots,
                        "peak_beyond_model_bytes": round(sampler.total),
                        "beyond_slots_bytes": round(sampler.total - slots),
                        "allowed_beyond_slots_bytes": round(ALLOWANCE),
                        "within": sampler.total <= slots + ALLOWANCE,
                        "peak": {
                            role: {kind: round(value) for kind, value in kinds.items()}
                            for role, kinds in sampler.peak.items()
                        },
                        "samples": sampler.samples,
                        "nodes": {n: node["outcome"] for n, node in report["nodes"].items()},
                        "seconds": report["seconds"],
                        "wire_rate": report["wire_rate"],
                        "push_seconds": round(time.monotonic() - started, 2),
                    }
                )
            )
        finally:
            for engine in engines:
                engine.terminate()
            for engine in engines:
                engine.wait(30)


if __name__ == "__main__":
    main()
