"""Greedy generation on one rank: queue, running sequences, prefix cache, pause, version spans.

Every rank runs the same code on the same calls in the same order, so all agree on every token.

    waiting → running → finished          abort: → finished at once, with what there is
                 └── retract ──► waiting  (its keys and values are dropped and computed again)

The prefix cache keeps keys and values by token ids and knows nothing of weights. Unless it is flushed
after an update it serves what the old weights computed, as SGLang's does.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from .decoder import Decoder, KeyValueCache
from .wire import Generate, Output, VersionSpan

#: Sequences whose keys and values are kept for reuse.
PREFIX_CACHE_ENTRIES = 16


class Sequence:
    """One request under way."""

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.output_ids: list[int] = []
        self.cache: KeyValueCache | None = None
        self.cached_tokens = 0
        self.retractions = 0
        #: (version, output tokens made under it or before), closed when the version changes.
        self.events: list[tuple[str, int]] = []

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.request.input_ids + self.output_ids


class PrefixCache:
    """Keys and values of recent sequences, by their token ids."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[int, ...], KeyValueCache] = OrderedDict()

    def put(self, tokens: list[int], cache: KeyValueCache) -> None:
        """Remember that the first ``len(tokens)`` positions of ``cache`` belong to ``tokens``."""
        key = tuple(tokens)
        self._entries[key] = cache
        self._entries.move_to_end(key)
        if len(self._entries) > PREFIX_CACHE_ENTRIES:
            self._entries.popitem(last=False)

    def longest_prefix(self, tokens: list[int]) -> tuple[int, KeyValueCache | None]:
        """The most positions of ``tokens`` that are known; never all, as the last one's logits are needed."""
        best, found = 0, None
        for key, cache in self._entries.items():
            common = 0
            for ours, theirs in zip(tokens[:-1], key, strict=False):
                if ours != theirs:
                    break
                common += 1
            if common > best:
                best, found = common, cache
        return best, found

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()


class Generation:
    """All sequences of one rank. ``version`` is the weight label that new tokens are counted under."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._prefixes = PrefixCache()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self.paused = False
        self.version = "default"

    @property
    def has_work(self) -> bool:
        """Whether `step` would make a token."""
        return not self.paused and bool(self._waiting or self._running)

    def counts(self) -> tuple[int, int]:
        """Sequences running and waiting."""
        return len(self._running), len(self._waiting)

    def add(self, request: Generate) -> None:
        """Queue a request."""
        self._waiting.append(Sequence(request))

    def pause(self, mode: str) -> None:
        """Stop stepping; ``retract`` puts running sequences back in the queue without their cache."""
        self.paused = True
        if mode == "retract":
            for sequence in reversed(self._running):
                sequence.cache = None
                sequence.retractions += 1
                self._waiting.appendleft(sequence)
            self._running = []

    def resume(self) -> None:
        """Step again."""
        self.paused = False

    def abort(self, rid: str, *, everything: bool) -> list[Output]:
        """End one sequence, or all, with what they have."""
        ended = [
            sequence
            for sequence in [*self._running, *self._waiting]
            if everything or sequence.request.rid == rid
        ]
        self._running = [sequence for sequence in self._running if sequence not in ended]
        self._waiting = deque(sequence for sequence in self._waiting if sequence not in ended)
        return [self._output(sequence, {"type": "abort", "message": "Aborted"}) for sequence in ended]

    def flush(self) -> bool:
        """Empty the prefix cache; False while sequences run, or wait without a pause."""
        if self._running or (self._waiting and not self.paused):
            return False
        self._prefixes.clear()
        return True

    def relabel(self, version: str | None) -> None:
        """Count tokens from now on under another weight version."""
        if version is None or version == self.version:
            return
        for sequence in [*self._running, *self._waiting]:
            if sequence.output_ids:
                sequence.events.append((self.version, len(sequence.output_ids)))
        self.version = version

    def step(self) -> list[Output]:
        """One more token for every sequence; waiting ones start. Answers what is to be told."""
        self._running += self._waiting
        self._waiting.clear()
        outputs: list[Output] = []
        going_on: list[Sequence] = []
        for sequence in self._running:
            self._extend(sequence)
            reason = self._finish_reason(sequence)
            if reason is not None or sequence.request.stream:
                outputs.append(self._output(sequence, reason))
            if reason is None:
                going_on.append(sequence)
        self._running = going_on
        return outputs

    def _extend(self, sequence: Sequence) -> None:
        tokens = sequence.tokens
        if sequence.cache is None:
            sequence.cache = KeyValueCache(
                self._decoder, len(sequence.request.input_ids) + sequence.request.max_new_tokens
            )
            known, source = self._prefixes.longest_prefix(tokens)
            if source is not None:
                sequence.cache.adopt(source, known)
            if not sequence.output_ids:
                sequence.cached_tokens = known
        logits = self._decoder.next_logits(tokens[sequence.cache.length :], sequence.cache)
        if not sequence.output_ids:
            self._prefixes.put(tokens, sequence.cache)
        sequence.output_ids.append(int(logits.argmax()))

    def _finish_reason(self, sequence: Sequence) -> dict[str, Any] | None:
        last = sequence.output_ids[-1]
        reason: dict[str, Any] | None = None
        if last in sequence.request.stop:
            reason = {"type": "stop", "matched": last}
        elif len(sequence.output_ids) >= sequence.request.max_new_tokens:
            reason = {"type": "length", "length": len(sequence.output_ids)}
        if reason is not None and sequence.cache is not None:
            self._prefixes.put(sequence.tokens[: sequence.cache.length], sequence.cache)
        return reason

    def _output(self, sequence: Sequence, reason: dict[str, Any] | None) -> Output:
        return Output(
            rid=sequence.request.rid,
            output_ids=list(sequence.output_ids),
            finish_reason=reason,
            spans=version_spans(sequence.events, self.version, len(sequence.output_ids)),
            cached_tokens=sequence.cached_tokens,
            num_retractions=sequence.retractions,
        )


def version_spans(events: list[tuple[str, int]], current: str, total: int) -> list[VersionSpan]:
    """Cut ``total`` output tokens into spans, one per weight version that made some of them.

    Args:
        events: (version, output tokens when it was replaced), in order.
        current: the version of the tokens after the last event.
    """
    spans: list[VersionSpan] = []
    for version, end in [*events, (current, total)]:
        if spans and end <= spans[-1].end:
            continue
        if spans and version == spans[-1].version:
            spans[-1] = VersionSpan(version, spans[-1].start, end)
        else:
            spans.append(VersionSpan(version, spans[-1].end if spans else 0, end))
    return spans
