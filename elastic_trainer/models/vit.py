"""A small vision transformer: patches, blocks, mean over patches, classes.

Layers: `patches`, `blocks.0` …, `head`.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from elastic_trainer.errors import ModelError
from elastic_trainer.models import outline
from elastic_trainer.models.gpt import INIT_STD, Block
from elastic_trainer.models.layers import LayerSpec, ModelSpec
from elastic_trainer.models.losses import cross_entropy


class Patches(nn.Module):
    """Cuts images into squares and embeds each; rows of numbers are taken as flat images."""

    def __init__(self, image_size: int, patch_size: int, channels: int, dim: int):
        super().__init__()
        self.shape = (channels, image_size, image_size)
        self.project = nn.Conv2d(channels, dim, patch_size, stride=patch_size)
        self.positions = nn.Embedding((image_size // patch_size) ** 2, dim)
        nn.init.normal_(self.positions.weight, std=INIT_STD)

    def forward(self, images: Tensor) -> Tensor:
        wanted = self.shape[0] * self.shape[1] * self.shape[2]
        if images[0].numel() != wanted:
            raise ModelError(
                f"Images of shape {tuple(images.shape[1:])} do not hold {self.shape} numbers",
                "Set model.args.image_size and channels to the data's",
            )
        pixels = images.reshape(-1, *self.shape).to(self.project.weight.dtype)
        x: Tensor = self.project(pixels).flatten(2).transpose(1, 2) + self.positions.weight
        return x


class Classify(nn.Module):
    """Norm, mean over patches, linear map to classes."""

    def __init__(self, dim: int, num_classes: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, num_classes)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.norm(x).mean(dim=1), self.dropout, self.training)
        logits: Tensor = self.linear(y)
        return logits


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
) -> ModelSpec:
    """An image classifier of `num_layers` blocks."""
    outline.vit(
        num_classes=num_classes,
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        dropout=dropout,
    )
    block = partial(
        Block, dim, num_heads, dropout=dropout, gelu="exact", causal=False, num_blocks=num_layers
    )
    layers = (
        LayerSpec("patches", partial(Patches, image_size, patch_size, channels, dim)),
        *[LayerSpec(f"blocks.{i}", block) for i in range(num_layers)],
        LayerSpec("head", partial(Classify, dim, num_classes, dropout)),
    )
    return ModelSpec(layers, cross_entropy, ("image",), ("label",))
