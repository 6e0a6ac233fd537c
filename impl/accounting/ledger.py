"""Bytes with names: what is live, what was live at the peak, and how much of each.

    ledger = Ledger()
    ledger.take("logits", 4_000)
    ledger.take("gradient of the logits", 4_000)
    ledger.free("logits")
    ledger.peak            # 8000
    ledger.peak.entries    # {"gradient of the logits": 4000, "logits": 4000}

A memory formula returns `Bytes`: an int that knows what it is the sum of. `explain` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from shardmark.api import Implementation


class Bytes(int):
    """The sum of named entries. Compares and adds as an int; the largest of several keeps its own entries."""

    entries: dict[str, int]
    """Bytes by name, largest first, none of them zero."""

    def __new__(cls, entries: Mapping[str, int]) -> Self:
        negative = [name for name, nbytes in entries.items() if nbytes < 0]
        assert not negative, f"fewer than no bytes of {negative[0]}"
        nbytes = super().__new__(cls, sum(entries.values()))
        nbytes.entries = dict(sorted(((k, n) for k, n in entries.items() if n), key=lambda entry: -entry[1]))
        return nbytes

    def __reduce__(self) -> tuple[type[Bytes], tuple[dict[str, int]]]:
        return Bytes, (self.entries,)  # ranks send it to one another

    def add(self, entries: Mapping[str, int]) -> Bytes:
        """With more bytes, or fewer, of these names."""
        return Bytes({name: self.entries.get(name, 0) + entries.get(name, 0) for name in {**self.entries, **entries}})

    def without(self, *names: str) -> Bytes:
        return Bytes({name: nbytes for name, nbytes in self.entries.items() if name not in names})


class Ledger:
    """Live bytes by name. `marks` and `peaks` hold the live bytes, and the peak so far, at each marked moment."""

    def __init__(self) -> None:
        self._live: dict[str, int] = {}
        self._plain: Mapping[str, int] = {}
        self._at_peak: dict[str, int] = {}
        self.total = self._peak = 0
        self.marks: dict[str, Bytes] = {}
        self.peaks: dict[str, Bytes] = {}

    def take(self, name: str, nbytes: int) -> None:
        """Allocate so many bytes, beside what is live under that name already."""
        self._live[name] = self._live.get(name, 0) + nbytes
        self.total += nbytes
        self.note_peak()

    def free(self, name: str, nbytes: int | None = None) -> None:
        """Free so many of the bytes under that name, or all; AssertionError where it is unknown or has fewer."""
        assert name in self._live or name in self._plain, f"{name} is freed, and was never allocated"
        live = self._live.get(name, 0) + self._plain.get(name, 0)
        nbytes = live if nbytes is None else nbytes
        assert nbytes <= live, f"{name}: {nbytes:,} bytes are freed, {live:,} are live"
        self._live[name] = self._live.get(name, 0) - nbytes
        self.total -= nbytes

    def borrow(self, name: str, nbytes: int) -> None:
        """Allocate and free again: what exists within one operator."""
        self.take(name, nbytes)
        self.free(name, nbytes)

    def rename(self, old: str, new: str, nbytes: int) -> None:
        """The same bytes under another name, as where one tensor takes another's place."""
        self.free(old, nbytes)
        self.take(new, nbytes)

    def beside(self, plain: Mapping[str, int]) -> None:
        """From here on, count these bytes as live, too: those of the plain step."""
        self.total += sum(plain.values()) - sum(self._plain.values())
        self._plain = plain

    def mark(self, moment: str) -> None:
        self.marks[moment], self.peaks[moment] = self.live, self.peak

    @property
    def live(self) -> Bytes:
        return Bytes(self._entries())

    @property
    def peak(self) -> Bytes:
        return Bytes(self._at_peak)

    def _entries(self) -> dict[str, int]:
        names = {**self._plain, **self._live}
        return {name: self._plain.get(name, 0) + self._live.get(name, 0) for name in names}

    def note_peak(self) -> None:
        """Compare what is live with the peak so far, as `take` does itself."""
        if self.total > self._peak:
            self._peak, self._at_peak = self.total, self._entries()


SMALL = 1e-3
"""Entries below this share of the total are one line of a table."""


@dataclass(frozen=True)
class Explanation:
    """Live bytes at the peak according to a formula, largest first; prints as a table in MiB."""

    title: str
    entries: dict[str, int]

    def __str__(self) -> str:
        total = sum(self.entries.values())
        rows = {name: nbytes for name, nbytes in self.entries.items() if nbytes >= SMALL * total}
        if smaller := len(self.entries) - len(rows):
            rows[f"{smaller} smaller"] = total - sum(rows.values())
        rows["total"] = total
        width = max(map(len, rows))
        return "\n".join(
            [self.title, *(f"  {name:<{width}}  {nbytes / 2**20:>12,.3f} MiB" for name, nbytes in rows.items())]
        )


def explain(implementation: Implementation, case: Any, device: str = "cpu") -> Explanation:
    """Live bytes at the case's peak, by the implementation's memory formula; ValueError where it has none."""
    nbytes = implementation.peak(case, device)
    title = f"{implementation.family}/{implementation} at the peak of {case}:"
    return Explanation(title, getattr(nbytes, "entries", {"one number, without named terms": nbytes}))
