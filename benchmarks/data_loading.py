"""How long a step waits for its images, loaded between steps and by worker processes.

    python benchmarks/data_loading.py [--images 256] [--batch 32] [--size 224] [--step-ms 400] [--steps 8]
                                      [--workers 0 1 2 4]

JPEG files of 500 x 375 pixels are made in a temporary folder. A rank that holds the first stage loads mini-batches of
random crops; a training step is a pause of fixed length, during which a GPU would compute. Printed is the median wait
per step after the first ones, in which workers start.
"""

import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

import numpy
from PIL import Image

from bapipe.training.checkpoint.manifest import Position
from bapipe.training.data.loader import RankParts, batches
from bapipe.zoo.data.images import images
from bapipe.zoo.data.open_dataset import augmented
from benchmarks import parser_of

WARM_UP_STEPS = 3


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--step-ms", type=float, default=400.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder, "any"), options.images)
        data = augmented(images(folder, image_size=options.size, num_classes=1), True, folder)
        size = options.batch  # one micro-batch, whose images this rank loads
        parts = RankParts(
            seed=0, num_inputs=1, places=(0,), microbatches=(0,), microbatch_size=size, minibatch_size=size
        )
        for num_workers in options.workers:
            waits_ms = []
            with closing(batches(parts, data, Position(), num_workers=num_workers)) as loader:
                for _ in range(WARM_UP_STEPS + options.steps):
                    start_s = time.perf_counter()
                    next(loader)
                    waits_ms.append((time.perf_counter() - start_s) * 1e3)
                    time.sleep(options.step_ms / 1e3)
            print(f"{num_workers} workers: {median(waits_ms[WARM_UP_STEPS:]):7.1f} ms per step")


def write_images(folder: Path, count: int) -> None:
    """Writes smooth random images: noise would take longer to decode than photographs do."""
    folder.mkdir()
    rng = numpy.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=numpy.uint8))
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)


if __name__ == "__main__":
    main()
