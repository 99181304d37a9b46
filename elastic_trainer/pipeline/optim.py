"""Optimizers: torch.optim unchanged, and access to its state by parameter.

Torch imports its compiler, for about two seconds, when a process makes its first optimizer and when
it takes its first step, only to exempt both from compilation. A worker that joins would spend them
while all others wait, so both are done here without it.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from elastic_trainer.config import OptimConfig
from elastic_trainer.errors import CheckpointError, ConfigError

# State that torch keeps as one number per parameter, on the host unless the optimizer is fused.
_SCALAR_STATE = frozenset({"step", "mu_product"})
_STATE_KEYS = {
    "adamw": frozenset({"step", "exp_avg", "exp_avg_sq"}),
    "nadam": frozenset({"step", "mu_product", "exp_avg", "exp_avg_sq"}),
}


def build_optimizer(
    params: Sequence[nn.Parameter], config: OptimConfig
) -> torch.optim.Optimizer | None:
    """The optimizer over `params`; None for a stage without parameters of its own."""
    if not params:
        return None
    _leave_compiler_out()
    lr, decay = config.learning_rate, config.weight_decay
    betas = (config.beta1, config.beta2)
    if config.name == "adamw":
        return torch.optim.AdamW(
            params, lr=lr, betas=betas, eps=config.eps, weight_decay=decay, fused=_can_fuse(params)
        )
    if config.name == "sgd":
        # Torch's SGD adds its decay to the gradient, where momentum gathers it: `decay_weights`.
        return torch.optim.SGD(
            params, lr=lr, momentum=config.beta1, weight_decay=0.0, fused=_can_fuse(params)
        )
    if config.name == "nadam":
        return torch.optim.NAdam(
            params,
            lr=lr,
            betas=betas,
            eps=config.eps,
            weight_decay=decay,
            momentum_decay=config.momentum_decay,
            decoupled_weight_decay=True,
        )
    raise ConfigError(
        f"optim.name {config.name!r} is not known", "Choose one of adamw, sgd or nadam."
    )


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, without what torch wraps around it for its compiler and its profiler."""
    step = inspect.unwrap(type(optimizer).step)
    with torch.no_grad():
        step(optimizer)


def _leave_compiler_out() -> None:
    """Exempt from compilation what torch would. Where it does so in another way, do nothing."""
    base = torch.optim.Optimizer
    for method in (base.add_param_group, base.state_dict, base.load_state_dict):
        plain = getattr(method, "__wrapped__", None)
        if plain is not None and not hasattr(plain, "__dynamo_disable"):
            setattr(plain, "__dynamo_disable", plain)  # noqa: B010 - only torch knows the name


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def decay_weights(optimizer: torch.optim.Optimizer, config: OptimConfig, lr: float) -> None:
    """Shrink the weights by lr times weight_decay, where the optimizer's step does not."""
    if config.name != "sgd" or config.weight_decay == 0.0:
        return
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    with torch.no_grad():
        torch._foreach_mul_(params, 1.0 - lr * config.weight_decay)


def check_state(state: Iterable[str], config: OptimConfig, param: str) -> None:
    """Refuse the state of one parameter that another optimizer has left.

    A parameter that was never stepped has none, whatever the optimizer.

    Raises:
        CheckpointError: names the keys and the setting.
    """
    found = frozenset(state)
    momentum = frozenset({"momentum_buffer"} if config.beta1 else ())
    wanted = _STATE_KEYS.get(config.name, momentum)
    if found and found != wanted:
        raise CheckpointError(
            f"{param}: the checkpoint holds the optimizer state {', '.join(sorted(found))}, but "
            f"optim.name={config.name} keeps {', '.join(sorted(wanted)) or 'none'}: it was saved "
            "with another optimizer",
            "Resume with the optim.name (and for sgd the optim.beta1) that it was saved with, or "
            "start a new run.",
        )


def export_state(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> dict[str, Tensor]:
    """Live references to the optimizer's tensors of one parameter; empty before its first step."""
    return {key: value for key, value in optimizer.state[param].items() if torch.is_tensor(value)}


def import_state(
    optimizer: torch.optim.Optimizer,
    param: nn.Parameter,
    state: Mapping[str, Tensor],
    *,
    copy: bool = True,
) -> None:
    """Replace the optimizer's tensors of one parameter by `state`, or by a copy of it."""
    optimizer.state.pop(param, None)
    if not state:
        return
    fused = bool(optimizer.param_groups[0].get("fused"))
    own: dict[str, Tensor] = {}
    for key, value in state.items():
        on_host = key in _SCALAR_STATE and not fused
        device = torch.device("cpu") if on_host else param.device
        own[key] = value.detach().to(device, copy=copy)
    optimizer.state[param] = own


def _can_fuse(params: Sequence[nn.Parameter]) -> bool:
    """Torch's fused kernels take floating-point parameters on CPU and CUDA."""
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params)
