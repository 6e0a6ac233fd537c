"""Closed forms of what implementations hold, compute and communicate: memory, FLOPs, bytes sent."""
