"""The agent beside an engine: registers it, watches it, and drives it through refits.

`agent` is the asyncio shell around `machine` (what to do next, without I/O) and `stages` (each order as a
sequence of engine calls). Nothing here imports torch; `reference` does.
"""
