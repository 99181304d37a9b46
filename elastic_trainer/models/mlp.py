"""A multilayer perceptron, for tests and tables of numbers."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from elastic_trainer.models import outline
from elastic_trainer.models.layers import LayerSpec, ModelSpec
from elastic_trainer.models.losses import default_loss

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
}


class Dense(nn.Module):
    """Linear, then activation and dropout; several inputs, or wider ones, are flattened."""

    def __init__(self, width_in: int, width_out: int, activation: str | None, dropout: float):
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)
        self.activation = ACTIVATIONS[activation]() if activation else nn.Identity()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.flatten(1).to(self.linear.weight.dtype))
        y = self.dropout(self.activation(y))
        return y


def mlp(
    *,
    input_dim: int,
    output_dim: int,
    hidden_dim: int = 64,
    num_layers: int = 3,
    activation: str = "relu",
    dropout: float = 0.0,
) -> ModelSpec:
    """`num_layers` dense layers; classes for integer labels, regression for others."""
    outline.mlp(
        input_dim=input_dim,
        output_dim=output_dim,
        hidden_dim=hidden_dim,
        num_layers=num_layers,
        activation=activation,
        dropout=dropout,
    )
    widths = [input_dim, *[hidden_dim] * (num_layers - 1), output_dim]
    last = num_layers - 1
    layers = [
        LayerSpec(
            f"layers.{i}",
            partial(
                Dense,
                widths[i],
                widths[i + 1],
                None if i == last else activation,
                0.0 if i == last else dropout,
            ),
        )
        for i in range(num_layers)
    ]
    return ModelSpec(tuple(layers), default_loss, ("inputs",), ("labels",))
