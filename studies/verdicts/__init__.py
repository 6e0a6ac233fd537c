"""How often noise decides a time verdict, and how small a slowdown is found: measured with real processes.

    python -m studies.verdicts record --minutes 10    # steps' times one after another, to be judged again and again
    python -m studies.verdicts live --minutes 30      # judge equal and slower steps beside a neighbour
    python -m studies.verdicts smoke --minutes 20     # whole runs at smoke scale beside a neighbour
    python -m studies.verdicts report                 # docs/verdicts.md and its plot

`tox -e verdicts` does all four, and records in real time too (`chrt --rr 1`) where that is permitted. New measurements
are added to those in docs/verdicts/.
"""
