"""Random split states for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from numba_meta.split.state import Segment, SplitState


@st.composite
def split_states(draw: st.DrawFn, max_extent: int = 4) -> SplitState:
    n_devices = draw(st.integers(1, 4))
    segment = st.builds(
        lambda extents, repeat: Segment(tuple(extents), repeat),
        st.lists(st.integers(0, max_extent), min_size=n_devices, max_size=n_devices),
        st.integers(1, 3),
    )
    return SplitState(draw(st.integers(0, 3)), tuple(draw(st.lists(segment, min_size=1, max_size=3))))
