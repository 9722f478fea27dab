"""The mesh: which ranks form which groups, what is refused, meshes beside each other."""
import itertools
import subprocess
import sys
import time

import numpy as np
import pytest
from mpi4py import MPI

from mpipar.comm.mesh import AXES, Mesh, check_order, fit
from tests.helpers.jobs import ROOT, environment

ORDERS = list(itertools.permutations(AXES))


def test_the_sizes_are_filled_in():
    assert fit(8, {"dp": None, "pp": 2, "tp": 2}) == {"dp": 2, "pp": 2, "tp": 2}
    assert fit(8, {"dp": 4, "pp": 1, "tp": 2}) == {"dp": 4, "pp": 1, "tp": 2}
    assert fit(1, {"dp": None, "pp": 1, "tp": 1}) == {"dp": 1, "pp": 1, "tp": 1}


@pytest.mark.parametrize("ranks, sizes, text", [
    (4, dict(dp=None, pp=1, tp=3), "tp=3 does not divide 4 ranks: tp can be 1, 2 or 4"),
    (4, dict(dp=None, pp=3, tp=1), "pp=3 does not divide 4 ranks: pp can be 1, 2 or 4"),
    (1, dict(dp=None, pp=1, tp=2), "tp=2 does not divide 1 rank: tp can be 1"),
    (8, dict(dp=None, pp=4, tp=4), "pp=4 does not fit 8 ranks beside tp=4: pp can be 1 or 2"),
    (8, dict(dp=2, pp=2, tp=1), "dp*pp*tp = 2*2*1 = 4, but there are 8 ranks: the product has to be 8"),
    (4, dict(dp=2, pp=2, tp=2), "dp*pp*tp = 2*2*2 = 8, but there are 4 ranks: the product has to be 4"),
    (4, dict(dp=None, pp=1, tp=0), "tp=0 is no size of an axis: a whole number, 1 or more, is needed"),
    (4, dict(dp=None, pp=1, tp=2.0), "tp=2.0 is no size of an axis: a whole number, 1 or more, is needed"),
    (4, dict(dp=-1, pp=1, tp=2), "dp=-1 is no size of an axis: a whole number, 1 or more, is needed"),
])
def test_sizes_that_do_not_fit(ranks, sizes, text):
    with pytest.raises(ValueError) as caught:
        fit(ranks, sizes)
    assert str(caught.value) == text


@pytest.mark.parametrize("order", [("dp", "pp"), ("dp", "pp", "tp", "tp"), ("dp", "pp", "xx"), ()])
def test_an_order_that_is_none(order):
    with pytest.raises(ValueError, match="names each of dp, pp, tp once"):
        check_order(order)
    with pytest.raises(ValueError, match="names each of dp, pp, tp once"):
        Mesh(order=order)


def test_the_serial_mesh_needs_no_mpi():
    code = """if True:
        import sys
        sys.modules["mpi4py"] = None                        # an import of it would fail
        from mpipar.comm import Mesh
        import numpy as np
        x = np.arange(3.0)
        for mesh in (Mesh.serial(), Mesh()):
            assert mesh.tp.all_reduce(x) is x and mesh.shape == {"dp": 1, "pp": 1, "tp": 1} and mesh.is_root
            assert mesh.first_on_node(lambda: 5) == 5 and mesh.nodes == mesh.ranks_on_node == 1
            with mesh.record() as log:
                mesh.world.all_reduce_start(x, "mean").wait()
            assert log.sent() == log.calls() == 0
            mesh.close()
        """
    subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, check=True)


def test_importing_comm_does_not_start_mpi():
    code = """if True:
        import sys, mpipar.comm.mesh, mpipar.comm.guard, mpipar.comm.fault
        assert "mpi4py" not in sys.modules
        """
    subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, check=True)


@pytest.mark.mpi(np=[1, 2, 4, 8])
@pytest.mark.parametrize("order", ORDERS, ids=",".join)
def test_every_factorisation(comm, order):
    """Each axis's group has the ranks that differ in that coordinate only, in its order."""
    sizes = [s for s in itertools.product(range(1, comm.size + 1), repeat=3) if np.prod(s) == comm.size]
    for dp, pp, tp in sizes:
        with Mesh(comm, dp=dp if tp == 1 else None, pp=pp, tp=tp, order=order) as mesh:
            assert mesh.shape == {"dp": dp, "pp": pp, "tp": tp} and mesh.rank == comm.rank
            everybody = [None] * mesh.size
            for rank in range(mesh.size):
                place = np.unravel_index(rank, [mesh.shape[axis] for axis in order])
                everybody[rank] = dict(zip(order, map(int, place)))
            assert mesh.coordinates == everybody[mesh.rank]
            for axis in AXES:
                group = getattr(mesh, axis)
                same = [
                    r
                    for r in range(mesh.size)
                    if all(everybody[r][a] == mesh.coordinates[a] for a in AXES if a != axis)
                ]
                assert (
                    list(group.ranks)
                    == same
                    == mesh.groups(axis)[[mesh.rank in g for g in mesh.groups(axis)].index(True)]
                )
                assert (
                    group.size == mesh.shape[axis]
                    and group.rank == mesh.coordinates[axis]
                    and group.name == axis
                )
                found = group.all_gather(np.array([mesh.rank]))
                assert found.tolist() == same
            stage = mesh.coordinates["pp"]
            ends = [mesh.pp.ranks[0], mesh.pp.ranks[-1]] if stage in (0, pp - 1) and pp > 1 else [mesh.rank]
            assert (
                list(mesh.ends.ranks) == ends and mesh.ends.all_gather(np.array([mesh.rank])).tolist() == ends
            )
            assert mesh.world.ranks == tuple(range(mesh.size)) and mesh.world.name == "world"
    with Mesh(comm, tp=comm.size) as mesh:  # tp is the fastest axis unless the order says otherwise
        assert mesh.tp.ranks == tuple(range(comm.size))


@pytest.mark.mpi(np=[1, 4, 6])
def test_nodes(comm, monkeypatch):
    with Mesh(comm) as mesh:
        assert (
            mesh.nodes == 1 and mesh.ranks_on_node == mesh.node.size == mesh.size and mesh.world.single_node
        )
    monkeypatch.setenv("MPIPAR_RANKS_PER_NODE", "4")
    with Mesh(comm, tp=2 if comm.size > 1 else 1) as mesh:
        assert mesh.nodes == -(-comm.size // 4) and mesh.tp.single_node
        assert mesh.world.single_node == mesh.dp.single_node == (comm.size <= 4)
        first = comm.rank // 4 * 4
        assert list(mesh.node.ranks) == list(range(first, min(first + 4, comm.size)))
        x = np.array([mesh.rank])
        assert mesh.node.all_reduce(x)[0] == sum(mesh.node.ranks)


@pytest.mark.mpi(np=4)
def test_one_rank_of_each_node_goes_first(comm, monkeypatch, tmp_path):
    monkeypatch.setenv("MPIPAR_RANKS_PER_NODE", "2")
    with Mesh(comm) as mesh:
        path = comm.bcast(str(tmp_path)) + f"/node{mesh.rank // 2}"

        def make():
            try:
                return open(path).read()
            except FileNotFoundError:
                time.sleep(0.1)
                with open(path, "w") as file:
                    file.write(f"made by {mesh.rank}")
                return "first"
        assert mesh.first_on_node(make) == ("first" if mesh.rank % 2 == 0 else f"made by {mesh.rank - 1}")


@pytest.mark.mpi(np=4)
def test_two_meshes_do_not_mix(comm):
    one, two = Mesh(comm, tp=2), Mesh(comm, pp=2, tp=2, order=("tp", "dp", "pp"))
    x, y = np.array([1.0 + comm.rank]), np.array([10.0 * (1 + comm.rank)])
    pending = one.world.all_reduce_start(x)
    two.world.all_reduce(y)
    two.close()
    pending.wait()
    assert (x, y) == (10, 100)
    one.tp.all_reduce(x)
    assert x == 20
    one.close()


@pytest.mark.mpi(np=4)
def test_closing_frees_every_communicator(comm):
    """MPI has room for some 2,000 of them."""
    mesh = Mesh(comm, pp=2, tp=2)
    groups = [mesh.world, mesh.dp, mesh.pp, mesh.tp, mesh.ends, mesh.node]
    handles = [group.comm for group in groups if group.size > 1]
    assert len(handles) == 5
    mesh.close()
    mesh.close()
    assert all(handle == MPI.COMM_NULL for handle in handles) and all(group.comm is None for group in groups)


@pytest.mark.mpi(np=3)
def test_wrong_sizes_are_refused_by_all_ranks_before_any_message(comm):
    for sizes in (dict(tp=2), dict(dp=3, pp=3), dict(order=("pp", "dp"))):
        with pytest.raises(ValueError):
            Mesh(comm, **sizes)
    x = np.ones(1)
    comm.Allreduce(np.ones(1), x)
    assert x == 3


@pytest.mark.mpi(np=4)
def test_a_mesh_of_some_of_the_ranks(comm):
    half = comm.Split(comm.rank // 2)
    with Mesh(half, tp=2) as mesh:
        assert mesh.size == 2 and mesh.tp.all_gather(np.array([comm.rank])).tolist() == [
            comm.rank // 2 * 2,
            comm.rank // 2 * 2 + 1,
        ]
        assert mesh.tp.ranks == (0, 1) and mesh.tp.members == (comm.rank // 2 * 2, comm.rank // 2 * 2 + 1)
    half.Free()
