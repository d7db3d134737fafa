"""What a training loop may hand to `refit`, and the order in which its tensors come.

nn.Module                       parameters and persistent buffers under their state-dict names; a tied
                                tensor once, under its first name (an engine ties it again by itself)
Mapping, sequence, iterable     pairs (name, tensor). A one-shot iterator is listed first: fine for
                                references to live tensors, as generators over a module yield
zero-argument callable          called for a fresh iterable each time and streamed, for exporters that
                                make tensors as they go. The first refit calls it twice: once to learn
                                names, dtypes and shapes; later refits check against what was learned.
                                    Collectives inside it are its own: a rank that raises before one leaves
                                    the others in it until the time-out of its group
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..proto.errors import InvalidLayout
from ..proto.layout import ITEM_SIZES, Layout, TensorSpec
from .gather import GatherPlan, plan_gather

Pairs = Iterable[tuple[str, torch.Tensor]]
NamedTensors = nn.Module | Mapping[str, torch.Tensor] | Pairs | Callable[[], Pairs]


class Described(NamedTuple):
    """One tensor before it is sent. ``fits``: the local shard is the box its placements say."""

    spec: TensorSpec
    plan: GatherPlan
    fits: bool


class TensorSource:
    """The tensors of one refit. ``streamed``: they come from a callable, one at a time."""

    def __init__(self, named_tensors: NamedTensors) -> None:
        self._listed: list[Any] | None = None
        self._produce: Callable[[], Pairs] | None = None
        if isinstance(named_tensors, nn.Module):
            self._listed = module_tensors(named_tensors)
        elif isinstance(named_tensors, Mapping):
            self._listed = list(named_tensors.items())
        elif isinstance(named_tensors, Iterable):
            self._listed = list(named_tensors)
        elif callable(named_tensors):
            self._produce = named_tensors
        else:
            raise InvalidLayout(
                f"refit got a {type(named_tensors).__name__}; it takes an nn.Module, a mapping, an iterable "
                "of (name, tensor), or a callable that returns such an iterable"
            )

    @property
    def streamed(self) -> bool:
        return self._produce is not None

    def pairs(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """A fresh pass over (name, tensor).

        Raises:
            InvalidLayout: for an item that is no such pair.
        """
        items: Iterable[Any] = self._produce() if self._produce is not None else self._listed or ()
        for item in items:
            if not (isinstance(item, Sequence) and len(item) == 2):
                raise InvalidLayout(f"refit got a {type(item).__name__} where (name, tensor) was expected")
            name, tensor = item
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise InvalidLayout(
                    f"refit got ({type(name).__name__}, {type(tensor).__name__}) named {name!r} "
                    "where (str, torch.Tensor) was expected"
                )
            yield name, tensor

    def describe(self, rank: int) -> list[Described]:
        """One pass over all tensors, keeping names, dtypes, shapes and gather plans only."""
        return [describe_tensor(name, tensor, rank) for name, tensor in self.pairs()]


def module_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's parameters and persistent buffers, each tensor once, in state-dict order.

    ``torch.compile``'s ``_orig_mod`` is left out of the names; no engine has it.
    """
    seen: set[int] = set()
    tensors = []
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        tensors.append((name.replace("_orig_mod.", ""), tensor))
    return tensors


def describe_tensor(name: str, tensor: torch.Tensor, rank: int) -> Described:
    """Name, dtype, whole shape and gather plan of one tensor.

    Raises:
        InvalidLayout: for a tensor without plain memory, or of a dtype that cannot be sent.
    """
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        raise InvalidLayout(
            f"{name!r} is a {tensor.layout} tensor on {tensor.device}; it has no plain bytes to send"
        )
    spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    if spec.dtype not in ITEM_SIZES:
        raise InvalidLayout(f"{name!r} has dtype {spec.dtype!r}, which cannot be sent")
    plan, fits = plan_gather(tensor, name=name, rank=rank)
    return Described(spec, plan, fits)


class BucketFeed:
    """Deals a source's tensors out bucket by bucket, in arrival order within each.

    A tensor that comes before its bucket (because a group in ``together`` has late members) is held; all
    others are given out at once and not kept.
    """

    def __init__(
        self, source: TensorSource, described: Sequence[Described], layout: Layout, rank: int
    ) -> None:
        self._pairs = source.pairs()
        self._streamed = source.streamed
        self._described = described
        self._layout = layout
        self._rank = rank
        self._home = {index: number for number, members in enumerate(layout.buckets) for index in members}
        self._early: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._next = 0

    def bucket(self, number: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensors of one bucket as (index in the layout, tensor). Call for 0, 1, 2, … in turn.

        Raises:
            InvalidLayout: naming the tensor, if a streamed source yields other tensors than it did before.
            Exception: whatever the source raises.
        """
        early = self._early.pop(number, [])
        wanted = len(self._layout.buckets[number]) - len(early)
        yield from early
        early.clear()
        while wanted:
            index, tensor = self._take()
            if self._home[index] == number:
                wanted -= 1
                yield index, tensor
            else:
                self._early.setdefault(self._home[index], []).append((index, tensor))
            del tensor
        if self._next == len(self._described):
            self._expect_end()

    def close(self) -> None:
        """End the source's iterator and drop what is held."""
        self._early.clear()
        self._pairs.close()

    def _take(self) -> tuple[int, torch.Tensor]:
        index = self._next
        expected = self._described[index]
        pair = next(self._pairs, None)
        if pair is None:
            raise InvalidLayout(
                f"the callable's iterable ended after {index} of {len(self._described)} tensors; "
                f"{expected.spec.name!r} did not come"
            )
        name, tensor = pair
        if self._streamed:
            found = describe_tensor(name, tensor, self._rank)
            if found != expected:
                raise InvalidLayout(
                    f"tensor {index} of the callable was {_say(expected)} when it was first listed and is "
                    f"now {_say(found)}"
                )
        self._next += 1
        return index, tensor

    def _expect_end(self) -> None:
        extra = next(self._pairs, None)
        if extra is not None:
            raise InvalidLayout(f"the callable yields {extra[0]!r}, which it did not have when first listed")


def _say(described: Described) -> str:
    spec = described.spec
    sharding = "" if described.plan.kind == "plain" else f", sharded ({described.plan.kind})"
    return f"{spec.name!r} ({spec.dtype} {list(spec.shape)}{sharding})"
