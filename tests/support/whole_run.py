"""A run of 200 rows: 25 questions of ten families, each with two cases of four implementations."""

import random
from itertools import product

from shardmark.report.outcomes import Outcomes
from shardmark.report.questions import Questions
from shardmark.report.summary import Summary
from tests.support.entries import entry

QUESTIONS, FAMILIES = 25, 10

MACHINE = {"cpu": {"brand_raw": "A processor"}, "cores": 2, "threads": 2, "torch": "2.13.0", "gpus": []}


def whole_run(failed: int = 0, missed: int = 5, why: str = "why " * 30) -> Summary:
    """So many tests have failed; so many rows have missed a goal."""
    draw = random.Random(0)
    entries = []
    for number, case in product(range(QUESTIONS), ("short", "long")):
        family, peer = f"family_{number % FAMILIES}", draw.randrange(2**20, 2**30)
        for name in ("peer", "naive", "fast", "slim"):
            ratio, half = draw.uniform(0.1, 2.0), draw.uniform(0.05, 0.5)
            race = None if name == "peer" else ("peer", ratio * (1 - half), ratio, ratio * (1 + half))
            tensors = peer if name == "peer" else round(peer * draw.choice((0.3, 0.97, 1.0, 1.2)))
            made = entry(name, ratio if race else 1.0, race, tensors=tensors, case=case, family=family)
            made["group"] = f"What does the technique of number {number} cost in time and in memory?"
            made["fullname"] = f"test_{number}.py::test_cost[{name}-{case}]"
            made["extra_info"]["case"]["words"] = f"at {number + 1},024 tokens of a {case} sequence"
            if race and missed > 0:
                made["extra_info"]["time"] |= {"goal": ratio / 2, "outcome": "missed"}
                missed -= 1
            entries.append(made)
    tests = [each["fullname"] for each in entries]
    outcomes = Outcomes(set(tests[failed:]), dict.fromkeys(tests[:failed], why))
    return Summary(entries, Questions(), outcomes, MACHINE)
