"""The fields of a row, with type, unit and description. A row is the `extra_info` of an entry of pytest-benchmark.

`python -m shardmark.rows` writes the JSON Schema and the table of docs/rows.md from these classes.
An observer outside this package declares the fields that it fills (`Observer.fields`). At run time a row is a dict.
"""

# Without `from __future__ import annotations`, which would hide NotRequired from typing.
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, TypedDict

SCHEMA = 2
"""Version of the schema: one more whenever a program that reads rows has to change."""


@dataclass(frozen=True)
class Unit:
    """Unit of a number, and the least value that makes sense."""

    name: str
    least: float | None = 0


@dataclass(frozen=True)
class OneOf:
    """A text that is one of these."""

    values: Sequence[str]


@dataclass(frozen=True)
class Items:
    """A list of exactly these elements."""

    types: Sequence[Any]


@dataclass(frozen=True)
class Described:
    """The type that the schema describes in place of the static one."""

    type: Any


@dataclass(frozen=True)
class More:
    """An object that may have further properties, of this type."""

    type: Any = Any


Bytes = Annotated[int, Unit("bytes")]
Count = Annotated[int, Unit("count")]
Flops = Annotated[int, Unit("FLOPs")]
Seconds = Annotated[float, Unit("seconds")]
Difference = Annotated[float, Unit("seconds", least=None)]
"""Noise can make it negative."""
Rate = Annotated[float, Unit("per second")]
Hertz = Annotated[float, Unit("hertz")]
Share = Annotated[float, Unit("1", least=None)]
Ratio = Annotated[float, Unit("1", least=None)]
Interval = Annotated[list[float], Items((Ratio, Ratio))]
Period = Annotated[list[float], Items((Seconds, Seconds))]
Outcome = Annotated[str, OneOf(("reached", "missed", "undecided"))]


# Static checks allow any parameter of a case; the schema requires its id.
class CaseId(TypedDict):
    id: Annotated[str, "As in the test's id and in tables."]
    words: NotRequired[Annotated[str, "As in sentences: at 2,048 tokens."]]


class Stage(TypedDict):
    live: Annotated[Bytes, "Live when the stage ends."]
    peak: Annotated[Bytes, "Peak so far."]
    reserved: NotRequired[Annotated[Bytes | None, "Reserved by CUDA's allocator; null on CPU."]]
    formula: NotRequired[Annotated[Bytes | None, "What should be live, by the formula."]]


class Activation(TypedDict):
    module: Annotated[str, "Module that saved it; empty outside of modules."]
    operator: Annotated[str, "Operator that saved it."]
    bytes: Annotated[Bytes, "Metered."]
    formula: Annotated[Bytes | None, "What should be saved, by the formula."]


class Block(TypedDict):
    nbytes: Annotated[Bytes, "Size."]
    kind: Annotated[str, "Parameters, gradients, activations, ..."]
    module: Annotated[str, "Module that allocated it."]
    operator: Annotated[str, "Operator that allocated it."]
    line: NotRequired[Annotated[str, "Line of code that allocated it."]]
    workspace: NotRequired[Annotated[str, "Operator that freed it before it returned; empty for a tensor."]]
    address: NotRequired[Annotated[int, "Address."]]


class Memory(TypedDict, total=False):
    # Metered, on the rank with the largest peak.
    phases: Annotated[dict[str, Bytes], "Live at the end of each phase."]
    peak: Annotated[Bytes, "Peak of a steady-state step, tensors and workspace, on the rank that holds most."]
    tensors: Annotated[Bytes, "Peak of tensors alone."]
    workspace: Annotated[Bytes, "The most that one operator allocated and freed before it returned."]
    workspace_operator: Annotated[str | None, "That operator."]
    allocated: Annotated[Bytes, "CUDA: peak of the allocator's blocks, rounded up."]
    reserved: Annotated[Bytes, "CUDA: peak of what the allocator had from the device."]
    host: Annotated[Bytes, "Prediction for a GPU: peak of the tensors that the program puts in the host's memory."]
    pinned: Annotated[Bytes, "Prediction for a GPU: peak of live pinned blocks, each rounded up to a power of two."]
    peak_by_rank: Annotated[list[Bytes], "Peak of each rank."]
    tensors_by_rank: Annotated[list[Bytes], "Peak of tensors of each rank."]
    # Budget.
    formula: Annotated[Bytes, "Expected peak of tensors, by the formula or a prediction."]
    source: Annotated[str, OneOf(("formula", "prediction")), "Where `formula` is from."]
    slack: Annotated[float, Unit("1"), "`budget` is `formula` times this."]
    expected_workspace: Annotated[Bytes, "Expected workspace."]
    budget: Annotated[Bytes, "The most that `tensors` may be."]
    needed: Annotated[Bytes, "Case that was not started: what it needs."]
    available: Annotated[Bytes, "Case that was not started, or prediction for a GPU: what the device has."]
    communicator: Annotated[Bytes, "Prediction: estimate of NCCL's communicator, not part of the peak."]
    # Filled by observers: Compile, Stages, Timeline.
    peaks: Annotated[dict[str, Bytes], "Peaks of tensors in the first, the second and the steady-state step."]
    stages: Annotated[dict[str, Stage], "Memory after each stage of making the workload."]
    kinds: Annotated[dict[str, dict[str, Bytes]], "Bytes by kind, at each phase and at the peak."]
    curve: Annotated[list[Any], "Bytes by kind through one step."]
    activations: Annotated[list[Activation], "What forward saves for backward."]
    largest: Annotated[list[Block], "The largest blocks at the peak."]


class Predicted(TypedDict):
    interval: Annotated[
        Period | None, "9 of 10 measured steps lie between these, by published ones; null where none are known."
    ]
    sources: Annotated[
        Count | None,
        "Sources of whole steps on that chip that judge the interval: 0 where single operators do, or other chips.",
    ]
    at_least: Annotated[Seconds | None, "Lower bound, by the data sheet alone; null where there is none."]
    streams: Annotated[
        dict[str, list[Period]], "For each stream, begin and end of each busy period; short gaps are closed."
    ]


class Gather(TypedDict):
    part: Annotated[str, "Part of the step in which it is wanted."]
    nbytes: Annotated[Bytes, "The whole tensor."]
    ahead: Annotated[Seconds, "From its start until it is wanted, or in a simulation until it ends if that is sooner."]
    exposed: Annotated[Seconds, "How long the rank waits for it."]
    in_time: Annotated[Share, "Share of the steps in which it has ended when it is wanted."]


class Spread(TypedDict):
    mean: Annotated[Seconds, "Mean."]
    stddev: Annotated[Seconds, "Standard deviation."]


class Pairs(TypedDict):
    ratio: Annotated[Ratio, "Median ratio of the pairs, of all processes."]
    interval: Annotated[Interval | None, "Its interval; null after too few pairs."]
    confidence: Annotated[float, Unit("1"), "Confidence of that interval."]
    mean: Annotated[Ratio, "Quotient of the mean steps."]
    mean_error: Annotated[Ratio | None, "Two standard errors of it; null for a single pair."]
    processes: Annotated[list[Ratio], "Median ratio in each fresh process; empty for the run's own process."]
    means: Annotated[list[Ratio], "Quotient of the mean steps in each fresh process."]
    count: Annotated[Count, "Number of pairs."]


class Time(TypedDict, total=False):
    # As in "stats", of all rows of a case at one speed of the machine (`shardmark.rows.case_times`).
    parts: Annotated[dict[str, Difference], "Each part's mean share of the step, times the median step."]
    median_by_rank: Annotated[list[Seconds], "Median step of each rank."]
    pace: Annotated[float, Unit("1"), "Measured times over those of the row: the machine's speed varies."]
    host: Annotated[Seconds | None, "GPU: what the host takes to launch a step."]
    machine: Annotated[dict[str, Share], "Disturbances while the case was timed, as shares of the step's time."]
    peer: Annotated[str | None, "Implementation that the case is timed against."]
    peer_called: Annotated[str, "The peer as in sentences: eager attention."]
    peer_median: Annotated[Seconds, "Median step of the peer, at the same speed."]
    ratio: Annotated[Ratio | None, "Step time over the peer's, by pairs of rounds."]
    interval: Annotated[Interval | None, "95% interval of the ratio; null after too few rounds."]
    judged_interval: Annotated[Interval | None, "Interval of the ratio that verdicts are taken from."]
    judged_confidence: Annotated[float, Unit("1"), "Confidence of that interval."]
    pairs: Annotated[
        dict[str, Pairs], 'What --against compares: the step paired with its "peer" and with the calibration "load".'
    ]
    stalls: Annotated[str, "Rare long steps that the peer has not: 1 step in 20 takes 3.0x."]
    budget: Annotated[Ratio | None, "The most that the ratio may be."]
    goal: Annotated[Ratio | None, "What the ratio should reach."]
    outcome: Annotated[Outcome | None, "Outcome of the goal."]
    # Simulation.
    predicted: Annotated[Predicted, "Simulation: how sure the step's time is, and what runs when."]
    copies: Annotated[Seconds, "Simulation: copies between the host's memory and the device's, one after another."]
    on_host: Annotated[Seconds, "Simulation: operators that the host computes itself: an offloaded optimizer's."]
    gathers: Annotated[list[Gather], "Each all-gather, in order: by Gathers, and of the simulated first rank."]
    # Filled by observers: HiddenCommunication, Compile, AfterWarmups, OverheadModel.
    compute_alone: Annotated[Seconds, "Median step without communication."]
    communication_alone: Annotated[Seconds, "Median communication without the rest of the step."]
    hidden: Annotated[Share, "Share of communication that the step hides behind computation."]
    first_step: Annotated[Seconds, "First step, which compiles."]
    compile: Annotated[Difference, "First step beyond the median step."]
    after_warmups: Annotated[dict[str, Spread], "Rounds after each number of warm-ups."]
    model: Annotated[
        dict[str, Any], "Overhead and bandwidth of an all-reduce, and what buckets of each size should cost."
    ]


class Work(TypedDict, total=False):
    flops: Annotated[Flops, "FLOPs of all ranks in one step."]
    bytes_moved: Annotated[Bytes, "Bytes that all ranks must read and write in one step."]
    bytes_communicated: Annotated[Bytes, "Bytes that each rank must send in one step, by theory."]
    model_flops: Annotated[Flops, "FLOPs of the model alone, for MFU; 0 where MFU is not asked."]
    flops_per_second: Annotated[Rate, "FLOPs over the step's time."]
    bytes_per_second: Annotated[Rate, "Bytes moved over the step's time."]
    tokens_per_second: Annotated[Rate, "Tokens of the batch over the step's time."]
    algorithm_bandwidth: Annotated[Rate, "Bytes of a collective over its time."]
    bus_bandwidth: Annotated[Rate, "Bytes that each rank must send over the collective's time."]
    efficiency: Annotated[Share, "Scaling efficiency: throughput over that of one rank times the ranks."]
    bytes_sent: Annotated[Bytes, "Bytes that the connections of the rank that sent most have sent."]
    bubble: Annotated[Share, "Share of a pipeline's step for which a rank does not compute."]
    bubble_by_formula: Annotated[Share | None, "That share where messages take no time; None where not known."]


class Goal(TypedDict):
    goal: Annotated[Share, "What the figure should reach."]
    outcome: Annotated[Outcome, "Whether it does."]


class Limit(TypedDict, total=False):
    seconds: Annotated[Seconds, "The roofline's time for this work."]
    fraction: Annotated[Share | None, "That time over the step's."]
    flops_per_second: Annotated[Rate, "Measured on this machine."]
    bytes_per_second: Annotated[Rate, "Measured on this machine."]
    peak_flops_per_second: Annotated[Rate, "Published dense peak where it is known, else `flops_per_second`."]
    mfu: Annotated[Share, "Model FLOPs utilization: model FLOPs over what the peak allows in the step's time."]
    not_done: Annotated[str, "More FLOP/s than this machine can compute: the work was not done."]
    goals: Annotated[dict[str, Goal], "Goals of `mfu` or `fraction`."]


class Counters(TypedDict, total=False):
    collectives: Annotated[
        list[Annotated[list[Any], Items((str, str, int, int))]],
        "[operation, dtype, bytes, times in a row] of each collective, in the order in which rank 0 began them.",
    ]
    bytes_sent: Annotated[Bytes | None, "Bytes that a rank must send for its collectives."]
    bytes_sent_by_axis: Annotated[dict[str, Bytes], "On a mesh: `bytes_sent` by axis; filled by SentByAxis."]
    operators: Annotated[Count | None, "PyTorch operators that compute something."]
    kernels: Annotated[Count | None, "GPU kernels."]
    flops: Annotated[Flops | None, "By the formulas of torch.utils.flop_counter."]
    saved_bytes: Annotated[Bytes | None, "What autograd holds at the end of forward."]
    synchronizations: Annotated[Count | None, "How often the host waits for the device."]
    bytecodes: Annotated[Count | None, "Bytecode instructions of the user's Python functions."]
    library_bytecodes: Annotated[Count | None, "Those of Python's and libraries' functions: with noise, not compared."]
    bytecodes_by_function: Annotated[dict[str, Count] | None, "`bytecodes` by function."]
    instructions: Annotated[Count | None, "Machine instructions: with a little noise, not compared."]
    operators_by_name: Annotated[dict[str, Count] | None, "`operators` by name."]


class Kernel(TypedDict):
    name: Annotated[str, "Name."]
    category: Annotated[str, "Matrix product, softmax, ..."]
    calls: Annotated[int, Unit("count", least=1), "Launches."]
    seconds: Annotated[Seconds, "Sum of its calls."]
    share: Annotated[Share, "Share of the phase."]


class KernelPhase(TypedDict):
    seconds: Annotated[Seconds, "Sum of its kernels."]
    elapsed: Annotated[Seconds, "From begin to end."]
    calls: Annotated[Count, "Launches."]
    categories: Annotated[dict[str, Seconds], "Seconds of each category."]
    top: Annotated[list[Kernel], "The longest kernels."]


class AttentionPart(TypedDict):
    seconds: Annotated[Seconds, "Seconds of its kernels."]
    flops: Annotated[float, Unit("FLOPs"), "FLOPs of all layers."]


class Kernels(TypedDict):
    phases: Annotated[dict[str, KernelPhase], "Kernels of one step under the profiler, by phase."]
    attention: NotRequired[Annotated[dict[str, AttentionPart], "Parts of attention's forward; by AttentionProfile."]]


class Span(TypedDict):
    kind: Annotated[str, "Forward, backward, ..."]
    label: Annotated[str, "Which of them, such as the micro-batch."]
    begin: Annotated[Seconds, "From the first beginning on any rank."]
    end: Annotated[Seconds, "From the same moment."]


class Spans(TypedDict):
    measured: Annotated[list[list[Span]], "Of each rank, in one more step."]
    expected: NotRequired[Annotated[list[list[Span]], "Of each rank, by the plan of the step."]]


class Gpu(TypedDict):
    sm_clock: Annotated[Hertz | None, "Median clock of the multiprocessors."]
    memory_clock: Annotated[Hertz | None, "Median clock of the memory."]
    reasons: Annotated[list[str], "Everything that kept clocks from rising, in any sample: power limit, heat, ..."]
    throttled: Annotated[dict[str, Share], "Share of the time in which power or heat lowered the clocks, by cause."]
    power: Annotated[Annotated[float, Unit("watts")] | None, "Average."]
    temperature: Annotated[Annotated[float, Unit("degrees Celsius")] | None, "Highest."]
    energy: Annotated[Annotated[float, Unit("joules")] | None, "Of all timed rounds, the peer's steps among them."]
    shared: Annotated[bool, "Partitioned (MIG): all but power and energy, which are null, are of all instances."]


class Ref(TypedDict):
    name: Annotated[str, "Commit, branch or tag, as --against-ref names it."]
    commit: Annotated[str, "Its commit."]
    ratio: NotRequired[Annotated[Ratio | None, "This version's step time over that version's."]]
    interval: NotRequired[Annotated[Interval | None, "Interval of that ratio; null after too few rounds."]]
    pairs: NotRequired[Annotated[Pairs, "All that the pairs of both versions show."]]


class Row(TypedDict):
    schema: Annotated[int, "Version of the schema."]
    family: Annotated[str, "Family of techniques."]
    implementation: Annotated[str, "Its name in the family, or what --impl names."]
    called: NotRequired[Annotated[str, "The implementation as in sentences: eager attention."]]
    case: Annotated[dict[str, Any], Described(CaseId), More(), "Id and parameters of the case."]
    device: Annotated[str, OneOf(("cpu", "cuda")), "Where tensors live."]
    backend: Annotated[str | None, "What ran below: the process group's backend, or the kernel that SDPA chose."]
    world_size: Annotated[int, Unit("ranks", least=1), "Number of ranks."]
    link: Annotated[str | None, "Rate of the link between the ranks' two hosts (--link)."]
    dtype: Annotated[str | None, "The case's dtype."]
    scale: Annotated[str, OneOf(("smoke", "laptop", "paper", "full")), "Grid of cases (--scale)."]
    simulated: Annotated[bool, "Predicted, not measured."]
    hardware: NotRequired[Annotated[str | None, "Hardware of the prediction (--simulate)."]]
    memory: Annotated[Memory, "Bytes of a steady-state step, on the rank that holds most."]
    time: Annotated[Time, "Seconds of a step, and the race against the peer."]
    work: Annotated[Work, More(float), "What a step does, and the rates that a test makes of it."]
    limit: Annotated[Limit, "What the machine allows."]
    counters: Annotated[Counters, "Figures without noise, of one more steady-state step under the profiler."]
    kernels: NotRequired[Annotated[Kernels, "Filled by Profile."]]
    losses: NotRequired[Annotated[list[float], "Loss of each step; filled by Losses."]]
    spans: NotRequired[Annotated[Spans, "Times at which each rank does what; filled by Spans."]]
    gpus: NotRequired[Annotated[list[Gpu], "Each rank's GPU in the timed rounds, by NVML; null where unsupported."]]
    trace: NotRequired[Annotated[list[str], "Names of the row's files in --trace-dir."]]
    ref: NotRequired[Annotated[Ref, "The other version of --against-ref."]]
    verdict: Annotated[
        Annotated[str, OneOf(("pass", "fail", "undecided", "not started", "out of memory"))] | None,
        "Verdict of all budgets together; null without a budget.",
    ]
    why: Annotated[str | None, "What is over its budget, undecided, or out of memory."]
