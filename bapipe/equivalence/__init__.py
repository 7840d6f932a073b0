"""Holds a traced and split model to the original, before anything trains.

Begin with `check`: `trace_checked` traces a module and compares its finest stages with its own code, with the same
random numbers. `outcome` is what is compared, and the pass of the original; `stages` and `stage_pass` are the pass of
the stages, by whole backwards or as a plan runs them;
`compare` tells rounding from differences; `locate` finds the first module that differs, and `cause` guesses why.
`earlier_forwards` finds the layers that keep values from one forward to the next.
`losses` notices losses that depend on how a mini-batch is cut into micro-batches, `mixed_samples` such models, and
`first_samples` such losses when training begins.
`target_weights` tells how much a micro-batch counts in a loss that computes means over targets, which `noted_means`
sees; for that losses run once more, and `tracing.reached_state` puts back what they keep.
"""
