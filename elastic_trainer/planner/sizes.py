"""How large a sample is for each part of a multimodal model, known without decoding it."""

from dataclasses import dataclass

# The projectors join so many neighbours into one token of the language model.
PATCHES_PER_TOKEN = 4
FRAMES_PER_TOKEN = 4

# Token ids that hold the place of one joined token of a picture or a clip.
IMAGE_PLACE = -1
AUDIO_PLACE = -2


def image_tokens(num_patches: int) -> int:
    """Tokens of the language model that a picture of so many patches takes."""
    return -(-num_patches // PATCHES_PER_TOKEN)


def audio_tokens(num_frames: int) -> int:
    """Tokens of the language model that a clip of so many log-mel frames takes."""
    return -(-num_frames // FRAMES_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class ItemSize:
    """Sizes of one sample.

    `image_patches` has an entry per picture, `audio_frames` (of log-mel) one per clip;
    `text_tokens` counts all tokens but the places of pictures and clips.
    """

    image_patches: tuple[int, ...] = ()
    audio_frames: tuple[int, ...] = ()
    text_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the language model sees."""
        pictures = sum(map(image_tokens, self.image_patches))
        clips = sum(map(audio_tokens, self.audio_frames))
        return pictures + clips + self.text_tokens
