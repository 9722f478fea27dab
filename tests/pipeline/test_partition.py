"""Layers over stages."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.parallel.pipeline.partition import even_costs, split_layers, stage_layers


@pytest.mark.parametrize("layers, stages, counts", [
    (7, 2, [4, 3]), (10, 3, [4, 3, 3]), (30, 4, [8, 8, 7, 7]), (4, 4, [1, 1, 1, 1]), (5, 1, [5])])
def test_counts(layers, stages, counts):
    assert split_layers(layers, stages) == counts


def test_an_explicit_split():
    assert split_layers(7, 3, [1, 5, 1]) == [1, 5, 1]
    assert stage_layers(7, 3, [1, 5, 1]) == [range(0, 1), range(1, 6), range(6, 7)]


@pytest.mark.parametrize("arguments, message", [
    ((3, 4), "3 layers do not fill 4 pipeline stages; valid: at least one layer a stage"),
    ((7, 2, [4, 4]), r"4\+4; valid: 2 counts of at least 1 that add up to 7, such as 4\+3"),
    ((7, 2, [7]), "7; valid: 2 counts"), ((7, 2, [7, 0]), "valid: 2 counts of at least 1"),
    ((7, 2, [3.5, 3.5]), r"3.5\+3.5; valid: 2 counts"), ((7, 0), "0 stages; valid: at least 1")])
def test_what_does_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        split_layers(*arguments)


@given(st.integers(1, 16), st.integers(0, 100))
def test_every_layer_once_in_order(stages, more):
    layers = stages + more
    assert [layer for stage in stage_layers(layers, stages) for layer in stage] == list(range(layers))
    counts = split_layers(layers, stages)
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 20), st.integers(0, 20))
def test_even_costs_are_the_best_of_all_divisions(costs, stages, front, back):
    if stages > len(costs):
        with pytest.raises(ValueError, match="do not fill"):
            even_costs(costs, stages, front, back)
        return

    def dearest(counts):
        ends = list(itertools.accumulate(counts))
        sums = [sum(costs[end - count:end]) for end, count in zip(ends, counts)]
        sums[0] += front
        sums[-1] += back
        return max(sums)

    found = even_costs(costs, stages, front, back)
    every = [counts for counts in itertools.product(range(1, len(costs) + 1), repeat=stages)
             if sum(counts) == len(costs)]
    assert tuple(found) in every and dearest(found) == min(map(dearest, every))


def test_equal_layers_and_a_dear_end():
    assert sorted(even_costs([1] * 30, 4)) == [7, 7, 8, 8]
    assert even_costs([1] * 8, 4) == [2, 2, 2, 2]
    assert even_costs([1] * 6, 2, back=10) == [5, 1]
    assert even_costs([1] * 6, 2, front=4) == [1, 5]
