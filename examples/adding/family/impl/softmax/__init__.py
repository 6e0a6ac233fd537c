"""Softmax over the last dimension."""
