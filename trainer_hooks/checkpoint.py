"""A Hugging Face folder of safetensors as a source of tensors: mapped, streamed, never read as a whole.

    folder/model.safetensors                     one file, or
    folder/model.safetensors.index.json          {"weight_map": {name: file}} and the files it names

A file is ``<u64 header length><JSON header><bytes>``; the header gives each tensor's dtype, shape and byte
range (https://github.com/huggingface/safetensors, "Format"). A tensor's bytes are a view of the mapped file;
once they are used, its pages are given back, so that a checkpoint larger than memory passes through in
constant space. No torch: bytes are all that is needed of a tensor here.

Order: layer by layer, numbers as numbers, and inside a layer q, k, v and gate, up next to each other in
the order in which engines fuse them: whoever recomputes a fused parameter's checksum then holds nothing back.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ..proto.errors import InvalidLayout
from ..proto.layout import ITEM_SIZES, TensorSpec

#: safetensors' dtype names.
DTYPES: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}

#: The format's own limit on a header, bytes.
_MAX_HEADER_BYTES = 100_000_000
#: Order inside a fused parameter, by the last part of a module's name.
_FUSED_ORDER = {"q_proj": "!0", "k_proj": "!1", "v_proj": "!2", "gate_proj": "!3", "up_proj": "!4"}


class CheckpointInvalid(InvalidLayout):
    """The folder is no whole checkpoint; the message names the file and the tensor."""


class Entry(NamedTuple):
    """One tensor of one file: bytes ``[start, stop)`` of the mapped file."""

    spec: TensorSpec
    file: int
    start: int
    stop: int


class Checkpoint:
    """An open checkpoint folder. Close it, or use it as a context manager.

    Raises:
        CheckpointInvalid: for a missing folder, index or shard, a corrupt header, a tensor in two files,
            or a weight map that does not agree with its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files, promised = _files_of(folder)
        self._maps: list[mmap.mmap] = []
        self.entries: tuple[Entry, ...] = ()
        try:
            found: dict[str, Entry] = {}
            for number, file in enumerate(self.files):
                mapped = _map(file)
                self._maps.append(mapped)
                for entry in _read_header(file, number, mapped):
                    name = entry.spec.name
                    if name in found:
                        other = self.files[found[name].file].name
                        raise CheckpointInvalid(f"{name!r} is in both {other} and {file.name}")
                    found[name] = entry
            _check_promises(promised, found, self.files)
        except BaseException:
            self.close()
            raise
        self.entries = tuple(sorted(found.values(), key=lambda entry: arrival_key(entry.spec.name)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.stop - entry.start for entry in self.entries)

    @contextlib.contextmanager
    def bytes_of(self, entry: Entry) -> Iterator[memoryview]:
        """The tensor's bytes (uint8, read-only) inside the block; its pages are given back after it."""
        whole = memoryview(self._maps[entry.file])
        part = whole[entry.start : entry.stop]
        try:
            yield part
        finally:
            part.release()
            whole.release()
            self._give_back(entry)

    def close(self) -> None:
        """Unmap the files. Safe to call twice."""
        while self._maps:
            self._maps.pop().close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _give_back(self, entry: Entry) -> None:
        page = mmap.PAGESIZE
        start = -(-entry.start // page) * page
        stop = entry.stop // page * page
        if stop > start:
            self._maps[entry.file].madvise(mmap.MADV_DONTNEED, start, stop - start)


def arrival_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key of a tensor's name: parts in turn, numbers as numbers, fused parts in fused order."""
    key = []
    for part in name.split("."):
        if re.fullmatch(r"[0-9]+", part):
            key.append((0, int(part), ""))
        else:
            key.append((1, 0, _FUSED_ORDER.get(part, part)))
    return tuple(key)


def _files_of(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        promised = _read_index(index)
        names = sorted(set(promised.values()))
        strange = [name for name in names if Path(name).name != name]
        if strange:
            raise CheckpointInvalid(f"{index} names files outside the folder: {', '.join(strange)}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointInvalid(
                f"{folder} lacks {len(missing)} of {len(names)} shards: {', '.join(missing)}"
            )
        return [folder / name for name in names], promised
    if single.is_file():
        return [single], None
    what = "is not a folder" if not folder.is_dir() else "has neither model.safetensors nor its index.json"
    raise CheckpointInvalid(f"{folder} {what}; give the folder of a Hugging Face checkpoint in safetensors")


def _read_index(index: Path) -> dict[str, str]:
    try:
        promised = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointInvalid(f"{index} is no index of safetensors: {error!r}") from error
    if (
        not isinstance(promised, dict)
        or not promised
        or not all(isinstance(v, str) for v in promised.values())
    ):
        raise CheckpointInvalid(f"{index} has no weight_map of names to files")
    return promised


def _map(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(f"{file} cannot be mapped: {error}") from error
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    return mapped


def _read_header(file: Path, number: int, mapped: mmap.mmap) -> Iterator[Entry]:
    length = int.from_bytes(mapped[:8], "little") if len(mapped) >= 8 else -1
    if not 2 <= length <= min(_MAX_HEADER_BYTES, len(mapped) - 8):
        raise CheckpointInvalid(
            f"{file} of {len(mapped)} bytes announces a header of {length}; it is corrupt or cut short"
        )
    try:
        header = json.loads(mapped[8 : 8 + length], object_pairs_hook=lambda pairs: _no_repeats(file, pairs))
    except ValueError as error:
        raise CheckpointInvalid(f"{file} has a header that is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointInvalid(f"{file} has a header that is no JSON object")
    for name, said in header.items():
        if name != "__metadata__":
            yield _entry(file, number, name, said, base=8 + length, size=len(mapped))


def _no_repeats(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        repeated = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise CheckpointInvalid(f"{file} names {repeated!r} twice")
    return found


def _entry(file: Path, number: int, name: str, said: Any, *, base: int, size: int) -> Entry:
    try:
        dtype, shape, (start, stop) = said["dtype"], tuple(said["shape"]), said["data_offsets"]
        extents = [*shape, start, stop]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointInvalid(f"{file} describes {name!r} as {said!r}") from error
    if dtype not in DTYPES:
        raise CheckpointInvalid(f"{file} has {name!r} in dtype {dtype!r}, which cannot be sent")
    if not all(type(extent) is int and extent >= 0 for extent in extents) or base + stop > size:
        raise CheckpointInvalid(
            f"{file} has {name!r} at bytes {start} to {stop} beyond its {size - base}; it is cut short"
        )
    if stop - start != math.prod(shape) * ITEM_SIZES[DTYPES[dtype]]:
        raise CheckpointInvalid(f"{file} has {name!r} of {dtype} {list(shape)} in {stop - start} bytes")
    return Entry(TensorSpec(name, DTYPES[dtype], shape), number, base + start, base + stop)


def _check_promises(promised: dict[str, str] | None, found: dict[str, Entry], files: list[Path]) -> None:
    for name, file in (promised or {}).items():
        if name not in found:
            raise CheckpointInvalid(f"the index promises {name!r} in {file}, which does not have it")
        if files[found[name].file].name != file:
            raise CheckpointInvalid(
                f"the index promises {name!r} in {file}; it is in {files[found[name].file].name}"
            )
    extra = [name for name in found if promised is not None and name not in promised]
    if extra:
        raise CheckpointInvalid(
            f"the shards have {len(extra)} tensors that the index does not: {', '.join(extra[:5])}"
        )
