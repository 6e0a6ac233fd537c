"""Measure one case on a rank: times, bytes, counters and traces."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints two lines at every use
