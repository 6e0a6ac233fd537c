"""Fully sharded data parallelism: every rank holds its shard of parameters, gradients and optimizer state."""
