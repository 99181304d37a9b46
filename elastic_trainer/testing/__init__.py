"""What tests need, ours and our users': pipelines in one process, oracles."""
