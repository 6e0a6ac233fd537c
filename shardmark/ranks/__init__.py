"""Worlds of real ranks, kept warm between tests, watched and replaced; torchrun's ranks; links between hosts."""
