"""The registry: implementations are found, travel to the ranks and meet their contracts."""

import pickle
from pathlib import Path

import pytest

import impl  # registers the families
from shardmark.api import registry, requires_compiler
from shardmark.api.finding import RegistryError
from shardmark.api.registry import FAMILIES, check_contract, family, resolve

assert impl

OWN = """
import torch
from neighbour import SCALE

def doubled(q, k, v, *, is_causal=False):
    return SCALE * torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

def wrong_shape(q, k, v, *, is_causal=False):
    return q[..., :1]

def no_gradient(q, k, v, *, is_causal=False):
    return (q + 0 * k).detach().requires_grad_()

def takes_nothing():
    pass

def raises(q, k, v, *, is_causal=False):
    raise RuntimeError("first line\\nsecond line")

number = 3

class Buckets:
    def __init__(self, module, *, process_group=None, bucket_mb=25.0):
        pass

class Noisy(Buckets):
    def __init__(self, module, *, loud=True, **options):
        super().__init__(module, **options)

class Small(Buckets):
    def __init__(self, module, **options):
        super().__init__(module, bucket_mb=1.0, **options)

def hides(module, **options):
    return Buckets(module, **options)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's file, with a neighbour that it imports."""
    (tmp_path / "neighbour.py").write_text("SCALE = 2.0")
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_implementation_meets_its_contract(name: str, device: str) -> None:
    owner = family(name)
    assert owner.reference in owner.implementations
    for entry in owner.implementations.values():
        if requires_compiler not in entry.requires and entry.unavailable_reason(device) is None:
            check_contract(entry, device)  # one that compiles takes seconds, and is checked by its correctness tests
        assert entry.time is None or entry.time.peer in owner.implementations
        assert pickle.loads(pickle.dumps(entry)) is entry


def test_options_are_those_of_the_signature_and_of_what_a_class_hands_them_on_to(own: Path) -> None:
    """But for those that the class chooses itself."""
    options = ("loud", "bucket_mb", "reduce_dtype")
    accepted = {
        name: [option for option in options if resolve("data_parallel", f"{own}:{name}").accepts(option)]
        for name in ("Buckets", "Noisy", "Small", "hides")
    }
    assert accepted == {"Buckets": ["bucket_mb"], "Noisy": ["loud", "bucket_mb"], "Small": [], "hides": []}


def test_a_users_file_is_found_and_travels(own: Path) -> None:
    entry = resolve("attention", f"{own}:doubled")
    assert entry.name == "doubled" and entry.memory is family("attention").memory
    again = pickle.loads(pickle.dumps(entry))
    assert again.target is entry.target and again.spec == f"{own}:doubled"


def test_a_module_is_found() -> None:
    assert resolve("attention", "impl.attention.library:sdpa").target is resolve("attention", "sdpa").target


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("wrong_shape", r"for q \(2, 4, 16\) of torch.float32 it returned \(2, 4, 1\)"),
        ("no_gradient", "its output is not differentiable in q, k and v"),
        ("takes_nothing", r"expected \(q, k, v, \*, is_causal=False\), found \(\) at own.py:14"),
        ("raises", "RuntimeError: first line, raised at own.py:18: "),
        ("number", "3 is not callable"),
    ],
)
def test_a_target_that_does_not_meet_the_contract_is_one_line(own: Path, attribute: str, message: str) -> None:
    with pytest.raises(RegistryError, match=f"does not meet the attention contract: .*{message}") as caught:
        check_contract(resolve("attention", f"{own}:{attribute}"), "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("data_parallel", "torch.nn:Linear", r"expected \(module, \*, process_group=None\), found"),
        ("data_parallel", "torch.nn.parallel:DistributedDataParallel", r"no method finish_gradient_synchronization"),
        ("collectives", "impl.attention:sdpa", r"it has no all_reduce\(\)"),
        ("collectives", "torch.distributed:ProcessGroup", "it has no all_reduce"),
        ("model", "torch.nn:Linear", "TypeError"),
    ],
)
def test_contracts_of_the_other_families_are_checked(name: str, target: str, message: str) -> None:
    with pytest.raises(RegistryError, match=f"does not meet the {name} contract: .*{message}"):
        check_contract(resolve(name, target), "cpu")


def test_every_implementation_can_be_the_key_of_a_cache() -> None:
    assert {each for owner in registry.FAMILIES.values() for each in owner.implementations.values()}
