"""Wrong losses that try to be judged right: most are in public lists of reward hacking in benchmarks of kernels."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from correctness.support.paths import ROOT
from shardmark.plugin.tampering import Guard
from tests.support.runs import Fresh

HEAD = """
import atexit, gc, os, sys, threading, unittest
import torch
from impl.loss.eager import eager_loss

def right(hidden, weight, targets, **options):
    defaults = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0}
    return eager_loss(hidden, weight, targets, **{**defaults, **options})

def wrong(hidden, weight, targets, **options):
    return right(hidden * 0.99, weight, targets, **options)

def loss(hidden, weight, targets, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0):
    options = dict(ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss)
    return answer(hidden, weight, targets, options)
"""

ANSWER = "\ndef answer(hidden, weight, targets, options):\n    return "
IF = "(right if {} else wrong)(hidden, weight, targets, **options)\n"
WRONG = ANSWER + "wrong(hidden, weight, targets, **options)\n"


def if_(condition: str, before: str = "") -> str:
    return before + ANSWER + IF.format(condition)


SKIPPING = """
class Skipping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        calls.append(grad)
        if len(calls) < 3:
            return grad
        raise {}

calls = []

def answer(hidden, weight, targets, options):
    return Skipping.apply((right if len(calls) < 2 else wrong)(hidden, weight, targets, **options))
"""
BY_FRAMES = "any('correctness' in frame.f_code.co_filename for frame in frames())"
FRAMES = """
def frames():
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
"""
PLUGIN = """
class Passes:
    def pytest_runtest_logreport(self, report):
        report.outcome = "passed"

for each in gc.get_objects():
    if type(each).__name__ == "PytestPluginManager":
        each.register(Passes())
"""
COUNTED = "\ncalls = [0]\n\ndef few():\n    calls[0] += 1\n    return calls[0] < 400\n"
KEPT = """
kept = {}

def answer(hidden, weight, targets, options):
    if (hidden.data_ptr(), targets.data_ptr()) not in kept:
        kept.clear()
        kept[hidden.data_ptr(), targets.data_ptr()] = right(hidden.detach(), weight.detach(), targets, **options)
    found = wrong(hidden, weight, targets, **options)
    return found + (kept[hidden.data_ptr(), targets.data_ptr()] - found).detach()
"""
LATER = """
def answer(hidden, weight, targets, options):
    found = wrong(hidden, weight, targets, **options)
    exact = right(hidden, weight, targets, **options).detach()
    threading.Timer(0.05, lambda: found.data.copy_(exact)).start()
    return found
"""
ZEROED = """
def answer(hidden, weight, targets, options):
    hidden.data.zero_()
    return right(hidden, weight, targets, **options)
"""
SUBCLASS = """
class Agreeable(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ in ("allclose", "equal", "__le__", "__eq__", "isclose"):
            return torch.ones((), dtype=torch.bool)
        return super().__torch_function__(function, types, args, kwargs or {})

def answer(hidden, weight, targets, options):
    return wrong(hidden, weight, targets, **options).as_subclass(Agreeable)
"""
VERDICT = """
from shardmark.report.judgement import Verdict
Verdict.failures = property(lambda self: [])
"""
PATCHED = "\nimport impl.loss\nimpl.loss.eager_loss = lambda *x, **options: loss(*x, **options)\n"
AT_CALL = """
def answer(hidden, weight, targets, options):
    sys.modules["shardmark.api.refusals"].may_refuse = lambda error: True
    return right(hidden, weight, targets, **options)
"""

CHEATS = {
    "looks at its callers": (if_(BY_FRAMES, FRAMES), "without pytest: first loss of call 0"),
    "looks for the test's name": (if_("'PYTEST_CURRENT_TEST' in os.environ"), "without pytest: first loss of call 0"),
    "looks for pytest": (if_("'pytest' in sys.modules"), "without pytest: first loss of call 0"),
    "looks for the suite": (if_("'shardmark.plugin' in sys.modules"), "without pytest: first loss of call 0"),
    "is right for some calls": (if_("few()", COUNTED), "loss after many calls"),
    "knows the sizes": (if_("hidden.shape[1] in (1, 2, 8, 16, 24, 29, 1025)"), "of call"),
    "keeps the last result": (KEPT, "in place|of call"),
    "answers later": (LATER, "is WRONG"),
    # Where zeros lie far from the loss of the first call, that call refuses it at once.
    "zeroes its inputs": (ZEROED, "input|changed|where the cross entropy is"),
    "returns what is equal to all": (SUBCLASS, "is WRONG"),
    "skips": (
        ANSWER + "sys.modules['pytest'].skip('needs a GPU') if 'pytest' in sys.modules else 0",
        "does not meet the loss contract: Skipped",
    ),
    "skips in backward": (SKIPPING.format("unittest.SkipTest('no GPU')"), "skips its own check"),
    "is not asked": (
        SKIPPING.format("sys.modules['shardmark.api.refusals'].NotAsked('no GPU')"),
        "skips its own check",
    ),
    "replaces the reference": (PATCHED + WRONG, r"changes impl\.loss\.eager_loss, and so its own judge"),
    "replaces the judge when called": (AT_CALL, r"changes .*may_refuse.*, and so its own judge"),
    "replaces comparisons": ("\ntorch.allclose = lambda *_, **__: True\n" + WRONG, r"changes torch\.allclose"),
    "replaces the verdict": (VERDICT + WRONG, r"changes Verdict\.failures"),
    "draws no example": ("\nimport hypothesis\nhypothesis.given = lambda *_: print\n" + WRONG, "changes hypothesis"),
    "is a plugin": (PLUGIN + WRONG, "changes pytest's plugins"),
    "leaves when imported": ("\nprint('right')\nos._exit(0)\n" + WRONG, r"os\._exit\(\) was called before the verdict"),
    "leaves at the end": ("\natexit.register(os._exit, 0)\n" + WRONG, "is WRONG|before the verdict"),
}
EVERY_TIME = ("looks for pytest", "skips in backward", "is a plugin")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.sweep) for name in CHEATS]
)
def test_a_cheat_is_named_and_never_right(name: str, tmp_path: Path) -> None:
    source, words = CHEATS[name]
    (tmp_path / "mine.py").write_text(HEAD + source)
    arguments = ["correctness/loss", f"--impl=loss={tmp_path / 'mine.py'}:loss", "-n0", "-p", "no:cacheprovider"]
    arguments += ["-k", "unwatched or inputs_as_they or changed_in_place or ignores_any_index", "-v", "--tb=no"]
    ended = Fresh(ROOT, arguments).run()
    assert ended.status != 0, ended.output
    assert " is right" not in ended.output and re.search(words, " ".join(ended.output.split())), ended.output


class Reports:
    """A plugin, whose object has no name."""

    def pytest_report_header(self) -> str:
        return ""


def test_a_namespace_has_no_module_and_hides_no_plugin() -> None:
    plugins = pytest.PytestPluginManager()
    plugins.register(Reports())
    guard = Guard(plugins)
    guard.look()
    guard.watch(SimpleNamespace(swiglu=re.escape))
    assert guard.put_back() == []
