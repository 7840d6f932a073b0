"""Images with questions about them, to train a model with two kinds of input."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bapipe.zoo.data.dataset import PipelineDataset
from bapipe.zoo.data.images import Images, images

PAD, SHOWN, NAMED = range(3)
"""The first words of the vocabulary: padding, and the two kinds of questions."""

_NUM_FILLERS = 50

Pair = tuple[tuple[Tensor, Tensor], Tensor]
"""((image [3, size, size], question [length]), answer)"""


def num_words(num_answers: int) -> int:
    """Returns the size of the vocabulary: the marks, filler words, and the name of each answer."""
    return NAMED + 1 + _NUM_FILLERS + num_answers


def visual_questions(spec: str, *, image_size: int, length: int, num_answers: int) -> "_Questions":
    """Returns the images of `spec`, see `images`, with questions of up to `length` words and their answers.

    Half of the questions ask what the image shows, the others which class the question itself names.

    Raises:
        BapipeError: no such images, or more classes than answers.
    """
    shown = images(spec, image_size=image_size, num_classes=num_answers)
    return _Questions(shown=shown, length=length, num_answers=num_answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Questions(PipelineDataset[Pair]):
    """The question of item i depends on i alone."""

    shown: Images
    length: int
    num_answers: int

    @property
    def held_out(self) -> "_Questions | None":
        others = self.shown.held_out
        if others is None:
            return None
        return _Questions(shown=others, length=self.length, num_answers=self.num_answers)

    def __len__(self) -> int:
        return len(self.shown)

    @property
    def is_slow_to_load(self) -> bool:
        return self.shown.is_slow_to_load

    @property
    def is_slow_for_gpu(self) -> bool:
        return self.shown.is_slow_for_gpu

    def __getitem__(self, index: int) -> Pair:
        return (self.part(index, 0), self.part(index, 1)), self.part(index, 2)

    def part(self, index: int, place: int) -> Tensor:
        if place == 0:
            return self.shown.part(index, 0)
        generator = torch.Generator().manual_seed(index)

        def draw(low: int, high: int) -> Tensor:
            return torch.randint(low, high, (), generator=generator)

        first_name = NAMED + 1 + _NUM_FILLERS
        count = int(draw(2, self.length + 1))
        question = torch.randint(NAMED + 1, first_name, (count,), generator=generator)
        named, asked = draw(0, self.num_answers), draw(SHOWN, NAMED + 1)
        question[0] = asked
        question[int(draw(1, count))] = first_name + named
        if place == 1:
            return functional.pad(question, (0, self.length - count), value=PAD)
        return torch.where(asked == SHOWN, self.shown.part(index, 1), named)
