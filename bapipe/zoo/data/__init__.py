"""Data sets for the models of the zoo.

`dataset` has the type that the runtime expects of any data set, `PipelineDataset`, and adapters for users' own classes:
begin there. `open_dataset` opens the data set that a user names.

- `images`: digits, made-up images, and folders of images, decoded and cropped by `image_io`
- `segmentation`: images and volumes with a class for each pixel; `synthetic_volumes`: volumes and their parameters
- `language_modeling`: texts whose next or masked tokens are to be predicted; `vqa`: images with questions
- `translation`: pairs of sentences, in words or in the subwords of `subwords`, from files or from the message
  catalogues of this machine (`gettext_corpus`); `buckets`: the same in several lengths
"""
