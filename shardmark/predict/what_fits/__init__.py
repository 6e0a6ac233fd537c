"""What fits: a user's own model under each strategy, on so many ranks, on hardware that is not here.

`prediction` is one strategy's memory, `processes` many at once, `advice` what makes a strategy fit, and its largest
batch, `table` what is printed and saved, `command` the command line.
"""
