"""Rows, the results of measured cases: fill, write, read, show and compare them."""
