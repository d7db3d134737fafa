"""Stands in for SGLang's compiled kernels, which have no build for CPUs without AMX.

On such a CPU SGLang takes its plain torch paths; it only needs the names to be importable. A name that
is called after all says so.
"""

__version__ = "0.0.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build")

    return absent
