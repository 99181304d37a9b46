"""Gradients of weights that are computed after the gradient of a stage's input has been sent.

The previous stage waits for the latter alone. A linear map makes both of the same two tensors, so
the former can come later without a second pass through the graph: best while the stage would wait
for a message. Splitting a backward like this is from Qi et al., Zero Bubble Pipeline Parallelism
(ICLR 2024), whose ZB-H1 plans ahead what fills which gap; here the order of actions stays that of
the schedule, and what is left fills the gaps as they come.

The kernels, their operands and the order in which gradients add up are autograd's own, so no bit
changes.
"""

import contextlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from elastic_trainer.errors import ModelError

_NO_CONTEXT: AbstractContextManager[Any] = contextlib.nullcontext()


class _Use(NamedTuple):
    """What the gradients of a map are made of: its parameters, its input, its output's gradient."""

    weight: Tensor
    bias: Tensor | None
    value: Tensor  # (rows, in)
    grad: Tensor  # (rows, out)
    versions: tuple[int, int]  # of the two: what autograd would have refused to use is refused

    def check(self) -> None:
        """
        Raises:
            ModelError: the input, or its output's gradient, was overwritten meanwhile.
        """
        if (self.value._version, self.grad._version) != self.versions:
            raise ModelError(
                f"the input of a linear map with a weight of {tuple(self.weight.shape)} was "
                "written to after its backward, before the gradient of the weight was computed",
                "Set pipeline.split_backward=false, or let the layer make a new tensor each time",
            )


class LateGradients:
    """Takes over the `nn.Linear` among a stage's modules until `release`.

    The gradients of all others come early: of subclasses, of maps whose parameters another module
    holds too, somebody watches, or something else computes, of those in compiled code. A parameter
    that code uses beside its module gets the same gradient, added up in another order.
    """

    def __init__(self) -> None:
        self._linears: list[nn.Linear] = []
        self._uses: dict[tuple[int, int], list[_Use]] = {}  # of the backward at hand
        self._left: deque[deque[list[_Use]]] = deque()  # by backward, then by weight
        self._hurries = False

    def take_over(self, modules: Iterable[nn.Module]) -> None:
        """Make the backwards of these modules leave work for `finish`."""
        everything = list(dict.fromkeys(m for top in modules for m in top.modules()))
        holders = Counter(id(p) for m in everything for p in m.parameters(recurse=False))
        for module in everything:
            # A forward of the instance's own is somebody else's wrapper.
            if type(module) is not nn.Linear or "forward" in vars(module):
                continue
            # Autograd would add the gradients of all holders before it adds them to others.
            if all(holders[id(p)] == 1 for p in module.parameters()):
                module.forward = _Forward(module, self)  # type: ignore[assignment, method-assign]
                self._linears.append(module)

    def release(self) -> None:
        """Give the modules back as they were."""
        for linear in self._linears:
            del linear.forward
        self._linears.clear()
        self.forget()

    def note(self, use: _Use) -> None:
        """Leave the gradients of this use for later; called in the backward."""
        # Autograd adds up what one graph gives a leaf. Reentrant checkpoints have graphs of their
        # own, and whichever ends first is added first.
        key = (id(use.weight), torch._C._current_graph_task_id())
        self._uses[key] = [*self._uses.pop(key, []), use]

    def begin_backward(self) -> None:
        """A backward begins: gradients that a layer has asked for in its forward are its own."""
        self._uses.clear()

    def end_backward(self) -> None:
        """A backward is over: what it has left is one entry in the line of what is to be done."""
        if self._uses:
            self._left.append(deque(self._uses.values()))
        self._uses.clear()

    @property
    def num_left(self) -> int:
        """How many backwards have left work that is not done."""
        return len(self._left)

    @property
    def left_bytes(self) -> int:
        """What all that is left keeps in memory, but for weights."""
        uses = [use for groups in self._left for group in groups for use in group]
        kept = [t.untyped_storage() for use in uses for t in (use.value, use.grad)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())

    @torch.no_grad()
    def finish_one(self) -> None:
        """Compute the gradients of the map that has waited longest, and add them to what there is.

        Each map's gradients thus add up in the order of the backwards.

        Raises:
            ModelError: what they are made of was overwritten meanwhile.
        """
        alike = self._left[0].popleft()
        if not self._left[0]:
            self._left.popleft()
        for use in alike:
            use.check()
        with _without_autocast(alike[0].value.device.type):
            _add(alike[0].weight, [use.grad.t().mm(use.value) for use in alike])
            if (bias := alike[0].bias) is not None and bias.requires_grad:
                _add(bias, [use.grad.sum(0) for use in alike])

    def finish(self, keep: int = 0) -> None:
        """Do what is left, but for that of the last `keep` backwards."""
        while len(self._left) > (0 if self._hurries else keep):
            self.finish_one()

    def hurry(self) -> None:
        """Keep nothing from now on: gradients that come early would overtake what is left."""
        self._hurries = True
        self.finish()

    def forget(self) -> None:
        """Drop what backwards have left that nobody wants any more."""
        self._uses.clear()
        self._left.clear()


class _Forward:
    """The forward of a linear map that was taken over."""

    def __init__(self, linear: nn.Linear, late: LateGradients) -> None:
        self._linear = linear
        self._late = late
        self._ways: set[bool] = set()  # whether its gradients came late, and whether early

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._linear.weight, self._linear.bias
        if torch.compiler.is_compiling() or not (weight.requires_grad and torch.is_grad_enabled()):
            return F.linear(x, weight, bias)
        kind = x.device.type
        casts = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
        # There is an early gradient to be made, and nobody watches the late one.
        waits = (
            x.requires_grad
            and x.dim() > 1
            and (casts or x.dtype == weight.dtype)
            and _is_unwatched(weight)
            and (bias is None or _is_unwatched(bias))
        )
        self._ways.add(waits)
        if len(self._ways) > 1:
            self._late.hurry()
        if not waits:
            return F.linear(x, weight, bias)
        if casts:
            x = x.to(torch.get_autocast_dtype(kind))
        made: Tensor = _Linear.apply(x, weight, bias, self._late)  # type: ignore[no-untyped-call]
        return made


def _is_unwatched(parameter: Tensor) -> bool:
    """Whether nobody but the optimizer learns of the parameter's gradient."""
    return (
        parameter.is_leaf
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Entering autocast takes as long as a small map: it is done only where it changes anything."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NO_CONTEXT


class _Linear(torch.autograd.Function):
    """`F.linear`, whose backward makes the gradient of its input alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, late: LateGradients
    ) -> Tensor:
        used = weight.to(x.dtype)
        ctx.save_for_backward(x, used)
        ctx.leaves = weight, bias
        ctx.late = late
        # All of one precision already: autocast has nothing left to change.
        return F.linear(x, used, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, used = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        weight, bias = ctx.leaves
        # Detached, so that what is left keeps no graph alive.
        value, rows_left = x.detach().reshape(-1, x.shape[-1]), rows.detach()
        versions = value._version, rows_left._version
        ctx.late.note(_Use(weight, bias, value, rows_left, versions))
        return rows.mm(used).view(x.shape), None, None, None


def _add(leaf: Tensor, grads: Sequence[Tensor]) -> None:
    """What autograd does with the gradients of one backward, in the order in which they came."""
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    total = total.to(leaf.dtype)
    if leaf.grad is None:
        leaf.grad = total
    else:
        leaf.grad.add_(total)
