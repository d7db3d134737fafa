"""`weightcast demo`: a real trainer, a broadcaster and rollout nodes on one machine."""
