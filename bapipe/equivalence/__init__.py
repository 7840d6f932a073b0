"""Holds a traced and split model to the original, before anything trains.

Begin with `choose_layers`: `trace_checked` traces a module, and makes larger layers of what stages do not compute as
its own code does, or smaller ones (`inlining`); layers that pass values other than tensors become one (`handed_on`), as
do those that add to lists which only code around them empties (`growing_collections`).
`check` compares the finest stages with that code, with the same random numbers (`randomness`). `outcome` is what is
compared, and the pass of the original; `stages` and `stage_pass` are the pass of the stages, by whole backwards or as
a plan runs them, of which each sees attributes of its own only (`own_attributes`). `compare` tells rounding from
differences; `locate` finds the first module that differs, and `cause` guesses why. `earlier_forwards` finds the
layers that keep values from one forward to the next. `cut_gradients` says which tensors that cross a cut need a
gradient; `communication` stops code that would wait for other processes.

`losses` notices losses that depend on how a mini-batch is cut into micro-batches, `mixed_samples` such models, and
`first_samples` such losses when training begins; `sample_dims` finds the samples in what a model returns,
`samples_of_model` by its traced code, and `ignored_labels` the labels that a loss may leave out. `target_weights` tells
how much a micro-batch counts in a loss that computes means over targets, which `noted_means` sees; for that losses run
once more, and `loss_state` puts back what they keep.
"""
