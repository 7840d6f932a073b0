"""The file formats profile/1, cluster/1 and plan/1: one module per type, each a frozen record checked when it is built.

Begin with `plan.py`, which holds the other two, with its `stage_plan.py`, `prediction.py` and `certificate.py`.
`profile.py` holds the layers of `layer_profile.py` and their `measurement.py`. `settings.py` is how a model is
computed. `codec.py` reads and writes the files, with the path inside the file in every error; `cache.py` stores
profiles and plans between commands; `schemas/` holds the JSON Schemas, written by `python -m bapipe.formats.schemas`.
"""
