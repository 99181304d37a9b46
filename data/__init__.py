"""Datasets: sources, sample order, packing, loading and building them."""

if __name__ != "elastic_trainer.data":
    raise ImportError("import elastic_trainer.data, not data")
