"""Intervals by betting, and the budgets and goals that they decide."""
