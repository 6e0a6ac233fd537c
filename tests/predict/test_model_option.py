"""`--model`: what a user's own model is, what is wrong with one in one line, and that a leak is found."""

import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch._dynamo  # or each run of pytest would import it anew, as `pytester` forgets it, and it registers for good
import torch.distributed as dist
from torch import nn

from correctness.support.own_model import Trained, assert_as_in_one_process, optimizer_of, own_model, train
from correctness.support.paths import ROOT
from impl.data_parallel import NaiveDataParallel
from impl.fsdp import with_blocks
from shardmark.api.finding import RegistryError
from shardmark.api.own_model import OwnModelCase, find_blocks, make
from shardmark.api.recipe import Recipe
from shardmark.meter.over_budget import Held, excess_lines
from shardmark.plugin import WorldsBySize
from shardmark.predict.memory_budget import Predicted
from shardmark.predict.own_model import check
from tests.support import own_models
from tests.support.own_models import Block
from tests.support.project import make_project, row_of, run_project

pytest_plugins = ["pytester", "tests.support.project"]

SPEC = "tests.support.own_models"
FILE = "tests/support/own_models.py"


def line_of(text: str) -> int:
    """The line of that file where the text stands."""
    lines = Path(own_models.__file__).read_text().splitlines()
    return 1 + next(i for i in range(len(lines)) if text in lines[i])


WRONG = {
    "number": "it is of type int, and not a function that makes a model",
    "missing": f"{SPEC} has no 'missing'",
    "nothing": "it returns (model, batch, loss), and perhaps the model's blocks, not NoneType",
    "two": "it returns (model, batch, loss), and perhaps the model's blocks, not 2 values",
    "no_module": "the model that it returns is an nn.Module, not function",
    "no_tuple": "the batch that it returns is a tuple of what the loss is given beside the model, not Tensor",
    "no_loss": "the loss that it returns is a function of the model and the batch, not int",
    "no_blocks": "the fourth value that it returns is the model's blocks, a list of its modules",
    "another_optimizer": "the optimizer that it returns is a function that makes one of a list of parameters, not SGD",
    "no_optimizer": "its optimizer: *: TypeError: it makes a int, and not a torch.optim.Optimizer",
    "misspelt": "it returns a dict of model, batch, loss and perhaps blocks, optimizer, not a dict of *, optimiser",
    "without_parameters": "its ReLU has no parameter to train",
    "vector": "its loss is of shape (32,), and not one number: take its mean",
    "python_number": "its loss is of type float, and not a tensor of one number",
    "constant": "its loss depends on no parameter of its Net",
    "misshapen": f"{FILE}:*: RuntimeError: Given normalized_shape=*",
    "raising": f"{FILE}:{line_of('raise LookupError')}: LookupError: two",
    "masking": f"aten::* in {FILE}:{line_of('x.mean(-1) > 0')} depends on values, and a simulation has none",
}

STEP = """
import pytest
from shardmark.api.own_model import OwnModelCase
from impl.training_step.accounting import work
from impl.training_step.cases import TrainingStepCase
from impl.data_parallel.workload import DataParallelStep
from impl.training_step.workload import LanguageModelStep
from shardmark.api.grid import Grid

TINY = [TrainingStepCase("tiny", 2, 32)]
GRID = Grid(smoke=TINY, laptop=TINY, paper=TINY, own=OwnModelCase.of)

@pytest.mark.family("training_step", only=("eager",))
@pytest.mark.cases(GRID)
def test_step(implementation, case, measure):
    measure(LanguageModelStep, implementation, case, work=work(case))

@pytest.mark.family("data_parallel", only=("naive",))
@pytest.mark.cases(GRID)
def test_on_ranks(implementation, case, world, measure):
    measure(DataParallelStep, implementation, case, work=work(case), world_size=world.size)

@pytest.mark.family("training_step", only=("eager",))
@pytest.mark.cases(Grid(smoke=TINY, laptop=TINY, paper=TINY))
def test_of_language_models_alone(implementation, case, measure): ...

@pytest.mark.cases(Grid(smoke=[], laptop=[], paper=[], own=OwnModelCase.of))
def test_of_own_models_alone(case): ...

def test_of_no_case(): ...
"""


@pytest.fixture
def steps(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with a question about training steps."""
    return make_project(pytester, monkeypatch, 'import impl\npytest_plugins = ["shardmark.plugin"]', test_steps=STEP)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_it_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(RegistryError) as error:
        check(f"{SPEC}:{name}", simulated=True)
    expected = re.escape(f"--model {SPEC}:{name}: {WRONG[name]}").replace(r"\*", ".*")
    assert re.fullmatch(expected, str(error.value)), str(error.value)


def test_what_cases_know_of_it() -> None:
    state = torch.random.get_rng_state()
    own = check(f"{SPEC}:make", simulated=False)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert own.parameters == sum(p.numel() for p in own_models.Net().parameters())
    products = 3 * 2 * 4 * own_models.WIDTH**2 + own_models.WIDTH**2
    assert own.flops == 6 * own_models.ROWS * products
    assert str(OwnModelCase.of(own)) == "own_models.make-float32-step"


def test_one_that_asks_for_a_gpu_is_made_where_the_run_is() -> None:
    made = make(f"{SPEC}:on_a_gpu", "cpu")
    tensors = [*made.module.parameters(), *made.module.buffers(), *made.batch]
    assert len(tensors) == 4 and all(tensor.is_cpu for tensor in tensors)


def test_one_whose_operators_depend_on_values_runs() -> None:
    assert check(f"{SPEC}:masking", simulated=False).flops > 0


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (nn.ModuleDict({"h": nn.ModuleList(Block() for _ in range(3)), "end": nn.Linear(2, 2)}), 3),
        (nn.Sequential(nn.Linear(2, 2), Block(), Block(), nn.Linear(2, 2)), 2),
        (nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block(), Block()])]), 2),
        (nn.ModuleDict({"left": nn.Sequential(Block(), Block()), "right": nn.ModuleList([Block(), Block()])}), 4),
        (nn.ModuleDict({"0": Block(), "1": Block(), "2": Block()}), 3),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 0),
        (nn.ModuleList([Block()]), 0),
    ],
    ids=["list", "among_others", "outermost", "two_lists", "numbered", "linears", "one"],
)
def test_blocks_are_the_outermost_modules_of_one_class_in_a_row(model: nn.Module, blocks: int) -> None:
    assert len(find_blocks(model)) == blocks


def test_units_are_the_blocks_and_what_is_outside_of_them() -> None:
    model = own_models.Net()
    units = with_blocks(find_blocks(model))(model)
    assert units == [*model.layers, model.output]


def test_layers_that_share_a_weight_lie_in_the_roots_unit() -> None:
    """As PyTorch's FSDP asks of a tied embedding and output."""
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "hidden": nn.Linear(3, 3), "output": nn.Linear(3, 5)})
    model["output"].weight = model["embedding"].weight
    assert with_blocks([])(model) == [model["hidden"]]


def test_only_its_cases_run_and_only_with_it(steps: pytest.Pytester) -> None:
    def collected(*arguments: str) -> list[str]:
        lines = steps.runpytest_inprocess("--collect-only", "-q", "--scale=smoke", *arguments).outlines
        return [line.partition("::")[2] for line in lines if "::" in line]

    own = "own_models.make-float32-step"
    step, ranks = f"test_step[eager-{own}]", f"test_on_ranks[naive-{own}-2ranks]"
    of_own = f"test_of_own_models_alone[{own}]"
    assert collected("--ranks=2", f"--model={SPEC}:make") == [step, ranks, of_own]
    assert collected("--ranks=2", f"--model={SPEC}:make", "--impl=training_step=checkpointed") == [
        step.replace("eager", "checkpointed")
    ]
    without = collected("--ranks=2")
    assert "test_of_no_case" in without and len(without) == 4 and not any("own" in name for name in without)


@pytest.mark.sweep
def test_a_file_of_ones_own_reaches_the_ranks_and_is_held_to_its_prediction(steps: pytest.Pytester) -> None:
    steps.makepyfile(mine=Path(own_models.__file__).read_text())
    result, output = run_project(steps, "--ranks=2", "--model=mine.py:make", "-k", "on_ranks")
    result.assert_outcomes(passed=1)
    memory = row_of(output, "naive-mine.make-float32-step-2ranks")["memory"]
    assert memory["source"] == "prediction" and memory["tensors_by_rank"] == [memory["formula"]] * 2


LEAKS = {
    "keeping": (4 * 32 * 16 * 8, "self.kept.append", "aten::repeat * 3 * 2 * Keeping, "),
    "remembering": (4, "return cross_entropy(model(x), y)", "aten::cross_entropy_loss * 3 * 2 * "),
}
"""By how many bytes each grows in a step, the line that allocates them, and what is said of it."""


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("keeping", ["--simulate=cpu"]),
        pytest.param("keeping", [], marks=pytest.mark.sweep),
        pytest.param("remembering", [], marks=pytest.mark.sweep),
        pytest.param("remembering", ["--simulate=h100-80gb"], marks=pytest.mark.sweep),
    ],
    ids=["keeping_predicted", "keeping", "remembering", "remembering_predicted"],
)
def test_a_model_that_keeps_more_with_each_step_is_over_its_prediction(
    name: str, how: list[str], steps: pytest.Pytester
) -> None:
    more, made_at, says = LEAKS[name]
    result, output = run_project(steps, *how, f"--model={SPEC}:{name}", "-k", "eager")
    result.assert_outcomes(failed=1)
    row = row_of(output, name)
    assert row["verdict"] == "fail" and row["memory"]["tensors"] - row["memory"]["formula"] == more
    result.stdout.fnmatch_lines(
        [
            "* of tensors at the peak, over the budget of * (prediction * x 1.0)",
            "what holds more than predicted  blocks *",
            f"{says}*own_models.py:{line_of(made_at)}",
        ]
    )


@pytest.mark.sweep
def test_one_without_a_prediction_has_no_budget_and_says_why(steps: pytest.Pytester) -> None:
    result, output = run_project(steps, f"--model={SPEC}:masking", "-k", "eager")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*eager has no memory budget: aten::* in *own_models.py:* depends on values*"])
    assert row_of(output, "masking")["memory"]["tensors"] > 0 and "budget" not in row_of(output, "masking")["memory"]


def test_what_holds_no_more_than_predicted_is_not_shown() -> None:
    predicted = [Held(8, 1, "aten::add", "block", "mine.py:1"), Held(4, 1, "aten::mul", "", "")]
    found = [Held(8, 1, "aten::add", "block", "mine.py:1"), Held(12, 3, "aten::mul", "", "")]
    budget = Predicted(12, lambda: predicted)
    lines = list(excess_lines(budget, found))
    assert [line.split()[0] for line in lines[2:]] == ["aten::mul"]
    assert type(pickle.loads(pickle.dumps(budget))) is int


def test_an_operator_has_its_own_line_or_that_of_its_function() -> None:
    predicted = [Held(8, 2, "aten::mul", "block", "mine.py:9"), Held(8, 1, "", "", "mine.py:7")]
    found = [Held(12, 3, "aten::mul", "block", "mine.py:7"), Held(8, 1, "", "", "mine.py:7")]
    (line,) = list(excess_lines(Predicted(16, lambda: predicted), found))[2:]
    assert line.split() == ["aten::mul", "3", "0.00", "2", "0.00", "block,", "mine.py:7"]


def trained_on_rank(case: OwnModelCase, device: str) -> Trained:
    own = own_model(case, device, dist.get_rank())
    model = NaiveDataParallel(own.module)
    optimizer = optimizer_of(case, own)(list(model.parameters()))
    return train(model, case, device, model.module.named_parameters, optimizer, model)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("make", None),
        pytest.param("with_optimizer", None, marks=pytest.mark.sweep),
        ("by_rank", "in step 0 the loss on rank 1 is * and of the same batch in one process *"),
        ("with_one_batch", "its batch is the same on every rank, so that nothing tells whether *"),
        ("drawn_by_python", "it makes another model or batch each time: have PyTorch's generator draw them"),
    ],
)
def test_trained_on_ranks_it_is_held_to_one_process(
    name: str, says: str | None, worlds: WorldsBySize, device: str, tmp_path: Path
) -> None:
    file = Path(shutil.copy(own_models.__file__, tmp_path / "mine.py"))
    case = OwnModelCase(f"{file}:{name}", name, "float32", 0, 0, recipe=Recipe(micro_batches=2, clip=0.01))
    ranks = worlds(2).run(trained_on_rank, case, device)
    if says is None:
        assert_as_in_one_process(ranks, case, device)
        return
    with pytest.raises((AssertionError, pytest.fail.Exception), match=re.escape(says).replace(r"\*", ".*")):
        assert_as_in_one_process(ranks, case, device)
