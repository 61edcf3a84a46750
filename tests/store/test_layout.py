"""What a file will contain, gathered from memory in place: any part of it, from any strides."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swansong.errors import UnrepresentableError
from swansong.state.tensors import HostTensor
from swansong.store.layout import Extent, Layout, Segment

BASE = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
VIEWS = {
    "contiguous": BASE,
    "transposed": BASE.transpose(2, 0, 1),
    "every other": BASE[:, ::2, 1:],
    "backwards": BASE[::-1, :, ::-1],
    "broadcast": np.broadcast_to(BASE[0, 0], (3, 4)),
    "0-dim": BASE[1, 1, 1],
    "empty": BASE[:, :0],
    "big-endian": BASE.astype(">i4"),
    "bool": BASE % 3 == 0,
    "complex": (BASE + 1j * BASE).astype(np.complex64).T,
}


def stored(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()


@pytest.mark.parametrize("array", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_is_stored_as_what_it_shows(array: np.ndarray) -> None:
    layout = Layout.of([Segment(HostTensor.of(array), "t")])
    out = np.empty(layout.size, np.uint8)
    layout.fill(0, out)
    assert out.tobytes() == stored(array)


@given(st.data())
def test_any_part_equals_that_part_of_the_whole(data: st.DataObject) -> None:
    piece = st.binary(max_size=9).map(Segment) | st.sampled_from(list(VIEWS.values())).map(
        lambda array: Segment(HostTensor.of(array), "t")
    )
    segments = data.draw(st.lists(piece, max_size=6))
    whole = b"".join(
        segment.data if isinstance(segment.data, bytes) else stored(segment.data.array)
        for segment in segments
    )
    layout = Layout.of(segments)
    assert layout.size == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    out = np.empty(data.draw(st.integers(0, len(whole) - start)), np.uint8)
    layout.fill(start, out)
    assert out.tobytes() == whole[start : start + len(out)]


def test_extents_name_tensors_once_per_slice_and_leave_out_what_is_empty() -> None:
    half = HostTensor.of(np.zeros(3, np.int16))
    layout = Layout.of(
        [
            Segment(b"head"),
            Segment(half, "a"),
            Segment(b"."),
            Segment(half, "a"),
            Segment(HostTensor.of(np.zeros((0, 2))), "empty"),
        ],
        trailer=lambda crc: b"end",
        trailer_size=3,
    )
    assert layout.extents() == [Extent("a", 4, 10), Extent("a", 11, 17)]
    assert (layout.body_size, layout.size) == (17, 20)


def test_gathering_a_part_of_a_transposed_tensor_does_not_copy_all_of_it() -> None:
    layout = Layout.of([Segment(HostTensor.of(np.zeros((2000, 2000), np.float32).T), "t")])
    out = np.empty(4096, np.uint8)
    tracemalloc.start()
    try:
        layout.fill(8_000_001, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    "array",
    [np.array(["text"]), np.array([1], "M8[s]"), np.array([None]), np.zeros(2, np.longdouble)],
    ids=str,
)
def test_elements_without_a_fixed_form_are_refused_by_name(array: np.ndarray) -> None:
    with pytest.raises(UnrepresentableError, match="moment: elements of type"):
        HostTensor.of(array, name="moment")
