"""Statistics of passes, by hand."""

from bapipe.profiler.layer_times import _spread_search_time, _typical, spread


def test_medians_are_scaled_to_the_median_pass() -> None:
    """Medians 2 and 3 add up to 5; the passes take 12, 5 and 6, of which 6 is the median."""
    assert _typical([(10, 2), (2, 3), (1, 5)]) == (round(2 * 6 / 5), round(3 * 6 / 5))
    assert _typical([(0, 0), (0, 0)]) == (0, 0)


def test_the_interval_is_the_whole_range_below_six_values() -> None:
    assert spread([9, 10, 11, 10, 10]) == 0.1
    assert spread([0, 0]) == 0.0
    outlier = [10] * 20 + [1000]
    assert spread(outlier) == 0.0  # the sign test leaves the extremes out


def test_the_search_for_weight_groups_is_divided_among_their_layers() -> None:
    times = [1, 2, 3, 10]
    _spread_search_time(times, {0, 2})
    assert times == [6, 2, 8, 0]
