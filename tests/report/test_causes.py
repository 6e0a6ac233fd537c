"""Failures grouped by cause: a dtype is blamed for what fails in it alone."""

import sys
from pathlib import Path

import pytest
import torch

from impl.layers import Layers
from shardmark.api import resolve
from shardmark.api.place import defined_at
from shardmark.api.refusals import Call, Feature, Ledger, Refusable
from shardmark.report.causes import causes, snippet
from shardmark.report.judgement import FAILED, PASSED, Check, Notes, Verdict

HALF, FULL = Feature("dtypes", "float16"), Feature("dtypes", "float32")


def _verdict(*checks: tuple[Feature, str]) -> Verdict:
    """A run of checks, each of a dtype, with the reason for which it fails, if any."""
    verdict = Verdict((Refusable("dtypes", lambda x: None, elsewhere=True),))
    for place, (dtype, reason) in enumerate(checks):
        notes = Notes(taken=(dtype,), last=(dtype,))
        verdict.add(Check(f"test_{place}", place, FAILED if reason else PASSED, reason, notes))
    return verdict


@pytest.mark.parametrize(
    ("reasons", "blamed"),
    [
        (["no such kernel", "no such kernel", ""], "float16 (2)"),
        (["wrong shape", "wrong shape", "", "wrong shape"], None),
        (["no such kernel", "no such kernel", "", "wrong shape"], "float16 (2)"),
        (["no such kernel", "no such kernel", "", "wrong shape", "no number"], None),
    ],
    ids=["in it alone", "in others too", "beside another", "beside most others"],
)
def test_a_dtype_is_blamed_for_failures_that_are_seen_in_it_alone(reasons: list[str], blamed: str | None) -> None:
    found = causes(_verdict(*zip([HALF, HALF, FULL, FULL, FULL], reasons, strict=False)))
    assert [cause.refusable for cause in found if cause.refusable] == [blamed] * (blamed is not None)
    assert sum(len(cause.checks) for cause in found) == sum(map(bool, reasons))


def test_a_decorated_function_is_where_it_is_written() -> None:
    @torch.no_grad()
    def mine() -> None: ...

    file, line = defined_at(mine) or ("", 0)
    assert Path(file) == Path(__file__)
    assert Path(file).read_text(encoding="utf-8").splitlines()[line - 1 : line + 1] == [
        "    @torch.no_grad()",
        "    def mine() -> None: ...",
    ]


OWN = """
class Mine:
    def swiglu(self, gate, up):
        return gate * gate.sigmoid() * up
"""


@pytest.mark.parametrize("name", ["gated_by_method", "7_gated", "lambda"])
def test_a_methods_call_to_paste_calls_the_method_of_both(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / f"{name}.py").write_text(OWN)
    x = torch.ones(2, 3)
    last = frozenset[Feature](), Call.of(Layers, (x, x), {}, "swiglu")
    notes = Notes.read(Notes.of(Ledger(last=last), None, False).saved())
    assert notes.call is not None and str(notes.call) == "swiglu: gate (2, 3) float32, up (2, 3) float32"
    lines = snippet(resolve("layers", f"{file}:Mine"), notes.call)
    assert lines[-2:] == ["print(mine().swiglu(gate, up))", "print(reference().swiglu(gate, up))"]
    monkeypatch.setattr(sys, "path", [*sys.path])
    exec("\n".join(lines), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 and printed[:2] == printed[2:]
