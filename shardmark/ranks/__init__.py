"""Worlds of real ranks: started, kept warm between tests, watched and replaced; torchrun's ranks; links between hosts."""
