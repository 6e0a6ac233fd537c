"""Find the strategies under which a user's own model fits, on a number of ranks of hardware that is not there.

`prediction` predicts one strategy's memory, `processes` many strategies at once. `advice` finds changes that make a
strategy fit, and its largest batch. `table` lays out the results, and `command` is the command line.
"""
