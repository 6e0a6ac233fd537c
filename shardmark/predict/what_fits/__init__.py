"""Find the strategies under which a user's own model fits, on a number of ranks of hardware that is not there.

`prediction` is one strategy's memory, `processes` many at once, `advice` what makes a strategy fit, and its largest
batch, `table` what is printed and saved, `command` the command line.
"""
