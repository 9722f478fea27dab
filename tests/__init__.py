"""Tests. One folder for each folder of mpipar, `harness/` for what runs them, and no test that measures time.

A test of one process is an ordinary pytest function. A test that needs ranks says how many and takes
`comm`, a communicator of exactly that many ranks:

    @pytest.mark.mpi(np=[2, 4])
    def test_sum(comm):
        assert comm.allreduce(1) == comm.size

`python -m pytest` runs both kinds: it starts one `mpirun` for each number of ranks.
`mpirun -np 2 python -m pytest` runs those of two ranks only. Python files that tests share are imported by
their full name, `from tests.comm.helpers import ...`."""
