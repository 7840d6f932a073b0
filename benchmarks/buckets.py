"""The gain from batching sentences of similar lengths: samples per second with several bucket lengths.

    python benchmarks/buckets.py [--hidden-size 256] [--steps 30] [--lengths 1 2 4 8] [--data locale:de]

GNMT-8 as two stages on two ranks, Adam, mini-batches of 32 in micro-batches of 16, sentences of up to 25 subwords. Mean
over the steps after the first ones.
"""

import bapipe
from bapipe.formats.settings import Settings
from bapipe.profiler.profile import profile_model_cached
from benchmarks import parser_of


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--data", default="locale:de")
    options = parser.parse_args()
    arguments = {"hidden_size": options.hidden_size, "vocabulary_size": 8000}
    profile = profile_model_cached("gnmt8", arguments, microbatch_sizes=(16,), settings=Settings(optimizer="adam"))
    plan = bapipe.plan(profile, 2, minibatch_size=32, num_stages=2)
    one = None
    for buckets in options.lengths:
        result = bapipe.run(plan, data=options.data, buckets=buckets, steps=options.steps, learning_rate=0.001)
        rate = plan.minibatch_size * 1e9 / result.mean_step_ns
        one = one or rate
        print(f"{buckets} lengths: {rate:.1f} samples/s, {rate / one:.2f} times", flush=True)


if __name__ == "__main__":
    main()
