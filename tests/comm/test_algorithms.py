"""All-reduces over send and receive: their sums, and the steps and bytes that their table states."""

import numpy as np
import pytest

from mpipar.comm.algorithms import ALGORITHMS, fits, predicted
from mpipar.comm.mesh import Mesh


@pytest.mark.mpi(np=[1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 5, 64])
def test_sums(comm, count):
    with Mesh(comm) as mesh:
        group = mesh.world
        for name, function in ALGORITHMS.items():
            if fits(name, group.size):
                x = np.arange(count, dtype=np.float64) * (group.rank + 1)
                assert function(group, x) is x
                np.testing.assert_array_equal(x, np.arange(count) * sum(range(1, group.size + 1)), name)
            else:
                with pytest.raises(ValueError, match="power of two"):
                    function(group, np.zeros(count))


@pytest.mark.mpi(np=[2, 4])
def test_bytes_and_steps_are_those_of_the_table(comm):
    with Mesh(comm) as mesh:
        group = mesh.world
        for name, function in ALGORITHMS.items():
            x = np.ones(64)
            with mesh.record() as log:
                function(group, x)
            steps, sent = predicted(name, group.size, x.nbytes)
            mine = [entry for entry in log.entries if entry.operation == "send"]
            most = group.all_reduce(np.array([len(mine), log.sent("group").get(group.name, 0)], np.int64), op="max")
            assert most[1] == sent, name
            if name not in ("two_calls", "tree"):  # in a tree no rank takes part in all steps as a sender
                assert most[0] == steps, name


def test_predictions():
    assert predicted("ring", 4, 1000) == (6, 1500) and predicted("ring", 1, 1000) == (0, 0)
    assert predicted("recursive_doubling", 8, 1000) == (3, 3000)
    assert predicted("recursive_halving", 8, 1000) == (6, 1750)
    assert predicted("tree", 5, 1000) == (6, 3000)
    with pytest.raises(ValueError, match="valid values: ring"):
        predicted("star", 4, 1000)


@pytest.mark.mpi(np=4)
def test_a_ring_that_forgets_a_step_is_noticed(comm):
    """Negative control: with one round less, some part is not the sum."""
    with Mesh(comm) as mesh:
        group = mesh.world

        class Short:
            rank, size = group.rank, group.size
            rounds = 0

            def recv_start(self, into, source):
                self.rounds += 1
                into[:] = 0 if self.rounds == 3 else into
                return group.recv_start(np.empty_like(into) if self.rounds == 3 else into, source)

            send_start = staticmethod(group.send_start)

        x = ALGORITHMS["ring"](Short(), np.ones(8))
        wrong = group.all_reduce(np.array([float(np.any(x != group.size))]))
        assert wrong[0] > 0
