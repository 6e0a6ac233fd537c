"""Paths in the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout's root."""
