"""What one case costs on a rank: its times, its bytes, its counters and its traces."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints two lines at every use
