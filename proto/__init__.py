"""The contract that trainer, broadcaster and rollout nodes share.

Everything two sides must agree on is written here once: control messages, the order and offsets of
tensors in a bucket, the digest, the slots, and the socket rules. This package imports none of the
other three, and nothing in it imports torch.
"""
