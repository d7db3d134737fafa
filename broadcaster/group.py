"""Rank 0's end of a weights update group, laid out exactly as SGLang lays out the other ranks.

SGLang joins by ``init_custom_process_group`` (srt/utils/common.py): a TCPStore client at
``tcp://ADDRESS:PORT``, wrapped in ``PrefixStore(NAME)``, handed to torch's ``_new_process_group_helper``,
which adds ``PrefixStore(NAME/)`` and one prefix for the device. So a gloo rank writes its address under
``/NAME/NAME//cpu//0/RANK``. torch's public ``init_process_group`` lays other prefixes: both ends would then
wait out the whole time-out.

Here the same prefixes are laid by hand and the backend is built directly. That needs no default group, leaves
nothing in torch's global tables, and ends with its last reference.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

# torch re-exports these without saying so to type checkers.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..proto.errors import WeightcastError


class GroupFailed(WeightcastError):
    """The store could not be opened, or not everybody joined; the message names the address."""

    code = "join_failed"


class OpenStore:
    """The rendezvous store of one epoch, listening on a free port of ``host`` until it is dropped.

    Attributes:
        port: the TCP port.
    """

    def __init__(self, *, host: str, timeout_seconds: float) -> None:
        timeout = datetime.timedelta(seconds=timeout_seconds)
        listener = _listen(host)
        self.port: int = listener.getsockname()[1]
        # The store listens on our socket: the port cannot be taken between choosing and binding it, and it
        # is not open on other addresses than the one advertised.
        self.store = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )


def _listen(host: str) -> socket.socket:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # A name may resolve to loopback on this host and to something else on the nodes': listen everywhere.
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", 0))
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family)
    except OSError as error:
        raise GroupFailed(
            f"cannot listen on {host}: {error.strerror}. `advertise` must be an address of this machine "
            "that the rollout hosts can reach"
        ) from error


class SourceGroup:
    """Rank 0 of one group. `broadcast` calls must not overlap."""

    def __init__(
        self, *, store: OpenStore, name: str, host: str, world_size: int, backend: str, timeout_seconds: float
    ) -> None:
        """Join; under gloo this returns when every rank has joined, under NCCL the first broadcast does that.

        Raises:
            GroupFailed: if not everybody joined in ``timeout_seconds`` or the backend is not there.
        """
        self.name = name
        self._store = store
        self._staging: torch.Tensor | None = None
        self._cuda = backend == "nccl"
        timeout = datetime.timedelta(seconds=timeout_seconds)
        store.store.set_timeout(timeout)
        device = "cuda" if self._cuda else "cpu"
        prefixed: Store = store.store
        for prefix in (name, f"{name}/", f"{device}/"):
            prefixed = PrefixStore(prefix, prefixed)
        try:
            self._backend: Any = (
                _nccl(prefixed, world_size, timeout)
                if self._cuda
                else _gloo(prefixed, world_size, timeout, host)
            )
        except RuntimeError as error:
            raise GroupFailed(
                f"the group {name} of {world_size} ranks did not form at {host}:{store.port} "
                f"({backend}): {_first_line(error)}"
            ) from error

    def broadcast(self, slot: torch.Tensor, *, timeout_seconds: float) -> float:
        """Send ``slot`` (1-D uint8, in host memory) to every rank; returns the seconds it took.

        On return the bytes have left the slot. On NCCL they are staged through device memory first.

        Raises:
            RuntimeError: from the backend, if a peer is gone or its time-out passed. The group is then dead.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = datetime.timedelta(seconds=timeout_seconds)
        started = time.perf_counter()
        if self._cuda:
            self._backend.broadcast([self._stage(slot)], options).wait()
            torch.cuda.synchronize()
        else:
            self._backend.broadcast([slot], options).wait()
        return time.perf_counter() - started

    def close(self) -> None:
        """Leave a healthy group, as its other ranks do now. A poisoned one is never closed: that hangs."""
        if self._cuda:
            self._backend.shutdown()
        self._backend = self._staging = None

    def _stage(self, slot: torch.Tensor) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < slot.numel():
            self._staging = torch.empty(slot.numel(), dtype=torch.uint8, device="cuda")
        staged = self._staging[: slot.numel()]
        staged.copy_(slot)
        return staged


def _gloo(store: Store, world_size: int, timeout: datetime.timedelta, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    if os.environ.get("GLOO_SOCKET_IFNAME") or not _is_ipv4(host):
        # As torch does at the other ranks. All ranks must have addresses of one family, and an IPv6 store
        # says nothing about which family gloo uses there.
        device = _default_gloo_device()
    else:
        # torch would use the address that this host's name resolves to, which may be any or none.
        device = dist.ProcessGroupGloo.create_device(hostname=host)
    options._devices = [device]
    return dist.ProcessGroupGloo(store, 0, world_size, options)


def _nccl(store: Store, world_size: int, timeout: datetime.timedelta) -> Any:
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        raise RuntimeError("the broadcaster's host has no CUDA device or this torch has no NCCL; set backend")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, 0, world_size, options)


def _default_gloo_device() -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def _is_ipv4(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 4
    except ValueError:
        return False


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
