"""The configuration: its schema, how it is read and checked, and its reference.

OmegaConf is known to this package only; everything else sees frozen dataclasses.
"""

from elastic_trainer.config.load import (
    load_config,
    recipe_names,
    to_mapping,
    to_yaml,
)
from elastic_trainer.config.schema import (
    CHANNELS,
    DATA_FORMATS,
    LR_SCHEDULES,
    MODELS,
    ON_ERROR,
    OPTIMIZERS,
    PACKING,
    PRECISIONS,
    SCHEDULES,
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    ElasticConfig,
    LossConfig,
    MetricsConfig,
    ModelConfig,
    NumericsConfig,
    OptimConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
    TransportConfig,
)
from elastic_trainer.config.validate import validate
from elastic_trainer.config.workers import fewest_workers, fixed_stages, parse_workers

__all__ = [
    "CHANNELS",
    "DATA_FORMATS",
    "LR_SCHEDULES",
    "MODELS",
    "ON_ERROR",
    "OPTIMIZERS",
    "PACKING",
    "PRECISIONS",
    "SCHEDULES",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "ElasticConfig",
    "LossConfig",
    "MetricsConfig",
    "ModelConfig",
    "NumericsConfig",
    "OptimConfig",
    "PipelineConfig",
    "RunConfig",
    "TrainConfig",
    "TransportConfig",
    "fewest_workers",
    "fixed_stages",
    "load_config",
    "parse_workers",
    "recipe_names",
    "to_mapping",
    "to_yaml",
    "validate",
]
