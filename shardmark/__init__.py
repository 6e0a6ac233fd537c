"""The instruments: worlds of ranks, clocks, memory meters, budgets, cases and rows, as a pytest plugin.

Nothing in here knows any implementation; `impl` registers itself in `shardmark.api.registry`.
"""
