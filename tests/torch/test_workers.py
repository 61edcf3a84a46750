"""Loaders with worker processes: the same samples and seeds, and what is said of the rest."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, get_worker_info

from torch_feed import Squares, Stream, after, batched, generator, plain, positions, resumed, undisturbed

WORKERS = {
    "new_each_epoch": {},
    "persistent": {"persistent_workers": True},
    "seeded_by_own_generator": {"own_generator": True, "persistent_workers": True, "prefetch_factor": 1},
    "sampler_drawing_ahead": {"ahead": True},
}


def with_workers(*, own_generator=False, ahead=False, **options):
    data = Squares(13, lambda: torch.rand(1).item() + np.random.rand() + random.random())
    if own_generator:
        options["generator"] = generator()
    if ahead:
        options["sampler"] = RandomSampler(data, replacement=True, num_samples=150, generator=generator(4))
    options = {"batch_size": 16 if ahead else 3, "shuffle": not ahead, **options}
    return DataLoader(data, num_workers=2, collate_fn=lambda samples: samples, **options)


def four_places(run):
    """Boundaries within the first of two epochs, at its end, between the two, and within the second."""
    half = len(run.boundaries) // 2
    return [run.boundaries[place] for place in (1, half - 2, half - 1, half + 1)]


def without_augmentation(trace):
    """Indices, the workers' seeds and the main process's draws."""
    return [
        (what if isinstance(what, str) else [sample[:2] for sample in what], *rest) for what, *rest in trace
    ]


@pytest.mark.parametrize("options", WORKERS.values(), ids=WORKERS)
def test_workers_load_the_same_samples_with_the_same_seeds(options):
    run = undisturbed(with_workers(**options), 2)

    for at in four_places(run):
        rest = resumed(with_workers(**options), at, 2)

        assert without_augmentation(rest.trace) == without_augmentation(run.trace[at.seen :])
        assert positions(rest.boundaries) == positions(after(run, at))


@pytest.mark.parametrize("options", WORKERS.values(), ids=WORKERS)
def test_changes_nothing_in_the_plain_loop_with_workers(options):
    assert undisturbed(with_workers(**options), 2).trace == plain(with_workers(**options), 2)


@pytest.mark.parametrize(
    ("options", "exact", "reasons"),
    [
        ({}, {}, ["worker processes", "worker processes", "", "worker processes"]),
        ({}, {"exact_augmentation": True}, ["", "", "", ""]),
        (
            {"persistent_workers": True},
            {"exact_augmentation": True},
            ["", "", "persistent worker", "persistent worker"],
        ),
    ],
    ids=["workers", "loading_what_is_skipped", "persistent_workers"],
)
def test_augmentation_in_workers_is_exact_unless_said(options, exact, reasons):
    run = undisturbed(with_workers(**options), 2)

    for at, reason in zip(four_places(run), reasons, strict=True):
        rest = resumed(with_workers(**options), at, 2, **exact)

        assert len(rest.feed.inexact) == (reason != "")
        assert reason in "".join(rest.feed.inexact)
        if not reason:
            assert rest.trace == run.trace[at.seen :]


@pytest.mark.parametrize("persistent", [False, True], ids=["new_each_epoch", "persistent"])
def test_workers_that_are_gone_through_again_are_exact_in_their_first_epoch(persistent):
    def make():
        return batched(Stream(lambda: random.random()), num_workers=2, persistent_workers=persistent)

    run = undisturbed(make(), 2)
    within_first, last_of_first, *second = four_places(run)

    for at in (within_first, last_of_first):
        rest = resumed(make(), at, 2)
        assert rest.trace == run.trace[at.seen :]
        assert rest.feed.inexact == ()
    for at in second:
        rest = resumed(make(), at, 2)
        assert (rest.trace == run.trace[at.seen :]) is not persistent
        assert len(rest.feed.inexact) == persistent


def test_a_loader_used_before_is_entered_all_the_same():
    """Its persistent workers exist already, and take their indices from the sampler itself."""
    run = undisturbed(with_workers(persistent_workers=True), 1)
    data = with_workers(persistent_workers=True)
    next(iter(data))

    at = run.boundaries[2]
    rest = resumed(data, at, 1)

    assert without_augmentation(rest.trace) == without_augmentation(run.trace[at.seen :])
    assert len(list(data)) == 5, "outside of the feed it is a loader like any other"


@pytest.mark.parametrize("persistent", [False, True], ids=["new_each_epoch", "persistent"])
def test_workers_load_nothing_that_is_skipped(persistent):
    loads = torch.zeros(2, dtype=torch.int64).share_memory_()

    def make():
        def count():
            loads[get_worker_info().id] += 1

        return batched(Squares(40, count), num_workers=2, persistent_workers=persistent, batch_size=2)

    run = undisturbed(make(), 2)
    at = run.boundaries[-4]
    assert at.position["batch"] == 18
    loads.zero_()

    resumed(make(), at, 2)

    assert loads.sum() == 4


def test_a_second_persistent_epoch_needs_the_workers_states():
    run = undisturbed(with_workers(persistent_workers=True), 2)
    first, second = run.boundaries[0].position, run.boundaries[-2].position

    assert first["workers"] is None
    assert second["workers"] == first["start"]
