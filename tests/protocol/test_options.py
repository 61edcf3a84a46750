"""Options of the protocol: what a launcher's budget makes of them."""

from __future__ import annotations

import pytest

from swansong.protocol.options import ProtocolOptions


@pytest.mark.parametrize(("budget_s", "reregister_s"), [(25.0, 5.0), (60.0, 5.0), (10.0, 2.0)])
def test_ranks_have_a_fifth_of_a_budget_at_most_to_find_a_new_controller(
    budget_s: float, reregister_s: float
) -> None:
    assert ProtocolOptions.within(budget_s).reregister_timeout_s == reregister_s


@pytest.mark.parametrize("budget_s", [1.0, 5.0, 25.0, 600.0])
def test_half_of_any_budget_at_least_is_left_for_writing(budget_s: float) -> None:
    left_s = ProtocolOptions.within(budget_s).writing_s
    assert left_s is not None
    assert budget_s / 2 < left_s < budget_s


def test_a_budget_that_the_rest_uses_up_leaves_nothing_for_writing() -> None:
    assert ProtocolOptions(budget_s=3.0).writing_s == 0.0
    assert ProtocolOptions().writing_s is None
