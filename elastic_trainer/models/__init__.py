"""Layer lists: the models that ship with the trainer, and the way to bring your own."""
