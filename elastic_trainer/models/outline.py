"""What can be told of the shipped models without torch: whether their arguments fit, how many
layers they have.

Loading torch takes seconds, and a user who waits for a run should not wait for them twice. The
functions take the arguments of the models' own, which ask them; the tests compare the two.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_trainer.config import Config
from elastic_trainer.errors import ModelError
from elastic_trainer.models.arguments import (
    check_arguments,
    nearest,
    require_choice,
    require_fraction,
    require_heads,
    require_positive,
)

ACTIVATIONS = ("relu", "gelu", "tanh")
GELUS = ("tanh", "exact")
COSTS = ("forward_s", "backward_s", "activation_bytes")
COST_FIELD = "cost_field"
FREEZABLE = ("vision", "audio")


def gpt(
    *,
    vocab_size: int,
    num_layers: int = 4,
    dim: int = 128,
    num_heads: int = 4,
    max_positions: int = 128,
    dropout: float = 0.0,
    tie_embeddings: bool = False,
    gelu: str = "tanh",
) -> int:
    """Layers of a language model with these arguments."""
    del tie_embeddings
    require_positive(
        "gpt",
        vocab_size=vocab_size,
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        max_positions=max_positions,
    )
    require_heads("gpt", dim, num_heads)
    require_fraction("gpt", dropout=dropout)
    require_choice("gpt", "gelu", gelu, GELUS)
    return num_layers + 2


def vit(
    *,
    num_classes: int,
    image_size: int = 32,
    patch_size: int = 4,
    channels: int = 3,
    num_layers: int = 4,
    dim: int = 64,
    num_heads: int = 4,
    dropout: float = 0.0,
) -> int:
    """Layers of an image classifier with these arguments."""
    require_positive(
        "vit",
        num_classes=num_classes,
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
    )
    require_heads("vit", dim, num_heads)
    require_fraction("vit", dropout=dropout)
    if image_size % patch_size:
        raise ModelError(
            f"vit: image_size {image_size} does not divide into patches of {patch_size}",
            "Change model.args.patch_size",
        )
    return num_layers + 2


def mlp(
    *,
    input_dim: int,
    output_dim: int,
    hidden_dim: int = 64,
    num_layers: int = 3,
    activation: str = "relu",
    dropout: float = 0.0,
) -> int:
    """Layers of a perceptron with these arguments."""
    require_positive(
        "mlp",
        input_dim=input_dim,
        output_dim=output_dim,
        hidden_dim=hidden_dim,
        num_layers=num_layers,
    )
    require_fraction("mlp", dropout=dropout)
    require_choice("mlp", "activation", activation, ACTIVATIONS)
    return num_layers


def multimodal(
    *,
    vocab_size: int,
    patch_size: int = 16,
    mel_bins: int = 40,
    vision_layers: int = 3,
    audio_layers: int = 2,
    lm_layers: int = 4,
    dim: int = 128,
    num_heads: int = 4,
    dropout: float = 0.0,
    freeze: Sequence[str] = (),
    tie_embeddings: bool = False,
) -> int:
    """Layers of two encoders and a language model with these arguments."""
    del tie_embeddings
    require_positive("multimodal", vocab_size=vocab_size, patch_size=patch_size, mel_bins=mel_bins)
    require_positive("multimodal", vision_layers=vision_layers, audio_layers=audio_layers)
    require_positive("multimodal", lm_layers=lm_layers, dim=dim, num_heads=num_heads)
    require_heads("multimodal", dim, num_heads)
    require_fraction("multimodal", dropout=dropout)
    for name in freeze:
        require_choice("multimodal", "freeze", name, FREEZABLE)
    # Each encoder has an entry and a projector, the language model an entry and a head.
    return vision_layers + audio_layers + lm_layers + 6


def emulated(
    *,
    layers: Sequence[Mapping[str, Any]] | None = None,
    num_layers: int = 8,
    forward_s: float = 0.005,
    backward_s: float = 0.01,
    activation_bytes: int = 65536,
    microbatch_size: int = 4,
) -> int:
    """Layers of a list of profiles, or that many alike."""
    common = dict(zip(COSTS, (forward_s, backward_s, activation_bytes), strict=True))
    require_positive("emulated", num_layers=num_layers, microbatch_size=microbatch_size)
    profiles = [{}] * num_layers if layers is None else list(layers)
    if not profiles:
        raise ModelError("emulated: layers is an empty list", "Set model.args.layers or num_layers")
    for index, profile in enumerate(profiles):
        emulated_costs(index, profile, common)
    return len(profiles)


def emulated_costs(
    index: int, profile: Mapping[str, Any], common: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What an emulated layer costs: its own profile, and what all have in common."""
    where = f"emulated: layer {index}"
    if not isinstance(profile, Mapping):
        raise ModelError(f"{where} is {profile!r}, a mapping is needed", f"Give {', '.join(COSTS)}")
    known = (*COSTS, COST_FIELD)
    for name in profile:
        if name not in known:
            raise ModelError(f"{where} has no cost {name!r} ({nearest(str(name), known)})")
    if not isinstance(field := profile.get(COST_FIELD, ""), str):
        raise ModelError(f"{where}: {COST_FIELD} is {field!r}, a name is needed")
    values = {**common, **{name: profile[name] for name in COSTS if name in profile}}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ModelError(
                f"{where}: {name} is {value!r}, a number of 0 or more is needed",
                "Correct model.args",
            )
    return values


OUTLINES: Mapping[str, Callable[..., int]] = {
    "gpt": gpt,
    "vit": vit,
    "mlp": mlp,
    "multimodal": multimodal,
    "emulated": emulated,
}


NAMES = (*OUTLINES, "hf")  # what another library's models are like, only it can tell


def check_name(name: str) -> None:
    """It is that of a shipped model."""
    if name not in NAMES:
        raise ModelError(
            f"There is no model {name!r} ({nearest(name, NAMES)})",
            "Correct model.name, or set model.target to your own",
        )


def shipped_arguments(config: Config) -> dict[str, Any]:
    """The arguments of a shipped model, with those that the rest of the configuration decides."""
    args = dict(config.model.args)
    if config.model.name == "gpt":
        args.setdefault("max_positions", config.data.sequence_length)
    if config.model.name == "multimodal":
        args.setdefault("patch_size", config.data.patch_size)
        args.setdefault("mel_bins", config.data.mel_bins)
    if config.model.name == "emulated":
        args.setdefault("microbatch_size", config.pipeline.microbatch_size)
    return args


def check_reduction(reduction: str) -> None:
    """A loss is a sum or a mean."""
    if reduction not in ("sum", "mean"):
        raise ModelError(
            f"loss.reduction is {reduction!r}", "Set it to sum or mean, whichever your loss returns"
        )


def num_layers(config: Config) -> int | None:
    """How many layers the model has; None if only its own code can tell.

    Raises:
        ModelError: what loading it would raise.
    """
    if config.model.target is not None or config.loss.target is not None:
        return None
    check_name(config.model.name)
    outline = OUTLINES.get(config.model.name)
    if outline is None:
        return None
    args = shipped_arguments(config)
    check_arguments(f"Model {config.model.name!r}", outline, args)
    found = outline(**args)
    check_reduction(config.loss.reduction)
    return found
