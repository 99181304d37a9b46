"""The pure elastic core: events in, instructions out, with their reasons. No clock, no I/O."""
