"""What the tests of this project, and of its users, need: clusters in a process, faults, oracles."""
