import itertools
import math
import os

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aqtlite.allocation import knapsack, quiet
from aqtlite.allocation.knapsack import Option

pytestmark = pytest.mark.code("quick")

COSTS = st.one_of(
    st.floats(-1, 10, allow_subnormal=False), st.integers(0, 3).map(float)
)
OPTIONS = st.lists(st.builds(Option, COSTS, st.integers(0, 40)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(st.lists(OPTIONS, min_size=1, max_size=4), st.integers(0, 120))
@example([[Option(0.0, 12), Option(0.0, 1), Option(0.0, 0)]], 0)
def test_it_is_as_good_as_trying_all(groups, limit):
    def totals(choice):
        taken = [options[i] for options, i in zip(groups, choice, strict=True)]
        return sum(one.cost for one in taken), sum(one.size for one in taken)

    all_of_them = itertools.product(*(range(len(options)) for options in groups))
    fitting = [cost for cost, size in map(totals, all_of_them) if size <= limit]
    solved = knapsack.solve(groups, limit)
    if not fitting:
        assert solved is None
        assert knapsack.smallest(groups) > limit
        return
    cost, size = totals(solved)
    assert size <= limit
    assert cost <= min(fitting) + 1e-6 * max(1.0, *map(abs, fitting))


@pytest.mark.parametrize("scale", [1e-307, 1e-9, 1.0, 1e9])
def test_the_scale_of_costs_and_sizes_does_not_matter(scale):
    sizes = 7_000_000_001, 3_500_000_000
    group = [Option(0.0, sizes[0]), Option(scale, sizes[1])]
    close = [Option(0.0, sizes[0]), Option(1.01 * scale, sizes[1])]
    assert knapsack.solve([group, close], sum(sizes)) == [1, 0]
    assert knapsack.solve([group, close], sum(sizes) - 1) == [1, 1]


def test_options_without_a_finite_cost_are_not_taken():
    group = [Option(math.nan, 1), Option(math.inf, 2), Option(5.0, 9)]
    assert knapsack.solve([group], 100) == [2]
    assert knapsack.solve([group], 8) is None


def test_the_solver_prints_nothing(capfd):
    random = np.random.default_rng(0)
    groups = []
    for size in random.integers(100, 10_000, 25):
        costs = random.exponential(4.0 ** -np.arange(2, 7))
        groups.append([Option(0.0, 32 * int(size))])
        groups[-1] += [
            Option(float(cost), bits * int(size)) for bits, cost in enumerate(costs, 2)
        ]
    total = sum(group[0].size for group in groups)
    for part in np.linspace(0.07, 0.3, 12):
        knapsack.solve(groups, int(total * part))
    assert capfd.readouterr().out == ""


def test_what_others_print_meanwhile_is_kept(capfd):
    print("before")
    with quiet.without_stray_lines():
        os.write(1, b"one\n" + quiet.STRAY + b"other\n")
    print("after")
    assert capfd.readouterr().out == "before\none\nother\nafter\n"
