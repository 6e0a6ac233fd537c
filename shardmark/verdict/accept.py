"""`--accept FILE.toml`: changes that are wanted, by test-id pattern, and how far each kind of figure may grow.

    ["*test_step[in_micro*]"]
    memory = 1.10   # bytes: at most 1.10 times those before
    why = "the mask has a row of bytes for each token"

`time`, `memory` and `counters` are factors on the figure before; `inf` accepts any size, also where there was none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardmark.verdict.patterns import matches, read_tables

KINDS = ("time", "memory", "counters")


class AcceptFileError(ValueError):
    """A `--accept` file that cannot be used, in one line."""


@dataclass(frozen=True)
class Acceptance:
    """The tests that `pattern` matches may grow by these factors, by kind, and `why`."""

    pattern: str
    why: str
    factors: tuple[tuple[str, float], ...]

    def factor(self, kind: str) -> float | None:
        """The largest accepted ratio of that kind of figure to the same figure before; None: no growth."""
        return dict(self.factors).get(kind)


@dataclass
class Accepted:
    """The wanted changes of a comparison, and the patterns that have matched a test of it."""

    acceptances: Sequence[Acceptance] = ()
    name: str = ""
    """The file's name; empty without `--accept`."""
    merged: Sequence[Acceptance] = ()
    """Those that the version before has too: they accepted an earlier change, and accept none of this one."""
    matched: set[str] = field(default_factory=set)

    def find(self, test_id: str, kind: str) -> tuple[float, str] | None:
        """The largest factor for that kind of figure of the test, and its reason; None if there is none."""
        matching = [each for each in self.acceptances if matches(each.pattern, test_id)]
        self.matched.update(each.pattern for each in matching)
        factors = [(factor, each.why) for each in matching if (factor := each.factor(kind)) is not None]
        return max(factors, key=lambda found: found[0], default=None)

    def since(self, before: Path) -> Accepted:
        """Without the tables that the file `before`, of the version before, has too; all if there is no such file."""
        try:
            old = read_accepted(before).acceptances if before.is_file() else ()
        except AcceptFileError:  # it was wrong then, so it accepted nothing
            old = ()
        new = [each for each in self.acceptances if each not in old]
        return Accepted(new, self.name, [each for each in self.acceptances if each in old])

    def remarks(self) -> Iterator[str]:
        """Lines on patterns that matched no compared test, and on tables of earlier changes."""
        for each in self.acceptances:
            if each.pattern not in self.matched:
                yield f'--accept: no compared test matches "{each.pattern}"'
        for each in self.merged:
            yield f'--accept: "{each.pattern}" was accepted in an earlier change, and accepts nothing now: remove it'


def read_accepted(path: Path) -> Accepted:
    """Read a `--accept` file. Raises AcceptFileError, in one line, on a file that is not there, is not TOML, or says
    anything else than in the example above."""
    acceptances = []
    for pattern, table in read_tables(path, "--accept", AcceptFileError).items():
        where = f'--accept {path}: ["{pattern}"]'
        if not isinstance(table, dict) or not set(table) <= {*KINDS, "why"} or not set(table) & set(KINDS):
            raise AcceptFileError(f"{where} takes `time`, `memory` or `counters`, and `why`, and nothing else")
        why = table.pop("why", None)
        if not isinstance(why, str) or not why.strip():
            raise AcceptFileError(f"{where} needs `why`, a text that says why the change is wanted")
        for kind, factor in table.items():
            if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 1:
                raise AcceptFileError(f"{where} {kind} = {factor!r} is not a factor above 1, such as 1.10")
        acceptances.append(Acceptance(pattern, " ".join(why.split()), tuple(table.items())))
    return Accepted(acceptances, path.name)
