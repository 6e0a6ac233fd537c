"""How often noise decides a time verdict, and how small a slowdown is found: measured with real processes.

python -m perf.verdicts live --minutes 60      # judge equal and slower steps beside a neighbour; rows are added
python -m perf.verdicts record --minutes 20    # steps' times one after another, to be judged again and again
python -m perf.verdicts report                 # docs/verdicts.md and its plot, from all that there is
"""
