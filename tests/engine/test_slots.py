"""Slots: a write that ends at any byte leaves everything readable that was there before."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swansong.engine.slots import HEADER_BYTES, Record, Slots, read_slots, slot_count, slot_size

PAYLOAD = 40
KEEP = {0: 2, 1: 1}
SIZE = slot_count(KEEP) * slot_size(PAYLOAD)
OFFSET = 24


class Killed(Exception):
    """The process is gone, as far as its memory is concerned."""


class MortalMemory:
    """Memory whose writer is killed after so many bytes."""

    def __init__(self) -> None:
        self.content = bytearray(OFFSET + SIZE)
        self.budget = 1 << 30

    def __setitem__(self, where: slice, data: bytes) -> None:
        assert where.stop - where.start == len(data)
        stored = min(len(data), self.budget)
        self.content[where.start : where.start + stored] = data[:stored]
        self.budget -= stored
        if stored < len(data):
            raise Killed

    def read(self, at: int, length: int) -> bytes:
        assert 0 <= at <= at + length <= len(self.content)
        return bytes(self.content[at : at + length])

    def records(self) -> list[tuple[int, int, bytes | None]]:
        return [(r.kind, r.step, r.payload) for r in read_slots(self.read, OFFSET, PAYLOAD, KEEP)]


def payload(kind: int, step: int) -> bytes:
    return random.Random(f"{kind} {step}").randbytes(PAYLOAD - step % 3)


def written(memory: MortalMemory, *records: tuple[int, int]) -> Slots:
    slots = Slots(memory, OFFSET, PAYLOAD, KEEP)
    for kind, step in records:
        data = payload(kind, step)
        slots.write(kind, step, data, len(data))
    return slots


def expected(*records: tuple[int, int]) -> list[tuple[int, int, bytes | None]]:
    return [(kind, step, payload(kind, step)) for kind, step in records]


def counting(records: list[tuple[int, int, bytes | None]]) -> list[tuple[int, int, bytes | None]]:
    """Without what was provisional and has been superseded, which may still stand in a spare slot."""
    return [record for place, record in enumerate(records) if record[0] == 0 or place == 0]


BEFORE = [(0, 1), (1, 2), (0, 2), (1, 3), (0, 3), (1, 4)]
"""Enough for every slot to hold something older than what is to be written."""


@pytest.mark.parametrize(
    ("new", "before", "after"),
    [
        pytest.param((0, 4), [(1, 4), (0, 3), (0, 2)], [(0, 4), (1, 4), (0, 3)], id="boundary"),
        pytest.param((1, 5), [(1, 4), (0, 3), (0, 2)], [(1, 5), (0, 3), (0, 2)], id="provisional"),
    ],
)
def test_a_write_torn_at_any_byte_leaves_what_was_there_or_is_complete(
    new: tuple[int, int], before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    data = payload(*new)
    total = 8 + len(data) + 32 + 8
    seen = []
    for budget in range(total + 1):
        memory = MortalMemory()
        slots = written(memory, *BEFORE)
        memory.budget = budget
        try:
            slots.write(*new, data, len(data))
        except Killed:
            seen.append(memory.records())
        else:
            assert budget == total
            assert memory.records() == expected(*after)
    assert len(seen) == total
    # The number is stored last, and the bytes that follow its lowest are zero as they were.
    assert seen[: total - 7] == [expected(*before)] * (total - 7)
    assert seen[total - 7 :] == [expected(*after)] * 7


def test_a_promotion_torn_at_any_byte_leaves_what_was_there_or_is_complete() -> None:
    before, after = [(1, 4), (0, 3), (0, 2)], [(0, 4), (0, 3)]
    for budget in range(9):
        memory = MortalMemory()
        slots = written(memory, *BEFORE)
        memory.budget = budget
        if budget < 8:
            with pytest.raises(Killed):
                slots.promote(1)
            assert memory.records() == expected(*before)
        else:
            slots.promote(1)
            assert counting(memory.records()) == [(0, 4, payload(1, 4)), *expected(*after[1:])]


def test_slots_are_reused_after_promotions_as_after_writes() -> None:
    memory = MortalMemory()
    slots = Slots(memory, OFFSET, PAYLOAD, KEEP)
    for step in range(1, 12):
        data = payload(1, step)
        slots.write(1, step, data, len(data))
        slots.write(1, step, data, len(data))  # as with two forward passes
        if step % 3:
            slots.promote(1)
        else:
            slots.write(0, step, data, len(data))
        kept = [(0, kept, payload(1, kept)) for kept in (step, step - 1) if kept]
        found = [record for record in memory.records() if record[0] == 0]
        assert found == kept


@pytest.mark.parametrize("promoted", [False, True], ids=["as_written", "promoted"])
@pytest.mark.parametrize("slot", range(slot_count(KEEP)))
def test_a_bit_that_flips_anywhere_in_a_slot_costs_that_record_at_most(slot: int, promoted: bool) -> None:
    memory = MortalMemory()
    slots = written(memory, *BEFORE)
    if promoted:
        slots.promote(1)
    whole = counting(memory.records())
    for at in range(slot_size(PAYLOAD) * 8):
        byte, bit = divmod(at, 8)
        memory.content[OFFSET + slot * slot_size(PAYLOAD) + byte] ^= 1 << bit
        found = counting(memory.records())
        # What the damaged record had superseded may still stand in the spare slot.
        assert set(found) <= {*expected(*BEFORE), *whole}
        assert len(set(whole) - set(found)) <= 1
        memory.content[OFFSET + slot * slot_size(PAYLOAD) + byte] ^= 1 << bit


def test_a_flipped_bit_in_a_payload_is_noticed() -> None:
    memory = MortalMemory()
    written(memory, (0, 1))
    at = memory.content.index(payload(0, 1))
    memory.content[at + 5] ^= 4
    assert memory.records() == []


@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(-5, 1000)), max_size=30))
def test_the_newest_of_each_kind_are_kept_in_the_order_of_writing(records: list[tuple[int, int]]) -> None:
    memory = MortalMemory()
    written(memory, *records)
    numbered = list(enumerate(records))
    kept = [
        item for kind, count in KEEP.items() for item in [n for n in numbered if n[1][0] == kind][-count:]
    ]
    assert memory.records() == expected(*[record for _, record in sorted(kept, reverse=True)])


@given(st.binary(min_size=OFFSET + SIZE, max_size=OFFSET + SIZE))
def test_memory_full_of_anything_holds_no_record(content: bytes) -> None:
    memory = MortalMemory()
    memory.content[:] = content
    assert memory.records() == []


@pytest.mark.parametrize("nbytes", [PAYLOAD + 1, 1 << 40, (1 << 64) - 1])
def test_no_length_is_believed(nbytes: int) -> None:
    memory = MortalMemory()
    written(memory, (0, 1))
    at = OFFSET + (slot_count(KEEP) - 1) * slot_size(PAYLOAD)
    assert memory.content[at] == 1
    memory.content[at + 24 : at + 32] = nbytes.to_bytes(8, "little")
    lengths: list[int] = []

    def read(where: int, length: int) -> bytes:
        lengths.append(length)
        return memory.read(where, length)

    assert read_slots(read, OFFSET, PAYLOAD, KEEP) == []
    assert max(lengths) <= HEADER_BYTES


def test_a_payload_kept_elsewhere_leaves_its_size() -> None:
    memory = MortalMemory()
    slots = Slots(memory, OFFSET, PAYLOAD, KEEP)
    slots.write(0, 3, None, 1 << 33)
    assert read_slots(memory.read, OFFSET, PAYLOAD, KEEP) == [Record(1, 0, 3, 1 << 33, None)]


def test_memory_that_is_cut_short_holds_what_is_left_whole() -> None:
    memory = MortalMemory()
    written(memory, (0, 1), (0, 2))
    for length in range(len(memory.content)):
        found = read_slots(
            lambda at, n, end=length: memory.read(at, n)[: max(0, end - at)], OFFSET, PAYLOAD, KEEP
        )
        assert {record.step for record in found} <= {1, 2}
        assert all(record.payload == payload(0, record.step) for record in found)
