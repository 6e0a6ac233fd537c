"""How long a simulated step takes: products, collectives and streams, against cases calculated by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.functional import conv2d, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from impl.data_parallel.bucketed import BucketedDataParallel
from shardmark.meter.hardware import Hardware, Reached, hardware
from shardmark.predict.simulation.chrome_trace import write_trace
from shardmark.predict.simulation.costs import Cost, Product
from shardmark.predict.simulation.links import collective_seconds, least_collective_seconds
from shardmark.predict.simulation.predict import simulation
from shardmark.predict.simulation.rates import GPU
from shardmark.predict.simulation.schedule import Mark, Span, Step
from studies.published.programs import fused_softmax
from studies.published.steps import attention
from studies.published.traces import trace


def device(**reached: float) -> Hardware:
    """An A100 whose data sheet is reached in full, and that a host launches to in no time."""
    whole = {"bandwidth": 1.0, "reduction": 1.0, "scattered": 1.0, "kernel": 1e-9, "link": 1.0, "network": 1.0}
    rates = whole | {"launch": 1e-9, "backward_launch": 1e-9, "collective": 1e-9} | reached
    products = dict.fromkeys(Reached().products, 1.0)
    return replace(hardware("a100-80gb"), reached=Reached(products=products, **rates))  # type: ignore[arg-type]


def test_a_product_of_whole_waves_takes_its_flops() -> None:
    """108 tiles of 128 x 128, one on each multiprocessor."""
    product = Product(1, 108 * 128, 128, 4096)
    flops = 2 * 108 * 128 * 128 * 4096
    seconds = GPU(device()).seconds(Cost(torch.bfloat16, flops, 0, (product,)))
    assert seconds == pytest.approx(flops / 311.9e12, rel=1e-3)
    assert GPU(device(narrow=0.5)).seconds(Cost(torch.bfloat16, flops, 0, (product,))) == pytest.approx(
        2 * seconds, rel=1e-3
    )


def test_one_tile_too_many_takes_a_second_wave() -> None:
    products = [Product(1, rows * 128, 128, 4096) for rows in (108, 2 * 108)]
    one, two = (GPU(device()).seconds(Cost(torch.float32, 1.0, 0, (each,))) for each in products)
    more = GPU(device()).seconds(Cost(torch.float32, 1.0, 0, (Product(1, 109 * 128, 128, 4096),)))
    assert two == pytest.approx(2 * one, rel=1e-3)
    assert more == pytest.approx(two, rel=1e-3)


def test_before_hopper_a_narrow_product_of_float32_takes_as_long_as_a_wide_one() -> None:
    narrow, wide = (Cost(torch.float32, 1.0, 0, (Product(8, 4096, n, 4096),)) for n in (16, 128))
    assert GPU(device()).seconds(narrow) == GPU(device()).seconds(wide)
    hopper = GPU(hardware("h100-80gb"))
    assert hopper.seconds(narrow) < hopper.seconds(wide)


def test_bytes_take_the_bandwidth_and_what_combines_rows_takes_longer() -> None:
    copied, summed = (Cost(torch.float32, 0.0, 2.039e9, (), reduces) for reduces in (False, True))
    assert GPU(device()).seconds(copied) == pytest.approx(1e-3, rel=1e-4)
    assert GPU(device(reduction=0.5)).seconds(summed) == pytest.approx(2e-3, rel=1e-4)


def test_an_all_reduce_across_two_nodes_takes_the_network_that_a_node_shares() -> None:
    """A ring of 16: 15/16 of the bytes twice, through the 8 adapters of a node; 14 steps of 3.4 us and 2 of 14 us."""
    on = device(collective=1e-12)
    nbytes = 8 * 2**30
    expected = 2 * (14 * 3.4e-6 + 14e-6) + 2 * 15 / 16 * nbytes / (8 * 25e9)
    assert collective_seconds(on, "all_reduce", nbytes, range(16)) == pytest.approx(expected, rel=1e-6)
    assert least_collective_seconds(on, "all_reduce", nbytes, range(16)) < expected
    assert collective_seconds(on, "all_reduce", nbytes, range(1)) == 0.0
    gathered = collective_seconds(on, "all_gather", 8, range(512))
    assert gathered == pytest.approx(448 * 3.4e-6 + 63 * 14e-6, rel=1e-2)  # a ring of 64 nodes
    assert collective_seconds(on, "send", nbytes, range(16)) == pytest.approx(14e-6 + nbytes / 25e9, rel=1e-6)
    to_all = 14 * 3.4e-6 + 14e-6 + 8 / 16 * nbytes / 25e9
    assert collective_seconds(on, "all_to_all", nbytes, range(16)) == pytest.approx(to_all, rel=1e-6)


def test_the_lower_bound_lets_groups_send_side_by_side() -> None:
    spans = [Span("mm", "", 0.0, 1.0, 1.0, Cost(torch.float32, 1.0, 0.0))]
    spans += [Span("all_gather", f"collectives {group}", 0.0, 3.0, 2.0, None, 8) for group in (0, 1)]
    assert Step(3.0, 1.0, {}, spans).at_least == 2.0


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(4)))


def step_of(wrap: str) -> Step:
    """A training step of four linears on 8 ranks."""
    with simulation(8, on=device()) as timer:
        model: nn.Module = chain()
        if wrap == "bucketed":
            model = BucketedDataParallel(model)
        elif wrap == "ddp":
            model = DistributedDataParallel(model)
        elif wrap == "fsdp1":
            for name, layer in list(model.named_children()):
                setattr(model, name, FullyShardedDataParallel(layer, device_id=torch.device("cpu")))
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            for layer in model.children():
                fully_shard(layer)
            fully_shard(model)
        x = torch.randn(32_768, 8192)

        def step(mark: Mark) -> None:
            model(x).sum().backward()
            if isinstance(model, BucketedDataParallel):
                model.finish_gradient_synchronization()
            model.zero_grad()
            mark("step")

        step(lambda part, of_host=False: None)
        return timer.step(step)


def test_a_step_is_the_same_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 without a mesh takes the kind of device that PyTorch is built for."""
    without = step_of("fsdp2").seconds
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda check=None: torch.device("cuda"))
    assert step_of("fsdp2").seconds == without


@pytest.mark.parametrize("wrap", ["bucketed", "ddp", "fsdp1", "fsdp2"])
def test_collectives_run_beside_products_and_the_step_waits_for_them(wrap: str) -> None:
    """Products bind the step: of the collectives only what is before the first one, or after the last, shows."""
    step = step_of(wrap)
    collectives = [span for span in step.spans if span.cost is None]
    products = [span for span in step.spans if span.cost is not None and span.cost.flops]
    assert collectives
    assert {span.stream for span in collectives}.isdisjoint(span.stream for span in products)
    overlapped = [c for c in collectives if any(c.begin < p.end and p.begin < c.end for p in products)]
    assert len(overlapped) >= len(collectives) / 2
    assert step.parts["step"] >= max(span.end for span in collectives)  # whoever comes next has the gradients
    alone = sum(span.end - span.begin for span in step.spans)
    assert step.seconds < alone
    assert step.at_least <= step.seconds


def test_fsdp2_gathers_the_next_unit_while_the_one_before_computes() -> None:
    step = step_of("fsdp2")
    gathers = [span for span in step.spans if "gather" in span.name and span.cost is None]
    products = [span for span in step.spans if span.cost is not None and span.cost.flops]
    assert gathers[2].begin < products[1].begin


def test_the_host_that_waits_is_where_the_device_is() -> None:
    """Reading a number waits for the product before it."""
    with simulation(on=device(launch=1e-3)) as timer:
        a, number = torch.randn(8192, 8192), torch.ones(1)

        def waits(mark: Mark) -> None:
            a @ a
            mark("launched", of_host=True)
            number.item()
            mark("read", of_host=True)

        step, ahead = timer.step(waits), timer.step(waits, ahead=0.02)
    product = GPU(device()).seconds(Cost(torch.float32, 1.0, 0, (Product(1, 8192, 8192, 8192),)))
    assert step.parts["launched"] == pytest.approx(1e-3, rel=1e-6)
    assert step.parts["read"] == pytest.approx(product, rel=1e-6)
    assert step.host == pytest.approx(ahead.host, rel=1e-6) == pytest.approx(2e-3, rel=1e-6)
    assert step.waited == pytest.approx(product - 1e-3, rel=1e-6)


def test_an_optimizer_reads_its_counters_without_waiting() -> None:
    with simulation(on=device(launch=1e-3)) as timer:
        parameters = [torch.randn(2**20, requires_grad=True) for _ in range(4)]
        optimizer = torch.optim.AdamW(parameters, foreach=True)
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        step = timer.step(lambda mark: optimizer.step())
        total = torch.ones(())
        optimizer.register_step_pre_hook(lambda *args: print(total.item()))
        reads = timer.step(lambda mark: optimizer.step())
    assert step is not None and step.waited == 0 and len(step.spans) < 20
    assert reads is not None and reads.host == pytest.approx(step.host + 1e-3, rel=1e-6)


def test_what_is_waited_for_ends_before_what_comes_after() -> None:
    with simulation(2, on=device()) as timer:
        a, total = torch.randn(4096, 4096), torch.randn(2**30)

        def waits(mark: Mark) -> None:
            handle = dist.all_reduce(total, async_op=True)
            a @ a
            handle.wait()
            a @ a
            mark("done")

        step = timer.step(waits)
    reduced, first, second = (
        next(span for span in step.spans if span.cost is None),
        *(span for span in step.spans if span.cost is not None and span.cost.flops),
    )
    assert first.begin < reduced.end
    assert second.begin == pytest.approx(reduced.end)


def test_a_trace_takes_what_the_schedule_says() -> None:
    on = device(launch=2e-5, backward_launch=5e-5)
    program = attention(64, 1024, fused_softmax)
    with simulation(on=on) as timer:
        step = timer.step(program(timer))
    found, rates = trace(program, "a100-80gb"), GPU(on)
    takes = torch.tensor([0.0 if cost is None else rates.seconds(cost) for cost in found.costs], dtype=torch.float64)
    parts = found.seconds_of_parts(takes.numpy(), (2e-5, 5e-5))
    assert parts == pytest.approx(step.parts, rel=1e-9)


def test_attention_counts_no_products_that_its_mask_leaves_out() -> None:
    """Or the lower bound would be twice what a kernel needs."""
    q = torch.empty(1, 2, 1024, 64, dtype=torch.bfloat16)
    with simulation(on=device()) as timer:

        def attends(causal: bool) -> float:
            step = timer.step(lambda mark: void(scaled_dot_product_attention(q, q, q, is_causal=causal)))
            assert step is not None
            return step.at_least

        assert attends(True) == attends(False) / 2 > 0


def test_busy_times_are_joined_until_there_are_few() -> None:
    spans = [Span("mm", "", i * 1.0, i * 1.0 + 0.5, 0.0) for i in range(1000)]
    spans.append(Span("all_reduce", "collectives 0", 3.0, 4.0, 0.0, None, 8))
    lanes = Step(1000.0, 1.0, {}, spans).lanes(most=100)
    assert lanes == {"compute": [[0.0, 999.5]], "collectives 0": [[3.0, 4.0]]}
    few = Step(10.0, 1.0, {}, spans[:10]).lanes(most=100)
    assert few["compute"] == [[span.begin, span.end] for span in spans[:10]]


def test_the_trace_has_every_operator_on_its_stream(tmp_path: Path) -> None:
    step = step_of("bucketed")
    events = json.loads(write_trace(step, tmp_path / "step.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    ran = [event for event in events if event["ph"] == "X" and names[event["tid"]] != "parts"]
    assert len(ran) == len(step.spans)
    assert {names[each["tid"]] for each in ran if each["name"] == "mm"} == {"compute"}
    assert {names[each["tid"]] for each in ran if each["name"] == "all_reduce"} == {"collectives 0"}
    assert max(each["ts"] + each["dur"] for each in ran) == pytest.approx(1e6 * max(s.end for s in step.spans))


def void(value: object) -> None:
    """A step returns nothing; this drops the value."""


@pytest.mark.parametrize("allowed", [True, False])
def test_a_convolution_in_float32_takes_tf32_unless_the_program_forbids_it(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrix products are the other way round: a lower bound at float32's rate would be above a convolution's time."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    x, kernel = torch.empty(8, 64, 32, 32), torch.empty(64, 64, 3, 3, requires_grad=True)
    on = device()
    with simulation(on=on) as timer:
        step = timer.step(lambda mark: void(conv2d(x, kernel).sum().backward()))
        product = timer.step(lambda mark: void(torch.empty(512, 512) @ torch.empty(512, 512)))
    assert step is not None and product is not None
    flops = sum(span.cost.flops for span in step.spans if span.cost is not None)
    assert flops == 2 * (2 * 8 * 64 * 30 * 30 * 64 * 9)  # forward, and the gradient of the kernel
    assert step.peak == on.flops["tf32" if allowed else "float32"] and product.peak == on.flops["float32"]
    assert step.at_least == pytest.approx(flops / step.peak) and step.at_least <= step.seconds
