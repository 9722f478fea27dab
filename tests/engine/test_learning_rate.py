"""The learning rate is a pure function of the step."""

import pytest

from mpipar.engine.learning_rate import Cosine


def test_warm_up_and_cosine():
    rate = Cosine(1e-3, 4, 20)
    assert [rate(s) for s in (1, 2, 3, 4)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3], rel=1e-15)
    assert rate(12) == pytest.approx(5e-4, rel=1e-12)
    assert rate(20) == pytest.approx(0, abs=1e-18)
    assert Cosine(1e-3, 4, 20, minimum=1e-4)(20) == pytest.approx(1e-4)


def test_odd_sizes():
    assert Cosine(1.0, 0, 0)(1) == 0.0
    assert Cosine(1.0, 10, 5)(5) == 0.5  # still warming up
    with pytest.raises(ValueError, match="at least 0"):
        Cosine(1.0, -1, 5)
