"""Weight updates on one rank: groups, the update session, receiving, loading, and what can be shown.

    closed ── begin ──► open ── update* ──► open ── end ──► closed

An update outside the session, a second begin and an end without begin are refused, as by SGLang
(``sglang/srt/managers/scheduler_components/weight_updater.py``).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ...proto.digest import digest_bytes, format_digest
from ...proto.errors import InvalidConfig
from ...proto.layout import TensorSpec
from .decoder import Decoder, check_checkpoint, read_checkpoint
from .faults import Fault
from .group import gather_bytes, join_update_group
from .sharding import Placement, expected_tensors, optional_tensors, placements, read_config
from .wire import (
    GetWeightsByName,
    InitWeightsUpdateGroup,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    WeightsChecker,
)

Result = tuple[bool, str]


class WeightUpdates:
    """Everything about weights that one rank is asked. Refusals are results, not exceptions."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._session_open = False

    # --- groups ----------------------------------------------------------------------------------

    def join(self, body: InitWeightsUpdateGroup) -> Result:
        """Join a weights update group as rank ``rank_offset + tp_rank``; blocks until all have."""
        try:
            self._groups[body.group_name] = join_update_group(
                master_address=body.master_address,
                master_port=body.master_port,
                rank=body.rank_offset + self._decoder.tp_rank,
                world_size=body.world_size,
                group_name=body.group_name,
                backend=body.backend,
            )
        except (RuntimeError, ValueError, AttributeError, KeyError) as error:
            return False, f"Failed to initialize custom process group: {error}."
        return True, "Succeeded to initialize custom process group."

    def leave(self, group_name: str) -> Result:
        """Destroy a group; its name is forgotten first, whatever then happens."""
        group = self._groups.pop(group_name, None)
        if group is None:
            return False, "The group to be destroyed does not exist."
        try:
            dist.destroy_process_group(group)
        except (RuntimeError, ValueError) as error:
            return False, f"Failed to destroy custom process group: {error}."
        return True, "Succeeded to destroy custom process group."

    # --- session ---------------------------------------------------------------------------------

    def begin(self) -> Result:
        """Open the session, on all ranks together."""
        if self._session_open:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self._session_open = True
        dist.barrier()
        return True, "Success"

    def end(self) -> Result:
        """Close the session, on all ranks together."""
        if not self._session_open:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self._session_open = False
        dist.barrier()
        return True, "Success"

    def update(self, body: UpdateWeightsFromDistributed, fault: Fault | None) -> Result:
        """Receive one broadcast and load it. Says nothing of whether anything was loaded."""
        if not self._session_open:
            return (
                False,
                "update_weights_from_distributed must run between begin_weight_update() and "
                "end_weight_update()",
            )
        try:
            tensors = self._receive(body)
        except (RuntimeError, ValueError, AttributeError, KeyError) as error:
            return False, f"Failed to receive weights: {error}"
        try:
            self._decoder.load_weights(_spoil(tensors, fault))
            if fault is not None and fault.kind == "half":
                raise ValueError("the load was made to fail half way")
        except (RuntimeError, ValueError, IndexError) as error:
            return (
                False,
                f"Failed to update parameter online: {error}. The full weights of the ModelRunner are "
                "partially updated. Please discard the whole weights.",
            )
        return True, "Succeeded to update parameter online."

    def _receive(self, body: UpdateWeightsFromDistributed) -> list[tuple[str, Tensor]]:
        group = self._groups.get(body.group_name)
        if group is None:
            raise KeyError(
                f"Group {body.group_name} not in {list(self._groups)}. "
                "Please call `init_weights_update_group` first."
            )
        device = self._decoder.device
        if body.load_format == "flattened_bucket":
            return _receive_bucket(body, group, device)
        tensors: list[tuple[str, Tensor]] = []
        waits: list[dist.Work | None] = []
        for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=False):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            waits.append(dist.broadcast(tensor, src=0, group=group, async_op=True))
            tensors.append((name, tensor))
        for wait in waits:
            if wait is not None:
                wait.wait()
        return tensors

    def load_from_disk(self, body: UpdateWeightsFromDisk) -> Result:
        """Load a whole model folder; a folder that does not fit changes nothing."""
        folder = Path(body.model_path)
        try:
            given = read_config(folder)
            check_checkpoint(folder, self._decoder.config)
        except InvalidConfig as error:
            return False, f"Failed to get weights iterator: {error}."
        if given.vocab_size != self._decoder.config.vocab_size:
            return False, f"Failed to update weights: {folder} has another vocabulary."
        self._decoder.load_weights(read_checkpoint(folder))
        return True, "Succeeded to update model weights."

    # --- what can be shown -----------------------------------------------------------------------

    def checksums(self, body: WeightsChecker) -> tuple[bool, str, list[dict[str, object]] | None]:
        """SGLang's ``weights_checker``: SHA-256 over each fused parameter's bytes; all ranks', on rank 0."""
        if body.action != "checksum":
            return False, f"Unsupported action={body.action!r}", None
        decoder = self._decoder
        skipped = body.skip_tensor_list or []
        checksums = {
            name: hashlib.sha256(_bytes_of(parameter)).hexdigest()[:16]
            for name, parameter in decoder.parameters.items()
            if not any(part in name for part in skipped)
        }
        overall = hashlib.sha256()
        for name in sorted(checksums):
            overall.update(name.encode() + checksums[name].encode())
        place = {"role": "target", "tp_rank": decoder.tp_rank, "tp_size": decoder.tp_size}
        place |= {"dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
        place |= {"rank": decoder.tp_rank, "size": decoder.tp_size}
        mine = {
            "checksums": checksums,
            "per_gpu_checksum": overall.hexdigest(),
            "parallelism_info": [place],
        }
        gathered = gather_bytes(
            msgspec.msgpack.encode(mine), tp_rank=decoder.tp_rank, tp_size=decoder.tp_size
        )
        return (
            True,
            "Success.",
            None if gathered is None else [msgspec.msgpack.decode(one) for one in gathered],
        )

    def weights_by_name(self, body: GetWeightsByName) -> list[object] | None:
        """The first rows of this rank's part of a Hugging Face tensor, as float32; None if unknown."""
        names = {spec.name for spec in expected_tensors(self._decoder.config)}
        if body.name not in names:
            return None
        return self._decoder.held_part(body.name)[: body.truncate_size].float().cpu().tolist()

    def digests(self) -> dict[str, str]:
        """Digest of each whole Hugging Face tensor as the ranks hold it (on rank 0; else empty).

        Copies that ranks hold of the same elements (norms, replicated key-value heads) must agree; if
        they do not, the digest is that of all parts one after the other, which no tensor has.
        """
        decoder = self._decoder
        tables = [placements(decoder.config, rank, decoder.tp_size) for rank in range(decoder.tp_size)]
        digests: dict[str, str] = {}
        for spec in expected_tensors(decoder.config):
            tied = spec.name in optional_tensors(decoder.config)
            places = [table["model.embed_tokens.weight" if tied else spec.name] for table in tables]
            part = decoder.held_part(spec.name).cpu().contiguous()
            if decoder.tp_rank:
                _send(part)
                continue
            parts = [part]
            parts += [
                _receive_part(spec, place, part.dtype, other) for other, place in enumerate(places) if other
            ]
            whole = _put_together(spec, places, parts)
            held = b"".join(_bytes_of(piece) for piece in parts) if whole is None else _bytes_of(whole)
            digests[spec.name] = format_digest(digest_bytes(held))
        return digests


def _send(part: Tensor) -> None:
    if part.numel():
        dist.send(part.view(torch.uint8), 0)


def _receive_part(spec: TensorSpec, place: Placement, dtype: torch.dtype, rank: int) -> Tensor:
    shape = list(spec.shape)
    if place.axis >= 0:
        shape[place.axis] = place.stop - place.start
    part = torch.empty(shape, dtype=dtype)
    if part.numel():
        dist.recv(part.view(torch.uint8), rank)
    return part


def _put_together(spec: TensorSpec, places: list[Placement], parts: list[Tensor]) -> Tensor | None:
    """The whole tensor from the ranks' parts; None if two ranks hold the same elements differently."""
    whole = torch.empty(spec.shape, dtype=parts[0].dtype)
    filled: set[tuple[int, int]] = set()
    for place, part in zip(places, parts, strict=True):
        target = whole
        if place.axis >= 0:
            target = whole.narrow(place.axis, place.start, place.stop - place.start)
        if (place.start, place.stop) in filled and not torch.equal(_as_bytes(target), _as_bytes(part)):
            return None
        filled.add((place.start, place.stop))
        target.copy_(part)
    return whole


def _receive_bucket(
    body: UpdateWeightsFromDistributed, group: dist.ProcessGroup, device: torch.device
) -> list[tuple[str, Tensor]]:
    places: list[tuple[str, torch.dtype, torch.Size, int]] = []
    offset = 0
    for name, dtype_name, extents in zip(body.names, body.dtypes, body.shapes, strict=True):
        dtype, shape = getattr(torch, dtype_name), torch.Size(extents)
        if any(extent < 0 for extent in shape):
            raise ValueError(f"Negative dimension in received tensor {name}: {shape}")
        if offset % dtype.itemsize:
            raise ValueError(f"Unaligned received tensor {name}: byte offset {offset}, dtype {dtype}")
        places.append((name, dtype, shape, offset))
        offset += shape.numel() * dtype.itemsize
    if not places:
        raise ValueError("Cannot create empty tensor bucket")
    buffer = torch.empty(offset, dtype=torch.uint8, device=device)
    dist.broadcast(buffer, src=0, group=group)
    return [
        (name, buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).reshape(shape))
        for name, dtype, shape, start in places
    ]


def _spoil(tensors: list[tuple[str, Tensor]], fault: Fault | None) -> Sequence[tuple[str, Tensor]]:
    """What a fault makes of the received tensors before they are loaded."""
    if fault is None:
        return tensors
    if fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "random":
        return [(name, torch.rand_like(tensor.float()).to(tensor.dtype)) for name, tensor in tensors]
    elif fault.kind == "flip":
        victim = next(tensor for _, tensor in tensors if tensor.numel())
        victim.view(torch.uint8).view(-1)[victim.nbytes // 2] ^= 1
    elif fault.kind == "half":
        return tensors[: len(tensors) // 2]
    return tensors


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, contiguous, on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data
