"""Per-layer checkpoints: format, store, retention and export."""
