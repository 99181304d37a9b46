"""Schedules as pure data: actions, generators, lowering, validation, segments."""
