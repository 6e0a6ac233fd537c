"""Predict the memory and the time of a case: the meter's own pass on one rank, without kernels and messages.

predict(plan, rank=0)      # what that rank would meter                                (`predict`)
with no_kernels(...): ...  # operators allocate what they would, and compute nothing   (`no_kernels`, `kinds`)
with one_rank_of(8): ...   # a process group of 8 ranks, of which this is the first    (`group`)
"""
