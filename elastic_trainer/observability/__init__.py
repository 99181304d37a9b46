"""Metrics, run records and progress displays."""
