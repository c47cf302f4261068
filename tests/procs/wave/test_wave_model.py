"""Model-parallel waves: the results of one process, the memory of a part of the model."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks, run_fresh
from torch import nn
from wave_model_cases import (
    dies_while_it_receives,
    model_waves_equal,
    rank_dies,
    refusals,
    state_dict_fails,
    updates_equal,
    used_after_they_were_closed,
    user_error,
)

from bytesched.plugins.wave.stages.cutting import balanced, layer_times_s
from bytesched.plugins.wave.stages.routes import Cargo, sends, source, visits
from bytesched.plugins.wave.stages.stage import Stage


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
@settings(deadline=None)
def test_cut_is_as_even_as_can_be(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    bounds = balanced(len(costs), parts, lambda start, stop: float(sum(costs[start:stop])))
    assert len(bounds) == parts + 1
    assert (bounds[0], bounds[-1]) == (0, len(costs))
    assert all(start < stop for start, stop in itertools.pairwise(bounds))

    def longest(cuts: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))

    every = itertools.combinations(range(1, len(costs)), parts - 1)
    assert longest(tuple(bounds[1:-1])) == min(map(longest, every))


def test_measuring_layers_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    times_s = layer_times_s(list(model), torch.randn(8, 4))
    after = torch.get_rng_state()
    torch.manual_seed(0)
    torch.randn(8, 4)
    assert torch.equal(after, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert len(times_s) == 3
    assert min(times_s) > 0


def test_layers_that_work_in_place_can_be_measured() -> None:
    inputs = torch.randn(8, 4)
    before = inputs.clone()
    layers = [nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True)]
    assert len(layer_times_s(layers, inputs)) == 3
    assert torch.equal(inputs, before)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_stage_reaches_every_rank_and_every_gradient_its_home(ranks: int) -> None:
    routes = {(rank, route) for rank in range(ranks) for route in sends(rank, ranks)}
    for rank, (cargo, k) in itertools.product(range(ranks), visits(ranks)):
        origin = source(rank, cargo, k, ranks)
        arriving = {sender for sender, route in routes if route == (cargo, k, rank)}
        assert arriving == (set() if origin is None else {origin})
        if origin is None:
            assert rank == k or (cargo, k) == (Cargo.BACKWARD, ranks - 1)
    gradients = {(sender, *route[1:]) for sender, route in routes if route.cargo is Cargo.GRADIENT}
    assert gradients == {(r, k, r + 1) for r in range(ranks - 1) for k in range(ranks)}
    home = {(sender, *route[1:]) for sender, route in routes if route.cargo is Cargo.HOME}
    assert home == {(ranks - 1, k, k) for k in range(ranks - 1)}


def test_stage_comes_back_for_what_autograd_saved() -> None:
    """Its memory is given back between forward and backward, and written anew."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(3, 4, requires_grad=True)
    module(x).sum().backward()
    expected = [x.grad, *(p.grad for p in module.parameters())]
    x.grad = None
    module.zero_grad()
    stage = Stage(1, module, is_home=False)
    weights = [torch.randn(0)]
    assert all(p.shape == weights[0].shape for p in module.parameters())
    torch.manual_seed(0)
    twin = Stage(0, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), is_home=True)
    stage.come()
    stage.flat.copy_(twin.flat)
    y = module(x)
    stage.leave()
    assert stage.flat.untyped_storage().nbytes() == 0
    stage.come()
    stage.flat.copy_(twin.flat)
    y.sum().backward()
    found = [x.grad, *(p.grad for p in module.parameters())]
    for a, b in zip(expected, found, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
    flat = stage.take_gradients()
    assert flat.numel() == stage.flat.numel()
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.procs
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_process_with_all_batches(ranks: int, request: pytest.FixtureRequest) -> None:
    pool: Ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    for wrong, figures in pool.run(model_waves_equal):
        assert wrong == []
        assert figures["home_bytes"] < figures["peak_bytes"] <= figures["bound_bytes"]
        assert figures["sent_bytes_per_step"] > 0


@pytest.mark.procs
@pytest.mark.parametrize("kind", ["", "clipped", "scaled"])
def test_what_looks_at_all_gradients_equals_one_process(kind: str, two_ranks: Ranks) -> None:
    assert two_ranks.run(updates_equal, kind) == [[], []]


@pytest.mark.procs
def test_refuses_what_cannot_be_cut_and_ranks_that_disagree(two_ranks: Ranks) -> None:
    for told in two_ranks.run(refusals):
        assert not [line for line in told if "and left" in line]
        few, shared, elsewhere, stranger, different, settings = told
        assert few.startswith("PluginError: the model is cut into 2 stages")
        assert shared.startswith("PluginError: layers 0 and 2 share a parameter")
        assert elsewhere.startswith("PluginError: the model is on meta")
        assert stranger.startswith(
            "PluginError: the optimizer has 1 parameters that the model has not, of shapes [(3,)]"
        )
        assert different.startswith("MismatchError: the ranks disagree: rank 0 has '0.weight")
        assert "rank 1 has 'partition_bytes = 512'" in settings


@pytest.mark.procs
def test_a_rank_that_dies_is_a_named_error_on_all_others() -> None:
    *survivors, dead = run_fresh(rank_dies, world_size=3, timeout_s=50)
    assert dead.code == -9
    for survivor in survivors:
        assert survivor.stdout.strip() == "PeerLost", survivor.stderr
        assert survivor.code == 0


@pytest.mark.procs
def test_a_rank_that_dies_in_the_middle_of_the_last_message_is_missed() -> None:
    _, survivor = run_fresh(dies_while_it_receives, timeout_s=45.0)
    assert survivor.stdout.strip() == "PeerLost", survivor.stderr
    assert survivor.code == 0


@pytest.mark.procs
def test_an_exception_of_one_rank_is_told_to_the_others(two_ranks: Ranks) -> None:
    other, own = two_ranks.run(user_error)
    assert own == "ValueError: no such target"
    assert "rank 1 said: ValueError: no such target" in other


@pytest.mark.procs
def test_a_state_dict_that_fails_on_one_rank_fails_on_all_at_once(two_ranks: Ranks) -> None:
    other, own = two_ranks.run(state_dict_fails)
    assert own == "OSError: no room"
    assert other.startswith("PeerLost")
    assert "rank 1 said: OSError: no room" in other


@pytest.mark.procs
def test_closed_waves_and_settings_that_do_nothing_say_so(two_ranks: Ranks) -> None:
    for rank, told in enumerate(two_ranks.run(used_after_they_were_closed)):
        *warnings, step, predict, state_dict = told
        for said, name in ((step, "step"), (predict, "predict"), (state_dict, "state_dict")):
            assert said == f"rank {rank}: {name}() of ModelWaves that are closed; make others"
        unused = "enabled = False (code), compression = 'fp16' (code)"
        assert warnings == ([] if rank else [f"ModelWaves does not use {unused}"])
