"""Loading of data: which items a mini-batch has, which parts of them a rank loads, and when.

Begin with `loader`, which yields mini-batches in an order drawn from a seed, with torch's DataLoader. `training_data`
opens the data set of a run, `samples_digest` tells whether two have the same samples. `buckets` puts items of similar
sizes into one mini-batch, `validation_split` holds out data to evaluate on, and `workers` chooses the number of
processes that load data. The type of data sets is `bapipe.zoo.data.dataset.PipelineDataset`.
"""
