"""Pure planning: profile, cost, memory, partition and simulation. No torch, no Ray."""
