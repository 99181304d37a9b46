"""Ray actors: the coordinator, the stage workers and the loader."""

if __name__ != "elastic_trainer.actors":
    raise ImportError("import elastic_trainer.actors, not actors")
