"""A model of your own, profiled, planned for two devices and trained on real digits: python examples/custom_model.py"""

from functools import partial

import torch
from torch import nn

import bapipe
from bapipe.zoo.data.images import images


def residual_mlp(width: int = 1024, depth: int = 6) -> bapipe.Example:
    """A stack of blocks with skip connections; `bapipe profile custom_model:residual_mlp` finds it too."""
    blocks = [Block(width) for _ in range(depth)]
    return bapipe.Example(
        module=nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, width), *blocks, nn.Linear(width, 10)),
        inputs=(torch.zeros(1, 3, 28, 28),),
        target=torch.zeros(1, dtype=torch.long),
        loss=nn.CrossEntropyLoss(),
        data=partial(images, image_size=28, num_classes=10),
        learning_rate=0.02,
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


if __name__ == "__main__":
    model = residual_mlp()
    profile = bapipe.profile(model.module, model.inputs, model.target, model.loss, microbatch_sizes=(8, 16, 32))
    plan = bapipe.plan(profile, 2, minibatch_size=128, num_stages=2)
    for stage in plan.stages:
        print(f"{stage.devices[0]}: {stage.layers[0]} to {stage.layers[-1]}")
    result = bapipe.run(plan, factory="custom_model:residual_mlp", data="mnist", steps=30)
    print(f"predicted {plan.prediction.step_ns / 1e6:.1f} ms a step, measured {result.typical_step_ns / 1e6:.1f} ms")
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}")
