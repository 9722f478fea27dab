"""Sums over rows against NumPy, in place too."""

import numpy as np
import pytest

from mpipar.kernels.shared import sum_rows, sum_rows_everywhere


def block(count, length, dtype):
    return np.random.default_rng(count * 1000 + length).standard_normal((count, length)).astype(dtype)


def in_order(rows, divisor=1):
    """The rows added one after the other, as the kernel does."""
    total = rows[0].copy()
    for row in rows[1:]:
        total = total + row
    return total / rows.dtype.type(divisor)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count,length,first,last", [
    (1, 8, 0, 8), (2, 5, 1, 4), (3, 3000, 7, 2999), (4, 70_000, 0, 70_000), (2, 9, 4, 4),
])
def test_sums(dtype, count, length, first, last):
    rows = block(count, length, dtype)
    for divisor in (1, count):
        expected = in_order(rows, divisor)[first:last]
        assert np.array_equal(sum_rows(rows, first, last, np.empty(last - first, dtype), divisor), expected)
        for row in range(count):                        # into one of the rows: the others stay
            work = rows.copy()
            sum_rows(work, first, last, work[row, first:last], divisor)
            assert np.array_equal(work[row, first:last], expected)
            work[row, first:last] = rows[row, first:last]
            assert np.array_equal(work, rows)
        work = sum_rows_everywhere(rows.copy(), first, last, divisor)
        for row in range(count):
            assert np.array_equal(work[row, first:last], expected)
        assert np.array_equal(work[:, :first], rows[:, :first]) and np.array_equal(work[:, last:], rows[:, last:])


def test_what_does_not_fit_is_refused():
    rows = np.zeros((2, 8))
    for bad in (lambda: sum_rows(rows, 0, 4, np.zeros(3)), lambda: sum_rows(rows, 0, 9, np.zeros(9)),
                lambda: sum_rows(rows[:, ::2], 0, 2, np.zeros(2)), lambda: sum_rows_everywhere(rows.astype(int), 0, 4)):
        with pytest.raises(ValueError):
            bad()
