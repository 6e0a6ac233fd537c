"""Measure the rates of the machine at hand, for predictions of programs that have not run here.

`points` lists what is measured, `measuring` times it on ranks, `figures` makes hardware of the times, `rows` makes it
of a saved run, and `toml` writes it as the file that `--hardware` and `--simulate` take.
"""
