"""The run directory: a broadcaster's local sockets, its lock and its announcement.

Only the owner may enter it (0700), which is what keeps strangers off the sockets in it. The lock is a
`flock`: it goes with the process however that ends, so no stale lock has to be cleaned up by hand.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from ..proto.config import Announcement
from ..proto.errors import AddressInUse, InvalidConfig

#: Longest path of a Unix socket, in bytes (sun_path without its final NUL).
_MAX_SOCKET_PATH = 107
_LOCK = "broadcaster.lock"
_ANNOUNCEMENT = "broadcaster.json"


class RunDirectory:
    """One broadcaster's directory, locked from construction until `close`."""

    def __init__(self, path: Path) -> None:
        """Make and lock it.

        Raises:
            InvalidConfig: the path is too long for a socket, cannot be made, or belongs to somebody else.
            AddressInUse: naming the process that holds it.
        """
        self.path = path.absolute()
        longest = len(os.fsencode(self.path / "slots-99999.sock"))
        if longest > _MAX_SOCKET_PATH:
            raise InvalidConfig(
                f"run_dir is {self.path}: a socket in it would have a path of {longest} bytes, and Unix "
                f"sockets allow {_MAX_SOCKET_PATH}; choose a shorter run_dir"
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.path.stat().st_uid
            if owner != os.getuid():
                raise InvalidConfig(f"run_dir {self.path} belongs to user {owner}, not to {os.getuid()}")
            self.path.chmod(0o700)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidConfig(f"run_dir {self.path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock)
            raise AddressInUse(
                f"process {holder} is the broadcaster of {self.path}; end it first, or give this job another "
                "name or run_dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        self._remove_leftovers()

    @property
    def trainer_endpoint(self) -> str:
        """Where a trainer connects."""
        return f"ipc://{self.path / 'trainer.ipc'}"

    @property
    def source_endpoint(self) -> str:
        """Where the source connects."""
        return f"ipc://{self.path / 'source.ipc'}"

    def announce(self, announcement: Announcement) -> None:
        """Write ``broadcaster.json``, whole or not at all."""
        fresh = self.path / f"{_ANNOUNCEMENT}.new"
        fresh.write_bytes(msgspec.json.encode(announcement) + b"\n")
        fresh.replace(self.path / _ANNOUNCEMENT)

    def close(self) -> None:
        """Remove the announcement and the sockets, and let go of the lock."""
        self._remove_leftovers()
        os.close(self._lock)

    def _remove_leftovers(self) -> None:
        for pattern in ("*.ipc", "slots-*.sock", f"{_ANNOUNCEMENT}*"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
