"""Families of techniques, the implementations of each, and what each one requires.

A family is a contract (a `typing.Protocol`), a reference that defines what is right, and a check that says in one line
why a target does not meet the contract. `impl` fills the registry; `--impl` adds a user's own target to it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from shardmark.api.finding import RegistryError, find, first_line
from shardmark.api.place import user_line
from shardmark.api.refusals import Refusable, watched
from shardmark.api.refusals import Unsupported as Unsupported
from shardmark.api.requirements import Requirement
from shardmark.api.signature import parameters_of


@dataclass(frozen=True)
class Race:
    """The peer, an implementation of the same family, whose steps are timed in the same rounds.

        Race("eager")                        # the ratio to eager's step time is shown
        Race("eager", goal=1.0)              # and reported: at most 1.0 is reached, or missed
        Race("ddp", budget=2.0, goal=1.0)    # and more than 2.0 fails the test

    A budget is wide enough for every machine: over it, something is wrong. A goal is what the technique is for, and may
    depend on the machine. Neither is judged where `applies(case, device)` is False.
    """

    peer: str
    budget: float | None = None
    goal: float | None = None
    applies: Callable[[Any, str], bool] = lambda case, device: True


@dataclass(frozen=True)
class Implementation:
    """One implementation of a family's technique.

    `target` is what the user calls (a function, a class, an object with methods), `time` the peer it is raced against.
    `memory` is the closed form of its peak in bytes for a case: an int; if it has `entries` (bytes by name), a failed
    budget lists them. A formula that differs by device has a parameter `device`; it may return None for cases that it
    does not cover. Without a formula, as PyTorch's own, an implementation is held to a simulated peak.
    `workspace(case, device)` is the bytes that operators allocate and free beside the peak: a case needs room for them.
    The implementation runs where `requires` is met; its times and bytes mean something only where `requires_to_measure`
    is met as well. Requirements are checked in turn, so the cheap
    ones stand first. The target is None where it cannot be imported; a requirement then gives the reason.
    """

    family: str
    name: str
    target: Any
    memory: Callable[..., int | None] | None = None
    workspace: Callable[[Any, str], int] = lambda case, device: 0
    time: Race | None = None
    requires: tuple[Requirement, ...] = ()
    requires_to_measure: tuple[Requirement, ...] = ()
    slack: float | None = None
    """The memory budget is the formula times this; None: the question's slack, or the default."""
    races: Mapping[str, Race] = field(default_factory=dict, hash=False)  # implementations are keys of caches
    """Races beside the usual step's, by the name under which a question looks them up, such as "link"."""
    facts: Any = None
    """Facts that its family's questions use: an instance of the family's own class, `Facts` in its contract."""
    tested_briefly: bool = False
    """Whether only the sweep tests it at large sizes, on more than two ranks and by random examples: set for PyTorch's
    own implementations, which PyTorch tests, and for steps on the way to a faster technique."""
    predicted: bool = False
    """Whether `shardmark.predict` always shows it."""
    called: str = ""
    """The name in words, as sentences of a report have it: "eager attention"; empty: the name itself."""
    spec: str = ""
    """The text by which another process finds it: its name, or an `--impl` target with an absolute path."""

    @property
    def adapted(self) -> Any:
        """The target in the form that its family's tests call."""
        return FAMILIES[self.family].adapt(self.target)

    @property
    def watched(self) -> Any:
        """`adapted`, which notes for the verdict what it takes and refuses (`shardmark.api.refusals`)."""
        owner = FAMILIES[self.family]
        if not owner.may_refuse:
            return self.adapted
        if not owner.methods:
            return watched(self.adapted, owner.contract, owner.may_refuse)
        calls = {name: getattr(self.adapted, name) for name in owner.methods}
        return SimpleNamespace(
            **{name: watched(call, owner.contract, owner.may_refuse, name) for name, call in calls.items()}
        )

    def unavailable_reason(self, device: str, to_measure: bool = False) -> str | None:
        """Why the implementation does not run, or is not measured, on `device`; None where it does."""
        requirements = (*self.requires, *(self.requires_to_measure if to_measure else ()))
        return next((reason for requirement in requirements if (reason := requirement(device))), None)

    def peak(self, case: Any, device: str) -> int:
        """Bytes at the peak of the case on "cpu" or "cuda", by its formula; NoFormula where it has none."""
        options = {"device": device} if self.memory is not None and "device" in parameters_of(self.memory) else {}
        found = None if self.memory is None else self.memory(case, **options)
        if found is None:
            raise NoFormula(f"{self.family}/{self} has no memory formula")
        return found

    def accepts(self, option: str) -> bool:
        """Whether the target has a parameter of that name; True where it could not be imported."""
        return self.target is None or option in parameters_of(self.target)

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled by name: ranks import the family's contract, whose package registers every implementation again.
        return _restore, (FAMILIES[self.family].contract.__module__, self.family, self.spec)


def ranks_alike(implementation: Implementation, case: Any) -> bool:
    """Whether all ranks hold the same number of bytes in that case."""
    return FAMILIES[implementation.family].ranks_alike and getattr(case, "ranks_alike", True)


class NoFormula(ValueError):
    """An implementation has no memory formula, or none that covers the case."""


@dataclass
class Family:
    """A contract, its reference, and the implementations registered for it.

    `check(target, device)` raises with one line when a target does not meet the contract; `memory` and `time` are the
    budgets that a user's own target is held to; `adapt` turns a target into what tests call.
    """

    name: str
    contract: type
    reference: str
    check: Callable[[Any, str], None]
    memory: Callable[..., int | None] | None = None
    time: Race | None = None
    facts: Any = None
    """The `facts` of a user's own target, and of each implementation that is registered without any."""
    adapt: Callable[[Any], Any] = lambda target: target
    may_refuse: tuple[Refusable, ...] = ()
    """Inputs that an implementation may refuse as `Unsupported`; one that refuses any other is wrong."""
    methods: tuple[str, ...] = ()
    """Names of the methods that are called; empty where the target itself is called."""
    workload: type[Any] | None = None
    """The `shardmark.api.Workload` that trains a user's own model (`--model`, what fits); None where the family trains
    none."""
    on_ranks: bool = False
    """Whether `workload` needs a process group."""
    ranks_alike: bool = True
    """Whether every rank holds as many bytes; otherwise formulas are for the one that holds most. A case of which they
    do not has `ranks_alike = False` itself."""
    zero_stage: int = 0
    """ZeRO's stage of its implementations: 0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""
    checkpoints: bool = False
    """Whether every implementation recomputes activations already."""
    implementations: dict[str, Implementation] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The name of its folder in `impl/` and in `correctness/`; "" where its contract is in no package."""
        return ["", *self.contract.__module__.split(".")][-2]


FAMILIES: dict[str, Family] = {}


def add_family(family: Family) -> Family:
    """Put a family into the registry and return it."""
    FAMILIES[family.name] = family
    return family


def family(name: str) -> Family:
    """The family of that name; RegistryError names the families there are."""
    if name not in FAMILIES:
        raise RegistryError(f"no family {name!r}; the families are {', '.join(sorted(FAMILIES)) or 'none'}")
    return FAMILIES[name]


def trains_own_model(
    family_name: str,
    workload: type[Any],
    *,
    on_ranks: bool,
    zero_stage: int = 0,
    checkpoints: bool = False,
) -> None:
    """Declare the workload that trains a user's own model by this family's implementations: see `Family`."""
    entry = family(family_name)
    entry.workload, entry.on_ranks, entry.zero_stage, entry.checkpoints = workload, on_ranks, zero_stage, checkpoints


def register(
    family_name: str,
    name: str,
    target: Any,
    *,
    memory: Callable[..., int | None] | None = None,
    workspace: Callable[[Any, str], int] = Implementation.workspace,
    time: Race | None = None,
    requires: tuple[Requirement, ...] = (),
    requires_to_measure: tuple[Requirement, ...] = (),
    slack: float | None = None,
    races: Mapping[str, Race] | None = None,
    facts: Any = None,
    tested_briefly: bool = False,
    predicted: bool = False,
    called: str = "",
) -> Implementation:
    """Add an implementation to a family: the one call that every test, table and listing picks up.

    The arguments are the fields of `Implementation`. Whatever a question needs to know about a technique is among them,
    so that no question compares names.
    """
    owner = family(family_name)
    entry = Implementation(
        family_name,
        name,
        target,
        memory,
        workspace,
        time,
        requires,
        requires_to_measure,
        slack,
        races or {},
        owner.facts if facts is None else facts,
        tested_briefly,
        predicted,
        called,
        spec=name,
    )
    owner.implementations[name] = entry
    return entry


def resolve(family_name: str, spec: str) -> Implementation:
    """Find an implementation by registered name, `module:attribute` or `file.py:attribute`.

    Raises RegistryError, in one line, when the target cannot be found or imported. `check_contract` checks it.
    """
    owner = family(family_name)
    if spec in owner.implementations:
        return owner.implementations[spec]
    source, _, attribute = spec.rpartition(":")
    if not (source and attribute):
        raise RegistryError(
            f"{family_name} has no implementation {spec!r}; registered are {', '.join(owner.implementations)}; "
            "your own is given as module:attribute or file.py:attribute"
        )
    target, absolute = find(f"{family_name}={spec}", source, attribute)
    return Implementation(
        family_name,
        attribute,
        target,
        owner.memory,
        time=owner.time,
        facts=owner.facts,
        spec=absolute,
    )


def check_contract(implementation: Implementation, device: str) -> None:
    """Raise RegistryError, in one line, where the target does not meet its family's contract on `device`."""
    try:
        FAMILIES[implementation.family].check(implementation.target, device)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's code raises, the contract is not met
        line = first_line(error)
        if not isinstance(error, RegistryError):
            at = user_line(error)
            line = f"{type(error).__name__}: {line}" + (f", raised at {at}" if at else "")
        raise RegistryError(
            f"{implementation.family}={implementation.spec} does not meet the {implementation.family} contract: {line}"
        ) from error


def listing(device: str) -> str:
    """The text of `--implementations`: each implementation, whether it runs on `device`, and if not why."""
    lines = [f"torch {torch.__version__}, device {device}"]
    width = max((len(name) for owner in FAMILIES.values() for name in owner.implementations), default=0)
    for owner in FAMILIES.values():
        lines += ["", f"{owner.name} (reference: {owner.reference})"]
        for entry in owner.implementations.values():
            if reason := entry.unavailable_reason(device):
                says = f"does not run here: {reason}"
            elif reason := entry.unavailable_reason(device, to_measure=True):
                says = f"runs here, and is not measured: {reason}"
            else:
                says = "runs here"
            lines.append(f"  {entry.name:<{width}}  {says}")
    return "\n".join(lines)


def _restore(contract_module: str, family_name: str, spec: str) -> Implementation:
    importlib.import_module(contract_module)
    return resolve(family_name, spec)
