"""Patterns for modules match these, and no others."""

import pytest
from torch import nn

from bapipe.tracing.leaf_modules import matching_paths, patterns_of

MODULE = nn.ModuleDict(
    {
        "stages": nn.ModuleList(nn.ModuleDict({"attn": nn.Linear(2, 2), "mlp": nn.Linear(2, 2)}) for _ in range(12)),
        "head": nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        "conv1": nn.ModuleDict({"attn": nn.Linear(2, 2)}),
    }
)


@pytest.mark.parametrize(
    ("paths", "patterns"),
    [
        ([f"stages.{n}.attn" for n in range(12)], ["stages.*.attn"]),
        (["stages.3.attn", "stages.10.attn"], ["stages.3.attn", "stages.10.attn"]),
        (["head.0", "head.1"], ["head.*"]),
        (["stages.0", "stages.1"], ["stages.0", "stages.1"]),  # `*` matches dots, too
        (["head", "conv1.attn"], ["head", "conv1.attn"]),
        ([*(f"stages.{n}.mlp" for n in range(12)), "head.1"], ["stages.*.mlp", "head.1"]),
    ],
)
def test_patterns_have_stars_for_numbers_where_they_match_no_other_modules(
    paths: list[str], patterns: list[str]
) -> None:
    assert patterns_of(MODULE, paths) == patterns
    assert matching_paths(MODULE, patterns) == paths
