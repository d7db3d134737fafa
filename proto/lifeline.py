"""No process of ours outlives the one that started it, however that one ends.

Called in the child, first thing, or between fork and exec. The kernel then signals the child when the
*thread* that started it ends, so start children from a thread that lives as long as they shall.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
# Loaded at import: between fork and exec nothing may be imported or allocated that needs a lock.
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send ``by`` to this process when its parent dies.

    Args:
        parent: process id of the parent. If it is no longer ours, it died before this call.

    Raises:
        OSError: if the kernel refuses, or the parent is gone.
    """
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise OSError("the parent ended before its child had started")
