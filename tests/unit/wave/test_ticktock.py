"""Tick-tock in one process: the results of gradient accumulation, whatever the waves share."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, Clock, after, fake_cuda
from torch import Tensor, nn
from wave_cases import (
    CLASSES,
    CLIPPED_AT,
    WIDTH,
    accumulated,
    batch_of,
    differences,
    in_waves,
    loss_of,
    optimizer_of,
    plain_model,
    seldom_loss,
    state_of,
    tied_model,
)

from bytesched.errors import ConfigError, PluginError, SchedulerClosed, SchedulerTimeout
from bytesched.plugins.wave import ActivationMemory, TickTock
from bytesched.plugins.wave.passes import JoinedGradients, Trial
from bytesched.plugins.wave.state import CudaLanes, Lanes, WaveStates

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("waves", [2, 3, 4])
@pytest.mark.parametrize(
    ("build", "loss_fn"), [(plain_model, loss_of), (tied_model, loss_of), (tied_model, seldom_loss)]
)
def test_equals_accumulation(
    waves: int, build: Callable[[], nn.Module], loss_fn: Callable[[nn.Module, Any], Tensor]
) -> None:
    expected, model = build(), build()
    torch.manual_seed(1)
    losses = accumulated(expected, loss_fn, waves)
    torch.manual_seed(1)
    found = in_waves(model, loss_fn, waves)
    assert differences(expected, model) == []
    assert [*map(float, losses)] == [*map(float, found)]


@pytest.mark.parametrize("scaled", [False, True], ids=["clipped", "scaled"])
def test_gradients_may_be_changed_before_the_update(scaled: bool) -> None:
    """Clipping, also by a GradScaler that overflows at first, in waves and in accumulation."""
    models, losses, scales = [], [], []
    for in_turn in (accumulated, in_waves):
        model = plain_model()
        optimizer = optimizer_of(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, enabled=scaled)

        def update(
            model: nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            scaler: torch.amp.GradScaler = scaler,
        ) -> None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_AT)
            scaler.step(optimizer)
            scaler.update(2.0 if scaled and scaler.get_scale() > 2.0**100 else None)

        def scaled_loss(
            model: nn.Module, batch: Any, scaler: torch.amp.GradScaler = scaler
        ) -> Tensor:
            return scaler.scale(loss_of(model, batch))

        torch.manual_seed(1)
        losses.append(in_turn(model, scaled_loss, 2, optimizer=optimizer, update=update))
        models.append(model)
        scales.append(scaler.get_scale())
    assert differences(*models) == []
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    assert scales == [2.0 if scaled else 1.0] * 2
    plain = plain_model()
    torch.manual_seed(1)
    accumulated(plain, loss_of, 2)
    assert differences(models[0], plain)


def test_waves_really_overlap() -> None:
    """Tock's forward pass waits, inside, for tick's backward pass, and that one for it."""
    tick_turned, tock_began = threading.Event(), threading.Event()

    class Meet(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, wave: int) -> Tensor:
            ctx.wave = wave
            if wave == 1:
                tock_began.set()
                assert tick_turned.wait(20)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            if ctx.wave == 0:
                tick_turned.set()
                assert tock_began.wait(20)
            return grads[0], None

    def loss_fn(model: nn.Module, batch: tuple[Any, int]) -> Tensor:
        part, wave = batch
        return Meet.apply(loss_of(model, part), wave)  # type: ignore[no-untyped-call, no-any-return]

    model = plain_model()
    wave = TickTock(model, optimizer_of(model), loss_fn, overlap=True)
    wave.step((batch_of(0), 0), (batch_of(1), 1))
    wave.close()


def test_replicas_are_ranks_of_their_own() -> None:
    """Two waves with their own statistics and random numbers against two copies of the model."""
    model, copies = plain_model(), [plain_model(), plain_model()]
    torch.manual_seed(5)
    wave = TickTock(model, optimizer_of(model), loss_of, replicas=True, overlap=True)
    for step in range(3):
        wave.step(batch_of(step))
    wave.close()
    drawn = torch.rand(1)
    optimizer = optimizer_of(copies[0])
    states = [torch.Generator().manual_seed(5 + copy).get_state() for copy in range(2)]
    for step in range(3):
        optimizer.zero_grad()
        for number, part in enumerate(
            zip(*(t.split(12) for t in batch_of(step)), strict=True)  # one part per copy
        ):
            copy = copies[number]
            copy.load_state_dict(dict(copies[0].named_parameters()), strict=False)
            torch.set_rng_state(states[number])
            (loss_of(copy, part) * 0.5).backward()
            states[number] = torch.get_rng_state()
        for first, second in zip(copies[0].parameters(), copies[1].parameters(), strict=True):
            assert first.grad is not None
            assert second.grad is not None
            first.grad += second.grad
            second.grad = None
        optimizer.step()
    assert differences(copies[0], model) == []
    torch.set_rng_state(states[0])
    assert torch.equal(drawn, torch.rand(1)), "wave 0 draws from torch's own generator"


def test_no_wave_draws_the_numbers_of_another_rank() -> None:
    """Where each of two ranks has added its number to the seed, as scripts do."""
    model, drawn = plain_model(), []
    for rank in range(2):
        torch.manual_seed(7 + rank)
        states = WaveStates(model, waves=3, ranks=2)
        for wave in range(3):
            with states.of(wave):
                drawn.append(float(torch.rand(1)))
    assert len(set(drawn)) == 6


def test_names_what_interferes(caplog: pytest.LogCaptureFixture) -> None:
    model = plain_model()
    with caplog.at_level(logging.INFO, "bytesched"):
        TickTock(model, optimizer_of(model), loss_of).close()
        assert "1 (BatchNorm1d), 3 (Dropout)" in caplog.text
        caplog.clear()
        TickTock(model, optimizer_of(model), loss_of, replicas=True).close()
    assert caplog.text == ""


@pytest.mark.parametrize("failing", ["forward 0", "forward 1", "backward 0", "backward 1"])
def test_an_exception_in_a_wave_is_the_users(failing: str) -> None:
    """It is raised as it is, no thread stays, and the next step is a good one."""

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
            ctx.where = where
            if where == f"forward {failing[-1]}" == failing:
                raise ValueError(failing)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            if f"backward {ctx.where[-1]}" == failing:
                raise ValueError(failing)
            return grads[0], None

    def failing_loss(model: nn.Module, batch: tuple[Any, str]) -> Tensor:
        part, where = batch
        return Fail.apply(loss_of(model, part), where)  # type: ignore[no-untyped-call, no-any-return]

    model, expected = plain_model(), plain_model()
    wave = TickTock(model, optimizer_of(model), failing_loss, overlap=True)
    before = state_of(model)
    with pytest.raises(ValueError, match=failing):
        wave.step((batch_of(0), "forward 0"), (batch_of(1), "forward 1"))
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], before[name]) for name in weights)
    wave._loss_fn = loss_of
    model.load_state_dict(expected.state_dict())
    torch.manual_seed(1)
    loss = wave.step(batch_of(0))
    wave.close()
    torch.manual_seed(1)
    assert float(loss) == float(accumulated(expected, loss_of, 2)[0])
    assert not [thread for thread in threading.enumerate() if "wave" in thread.name]


def test_another_backward_pass_inside_a_step_is_refused() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss_of(model, batch).backward()
        return loss_of(model, batch)

    model = plain_model()
    wave = TickTock(model, optimizer_of(model), loss_fn, overlap=True)
    with pytest.raises(PluginError, match=r"own has a gradient of 6\.bias"):
        wave.step(batch_of(0))
    wave.close()


def test_a_wave_that_is_not_heard_of_is_named() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    gradients = JoinedGradients([("entry.weight", parameter)], 2, Lanes(), rank=3, timeout_s=0.01)
    gradients.begin()
    with pytest.raises(SchedulerTimeout, match=r"of entry\.weight of wave 0") as raised:
        gradients.ended(1)
    assert (raised.value.task, raised.value.rank) == ("entry.weight", 3)


def test_closed_waves_say_so() -> None:
    model = plain_model()
    wave = TickTock(model, optimizer_of(model), loss_of)
    wave.step(batch_of(0))
    wave.close()
    with pytest.raises(SchedulerClosed, match=r"rank 0: step\(\) of closed waves"):
        wave.step(batch_of(1))


def test_settings_that_do_nothing_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not those of the environment: they may be meant for bytesched.wrap."""
    monkeypatch.setenv("BYTESCHED_CREDIT_BYTES", "4MiB")
    model = plain_model()
    TickTock(model, optimizer_of(model), loss_of, compression="fp16", timeout_s=5.0).close()
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == ["TickTock does not use compression = 'fp16' (code)"]


def test_unfreezing_under_way_is_refused() -> None:
    """Early waves would leave the gradients of the new ones out."""
    model = tied_model()
    wave = TickTock(model, optimizer_of(model), loss_of)
    wave.step(batch_of(0))
    model.requires_grad_(True)
    with pytest.raises(PluginError, match="other parameters require a gradient"):
        wave.step(batch_of(1))
    wave.close()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ((batch_of(0), batch_of(1), batch_of(2)), "3 batches for 2 waves"),
        (((torch.zeros(4), torch.zeros(6)),), r"first dimensions of the batch are \[4, 6\]"),
        ((torch.zeros(1, WIDTH),), "a batch of 1 has nothing for 2 waves"),
        (("text",), "missing"),
    ],
)
def test_batches_that_do_not_fit(batches: tuple[Any, ...], message: str) -> None:
    model = plain_model()
    wave = TickTock(model, optimizer_of(model), loss_of)
    with pytest.raises(PluginError, match=message):
        wave.step(*batches)
    wave.close()


def test_uneven_parts_have_the_weight_of_their_samples() -> None:
    """A batch of 7 in two waves of 3 and 4 has the mean loss of the whole batch."""
    model = nn.Linear(WIDTH, CLASSES)
    inputs, targets = batch_of(0, size=7)
    expected = loss_of(model, (inputs, targets)).item()
    wave = TickTock(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: loss_of(model, (batch["inputs"], batch["more"][0])),
    )
    loss = wave.step({"inputs": inputs, "more": (targets, "kept")})
    wave.close()
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_one_wave_is_none() -> None:
    model = plain_model()
    with pytest.raises(ConfigError, match="at least 2"):
        TickTock(model, optimizer_of(model), loss_of, waves=1)


def test_trial_takes_turns_and_keeps_what_is_faster() -> None:
    for beside_s, after_s in ((1.0, 2.0), (2.0, 1.0)):
        trial = Trial()
        seen = []
        while trial.overlap is None:
            seen.append(trial.next_overlaps)
            trial.add(beside_s if seen[-1] else after_s)
        assert seen == [True, False] * (len(seen) // 2)
        assert trial.overlap is (beside_s < after_s)
        assert trial.figures_ms() == (1e3 * beside_s, 1e3 * after_s)


def test_counts_cores_where_processes_cannot_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    model = plain_model()
    wave = TickTock(model, optimizer_of(model), loss_of)
    assert not wave.overlaps
    wave.close()


def test_on_one_core_it_steps_aside_and_says_so_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To a script that has set up no logging, and has not called bytesched.wrap."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    monkeypatch.setattr(logging.getLogger("bytesched"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("bytesched"), "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    model = plain_model()
    wave = TickTock(model, optimizer_of(model), loss_of)
    assert not wave.overlaps
    wave.close()
    assert "waves are off, gradients are accumulated: this process has one core" in (
        capsys.readouterr().err
    )


def test_a_step_that_cannot_begin_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an error, when waves that are sent one by one go no further."""
    model = plain_model()
    wave = TickTock(model, optimizer_of(model), loss_of, overlap=True)

    def refuse() -> None:
        raise PluginError("it has failed before")

    monkeypatch.setattr(wave._gradients, "begin", refuse)
    with pytest.raises(PluginError, match="failed before"):
        wave.step(batch_of(0))
    wave.close()
    loss_of(model, batch_of(0)).backward()


def test_activation_memory_is_below_that_of_one_big_batch() -> None:
    """Counted exactly in tensors of known size, and nothing is left when a step is over."""
    layers = 6
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(layers)))
    batch = torch.randn(64, 64)

    def loss_fn(model: nn.Module, part: Tensor) -> Tensor:
        return model(part).square().mean()  # type: ignore[no-any-return]

    with ActivationMemory(model.parameters()) as memory:
        loss_fn(model, batch).backward()
    # Each layer keeps its output, which is the next one's input; the first one's input as well.
    assert memory.peak_bytes == (1 + layers) * batch.nbytes
    assert memory.live_bytes == 0
    accumulation, waves = (ActivationMemory(model.parameters()) for _ in range(2))
    for memory_of_step, overlap in ((accumulation, False), (waves, True)):
        wave = TickTock(model, optimizer_of(model), loss_fn, waves=4, overlap=overlap)
        with memory_of_step:
            wave.step(batch)
        wave.close()
    assert waves.live_bytes == accumulation.live_bytes == 0
    assert accumulation.peak_bytes <= waves.peak_bytes <= memory.peak_bytes
    # The whole batch, of which its part is a view, and a quarter of what each layer puts out.
    assert accumulation.peak_bytes == (1 + layers / 4) * batch.nbytes


def test_streams_of_the_waves_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that computes late: forward passes in turn, gradients after they are given."""
    with fake_cuda():
        lanes = CudaLanes(torch.device("cuda", 0), 2)
        updated = CUDA.current().queue()
        lanes.begin()
        places: dict[str, Clock] = {}
        for wave in range(2):
            with lanes.forward(wave):
                places[f"forward {wave}"] = CUDA.current().queue()
        gradient = torch.zeros(1)
        monkeypatch.setattr(gradient, "record_stream", lambda stream: None, raising=False)
        with lanes.backward(0):
            places["backward 0"] = CUDA.current().queue()
            given = lanes.give()
        with lanes.backward(1):
            beside = CUDA.current().queue()
            lanes.take(gradient, given)
            places["sum"] = CUDA.current().queue()
        lanes.end()
        end = CUDA.current().queue()
    assert after(places["forward 0"], updated)
    assert after(places["forward 1"], places["forward 0"])
    assert not after(beside, places["backward 0"])
    assert after(places["sum"], places["backward 0"])
    assert all(after(end, place) for place in places.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Of torch, from 2.10 on: gradients of one parameter come on two streams, as they are meant to.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_equals_accumulation_on_a_gpu() -> None:
    """Without dropout: its random numbers are drawn in the order in which kernels are queued."""
    models = [nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, CLASSES)).cuda()]
    models.append(copy.deepcopy(models[0]))
    batches = [tuple(part.cuda() for part in batch_of(step)) for step in range(4)]
    for model, overlap in zip(models, (False, True), strict=True):
        wave = TickTock(model, optimizer_of(model), loss_of, overlap=overlap)
        for batch in batches:
            wave.step(batch)
        wave.close()
    assert differences(*models) == []
