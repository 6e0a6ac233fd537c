"""Simulated offloading: the host's bytes, pinned or not, and the time of copies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from impl.fsdp.accounting import sharded_peak
from impl.fsdp.cases import FSDPCase
from impl.fsdp.workload import FSDPStep
from impl.model.sizes import SIZES
from shardmark.api import resolve
from shardmark.api.host import counts_as_device_memory
from shardmark.meter.allocations import Allocated, Marked, Released
from shardmark.meter.hardware import Hardware, hardware
from shardmark.meter.measure_case import meter_pass
from shardmark.meter.memory import Memory, meter
from shardmark.meter.plan import Plan
from shardmark.meter.recording import mark, recording
from shardmark.predict.simulation.host_memory import PAGEABLE, PINNED, place_of
from shardmark.predict.simulation.predict import Predicted, predict, simulation
from shardmark.predict.simulation.schedule import COPY, HOST, Step
from shardmark.predict.what_fits.prediction import Prediction, Strategy, followed
from shardmark.predict.what_fits.prediction import predicted as predicted_strategy
from shardmark.ranks.world import World

H100 = hardware("h100-80gb")
LINK = H100.host_link * H100.reached.host_link
CASE = FSDPCase("tiny", batch=2, context=32, ranks=2, offload=True)
MIB = 2**20


def simulated(program: Callable[[], Any], on: Hardware = H100) -> tuple[Memory, Step | None]:
    """Meter the program, then time it once more."""
    with simulation(1, on=on) as schedule:
        with meter("cpu") as memory:
            kept = program()
        del kept
        return memory, schedule.step(lambda mark: program())


def predicted(name: str, case: FSDPCase = CASE) -> Predicted:
    return predict(Plan(FSDPStep, resolve("fsdp", name), None, case, "cpu", case.ranks), on=H100)


def seconds(step: Step | None, name: str) -> float:
    assert step is not None
    return sum(span.end - span.begin for span in step.spans if name in (span.name, span.stream))


@pytest.mark.parametrize("name", ["sharded", "fsdp2"])
def test_offloaded_shards_gradients_and_moments_are_in_the_hosts_memory(name: str) -> None:
    with_offload, without = predicted(name), predicted(name, replace(CASE, offload=False))
    moved = without.memory.phases["after_init"] - with_offload.memory.phases["after_init"]
    assert moved == pytest.approx(SIZES[CASE.model].parameters * 4 / CASE.ranks, rel=0.01)
    assert with_offload.memory.host == 4 * moved  # the fused AdamW makes no other tensor
    if name == "sharded":
        step_counts = with_offload.memory.phases["before_step"] - with_offload.memory.phases["after_init"]
        assert with_offload.memory.tensors == sharded_peak(CASE, "cuda") + step_counts
    assert without.memory.host == without.memory.pinned == 0
    assert seconds(with_offload.steps[H100.name], COPY) > 0 < seconds(with_offload.steps[H100.name], HOST)
    assert seconds(without.steps[H100.name], COPY) == seconds(without.steps[H100.name], HOST) == 0


def live_with_this_counts_as_device_memory(case: FSDPCase) -> dict[str, int]:
    """Bytes live after each part of a real step, on a CPU that passes for an accelerator."""
    with (
        counts_as_device_memory("cpu"),
        patch.object(Tensor, "pin_memory", Tensor.clone),
        patch.object(torch.accelerator, "current_stream", lambda device: Mock()),
    ):
        _, memory, _ = meter_pass(Plan(FSDPStep, resolve("fsdp", "sharded"), None, case, "cpu", case.ranks))
    return memory.phases


def test_a_real_step_has_the_predicted_bytes_on_host_and_device_together(worlds: Callable[[int], World]) -> None:
    real, _ = worlds(2).run(live_with_this_counts_as_device_memory, CASE)
    with simulation(2, on=H100), recording("cpu") as recorded:
        workload = FSDPStep(resolve("fsdp", "sharded"), CASE, "cpu")
        mark("after_init")
        for _ in range(2):
            workload.prepare()
            workload.step(lambda part: None)
        mark("after_step")
    live, at = 0, {}
    for event in recorded.replay_all():
        match event:
            case Allocated(block):
                live += block.nbytes * (not block.workspace)
            case Released(block):
                live -= block.nbytes * (not block.workspace)
            case Marked(name):
                at[name] = live
    assert {phase: at[phase] for phase in ("after_init", "after_step")} == {
        phase: real[phase] for phase in ("after_init", "after_step")
    }


def forward_and_backward(model: nn.Module, x: Tensor, pin: bool | None) -> None:
    if pin is None:
        model(x).sum().backward()
        return
    with save_on_cpu(pin_memory=pin):
        loss = model(x).sum()
    loss.backward()


@pytest.mark.parametrize("pin", [False, True])
def test_saved_tensors_are_copied_to_the_host_and_back(pin: bool) -> None:
    def program(pin: bool | None) -> None:
        forward_and_backward(nn.Sequential(*(nn.Tanh() for _ in range(8))), torch.zeros(MIB, requires_grad=True), pin)

    kept, kept_step = simulated(lambda: program(None))
    offloaded, step = simulated(lambda: program(pin))
    saved = 8 * 4 * MIB
    assert offloaded.host == saved
    assert offloaded.pinned == pin * saved
    assert kept.host == 0 and offloaded.tensors < kept.tensors - saved / 2
    assert seconds(step, COPY) == pytest.approx(2 * saved / LINK)
    assert kept_step is not None and step is not None and step.seconds > kept_step.seconds


def test_pinned_blocks_are_rounded_up_to_powers_of_two() -> None:
    memory, _ = simulated(lambda: [torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in (2**20, 2**20 + 1, 3)])
    assert memory.host == 2 * 2**20 + 4
    assert memory.pinned == 2**20 + 2**21 + 4


@pytest.mark.parametrize(("pinned", "non_blocking", "waits"), [(1, 1, False), (1, 0, True), (0, 1, True), (0, 0, True)])
@pytest.mark.parametrize("to_host", [False, True])
def test_the_host_waits_for_copies_unless_they_are_of_pinned_memory(
    pinned: int, non_blocking: int, waits: bool, to_host: bool
) -> None:
    with simulation(1, on=H100) as schedule:
        here, there = (
            torch.zeros(64 * MIB),
            torch.empty(64 * MIB, pin_memory=True) if pinned else torch.zeros(64 * MIB).cpu(),
        )
        to, of = (there, here) if to_host else (here, there)
        step = schedule.step(lambda mark: to.copy_(of, non_blocking=bool(non_blocking)))
    assert step is not None
    assert seconds(step, COPY) == pytest.approx(256 * MIB / LINK)
    assert (step.waited > 0.99 * 256 * MIB / LINK) == waits


def test_optimizers_update_the_hosts_parameters_one_by_one() -> None:
    with simulation(1, on=H100) as schedule:
        on_host = [nn.Parameter(torch.zeros(MIB).cpu()) for _ in range(3)]
        on_device = [nn.Parameter(torch.zeros(MIB)) for _ in range(3)]
        found = []
        for parameters in (on_host, on_device):
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            for p in parameters:
                p.grad = torch.zeros_like(p)
            step = schedule.step(lambda mark, optimizer=optimizer: optimizer.step())
            assert step is not None
            found.append([span.name for span in step.spans])
    assert found == [["add_"] * 3, ["_foreach_add_"]]


def test_the_host_computes_what_is_in_its_memory_and_makes_its_results_there() -> None:
    with simulation(1, on=H100) as schedule:
        kept = torch.zeros(MIB).cpu()
        results = kept * 2, torch.zeros_like(kept), kept.new_empty(10**5), kept[5:], nn.Parameter(kept)
        assert [place_of(each) for each in results] == [PAGEABLE] * 5
        assert not place_of(torch.zeros_like(kept, device="cpu")) and not place_of(torch.zeros(MIB))
        assert place_of(torch.zeros(MIB).pin_memory()) == PINNED and not place_of(kept.to("cpu"))
        step = schedule.step(lambda mark: kept.add_(kept))
    assert seconds(step, HOST) == pytest.approx(12 * MIB / H100.host_bandwidth)


def test_gradients_go_back_to_where_their_tensors_are() -> None:
    with simulation(1, on=H100):
        here, there = nn.Parameter(torch.zeros(300, 300)), nn.Parameter(torch.zeros(300, 300).cpu())
        ((here * 2).cpu() * there).sum().backward()
        (here * there.to(torch.device("cpu"))).sum().backward()
        assert here.grad is not None and there.grad is not None
        assert not place_of(here.grad) and place_of(there.grad) == PAGEABLE


def test_a_batch_goes_to_the_device_and_the_hosts_indices_index_what_is_there() -> None:
    """Whatever else was offloaded: `x.to(device, non_blocking=True)` of what is there already changes nothing."""
    with simulation(1, on=H100):
        kept = torch.zeros(MIB).cpu()
        weights, batch = torch.zeros(100, 30), torch.zeros(5, 1000)
        assert not place_of(batch.to(weights.device, non_blocking=True))
        assert not place_of(batch.pin_memory().to(weights.device, non_blocking=True))
        assert not place_of(weights[torch.arange(20).pin_memory()]) and place_of(kept[torch.arange(20)])
        assert not place_of(batch.sum().cpu())


def test_a_device_context_makes_tensors_there_during_a_simulation_and_after_it() -> None:
    """In a new process, where PyTorch has not yet listed the functions that make tensors."""
    program = """
import torch
from shardmark.meter.hardware import hardware
from shardmark.predict.simulation.predict import simulation
with simulation(1, on=hardware("h100-80gb")), torch.device("meta"):
    print(torch.empty(3).device)
with torch.device("meta"):
    print(torch.empty(3).device)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["meta", "meta"]


def test_where_the_link_is_not_known_bytes_are_predicted_and_no_time() -> None:
    memory, step = simulated(lambda: torch.zeros(MIB).cpu(), replace(H100, host_link=float("nan")))
    assert memory.host == 4 * MIB and step is None


def test_a_users_own_model_is_predicted_with_offload() -> None:
    """GPT of the examples: the device keeps neither shards nor their state, the host four times a shard."""
    case = followed("examples/gpt.py:make").case
    fsdp2 = Strategy(resolve("fsdp", "fsdp2"))
    kept, offloaded = (
        predicted_strategy(replace(fsdp2, offloaded=each), replace(case, ranks=8), H100) for each in (False, True)
    )
    assert isinstance(kept, Prediction) and isinstance(offloaded, Prediction)
    assert kept.host == 0 and offloaded.host == pytest.approx(16 * case.parameters / 8, rel=0.02)
    assert offloaded.tensors < kept.tensors and offloaded.steps[H100.name].seconds > kept.steps[H100.name].seconds
