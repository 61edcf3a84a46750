"""Names: what is spelt can be parsed, whatever a user calls things, and fits into a directory entry."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from swansong.errors import ConfigError
from swansong.store import naming

ENTRY_LIMIT = 255

TEXT = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), max_size=40)
ODD = st.sampled_from(
    [
        *(
            "",
            " ",
            ".",
            "..",
            "-",
            "_",
            "a b",
            "a\nb",
            "100%",
            "%s%n",
            "Ünïcödé",
            "日本",
            "..hidden",
            "-rf",
            "*?[a]",
        ),
        *("a-1", "a-1_2", "a-1_2.ckpt", "run-1_2_breakpoint", "x.deadbeef.json", "x.ckpt.deadbeef.json"),
        *("x.deadbeef.rest.safetensors", "c0-00000-deadbeef.safetensors", "part-0-0-0.json", ".swansong"),
    ]
)
PREFIX = ODD | TEXT
ID8 = st.text("0123456789abcdef", min_size=8, max_size=8)
NUMBER = st.integers(0, 10**9)
SUFFIX = st.sampled_from([".ckpt", ".safetensors", ""])


@given(PREFIX, NUMBER, NUMBER, SUFFIX, st.booleans())
def test_a_position_is_read_back_from_its_name(
    stem: str, epoch: int, step: int, suffix: str, on_exception: bool
) -> None:
    name = naming.position_name(stem, epoch, step, suffix, on_exception=on_exception)
    assert naming.parse_position(name) == (stem, epoch, step)


@given(PREFIX, NUMBER, SUFFIX, ID8)
def test_names_beside_a_single_file_are_read_back_and_not_taken_for_one_another(
    stem: str, number: int, suffix: str, id8: str
) -> None:
    name = naming.position_name(stem, 1, number, suffix)
    sidecar = naming.sidecar(name, id8)
    assert (naming.parse_sidecar(sidecar), naming.parse_rest(sidecar)) == ((name, id8), None)
    for sealed in (False, True):
        rest = naming.rest(name, id8, sealed=sealed)
        assert (naming.parse_rest(rest), naming.parse_sidecar(rest)) == ((name, id8), None)


@given(PREFIX)
def test_a_series_lock_is_neither_manifest_nor_rest(series: str) -> None:
    lock = naming.series_lock(series)
    assert naming.parse_sidecar(lock) is None
    assert naming.parse_rest(lock) is None
    assert lock != naming.TEMPORARY


@given(NUMBER, NUMBER, NUMBER, st.integers(0, 10**6), ID8, st.booleans())
def test_names_within_a_directory_are_read_back(
    generation: int, attempt: int, rank: int, number: int, id8: str, sealed: bool
) -> None:
    data = naming.data_file(rank, number, id8, sealed=sealed)
    staged = naming.staged_data_file(generation, attempt, rank, number, sealed=sealed)
    part = naming.part(generation, attempt, rank)
    assert (naming.parse_data_file(data), naming.is_staged(data)) == (id8, False)
    assert (naming.parse_data_file(staged), naming.is_staged(staged)) == (None, True)
    assert (naming.parse_part(part), naming.is_staged(part)) == ((generation, attempt, rank), True)
    assert not naming.is_staged(naming.MANIFEST)


@pytest.mark.parametrize(
    "entry",
    [
        *("run-1_2.ckpt.json", "run-1_2.ckpt.DEADBEEF.json", "run-1_2.ckpt.deadbee.json", ".deadbeef.json"),
        *("run-1_2.ckpt.deadbeef.json~", "run-1_2.ckpt.deadbeef.json\n"),
    ],
)
def test_what_only_resembles_a_manifest_is_none(entry: str) -> None:
    assert naming.parse_sidecar(entry) is None


@pytest.mark.parametrize(
    "name", ["a-2023.ckpt", "a-1_x.ckpt", "a-1_2.txt", "a-١_2.ckpt", "a1_2.ckpt", "a-1_2.ckpt2"]
)
def test_a_persons_own_file_is_no_position(name: str) -> None:
    assert naming.parse_position(name) is None


# -- limits ------------------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), max_size=150))
def test_every_name_that_an_accepted_prefix_leads_to_fits(prefix: str) -> None:
    assume(len(prefix.encode()) <= 150)
    stem = naming.checked_prefix(prefix) + "_9999"
    name = naming.position_name(stem, 10**9, 10**9, ".safetensors", on_exception=True)
    naming.checked_name(name)
    id8 = "deadbeef"
    derived = [
        naming.sidecar(name, id8),
        naming.rest(name, id8, sealed=True),
        naming.temporary(id8, name) + naming.LOCK,
        naming.series_lock(prefix),
    ]
    assert max(len(entry.encode()) for entry in derived) <= ENTRY_LIMIT


@pytest.mark.parametrize("length", [naming.NAME_LIMIT, naming.NAME_LIMIT + 1])
def test_a_name_may_have_so_many_bytes_and_no_more(length: int) -> None:
    name = ("é" * length)[: length // 2] + "x" * (length % 2)
    if length <= naming.NAME_LIMIT:
        assert naming.checked_name(name) == name
    else:
        with pytest.raises(ConfigError, match=r"at most 200 bytes, this has 201"):
            naming.checked_name(name)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (7, "wanted a str, got 7 of type int"),
        (None, "wanted a str, got None"),
        ("a/b", "must not contain '/' or NUL"),
        ("a\0b", "must not contain '/' or NUL"),
        ("a\udc80", "no UTF-8 form"),
        ("é" * 76, "at most 150 bytes, got 152"),
    ],
    ids=["int", "None", "slash", "NUL", "surrogate", "long"],
)
def test_a_prefix_that_cannot_be_one_is_refused(prefix: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        naming.checked_prefix(prefix)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", ".", "..", ".swansong", "a/b", "a\0", "a\udc80", "run.lock"])
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be|no UTF-8 form|must not end"):
        naming.checked_name(name)


# -- the collision rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "taken", "stem"),
    [
        ("L", [], "L"),
        ("L", ["other-1_1.ckpt", "Lx-1_1.ckpt", "L.ckpt", "aL-1_1.ckpt"], "L"),
        ("L", ["L-1_1.ckpt"], "L_1"),
        ("L", ["L-1_1.ckpt", "L-1_2.ckpt"], "L_1"),
        ("L", ["L-1_1.ckpt", "L_1-1_1.ckpt"], "L_2"),
        ("L", ["L_7-1_1.ckpt"], "L_8"),
        ("L", ["L_20240101-1_1.ckpt"], "L_20240102"),
        ("L_1", ["L_1-1_1.ckpt"], "L_1_1"),
        ("L", ["L-2023.ckpt"], "L_1"),
        ("a.b", ["axb-1_1.ckpt"], "a.b"),
        ("a+", ["a+-1_1.ckpt"], "a+_1"),
        ("a\nb", ["a\nb-1_1.ckpt"], "a\nb_1"),
        ("", ["-1_1.ckpt"], "_1"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_the_stem_of_a_fresh_run_as_mindspore_would_choose_it(
    prefix: str, taken: list[str], stem: str
) -> None:
    assert naming.free_stem(prefix, taken) == stem


@given(PREFIX, st.lists(st.tuples(st.integers(0, 12), st.integers(1, 3))))
def test_a_fresh_stem_is_never_in_use(prefix: str, runs: list[tuple[int, int]]) -> None:
    stems = [prefix if number == 0 else f"{prefix}_{number}" for number, _ in runs]
    taken = [
        naming.position_name(stem, 1, step, ".ckpt") for stem, (_, step) in zip(stems, runs, strict=True)
    ]
    stem = naming.free_stem(prefix, taken)
    assert not any(name.startswith(f"{stem}-") for name in taken)
    assert naming.free_stem(prefix, [*taken, f"{stem}-1_1.ckpt"]) != stem
