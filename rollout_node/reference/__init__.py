"""The reference engine: a small, real decoder behind SGLang's weight endpoints.

For laptops, tests and fault injection. It answers as SGLang 0.5 does, traps included, keeps its
parameters fused and sharded as SGLang keeps them, runs one process per tensor-parallel rank with real
gloo (or NCCL) groups, and can show a digest of every tensor it holds.

    HTTP front (aiohttp, no torch)  ◄─ipc─►  rank 0  ─ipc─►  rank 1, 2, …
                                                └────── gloo / NCCL ──────┘

Start one with ``python -m weightcast.rollout_node.reference --model-path DIR --port 0``.
"""
