"""Split states: how a tensor is divided over the devices of a meta device.

A state is a value: it knows nothing of devices, buffers or graphs. Axes are counted as in GGUF files, axis 0 is the
fastest-varying one (the row of a weight); shapes are `(n_axis_0, n_axis_1, ...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from numba_meta.dtypes import DType
from numba_meta.errors import SplitError

MAX_AXES = 4
MIRRORED_AXIS = -1
PARTIAL_AXIS = -2


@dataclass(frozen=True)
class Segment:
    """One part of a cut axis: device j holds `extents[j]` elements, then the pattern starts again, `repeat` times in all."""

    extents: tuple[int, ...]
    repeat: int = 1

    def __post_init__(self) -> None:
        if not self.extents or min(self.extents) < 0:
            raise SplitError(f"extents {self.extents} of a segment: expected one number of elements per device, none below 0")
        if self.repeat < 1:
            raise SplitError(f"repeat count {self.repeat} of a segment: expected 1 or more")

    @property
    def total(self) -> int:
        """Elements of the axis that this segment covers."""
        return sum(self.extents) * self.repeat

    def __str__(self) -> str:
        cuts = "|".join(map(str, self.extents))
        return cuts if self.repeat == 1 else f"{self.repeat} x ({cuts})"


@dataclass(frozen=True)
class SplitState:
    """How a tensor is divided: on `axis` 0..3 by `segments`, or `MIRRORED`, or `PARTIAL` (both without segments).

    Device j stores its piece of segment 0, then its piece of segment 1, and so on. Raises `SplitError` for what
    cannot be a state; whether it fits a tensor is for `validate` to say.
    """

    axis: int
    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        if not PARTIAL_AXIS <= self.axis < MAX_AXES:
            raise SplitError(f"axis {self.axis} of a split: expected 0 to {MAX_AXES - 1}")
        if (self.axis >= 0) != bool(self.segments):
            raise SplitError(f"axis {self.axis} with {len(self.segments)} segments: a cut axis has at least one, other states have none")
        if len({len(segment.extents) for segment in self.segments}) > 1:
            raise SplitError(f"segments {' + '.join(map(str, self.segments))}: expected the same number of devices in each")

    @property
    def is_split(self) -> bool:
        """Whether an axis is cut, so that a device holds a part of the elements."""
        return self.axis >= 0

    @property
    def is_mirrored(self) -> bool:
        """Whether every device holds the whole tensor."""
        return self.axis == MIRRORED_AXIS

    @property
    def is_partial(self) -> bool:
        """Whether every device holds a summand of the tensor."""
        return self.axis == PARTIAL_AXIS

    @property
    def n_devices(self) -> int | None:
        """Devices that the axis is cut over; None for `MIRRORED` and `PARTIAL`, which fit any number."""
        return len(self.segments[0].extents) if self.segments else None

    @property
    def total(self) -> int:
        """Elements of the cut axis over all devices."""
        self._need_axis()
        return sum(segment.total for segment in self.segments)

    def extent(self, device: int) -> int:
        """Elements of the cut axis that a device holds, over all segments and repeats."""
        self._need_device(device)
        return sum(segment.extents[device] * segment.repeat for segment in self.segments)

    @property
    def extents(self) -> tuple[int, ...]:
        """`extent` of every device."""
        self._need_axis()
        return tuple(map(self.extent, range(len(self.segments[0].extents))))

    def ranges(self, device: int) -> tuple[tuple[int, int], ...]:
        """The (start, stop) ranges of the whole axis that a device holds, in the order in which it stores them.

        Empty ranges are left out and adjacent ones are joined, so that two states with equal ranges cut alike.
        """
        self._need_device(device)
        joined: list[tuple[int, int]] = []
        offset = 0
        for segment in self.segments:
            before = sum(segment.extents[:device])
            n = segment.extents[device]
            period = sum(segment.extents)
            starts = range(offset + before, offset + before + period * segment.repeat, period) if n else ()
            for start in starts:
                if joined and joined[-1][1] == start:
                    joined[-1] = (joined[-1][0], start + n)
                else:
                    joined.append((start, start + n))
            offset += segment.total
        return tuple(joined)

    def same_cuts(self, other: SplitState) -> bool:
        """Whether both divide their axes (which may be different ones) at the same places over the same devices.

        `MIRRORED` has the cuts of `MIRRORED` only, and `PARTIAL` those of `PARTIAL`.
        """
        if not self.is_split or not other.is_split:
            return self == other
        if self.segments == other.segments:
            return True
        if self.n_devices != other.n_devices or self.total != other.total:
            return False
        return all(self.ranges(device) == other.ranges(device) for device in range(len(self.segments[0].extents)))

    def on_axis(self, axis: int) -> SplitState:
        """The same cuts on another axis (a permute); `MIRRORED` and `PARTIAL` stay."""
        return replace(self, axis=axis) if self.is_split else self

    def scaled(self, factor: int) -> SplitState:
        """Every extent times `factor`: the cut axis was merged with `factor` elements that lie inside each of its own."""
        if factor < 1:
            raise SplitError(f"a split ({self}) scaled by {factor}: expected 1 or more")
        return self._with_extents(lambda extent: extent * factor)

    def divided(self, factor: int) -> SplitState:
        """Every extent over `factor`: `factor` elements were split off below the cut axis. `SplitError` where a cut is not between them."""
        if factor < 1 or any(extent % factor for segment in self.segments for extent in segment.extents):
            raise SplitError(f"a split ({self}) divided by {factor}: expected every extent to be a multiple; cut in units of {factor}")
        return self._with_extents(lambda extent: extent // factor)

    def repeated(self, count: int) -> SplitState:
        """The cuts `count` times in a row: the cut axis was merged with `count` elements that lie outside of it."""
        if count < 1:
            raise SplitError(f"a split ({self}) repeated {count} times: expected 1 or more")
        if not self.is_split or count == 1:
            return self
        if len(self.segments) == 1:
            only = self.segments[0]
            return replace(self, segments=(Segment(only.extents, only.repeat * count),))
        return replace(self, segments=self.segments * count)

    def unrepeated(self, count: int) -> SplitState:
        """The inverse of `repeated`: `count` equal stretches were split off. `SplitError` where the stretches are not cut alike."""
        if not self.is_split or count == 1:
            return self
        if count > 1 and len(self.segments) == 1 and self.segments[0].repeat % count == 0:
            only = self.segments[0]
            return replace(self, segments=(Segment(only.extents, only.repeat // count),))
        if count > 1 and len(self.segments) % count == 0:
            first = self.segments[: len(self.segments) // count]
            if first * count == self.segments:
                return replace(self, segments=first)
        raise SplitError(f"a split ({self}) over {count} stretches: expected each to be cut alike")

    def of_devices(self, devices: range) -> SplitState:
        """The same cuts over some of the devices alone, of a tensor that holds their parts of the axis and nothing else."""
        if not self.is_split:
            return self
        return replace(self, segments=tuple(Segment(s.extents[devices.start : devices.stop], s.repeat) for s in self.segments))

    def validate(self, shape: Sequence[int], dtype: DType, name: str = "") -> None:
        """Raises `SplitError` unless this state fits a tensor of this shape and type (`name` is for the message)."""
        if not self.is_split:
            return
        what = f"{name} {list(shape)} {dtype}".lstrip()
        n = shape[self.axis] if self.axis < len(shape) else 1
        if self.total != n:
            raise SplitError(f"{what}: the split ({self}) covers {self.total} elements of axis {self.axis}, expected {n}")
        if self.axis == 0 and any(extent % dtype.block_size for segment in self.segments for extent in segment.extents):
            raise SplitError(f"{what}: the split ({self}) cuts inside a block; expected multiples of {dtype.block_size}")

    def piece_shape(self, shape: Sequence[int], device: int) -> tuple[int, ...]:
        """The shape of what a device holds: `shape` with the cut axis at this device's extent."""
        if not self.is_split:
            return tuple(shape)
        padded = tuple(shape) + (1,) * (self.axis + 1 - len(shape))
        return padded[: self.axis] + (self.extent(device),) + padded[self.axis + 1 :]

    def __str__(self) -> str:
        if not self.is_split:
            return "mirrored" if self.is_mirrored else "partial"
        return f"axis {self.axis}: {' + '.join(map(str, self.segments))}"

    def _with_extents(self, change: Callable[[int], int]) -> SplitState:
        segments = tuple(Segment(tuple(map(change, segment.extents)), segment.repeat) for segment in self.segments)
        return replace(self, segments=segments)

    def _need_axis(self) -> None:
        if not self.is_split:
            raise SplitError(f"extents of a {self} tensor: expected one that is split on an axis")

    def _need_device(self, device: int) -> None:
        self._need_axis()
        if not 0 <= device < len(self.segments[0].extents):
            raise SplitError(f"device {device} of a split over {self.n_devices} devices ({self})")


MIRRORED = SplitState(MIRRORED_AXIS)
PARTIAL = SplitState(PARTIAL_AXIS)


def split(axis: int, extents: Iterable[int], repeat: int = 1) -> SplitState:
    """A plain tensor cut on `axis`: device j holds `extents[j]` elements (of each of `repeat` stretches)."""
    return SplitState(axis, (Segment(tuple(extents), repeat),))


def split_segments(axis: int, segments: Iterable[Segment | Iterable[int]]) -> SplitState:
    """A fused tensor cut on `axis`, part by part; each part is a `Segment` or the extents of one with repeat 1."""
    return SplitState(axis, tuple(part if isinstance(part, Segment) else Segment(tuple(part)) for part in segments))


def cut_points(extents: Sequence[int]) -> tuple[int, ...]:
    """Where the pieces begin and end: 0, then the end of each device's piece."""
    return (0, *accumulate(extents))
