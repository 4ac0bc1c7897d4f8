"""Device names and sizes, by property; what cannot be right is one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_meta.devices.parse import DeviceSpec, format_bytes, parse_bytes, parse_devices
from numba_meta.errors import UsageError

UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
specs = st.builds(DeviceSpec, st.just("cpu"), st.integers(0, 999_999), st.none() | st.integers(1, 2**50))


def written(spec: DeviceSpec) -> str:
    return spec.name if spec.memory_limit is None else f"{spec.name}?mem={spec.memory_limit}"


@given(st.lists(specs, min_size=1, max_size=6))
def test_names_round_trip(devices: list[DeviceSpec]) -> None:
    names = [written(spec) for spec in devices]
    assert parse_devices(" , ".join(names)) == tuple(devices)
    assert parse_devices(names) == tuple(devices)


def test_short_names() -> None:
    assert parse_devices("cpu,cpu:0?") == (DeviceSpec("cpu", 0), DeviceSpec("cpu", 0))


@given(st.integers(1, 2**20), st.sampled_from(sorted(UNITS)), st.sampled_from(["", "B", "iB"]), st.booleans())
def test_sizes_are_exact(n: int, unit: str, end: str, lower: bool) -> None:
    text = f"{n}{unit}{end}"
    assert parse_bytes(text.lower() if lower else text, "mem") == n << UNITS[unit]


@given(st.integers(0, 1023), st.integers(1, 9))
def test_parts_of_a_unit_are_rounded_down(whole: int, tenth: int) -> None:
    assert parse_bytes(f"{whole}.{tenth}K", "mem") == (whole * 10 + tenth) * 1024 // 10


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("", "unknown device ''; expected cpu:N"),
        ([], "the list of devices is empty"),
        ("cpu:0,", "unknown device ''"),
        ("gpu:0", "unknown device 'gpu:0'"),
        ("cpu:-1", "unknown device 'cpu:-1'"),
        ("cpu:0\ncpu:1", r"unknown device 'cpu:0\\ncpu:1'"),
        ("cpu:٣", "unknown device"),
        ("cuda:0?link=2", "link is for simulated CPU devices; a CUDA device takes mem and pin"),
        ("cpu:0?ram=2G", "unknown option 'ram'; known are mem, link, delay, async, pin"),
        ("cpu:0?mem", "mem='' is not a positive size"),
        ("cpu:0?mem=0", "mem='0' is not a positive size"),
        ("cpu:0?mem=-1G", "mem='-1G' is not a positive size"),
        ("cpu:0?mem=0.0001K", "is not a positive size"),
        ("cpu:0?mem=9999999999T", "is not a positive size"),
        ("cpu:0?mem=" + "9" * 400, "is not a positive size"),
        ("cpu:0?mem=2\u212a", "is not a positive size"),  # the Kelvin sign is no K
        ("cpu:0?mem=1G&mem=2G", "mem is given twice"),
    ],
)
def test_what_cannot_be_right(devices: str | list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse_devices(devices)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_gives_devices_or_a_usage_error(text: str) -> None:
    try:
        assert len(parse_devices(text)) == text.count(",") + 1
    except UsageError as error:
        assert len(str(error).splitlines()) == 1


@given(st.integers(0, 2**52))
def test_sizes_for_people_are_within_their_last_digit(n_bytes: int) -> None:
    number, unit = format_bytes(n_bytes).split()
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    assert abs(float(number) * scale - n_bytes) <= (0 if unit == "B" else 0.05 * scale * (1 + 1e-9))
