"""The bucketed wrapper's memory, and the model of overhead: formulas against the meter and against brute force."""

import pytest

from correctness.support.metering import assert_metered, device_of_rank, metered
from impl.data_parallel.accounting import best_bucket_bytes, bucketed_peak, copying_peak, exposed_seconds, work
from impl.data_parallel.cases import ReductionCase
from impl.data_parallel.workload import DataParallelStep
from impl.training_step.cases import TrainingStepCase
from shardmark.api import Implementation, family
from shardmark.meter.memory import meter
from shardmark.meter.plan import Plan
from shardmark.plugin import WorldsBySize
from shardmark.predict.simulation.predict import predict
from shardmark.rows.observers.fits import fit_polynomial
from shardmark.rows.observers.overhead_model import bucket_lines


def peak(implementation: Implementation, case: TrainingStepCase) -> dict[str, int]:
    """Peak bytes of the third step."""
    return {"peak": metered(DataParallelStep, implementation, case).tensors}


@pytest.mark.parametrize(
    "case",
    [
        ReductionCase("tiny", 1, 4),  # peak at the end of backward
        pytest.param(ReductionCase("tiny", 2, 32), marks=pytest.mark.sweep),  # peak at the loss
        ReductionCase("deep", 1, 4),  # several buckets: their reductions start before backward ends
    ],
    ids=str,
)
def test_a_narrower_reductions_peak_is_the_formulas(case: ReductionCase, worlds: WorldsBySize, device: str) -> None:
    expected = [{"peak": bucketed_peak(case, device)}] * 2
    bucketed = family("data_parallel").implementations["bucketed"]
    # The last bucket holds more than the embedding.
    assert_metered(worlds(2), expected, peak, bucketed, case, below=2e-3)


def first_steps_peak(implementation: Implementation, case: TrainingStepCase) -> int:
    """Peak of the step that learns the gradient order and rebuilds the buckets."""
    device = device_of_rank()
    with meter(device) as memory:
        workload = DataParallelStep(implementation, case, device)
        workload.prepare()
        memory.reset_peak()
        workload.step(lambda part: None)
    return memory.tensors


@pytest.mark.parametrize(
    "case", [TrainingStepCase("tiny", 2, 32), TrainingStepCase("tiny", 2, 32, dtype="bfloat16")], ids=str
)
@pytest.mark.parametrize("name", ["naive", "bucketed"])
def test_a_peak_is_the_formulas_under_autocast_too(
    name: str, case: TrainingStepCase, worlds: WorldsBySize, device: str
) -> None:
    """Under autocast activations have half the bytes; gradients, and so what is communicated, have as many."""
    implementation = family("data_parallel").implementations[name]
    expected = [{"peak": implementation.peak(case, device)}] * 2
    assert_metered(worlds(2), expected, peak, implementation, case, below=0.01)


@pytest.mark.parametrize("bucket_mb", [1, pytest.param(25, marks=pytest.mark.sweep)])
def test_learning_the_order_takes_no_more_than_a_step(bucket_mb: int, worlds: WorldsBySize, device: str) -> None:
    case = TrainingStepCase("deep", 1, 4, bucket_mb=bucket_mb)
    for found in worlds(2).run(first_steps_peak, family("data_parallel").implementations["bucketed"], case):
        assert found <= bucketed_peak(case, device)


def test_a_users_own_wrapper_may_have_as_much_as_pytorchs() -> None:
    """PyTorch's own has no formula: a prediction is its budget."""
    case, ddp = TrainingStepCase("tiny", batch=2, context=32), family("data_parallel").implementations["ddp"]
    assert ddp.memory is None and family("data_parallel").memory is copying_peak
    needed = predict(Plan(DataParallelStep, ddp, None, case, "cpu", 2)).memory.tensors
    assert needed <= copying_peak(case) <= 1.001 * needed


def test_a_narrower_reduction_communicates_half() -> None:
    case = ReductionCase("tiny", batch=2, context=32)
    plain = TrainingStepCase("tiny", batch=2, context=32)
    assert 2 * work(case, 4).bytes_communicated == work(plain, 4).bytes_communicated
    assert work(case, 4).flops == work(plain, 4).flops


def test_the_best_bucket_is_the_best_of_all() -> None:
    """Brute force: 10 MB of gradients, 1 ms an all-reduce, 1 GB/s."""
    s, o, w = 10_000_000, 1e-3, 1e9
    best = best_bucket_bytes(s, o, w)
    assert best == pytest.approx(s / 10**0.5)  # n = sqrt(s / (w o)) = sqrt(10)
    # one bucket: one overhead plus all the communication
    assert exposed_seconds(s, s, o, w) == pytest.approx(o + s / w)
    assert exposed_seconds(s, s / 5, o, w) == pytest.approx(5 * o + s / 5 / w)
    assert min(range(100_000, s, 100_000), key=lambda b: exposed_seconds(s, b, o, w)) == pytest.approx(best, rel=0.02)


def test_a_line_is_found_through_times_of_all_sizes() -> None:
    (slope, constant), miss = fit_polynomial(
        {size: 2e-4 + size / 4e9 for size in (4_096, 262_144, 16_777_216)}, degree=1
    )
    assert constant == pytest.approx(2e-4) and 1 / slope == pytest.approx(4e9) and miss < 1e-9
    assert fit_polynomial({1: 1.0, 2: 2.0, 3: 1.0}, degree=1)[1] > 0.2


def test_the_table_sets_the_model_beside_what_was_measured() -> None:
    fit = {
        "overhead": 2e-4,
        "bandwidth": 4e9,
        "miss": 0.01,
        "gradient_bytes": 40 * 2**20,
        "best_bytes": 2**22,
        "best_seconds": 3e-3,
        "exposed": {"1": 8.3e-3, "25": 7.0e-3},
    }
    rows = [
        {"implementation": "backend", "case": {}, "time": {"model": fit}},
        *(
            {"implementation": "ddp", "case": {"bucket_mb": size}, "time": {"parts": {"communication": size / 1e3}}}
            for size in (1, 25)
        ),
    ]
    lines = list(bucket_lines([{"extra_info": row} for row in rows]))
    assert lines[1] == "an all-reduce with backend: 0.200 ms + bytes / 4.00 GB/s (misses by 1% at most)"
    assert [line.split() for line in lines[5:7]] == [["1", "40", "8.300", "1.000"], ["25", "2", "7.000", "25.000"]]
    assert lines[7:] == [
        "least by the model, backend: 3.000 ms in buckets of 4.00 MB",
        "least as measured, ddp: 1.000 ms in buckets of at most 1 MB",
    ]
    assert list(bucket_lines([{"extra_info": row} for row in rows[1:]])) == []
