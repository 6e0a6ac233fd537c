"""Rows: what a measured case says, how it is written, read and shown, and beside older ones."""
