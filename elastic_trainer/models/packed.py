"""Blocks for sequences of many lengths that lie one behind the other, without padding."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_trainer.models.gpt import Block

_LONGEST_WAVE = 10000.0


class PackedBlock(Block):
    """A block over `(sum of lengths, dim)`; attention stays within each sequence.

    Attention has no dropout of its own: PyTorch's fused kernels for CPUs have none.
    """

    def run(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Apply it to sequences of these lengths."""
        x = x + self._drop(self.proj(self._attend_within(self.norm1(x), lengths)))
        y = F.gelu(self.up(self.norm2(x)), approximate=self.approximation)
        return x + self._drop(self.down(y))

    def _attend_within(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        # One call per sequence: on a CPU two to eight times as fast as one with a block-diagonal
        # mask, whose cost grows with the square of all lengths together.
        num_tokens, dim = x.shape
        qkv = self.qkv(x).view(num_tokens, 3, self.num_heads, dim // self.num_heads)
        found = []
        for part in qkv.split(list(lengths)):
            q, k, v = part.permute(1, 2, 0, 3).unsqueeze(1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            found.append(y[0])
        return torch.cat(found, dim=1).transpose(0, 1).reshape(num_tokens, dim)


def waves(positions: Tensor, dim: int) -> Tensor:
    """Sines and cosines of whole positions, (n,) to (n, dim): there is no largest position."""
    half = dim // 2
    exponents = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angles = positions[:, None].float() * _LONGEST_WAVE**-exponents
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return F.pad(table, (0, dim - 2 * half))


def places_within(lengths: Tensor) -> Tensor:
    """0, 1, … for each of the sequences of these lengths, one behind the other."""
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return torch.arange(len(starts), device=lengths.device) - starts
