"""What each stream did and when: data, from the virtual clock or from a recording of a real step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

KINDS = ("attention", "compute", "copy", "wait", "meet")


@dataclass(frozen=True)
class Span:
    """One thing on one stream, in seconds from the timeline's begin.

    `kind` is one of `KINDS`: attention (what reads a window), other compute, copy, wait (for an event or a link), meet (for other devices).
    """

    stream: str
    label: str
    start: Fraction
    stop: Fraction
    kind: str
    n_bytes: int = 0

    @property
    def seconds(self) -> Fraction:
        """How long it took."""
        return self.stop - self.start


@dataclass(frozen=True)
class Timeline:
    """Streams in the order in which they are drawn, and their spans; those of one stream do not overlap and come in order."""

    streams: tuple[str, ...]
    spans: tuple[Span, ...]

    @property
    def stop(self) -> Fraction:
        """The end of the last span, 0 without any."""
        return max((span.stop for span in self.spans), default=Fraction())

    def between(self, start: Fraction | float, stop: Fraction | float) -> Timeline:
        """The part from `start` to `stop`, which becomes its own begin and end; spans are cut there."""
        low, high = Fraction(start), Fraction(stop)
        inside = (span for span in self.spans if span.start < high and span.stop > low)
        cut = tuple(replace(span, start=max(span.start, low) - low, stop=min(span.stop, high) - low) for span in inside)
        return Timeline(self.streams, cut)

    def of(self, stream: str) -> tuple[Span, ...]:
        """The spans of one stream."""
        return tuple(span for span in self.spans if span.stream == stream)

    def seconds(self, stream: str, *kinds: str) -> Fraction:
        """How long a stream was at things of these kinds."""
        return sum((span.seconds for span in self.of(stream) if span.kind in kinds), Fraction())
