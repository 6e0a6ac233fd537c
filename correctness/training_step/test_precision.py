"""Mixed precision: policies, sums, what autocast makes of each dtype, where half precision overflows, skipped steps."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm

from impl.model.layers import RMSNorm
from impl.optim import AdamW
from impl.precision import FLOAT32, PRECISIONS, Precision
from impl.training_step import EagerStep

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALVES = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)


@pytest.mark.parametrize(
    ("sums", "terms", "value", "times", "published"),
    [
        (F32, F32, 0.01, 1_000, 10.000133514404297),
        (F16, F16, 0.01, 1_000, 9.953125),
        (F32, F16, 0.01, 1_000, 10.00213623046875),
        (BF16, BF16, 0.01, 1_000, 4.0),
        (F32, BF16, 0.01, 1_000, 10.009765625),
        (F32, F32, 0.001, 10_000, 10.000411033630371),
        (F16, F16, 0.001, 10_000, 4.0),
        (BF16, BF16, 0.001, 10_000, 0.5),
    ],
)
def test_sums_are_the_published_ones(
    sums: torch.dtype, terms: torch.dtype, value: float, times: int, published: float, device: str
) -> None:
    """Exactly: every addition rounds alike everywhere. A sum in half precision stops where a term is half its ulp."""
    total = torch.zeros((), dtype=sums, device=device)
    term = torch.tensor(value, dtype=terms, device=device)
    for _ in range(times):
        total += term
    assert total.item() == published


class Toy(nn.Module):
    """fc1, ReLU, LayerNorm, fc2: what the published experiment looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(8, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 5, bias=False)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.named_children():
            x = layer(x.relu() if name == "norm" else x)
            self.seen[name] = x.dtype
        return x


@HALVES
def test_dtypes_under_autocast(dtype: torch.dtype, device: str) -> None:
    model = Toy().to(device)
    with torch.autocast(device, dtype=dtype):
        logits = model(torch.randn(4, 8, device=device))
        loss = cross_entropy(logits, torch.arange(4, device=device))
    loss.backward()
    assert {p.dtype for p in model.parameters()} == {F32}
    assert model.seen["fc1"] == dtype
    # CUDA's autocast has LayerNorm in float32; CPU's leaves it in its input's dtype, and its statistics are float32.
    assert model.seen["norm"] == (F32 if device == "cuda" else dtype)
    assert logits.dtype == model.seen["fc2"] == dtype
    assert loss.dtype == F32
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32}


def _plain_layer_norm(x: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5)


NORMS = {"layer_norm": _plain_layer_norm, "rms_norm": lambda x: RMSNorm(x.shape[-1]).to(x)(x)}


@pytest.mark.parametrize("norm", NORMS)
def test_norms_in_float16_overflow_at_256_and_in_bfloat16_do_not(norm: str, device: str) -> None:
    """The square of 256 is 65,536, past float16's largest; its root's inverse is 0, and so is all that comes out."""

    def outputs(value: float, dtype: torch.dtype) -> Tensor:
        return NORMS[norm](torch.tensor([value, -value] * 8, dtype=dtype, device=device))

    assert outputs(255, F16).abs().float().mean().item() == pytest.approx(1, rel=2 * torch.finfo(F16).eps)
    assert not outputs(256, F16).any()
    assert outputs(2.0**60, BF16).abs().float().mean().item() == pytest.approx(1, rel=2 * torch.finfo(BF16).eps)


@HALVES
def test_pytorchs_layer_norm_keeps_its_statistics_in_float32(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor([1000.0, -1000.0] * 8, dtype=dtype, device=device)
    assert layer_norm(x, x.shape).abs().tolist() == [1.0] * 16


@pytest.mark.parametrize(
    ("dtypes", "line"),
    [
        ({"parameter": torch.int64}, "parameter is torch.float16, bfloat16, float32 or float64, got torch.int64"),
        ({"compute": "bfloat16"}, "compute is torch.float16, bfloat16, float32 or float64, got bfloat16"),
        (
            {"parameter": torch.float8_e5m2, "compute": torch.float8_e5m2},
            "parameter is torch.float16, bfloat16, float32",
        ),
        ({"compute": F16, "reduction": BF16}, "float16 and bfloat16 do not mix"),
        ({"parameter": F64, "compute": BF16}, "compute is the parameters' own dtype, or float16 or bfloat16"),
        ({"parameter": BF16}, "compute is the parameters' own dtype, or float16 or bfloat16"),
        ({"compute": F64}, "compute is the parameters' own dtype, or float16 or bfloat16"),
        ({"master": BF16}, "master weights are at least as wide as the parameters"),
        ({"parameter": F16, "compute": F16}, "float16 parameters need master weights"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_dtypes_that_do_not_go_together_are_one_line(dtypes: dict[str, torch.dtype], line: str) -> None:
    with pytest.raises(ValueError, match=rf"^{line}[^\n]*$"):
        Precision(**dtypes)


def test_the_named_precisions_and_their_words() -> None:
    assert FLOAT32 == PRECISIONS["float32"] == Precision()
    assert str(PRECISIONS["bfloat16"]) == "parameter float32, compute bfloat16, reduction float32, master None"
    for name, precision in PRECISIONS.items():
        assert precision.scaler("cpu").is_enabled() == (name == "float16")
    assert PRECISIONS["bfloat16_parameters"].parameter == BF16


@pytest.mark.parametrize("name", PRECISIONS)
def test_products_are_in_the_compute_dtype(name: str, device: str) -> None:
    precision = PRECISIONS[name]
    layer = nn.Linear(4, 4, bias=False, device=device, dtype=precision.parameter)
    with precision.autocast(device):
        assert layer(torch.ones(2, 4, device=device, dtype=precision.parameter)).dtype == precision.compute


def test_a_model_of_another_dtype_than_the_precisions_is_one_line() -> None:
    model = nn.Embedding(3, 3, dtype=BF16)
    with pytest.raises(
        ValueError, match=r"^the model's parameters are torch.bfloat16, and the precision's torch.float32$"
    ):
        EagerStep(model, torch.optim.SGD(model.parameters()))


def test_master_weights_that_the_optimizer_does_not_keep_are_one_line() -> None:
    model = nn.Embedding(3, 3, dtype=BF16)
    precision = PRECISIONS["bfloat16_parameters"]
    with pytest.raises(ValueError, match=r"^master weights are the optimizer's to keep, and SGD keeps none[^\n]*$"):
        EagerStep(model, torch.optim.SGD(model.parameters()), precision=precision)
    optimizer = AdamW(model.parameters(), master_weights=True)
    EagerStep(model, optimizer, precision=precision)(*(x % 3 for x in _batch("cpu")))
    assert optimizer.state[model.weight]["master_weight"].dtype == F32


def test_float16_parameters_whose_gradients_nobody_unscales_are_one_line() -> None:
    model = nn.Embedding(3, 3, dtype=F16)
    precision = Precision(F16, F16, F16, master=F32)
    with pytest.raises(ValueError, match=r"^float16 parameters need an optimizer that unscales their gradients[^\n]*$"):
        EagerStep(model, AdamW(model.parameters(), master_weights=True), precision=precision)


def test_a_target_that_the_vocabulary_does_not_have_is_one_line() -> None:
    model = nn.Embedding(7, 7)
    tokens, targets = _batch("cpu")
    targets[1, 2] = 7
    with pytest.raises(ValueError, match=r"^targets go from 0 to 6, or are -100 to be ignored, got another$"):
        EagerStep(model, torch.optim.SGD(model.parameters()))(tokens, targets)


@pytest.fixture
def float16_step(device: str) -> EagerStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 7)).to(device)
    step = EagerStep(model, torch.optim.AdamW(model.parameters(), lr=0.01), precision=PRECISIONS["float16"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the first scale may be too large for a model; for this one it is not
        step(*_batch(device))
        step.optimizer.zero_grad()
    return step


def _batch(device: str) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(12, device=device).reshape(2, 6) % 7
    return tokens, (tokens + 1) % 7


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_float16_step_whose_gradients_overflow_is_skipped_and_says_so(
    bad: float, float16_step: EagerStep, device: str
) -> None:
    weight = next(float16_step.model.parameters())
    before = [p.detach().clone() for p in float16_step.model.parameters()]
    scale = float16_step.scaler.get_scale()
    hook = weight.register_hook(lambda grad: torch.full_like(grad, bad))
    line = (
        rf"^float16 gradients overflowed: the step is skipped, the loss is scaled by {scale / 2:g} from here on, where"
    )
    with pytest.warns(RuntimeWarning, match=line):
        float16_step(*_batch(device))
    assert all(torch.equal(p, old) for p, old in zip(float16_step.model.parameters(), before, strict=True))
    assert float16_step.scaler.get_scale() == scale / 2

    hook.remove()
    float16_step.optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        float16_step(*_batch(device))
    assert not any(torch.equal(p, old) for p, old in zip(float16_step.model.parameters(), before, strict=True))
    assert all(p.isfinite().all() for p in float16_step.model.parameters())


def test_gradients_too_small_for_float16_arrive_because_the_loss_is_scaled(device: str) -> None:
    """A gradient of 1e-8 is zero in float16, whose smallest is 6e-8."""
    x = torch.ones(1, dtype=F16, device=device, requires_grad=True)
    (x.float() * 1e-8).sum().backward()
    assert x.grad is not None and x.grad.item() == 0
    scaler = PRECISIONS["float16"].scaler(device)
    x.grad = None
    scaler.scale((x.float() * 1e-8).sum()).backward()
    assert x.grad is not None and x.grad.item() / scaler.get_scale() == pytest.approx(1e-8, rel=2**-10)
