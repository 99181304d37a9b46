"""Gradients of weights that come after the gradient of the input: the same bits, later."""

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from elastic_trainer.errors import ModelError
from elastic_trainer.pipeline.late import LateGradients

Make = Callable[[], nn.Module]


class Often(nn.Module):
    """Uses one map three times, so that the order of adding shows, and another once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.inner(x))
        made: Tensor = self.outer(x)
        return made


class Shared(nn.Module):
    """Two maps with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.two(torch.tanh(self.one(x)))
        return made


class Again(nn.Module):
    """Runs its maps once more in the backward, by torch's own means."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = Often()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return made


class Looped(nn.Module):
    """Runs the same maps again and again, each time once more in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.inner(x))
            x = checkpoint(self.inner, x, use_reentrant=True)
        return x


def computed(wrap: Callable[[nn.Module], nn.Module]) -> Make:
    """The first map's weight is made of other parameters."""

    def make() -> nn.Module:
        return nn.Sequential(wrap(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 4))

    return make


def pruned(module: nn.Module) -> nn.Module:
    made: nn.Module = prune.l1_unstructured(module, "weight", 5)  # type: ignore[no-untyped-call]
    return made


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4, bias=False))


def frozen(*names: str) -> Make:
    def make() -> nn.Module:
        module = plain()
        for name in names:
            module.get_parameter(name).requires_grad_(False)
        return module

    return make


def compiled() -> nn.Module:
    module = Often()
    module.compile(backend="eager")
    return nn.Sequential(module, nn.Linear(4, 4))


def gradients(
    make: Make,
    shape: Sequence[int],
    late: bool,
    dtype: torch.dtype | None = None,
    keep: int = 0,
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Of the inputs and of the parameters, after three microbatches."""
    torch.manual_seed(0)
    module = make()
    taken = LateGradients()
    if late:
        taken.take_over([module])
    inputs = []
    for _ in range(3):
        x = torch.randn(shape, requires_grad=True)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            y = module(x)
        y.backward(torch.randn_like(y))
        taken.end_backward()
        taken.finish(keep)
        assert x.grad is not None
        inputs.append(x.grad)
    taken.finish()
    taken.release()
    return inputs, {name: p.grad for name, p in module.named_parameters()}


CASES: dict[str, Make] = {
    "plain": plain,
    "often": Often,
    "shared": Shared,
    "frozen weight": frozen("0.weight"),
    "frozen bias": frozen("0.bias"),
    "frozen map": frozen("3.weight"),
    "checkpoint": lambda: Again(use_reentrant=False),
    "reentrant checkpoint": lambda: Again(use_reentrant=True),
    "looped checkpoint": Looped,
    "spectral norm": computed(nn.utils.spectral_norm),
    "pruned": computed(pruned),
    "compiled": compiled,
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (0, 6), (2, 2, 3, 6), (1, 6)], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("keep", [0, 2])
def test_no_bit_changes(
    case: str, shape: tuple[int, ...], dtype: torch.dtype | None, keep: int
) -> None:
    (want_inputs, want), (got_inputs, got) = (
        gradients(CASES[case], shape, late, dtype, keep) for late in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(got_inputs, want_inputs, strict=True))
    assert got.keys() == want.keys()
    for name, grad in want.items():
        other = got[name]
        assert (other is None) == (grad is None), name
        if grad is not None and other is not None:
            assert other.dtype == grad.dtype and torch.equal(other, grad), name


def test_what_is_left_is_that_of_the_maps_alone() -> None:
    module, late = plain(), LateGradients()
    late.take_over([module])
    x = torch.randn(5, 6, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    late.end_backward()
    early = {name for name, p in module.named_parameters() if p.grad is not None}
    assert early == {"2.weight", "2.bias"}
    late.finish()
    assert all(p.grad is not None for p in module.parameters())


def test_what_is_watched_comes_early() -> None:
    module, late, seen = nn.Linear(6, 4), LateGradients(), list[torch.Size]()
    late.take_over([module])
    module.weight.register_hook(lambda grad: seen.append(grad.shape))  # type: ignore[no-untyped-call]
    module(torch.randn(5, 6, requires_grad=True)).sum().backward()
    assert seen == [module.weight.shape] and module.weight.grad is not None


class Turns(nn.Module):
    """A map whose input wants no gradient every third time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.turn = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        made: Tensor = x * self.inner(x if self.turn % 3 else x.detach())
        return made


def test_gradients_that_come_early_overtake_none() -> None:
    (_, want), (_, got) = (
        gradients(Turns, (500, 6), late, keep=9 if late else 0) for late in (False, True)
    )
    weight, other = want["inner.weight"], got["inner.weight"]
    assert weight is not None and other is not None and torch.equal(weight, other)


def test_what_is_left_is_done_in_order_and_counted() -> None:
    module, late = nn.Linear(6, 4, bias=False), LateGradients()
    late.take_over([module])
    grads = []
    for _ in range(3):
        x = torch.randn(5, 6, requires_grad=True)
        y = module(x)
        grad = torch.randn_like(y)
        y.backward(grad)
        late.end_backward()
        grads.append(grad.t() @ x.detach())
    assert late.num_left == 3 and late.left_bytes == 3 * 4 * (5 * 6 + 5 * 4)
    late.finish(keep=2)
    assert late.num_left == 2 and module.weight.grad is not None
    assert torch.equal(module.weight.grad, grads[0])
    late.finish_one()
    assert torch.equal(module.weight.grad, grads[0] + grads[1])
    late.forget()
    assert late.num_left == late.left_bytes == 0


class Workspace(nn.Module):
    """Writes the input of its map to where the last one was."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.space = nn.Linear(6, 6), torch.empty(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        space = self.space.detach()
        space.copy_(x)
        made: Tensor = self.inner(space)
        return made


def test_an_input_that_was_written_to_is_refused_as_by_autograd() -> None:
    gradients(Workspace, (5, 6), late=True)
    with pytest.raises(
        ModelError, match=r"weight of \(6, 6\) was written to.*split_backward=false"
    ):
        gradients(Workspace, (5, 6), late=True, keep=2)


def test_what_is_left_keeps_no_graph() -> None:
    module, late = plain(), LateGradients()
    late.take_over([module])
    x = torch.randn(5, 6, requires_grad=True)
    leaf = weakref.ref(x)
    module(torch.tanh(x)).sum().backward()
    late.end_backward()
    del x
    assert late.num_left == 1 and leaf() is None


def test_what_is_left_is_computed_in_its_own_precision() -> None:
    """Though hurried by a forward under autocast."""
    grads = []
    for hurried in (False, True):
        torch.manual_seed(0)
        module, late = nn.Linear(6, 4), LateGradients()
        late.take_over([module])
        module(torch.randn(5, 6, requires_grad=True)).sum().backward()
        late.end_backward()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=hurried):
            late.hurry()
        assert module.weight.grad is not None
        grads.append(module.weight.grad)
    assert torch.equal(*grads)


def test_others_wrappers_and_subclasses_stay() -> None:
    class Mine(nn.Linear):
        pass

    wrapped, mine, late = nn.Linear(6, 4), Mine(6, 4), LateGradients()
    wrapped.forward = lambda input: F.linear(input, wrapped.weight) + 1  # type: ignore[method-assign]
    late.take_over([wrapped, mine])
    for module in (wrapped, mine):
        module(torch.randn(5, 6, requires_grad=True)).sum().backward()
        assert module.weight.grad is not None


def test_modules_are_given_back_as_they_were() -> None:
    module, late = plain(), LateGradients()
    late.take_over([module])
    assert "forward" in vars(module[0])  # type: ignore[index]
    late.release()
    assert all("forward" not in vars(m) for m in module.modules())


def test_mixed_types_fail_as_without() -> None:
    module, late = nn.Linear(6, 4), LateGradients()
    late.take_over([module])
    with pytest.raises(RuntimeError, match="dtype"):
        module(torch.randn(5, 6, dtype=torch.float64, requires_grad=True))
