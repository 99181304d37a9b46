"""Faults and changes of membership in a run that goes on elsewhere, and how it took them."""
