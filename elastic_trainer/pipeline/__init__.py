"""Schedules as data, and the runtime that executes them on one stage worker."""
