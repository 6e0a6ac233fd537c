"""Answers from what observers and cases add to rows, of made-up figures."""

from typing import Any

from shardmark.report import observed_answers as answers
from shardmark.report.answers import answered
from shardmark.rows.columns import Entry
from tests.support.entries import entry

MIB = 2**20


def answer(how: Any, *entries: Entry) -> str:
    return answered(entries, how)


def exposing(name: str, seconds: float, race: tuple[str, float, float, float] | None = None, **time: Any) -> Entry:
    """A step with so many seconds of exposed communication."""
    return entry(name, 1.0, race, time={"parts": {"communication": seconds}, **time})


def of(name: str, seconds: float = 1.0, case: dict[str, Any] | None = None, **sections: Any) -> Entry:
    made = entry(name, seconds, error=0.001, **sections)
    made["extra_info"]["case"] |= case or {}
    return made


def test_what_is_hidden_is_measured_and_not_what_is_saved() -> None:
    """A wrapper that waits for a quarter of `naive`'s time, as it sends fewer messages, hides nothing."""
    naive = exposing("naive", 0.4, hidden=0.0)
    bucketed = exposing("bucketed", 0.1, ("naive", 0.7, 0.73, 0.76), hidden=0.62)
    flat = exposing("flat", 0.1, ("naive", 0.5, 0.6, 0.65), hidden=0.0)
    assert (
        answer(answers.hides("naive"), naive, bucketed)
        == "Bucketed hides 62% of communication and takes 0.73 of the time of naive."
    )
    assert answer(answers.hides("naive"), naive, flat) == "Flat is fastest with 0.60 of the time of naive."


def test_collectives_are_named_by_who_is_fastest() -> None:
    def collective(name: str, kind: str, seconds: float, race: Any = None) -> Entry:
        made = entry(name, seconds, race, case=f"{kind}-25MB")
        made["extra_info"]["case"]["collective"] = kind
        return made

    entries = [
        collective("backend", "all_reduce", 1.0),
        collective("ring", "all_reduce", 0.5, ("backend", 0.4, 0.5, 0.6)),
        collective("backend", "all_gather", 1.0),
        collective("ring", "all_gather", 0.9, ("backend", 0.7, 0.9, 1.2)),
    ]
    assert answer(answers.fastest_by("collective"), *entries) == (
        "For all-reduce, ring is fastest; for all-gather, which is fastest is undecided."
    )


def test_a_collectives_peer_without_a_row_may_be_fastest() -> None:
    for ratio, ends, said in (
        (1.7, (1.6, 1.8), "backend is fastest"),
        (0.5, (0.4, 0.6), "ring is fastest"),
        (0.9, (0.7, 1.2), "which is fastest is undecided"),
    ):
        ring = of("ring", ratio, {"collective": "all_reduce"}, race=("backend", ends[0], ratio, ends[1]))
        assert answer(answers.fastest_by("collective"), ring) == f"For all-reduce, {said}."
    alone = of("ring", 1.0, {"collective": "all_reduce"})
    assert answer(answers.fastest_by("collective"), alone) == "For all-reduce, ring is the only one that was timed."


def test_the_shortest_step_of_sizes_that_were_not_timed_in_turns_decides_nothing() -> None:
    sizes = {1: 1.0, 10: 0.45, 100: 0.5}
    ours = [of("bucketed", seconds, {"bucket_mb": size}) for size, seconds in sizes.items()]
    ddp = [of("ddp", 1.0, {"bucket_mb": size}) for size in sizes]
    model = of("backend", time={"model": {"best_bytes": 4_500_000}})
    model_says = "by the time of single all-reduces 4.3 MB should be best."
    assert answer(answers.best_bucket, *ours, *ddp, model) == (
        "For bucketed 10 MB had the shortest step; for ddp 1 MB had the shortest step; "
        f"sizes were not timed in turns, so which is best is undecided; {model_says}"
    )
    for each in ours:
        each["extra_info"]["simulated"] = True
    assert answer(answers.best_bucket, *ours) == "For bucketed 10 MB is predicted to be best."
    assert answer(answers.best_bucket, of("a")) == "No answer: its rows do not say."


def test_what_is_held_while_a_model_is_made() -> None:
    def made(meta: bool, peak: int) -> Entry:
        return of("eager", case={"meta": meta}, memory={"stages": {"a": {"peak": peak}, "b": {"peak": peak // 2}}})

    shown = answer(answers.held_while_made, made(False, 8 * MIB), made(True, 2 * MIB))
    assert shown == (
        "With the model made on the meta device a rank holds at most 2.00 MiB, "
        "0.25 of the memory of the whole model made on each rank."
    )
    assert answer(answers.held_while_made, made(True, MIB)) == "No answer: its rows do not say."


def test_who_trains_is_whose_loss_falls() -> None:
    def variant(name: str, losses: list[float], live: int) -> Entry:
        made = of(name, memory={"stages": {"model": {"live": 1}, "step_2": {"live": live}}})
        made["extra_info"]["losses"] = losses
        return made

    after, before = variant("after", [2.0, 1.5], 100), variant("before", [2.0, 2.0], 133)
    stays = "it stays with before, and a rank holds 1.33 times the memory then."
    assert answer(answers.who_trains, after, before) == f"The loss falls with after; {stays}"
    for last, later, said in (
        (1.5, [1.5, 1.0], "the same losses"),
        (1.25, [2.0, 1.125], "losses at most 0.4 apart"),
    ):
        repaired, stepped = variant("repaired", [2.0, last], 100), variant("stepped", later, 100)
        assert answer(answers.who_trains, after, before, repaired, stepped) == (
            f"The loss falls with after, repaired, stepped ({said} from the same start); {stays}"
        )
    assert answer(answers.who_trains, after) == "The loss falls with after."
    assert answer(answers.who_trains, before) == "The loss stays with before."
    assert answer(answers.who_trains, after, variant("repaired", [2.0, 1.5], 1)) == "The loss falls in all 2 variants."


def test_each_kind_of_scaling_has_its_best() -> None:
    entries = [
        of(name, case={"kind": kind}, work={"efficiency": share})
        for kind, name, share in (("strong", "a", 0.25), ("strong", "b", 0.5), ("weak", "a", 0.75))
    ]
    assert answer(answers.efficiencies, *entries) == (
        "Strong scaling to 1 rank is at most 50% efficient, with b; "
        "weak scaling to 1 rank is at most 75% efficient, with a."
    )


def test_most_of_a_step_is_in_two_kinds_and_two_parts() -> None:
    kinds = {"peak": {"activations": 50, "parameters": 20, "gradients": 30}}
    assert (
        answer(answers.largest_kinds, of("eager", memory={"kinds": kinds}))
        == "Activations are 50% and gradients 30% of the peak's memory."
    )
    phase = {"seconds": 1.0, "categories": {"matrix product": 0.8}}
    step = of("eager", time={"parts": {"forward": 0.3, "backward": 0.6, "optimizer": 0.1}})
    step["extra_info"]["kernels"] = {"phases": {"forward": phase, "backward": phase}}
    assert answer(answers.largest_parts, step) == (
        "Backward takes 60% and forward 30% of the step; matrix products take 80% of its kernels' time."
    )


def test_warm_ups_are_beside_as_many_as_there_are() -> None:
    after = {"0": {"mean": 2.0, "stddev": 0.3}, "2": {"mean": 9.0, "stddev": 9.0}, "5": {"mean": 1.0, "stddev": 0.1}}
    shown = answer(answers.warmed_up, of("eager", time={"after_warmups": after}))
    assert shown == "Rounds after 0 warm-ups take 2.00 times as long as after 5, and vary 3.00 times as much."
