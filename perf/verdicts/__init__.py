"""How often noise decides a time verdict, and how small a slowdown is found: measured with real processes.

    python -m perf.verdicts record --minutes 10    # steps' times one after another, to be judged again and again
    python -m perf.verdicts live --minutes 30      # judge equal and slower steps beside a neighbour
    python -m perf.verdicts smoke --minutes 20     # whole runs at smoke scale beside a neighbour
    python -m perf.verdicts report                 # docs/verdicts.md and its plot

`tox -e verdicts` does all four, and records in real time too (`chrt --rr 1`) where that is permitted. What is measured
is added to what there is in docs/verdicts/.
"""
