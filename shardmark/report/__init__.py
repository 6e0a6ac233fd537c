"""Rows for people: the end of a run in the terminal, the page, Markdown."""
