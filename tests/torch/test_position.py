"""Each kind of loader, resumed at every boundary, against a run that was never disturbed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from swansong.errors import ConfigError, LoadError, NotSupportedError, SwansongWarning
from swansong.torch import skipping
from swansong.torch.position import Feed
from torch_feed import (
    Squares,
    Stream,
    after,
    batched,
    generator,
    main_process_draws,
    plain,
    positions,
    resumed,
    seed_all,
    undisturbed,
)

EPOCHS = 3


def loader(length=11, *, sampler=None, **options):
    dataset = Squares(length, main_process_draws)
    if sampler is not None:
        options["sampler"] = sampler(dataset)
    return DataLoader(dataset, collate_fn=lambda samples: samples, **{"batch_size": 3, **options})


class ShuffledBatches:
    """A user's batch sampler: draws from Python's and NumPy's generators as soon as it is iterated."""

    def __iter__(self):
        order = list(range(9))
        random.shuffle(order)
        sizes = np.random.permutation([2, 3, 4])
        ends = np.cumsum(sizes)
        return iter([order[end - size : end] for size, end in zip(sizes, ends, strict=True)])

    def __len__(self):
        return 3


class Moved(DataLoader):
    """As many do to bring batches to a device: an iterator of its own around DataLoader's."""

    def __iter__(self):
        for batch in super().__iter__():
            yield ("moved", batch)


def distributed(ranks, rank, **options):
    return lambda dataset: DistributedSampler(dataset, ranks, rank, seed=5, **options)


SKIPPED_WITHOUT_LOADING = {
    "in_order": lambda: loader(),
    "short_last_batch_dropped": lambda: loader(drop_last=True),
    "full_last_batch": lambda: loader(9),
    "one_batch": lambda: loader(2),
    "shuffled": lambda: loader(shuffle=True),
    "shuffled_by_own_generator": lambda: loader(shuffle=True, generator=generator()),
    "samples_without_batches": lambda: loader(4, shuffle=True, batch_size=None),
    "drawn_with_replacement": lambda: loader(
        sampler=lambda data: RandomSampler(data, replacement=True, num_samples=70, generator=generator()),
        batch_size=16,
    ),
    "two_permutations_an_epoch": lambda: loader(5, sampler=lambda data: RandomSampler(data, num_samples=12)),
    "subset_by_global_generator": lambda: loader(sampler=lambda data: SubsetRandomSampler(range(1, 9))),
    "weighted": lambda: loader(sampler=lambda data: WeightedRandomSampler([0.1, 0.2, 0.7] * 3, 10)),
    "own_batch_sampler": lambda: loader(batch_sampler=ShuffledBatches(), batch_size=1),
    "rank_0_of_2": lambda: loader(sampler=distributed(2, 0)),
    "rank_1_of_2_drop_last": lambda: loader(sampler=distributed(2, 1, drop_last=True), drop_last=True),
    "rank_2_of_3": lambda: loader(sampler=distributed(3, 2), batch_size=2),
    "rank_1_of_3_unshuffled": lambda: loader(sampler=distributed(3, 1, shuffle=False), batch_size=2),
}


@pytest.mark.parametrize("make", SKIPPED_WITHOUT_LOADING.values(), ids=SKIPPED_WITHOUT_LOADING)
def test_resumed_at_every_boundary_as_if_never_disturbed(make):
    run = undisturbed(make(), EPOCHS)

    for at in run.boundaries:
        data = make()
        rest = resumed(data, at, EPOCHS)

        assert rest.trace == run.trace[at.seen :]
        assert positions(rest.boundaries) == positions(after(run, at)), "so that it can be resumed again"
        assert rest.feed.inexact == ()
        assert data.dataset.loaded == indices(rest.trace), "what came before must not be loaded"


def indices(trace):
    found = []
    for batch, *_ in trace:
        if batch not in ("begin", "end"):
            found += [sample[0] for sample in batch] if isinstance(batch, list) else [batch[0]]
    return found


@pytest.mark.parametrize("make", SKIPPED_WITHOUT_LOADING.values(), ids=SKIPPED_WITHOUT_LOADING)
def test_changes_nothing_in_the_plain_loop(make):
    data = make()
    set_epoch = getattr(data.sampler, "set_epoch", lambda epoch: None)

    assert undisturbed(make(), EPOCHS).trace == plain(data, EPOCHS, set_epoch)


class Drawn:
    """Batches in an order that is decided when iteration begins."""

    def __iter__(self):
        return iter(torch.randperm(5).tolist())


LOADED = {
    "list": lambda: ["a", "b", "c"],
    "iterable": Drawn,
    "loader_with_its_own_iterator": lambda: Moved(Squares(7), batch_size=2, shuffle=True, collate_fn=str),
    "iterable_dataset": lambda: DataLoader(Stream(), batch_size=2, collate_fn=str),
}


@pytest.mark.parametrize("make", LOADED.values(), ids=LOADED)
def test_data_without_a_sampler_are_positioned_by_drawing(make):
    run = undisturbed(make(), EPOCHS)

    for at in run.boundaries:
        rest = resumed(make(), at, EPOCHS)

        assert rest.trace == run.trace[at.seen :]
        assert rest.feed.inexact == ()


def test_drawing_batch_by_batch_from_shared_generators_is_said_to_be_inexact():
    def make():
        return DataLoader(Stream(main_process_draws), batch_size=2, collate_fn=lambda samples: samples)

    run = undisturbed(make(), 1)
    at = run.boundaries[1]

    with pytest.warns(SwansongWarning, match="draws from as well, batch by batch"):
        rest = resumed(make(), at, 1)

    assert len(rest.feed.inexact) == 1
    assert rest.trace == run.trace[at.seen :], "here the draws do not decide the order"


def test_a_one_shot_iterator_is_gone_on_with():
    feed = Feed(iter(range(5)))
    batches = feed.batches()
    assert [next(batches), next(batches)] == [0, 1]

    later = Feed(iter(range(5)))
    later.load(feed.state())

    assert list(later.batches()) == [2, 3, 4]


def test_a_long_skip_is_said_once(monkeypatch):
    monkeypatch.setattr(skipping, "LONG_SKIP_S", 0.0)
    feed = Feed(range(9))
    batches = feed.batches()
    for _ in range(5):
        next(batches)
    later = Feed(range(9))
    later.load(feed.state())

    with pytest.warns(SwansongWarning, match="loads again the 5 batches") as caught:
        assert list(later.batches()) == [5, 6, 7, 8]
    assert len(caught) == 1


class Remembering:
    """The protocol of torchdata's StatefulDataLoader, in small: a state before the epoch's end goes on after
    it, one at the end begins the next epoch; the order is drawn when iteration begins, again if resumed."""

    def __init__(self):
        self.state = {"taken": 0, "ended": False}
        self.begun = False
        self.loaded = []

    def __iter__(self):
        self.begun = True
        order = torch.randperm(4).tolist()
        if self.state["ended"]:
            self.state = {"taken": 0, "ended": False}
        return self._batches(order[self.state["taken"] :])

    def _batches(self, items):
        for item in items:
            self.state = {**self.state, "taken": self.state["taken"] + 1}
            self.loaded.append(item)
            yield item
        self.state = {**self.state, "ended": True}

    def state_dict(self):
        assert self.begun, "torchdata's would begin an epoch in order to answer"
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_a_loader_with_its_own_state_is_trusted_with_it():
    run = undisturbed(Remembering(), EPOCHS)

    for at in run.boundaries:
        data = Remembering()
        rest = resumed(data, at, EPOCHS)

        assert rest.trace == run.trace[at.seen :]
        assert positions(rest.boundaries) == positions(after(run, at))
        assert data.loaded == [batch for batch, *_ in rest.trace if batch not in ("begin", "end")]


def test_a_loader_is_not_asked_for_its_state_before_it_is_iterated():
    state = Feed(Remembering()).state()
    later = Feed(Remembering())

    later.load(state)

    assert state["loader"] is None
    assert sorted(later.batches()) == [0, 1, 2, 3]


def test_a_loader_with_its_own_state_refuses_the_position_of_another():
    feed = Feed([1, 2, 3])
    next(feed.batches())

    with pytest.raises(LoadError, match="Remembering has one; resume with a loader of the kind"):
        Feed(Remembering()).load(feed.state())


class Hidden:
    """A batch sampler that shuffles by a generator nobody else knows of."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def __iter__(self):
        return iter(self.generator.permutation(12).reshape(4, 3).tolist())


@pytest.mark.parametrize(
    ("other", "what", "rest"),
    [
        (lambda: batched(Squares(12), batch_sampler=Hidden(2)), "the epoch begins with other samples", 2),
        (lambda: batched(Squares(12), batch_size=5), "the epoch begins with other samples", 1),
        (lambda: batched(Squares(12), batch_size=12), "there are only 1 batches", 0),
    ],
    ids=["another_order", "another_batch_size", "fewer_batches"],
)
def test_data_in_another_order_are_refused_unless_allowed(other, what, rest):
    feed = Feed(batched(Squares(12), batch_sampler=Hidden(1)))
    batches = feed.batches()
    next(batches), next(batches)
    later = Feed(other())

    later.load(feed.state())
    with pytest.raises(ConfigError, match=f"after batch 2 of epoch 1: {what}"):
        next(later.batches())

    later.load(feed.state(), allow_reshuffle=True)
    with pytest.warns(SwansongWarning, match=what):
        assert len(list(later.batches())) == rest
    assert later.inexact == (what,)


class Lazy:
    """Draws each batch's indices from a generator that training draws from as well."""

    def __iter__(self):
        for _ in range(4):
            yield torch.randint(0, 12, (3,)).tolist()


def test_a_sampler_that_draws_lazily_from_a_shared_generator_is_said_to_be_inexact():
    run = undisturbed(batched(Squares(12), batch_sampler=Lazy()), 1)

    with pytest.warns(SwansongWarning, match="if they decide the order, it is another"):
        rest = resumed(batched(Squares(12), batch_sampler=Lazy()), run.boundaries[1], 1)

    assert len(rest.feed.inexact) == 1


def test_a_loader_unlike_pytorchs_is_refused():
    data = batched(Squares(4))
    del data._iterator

    with pytest.raises(NotSupportedError, match="it has no _iterator"):
        Feed(data)


def test_what_cannot_be_iterated_is_refused():
    with pytest.raises(NotSupportedError, match="a loader must be iterable; int is not"):
        Feed(3)


def test_a_loop_that_breaks_off_an_epoch_gets_the_next():
    feed = Feed(batched(Squares(6), batch_size=2))
    seen = []
    for epoch in feed.epochs(2):
        for batch in feed.batches():
            seen.append((epoch, batch[0][0]))
            if len(seen) % 2 == 0:
                break

    assert seen == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert (feed.epoch, feed.batch_in_epoch) == (3, 0)
    assert list(feed.epochs(2)) == []
    assert list(feed.epochs(3)) == [3], "more epochs may be asked for"


def test_without_epochs_each_call_for_batches_goes_on_with_the_next_epoch():
    def make():
        return loader(6, shuffle=True)

    seed_all(7)
    feed = Feed(make())
    next(feed.batches())
    first = list(feed.batches())
    assert feed.epoch == 3
    position, states = feed.state(), feed.generators.capture()
    second = list(feed.batches())

    later = Feed(make())
    later.load(position, restore=lambda: later.generators.restore(states))

    assert list(later.batches()) == second != first


def test_an_epoch_that_the_loop_does_not_go_on_with_is_left_behind_restored():
    run = undisturbed(loader(9), 2)
    at = run.boundaries[1]
    feed = Feed(loader(9))
    feed.load(at.position, restore=lambda: feed.generators.restore(at.generators))

    assert list(feed.epochs(1)) == [1]

    assert feed.generators.capture() == at.generators


def test_counts_epochs_from_one_and_batches_that_were_taken():
    feed = Feed(batched(Squares(4), batch_size=2))
    assert not feed.begun

    places = [(feed.epoch, feed.batch_in_epoch)]
    for _ in feed.batches():
        places.append((feed.epoch, feed.batch_in_epoch))

    assert places == [(1, 0), (1, 1), (1, 2)]
    assert (feed.epoch, feed.batch_in_epoch) == (2, 0)
    assert feed.begun


def test_the_state_embeds_the_same_objects_at_each_boundary_of_an_epoch():
    feed = Feed(loader(shuffle=True))
    starts = [feed.state()["start"] for _ in feed.batches()]

    assert len({id(start) for start in starts}) == 1


@pytest.mark.parametrize("place", [1, 3], ids=["within_an_epoch", "between_epochs"])
def test_a_position_stays_what_it_was_until_it_is_taken_up(place):
    data = loader(8)
    run = undisturbed(data, 1)
    at = run.boundaries[place]
    feed = Feed(data)
    restored = []

    feed.load(at.position, restore=lambda: restored.append(torch.get_rng_state()))

    assert feed.state() == at.position
    assert feed.awaiting
    assert not restored
    assert (feed.epoch, feed.batch_in_epoch) == (at.position["epoch"], at.position["batch"])
    for _ in feed.epochs(3):
        list(feed.batches())
    assert len(restored) == 1
    assert not feed.awaiting


def test_a_finished_run_has_no_epochs_left():
    run = undisturbed(loader(), 1)

    rest = resumed(loader(), run.boundaries[-1], 1)

    assert rest.trace == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: None, "wanted a dictionary with epoch, batch"),
        (lambda state: {**state, "more": 1}, "wanted a dictionary with epoch, batch"),
        (lambda state: {**state, "epoch": 0}, "epoch: wanted an integer from 1"),
        (lambda state: {**state, "batch": -1}, "batch: wanted an integer from 0"),
        (lambda state: {**state, "batch": True}, "batch: wanted an integer from 0"),
        (lambda state: {**state, "order": "x"}, "order: wanted an integer from 0"),
        (lambda state: {**state, "start": None}, "start: wanted the generators' states 1 batches earlier"),
        (lambda state: {**state, "start": {}}, "generator states: python: wanted a dictionary"),
        (lambda state: {**state, "workers": 5}, "generator states: wanted a dictionary"),
    ],
)
def test_what_is_no_position_is_refused_and_changes_nothing(change, message):
    feed = Feed(loader())
    next(feed.batches())
    later = Feed(loader())

    with pytest.raises(LoadError, match=message):
        later.load(change(feed.state()))

    assert (later.epoch, later.batch_in_epoch, later.awaiting) == (1, 0, False)


def test_generators_of_loader_and_samplers_are_found_once_each():
    own, augment = generator(1), generator(2)
    data = Squares(6)
    sampler = RandomSampler(data, generator=own)

    feed = Feed(DataLoader(data, 2, sampler=sampler, generator=augment), generators={"augment": augment})

    assert dict(feed.generators.named) == {"augment": augment, "loader.sampler.generator": own}
