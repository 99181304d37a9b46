"""The multimodal model's layers: what they make, how large they are, what they refuse."""

import numpy as np
import pytest
import torch
from torch import Tensor

from elastic_trainer.config import Config, DataConfig, ModelConfig
from elastic_trainer.errors import ModelError
from elastic_trainer.models.inference import Unsplit
from elastic_trainer.models.layers import build_layer
from elastic_trainer.models.losses import count_valid
from elastic_trainer.models.multimodal import AudioEmbed, multimodal, text_loss
from elastic_trainer.models.packed import PackedBlock, places_within, waves
from elastic_trainer.models.registry import load_model
from elastic_trainer.testing.media_toys import (
    BOTH,
    MEL_BINS,
    SEVERAL,
    microbatch,
    random_sample,
    tiny_multimodal,
)

RNG = np.random.default_rng(5)


def batch() -> dict[str, Tensor]:
    return microbatch([random_sample(shape, RNG) for shape in (SEVERAL, BOTH)])


def test_the_default_model_is_small() -> None:
    model = multimodal(vocab_size=4096)
    count = sum(p.numel() for spec in model.layers for p in spec.build().parameters())
    assert 2e6 < count < 4e6
    assert model.names[0] == "vision.embed" and model.names[-1] == "lm.head"


def test_configuration_gives_patches_and_bands() -> None:
    config = Config(
        model=ModelConfig(name="multimodal", args={"vocab_size": 9}),
        data=DataConfig(format="media", patch_size=4, mel_bins=7),
    )
    model = load_model(config)
    shapes = {
        spec.name: {n: p.shape for n, p in build_layer(spec, 0).named_parameters()}
        for spec in model.layers
    }
    assert shapes["vision.embed"]["linear.weight"][1] == 48
    assert shapes["audio.embed"]["conv1.weight"][1] == 7
    assert model.label_fields == ("labels",)


def test_one_row_of_logits_per_label() -> None:
    fields = batch()
    logits = Unsplit(tiny_multimodal()).forward(fields)
    assert logits.shape[0] == count_valid({"labels": fields["labels"]}) == 6 + 1 + 2 + 1
    assert text_loss(logits[:0], {"labels": torch.full((1, 3), -100)}).item() == 0.0


@pytest.mark.parametrize("lengths", [[1], [3], [4], [5, 1], [2, 9, 4, 7]])
def test_packed_clips_sound_as_they_do_alone(lengths: list[int]) -> None:
    torch.manual_seed(0)
    layer = AudioEmbed(MEL_BINS, 8)
    clips = [torch.randn(n, MEL_BINS) for n in lengths]
    packed = layer({}, torch.cat(clips), torch.tensor(lengths))["audio"]
    alone = []
    for clip in clips:
        x = clip.t()[None]
        for convolution in (layer.conv1, layer.conv2):
            x = torch.nn.functional.gelu(convolution(x))
        y = x[0].t()
        alone.append(y + waves(torch.arange(len(y)), 8))
    assert packed is not None and (packed - torch.cat(alone)).abs().max() < 1e-6


@pytest.mark.parametrize("causal", [False, True])
def test_packed_attention_equals_a_block_diagonal_mask(causal: bool) -> None:
    torch.manual_seed(0)
    block = PackedBlock(8, 2, causal=causal)
    lengths = [3, 1, 5]
    x = torch.randn(9, 8)
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    mask = owner[:, None] == owner
    if causal:
        mask &= torch.ones(9, 9, dtype=torch.bool).tril()
    q, k, v = block.qkv(block.norm1(x)).view(9, 3, 2, 4).permute(1, 2, 0, 3)
    y = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], mask)[0]
    x1 = x + block.proj(y.transpose(0, 1).reshape(9, 8))
    up = torch.nn.functional.gelu(block.up(block.norm2(x1)), approximate="tanh")
    assert (block.run(x, lengths) - (x1 + block.down(up))).abs().max() < 1e-6


def test_positions_begin_anew_and_tell_places_apart() -> None:
    assert places_within(torch.tensor([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]
    table = waves(torch.arange(2000), 16)
    assert torch.cdist(table, table).fill_diagonal_(1).min() > 0.01
    assert waves(torch.arange(3), 5).shape == (3, 5)


def change(fields: dict[str, Tensor], **changed: Tensor) -> dict[str, Tensor]:
    return {**fields, **changed}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"patches": torch.zeros(4, 27, dtype=torch.uint8)}, "27 numbers, the model wants 12"),
        ({"frames": torch.zeros(4, 9)}, "9 bands, the model wants 5"),
        ({"input_ids": torch.full((1, 30), 29)}, "Token id 29 is outside"),
        ({"input_ids": torch.zeros(1, 30, dtype=torch.int64)}, "tokens of image came for 0 places"),
    ],
)
def test_fields_that_do_not_fit_are_named(changed: dict[str, Tensor], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        Unsplit(tiny_multimodal()).forward(change(batch(), **changed))


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"freeze": ["visoin"]}, "visoin"),
        ({"dim": 10, "num_heads": 4}, "num_heads"),
        ({"lm_layers": 0}, "lm_layers"),
        ({"dropout": 1.5}, "dropout"),
    ],
)
def test_bad_arguments_are_refused(args: dict[str, object], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        multimodal(vocab_size=9, **args)  # type: ignore[arg-type]


def test_it_generates_no_text_from_text_alone() -> None:
    with pytest.raises(ModelError, match="not text alone"):
        Unsplit(tiny_multimodal()).logits(torch.zeros(1, 3, dtype=torch.int64))


def test_frozen_layers_are_those_of_encoders_only() -> None:
    model = tiny_multimodal(freeze=["audio"])
    frozen = {
        spec.name
        for spec in model.layers
        if not any(p.requires_grad for p in build_layer(spec, 0).parameters())
    }
    assert frozen == {"audio.embed", "audio.blocks.0"}
