"""What is saved of a run, under which names, and that it comes back exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from swansong.errors import ConfigError, LoadError, UnrepresentableError
from swansong.torch.state import TrainingState
from torch_states import linear, round_trip, saved, step, values, with_optimizer
from torch_training import bits

# -- schedulers and whatever else ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(o, 1),
        lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
        lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
        lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, cycle_momentum=False),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
        lambda o: lr_scheduler.MultiStepLR(o, [1, 5]),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [1]
        ),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)], o),
    ],
    ids=["step", "lambda", "one cycle", "cyclic", "restarts", "plateau", "milestones", "sequence", "chain"],
)
def test_a_scheduler_of_each_kind_goes_on_exactly(make):
    (_, optimizer, given), (_, another, theirs) = round_trip(
        with_optimizer(torch.optim.SGD, lr=0.1),
        others=lambda model, optimizer: {"scheduler": make(optimizer)},
    )
    for _ in range(4):
        for mine, scheduler in ((optimizer, given["scheduler"]), (another, theirs["scheduler"])):
            mine.step()
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        assert another.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_rate_and_a_scheduler_in_tensors_come_back():
    (_, optimizer, _), (_, another, _) = round_trip(
        with_optimizer(torch.optim.Adam, lr=torch.tensor(0.1)),
        others=lambda model, optimizer: {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5)},
    )
    assert bits(another.param_groups[0]["lr"]) == bits(optimizer.param_groups[0]["lr"])


def test_a_scaler_and_averages_come_back():
    def others(model, optimizer):
        return {
            "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
            "averages": torch.optim.swa_utils.AveragedModel(model),
        }

    torch.manual_seed(1)
    model, optimizer = with_optimizer(torch.optim.SGD, lr=0.1)()
    given = others(model, optimizer)
    state = TrainingState(model, {"optimizer": optimizer}, given)
    scaler = given["scaler"]
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update(2.0)
    given["averages"].update_parameters(model)
    second, another = with_optimizer(torch.optim.SGD, lr=0.1)()
    theirs = others(second, another)
    TrainingState(second, {"optimizer": another}, theirs).load(*saved(state))
    assert theirs["scaler"].state_dict() == scaler.state_dict()
    assert values(theirs["averages"]) == values(given["averages"])


def test_state_that_modules_keep_besides_tensors_comes_back():
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    def make():
        model = nn.Sequential(Counting(2, 2))
        return model, torch.optim.SGD(model.parameters())

    model, optimizer = make()
    model[0].count = 7
    second, another = make()
    state = TrainingState(model, {"o": optimizer}, {})
    TrainingState(second, {"o": another}, {}).load(*saved(state))
    assert second[0].count == 7


def test_what_the_checkpoint_lacks_is_named_and_what_it_has_besides_is_told():
    model, optimizer = with_optimizer(torch.optim.SGD, lr=0.1)()
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    plain = saved(TrainingState(model, {"optimizer": optimizer}, {}))
    full = TrainingState(model, {"optimizer": optimizer}, {"scheduler": scheduler})
    with pytest.raises(LoadError, match="no state of scheduler"):
        full.load(*plain)
    (told,) = TrainingState(model, {"optimizer": optimizer}, {}).load(*saved(full))
    assert told.startswith("scheduler: ")
    with pytest.raises(LoadError, match="'sgd'"):
        TrainingState(model, {"sgd": optimizer}, {}).load(*saved(full)[:2], None)


def test_without_shared_objects_the_rest_is_loaded_and_that_is_told():
    make = with_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    model, optimizer = make()
    state = TrainingState(model, {"o": optimizer}, {})
    step(model, optimizer)
    second, another = make()
    another.param_groups[0]["lr"] = 0.7
    (told,) = TrainingState(second, {"o": another}, {}).load(*saved(state)[:2], None)
    assert "groups" in told
    assert bits(second.weight) == bits(model.weight)
    assert another.param_groups[0]["lr"] == 0.7


# -- parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128],
    ids=lambda dtype: str(dtype),
)
def test_parameters_of_each_type_come_back(dtype):
    def make():
        model = nn.ParameterDict({"a": torch.randn(3, 2).to(dtype), "point": torch.randn(()).to(dtype)})
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(model, optimizer):
        for parameter in model.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    _, (second, _, _) = round_trip(make, train)
    assert second["point"].shape == ()


def test_parameters_that_are_not_contiguous_come_back():
    def make():
        model = nn.Linear(4, 3)
        model.weight = nn.Parameter(torch.randn(4, 3).t())
        images = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        both = nn.ModuleList([model, images])
        return both, torch.optim.SGD(both.parameters(), lr=0.1, momentum=0.9)

    def train(model, optimizer):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    _, (second, _, _) = round_trip(make, train)
    assert second[0].weight.stride() == (1, 3)


def test_tied_parameters_are_stored_once_and_stay_tied():
    def make():
        model = nn.Sequential(linear(), linear())
        model[1].weight = model[0].weight
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    (model, optimizer, _), (second, _, _) = round_trip(make)
    flat = TrainingState(model, {"optimizer": optimizer}, {}).live()
    assert flat.aliases == {"model/1.weight": "model/0.weight"}
    assert second[1].weight is second[0].weight


def test_names_in_a_checkpoint():
    model = nn.Sequential(linear(), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    state = TrainingState(model, {"adam": optimizer}, {})
    step(model, optimizer)
    assert sorted(state.live().tensors)[:4] == [
        "adam/state/0/exp_avg",
        "adam/state/0/exp_avg_sq",
        "adam/state/0/step",
        "adam/state/1/exp_avg",
    ]
    assert [tensor.name for tensor in state.moving()] == [
        "model/1.running_mean",
        "model/1.running_var",
        "model/1.num_batches_tracked",
    ]
    apart = TrainingState(model, {"adam": optimizer}, {}, "stage 1")
    assert all(name.startswith("stage 1/") for name in apart.live().tensors)
    assert all(tensor.name.startswith("stage 1/model/") for tensor in apart.moving())


def test_what_is_live_is_shown_in_place():
    model, optimizer = with_optimizer(torch.optim.SGD, lr=0.1)()
    shown = TrainingState(model, {"o": optimizer}, {}).live().tensors["model/weight"]
    with torch.no_grad():
        model.weight.fill_(3)
    assert shown.array.tolist() == [[3, 3], [3, 3]]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (lambda m: m.register_buffer("odd", torch.ones(2, 2).to_sparse()), "model/odd"),
        (
            lambda m: m.register_buffer("odd", torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8)),
            "odd",
        ),
        (lambda m: m.register_parameter("odd", nn.Parameter(torch.ones(2, device="meta"))), "odd"),
    ],
    ids=["sparse", "quantized", "meta"],
)
def test_tensors_without_a_form_are_refused_by_name(spoil, where):
    model = linear()
    spoil(model)
    with pytest.raises(UnrepresentableError, match=where):
        TrainingState(model, {"o": torch.optim.SGD([model.weight])}, {})


def test_objects_without_a_form_are_refused_by_place():
    model, optimizer = with_optimizer(torch.optim.SGD, lr=0.1)()
    optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(UnrepresentableError, match=r"shared\['groups'\]\['o'\]\[0\]\['odd'\]"):
        TrainingState(model, {"o": optimizer}, {})


def test_a_model_whose_shapes_are_not_known_yet_is_refused():
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ConfigError, match=r"0\.weight has no shape yet"):
        TrainingState(model, {"o": torch.optim.SGD(model.parameters())}, {})
