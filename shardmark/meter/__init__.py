"""What one case costs on a rank: its times, its bytes, its counters and its traces."""
