"""The broadcaster: a control process that decides and a source process that moves bytes.

machine.py   every decision, as a state machine without I/O: (event, now) → actions
  fleet.py     the rollout nodes and where each stands
  epochs.py    the source process and the weights update group, as control knows them
  refit.py     one refit, phase by phase;  buckets.py its buckets;  verdict.py its judgement
  ranks.py     who has which rank
control.py   the asyncio shell around it: sockets, the source and agent processes, signals
source.py    rank 0: broadcasts buckets straight from the trainer's slots (torch lives here only)
"""
