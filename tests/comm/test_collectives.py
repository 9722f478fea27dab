"""Every collective against the same thing done in NumPy on all ranks' inputs, for arrays of every kind and
any group size."""
import numpy as np
import pytest

from mpipar.comm.buffers import split_sizes
from mpipar.comm.mesh import Mesh

RANKS = [1, 2, 3, 4]
REDUCE = {"sum": lambda stack: stack.sum(0), "mean": lambda stack: stack.mean(0),
          "min": lambda stack: stack.min(0), "max": lambda stack: stack.max(0)}


@pytest.fixture(params=["mpi", "auto"])
def world(comm, request):
    """All ranks, by messages, or (floats) through slots of shared memory."""
    with Mesh(comm, back_end=request.param) as mesh:
        yield mesh.world


def input_of(rank, shape, dtype="f8"):
    """What rank `rank` puts in: integers, so that sums are exact in any order."""
    values = np.random.default_rng(rank).integers(0, 50, shape)
    return (values % 2 == 0) if dtype == "?" else values.astype(dtype)


def inputs(world, shape, dtype="f8"):
    return np.stack([input_of(rank, shape, dtype) for rank in range(world.size)])


def layouts(shape, dtype="f8"):
    """Empty arrays of one shape in several memory layouts, named."""
    rows, columns = shape
    yield "C", np.zeros(shape, dtype)
    yield "Fortran", np.zeros(shape, dtype, order="F")
    yield "transposed", np.zeros((columns, rows), dtype).T
    yield "every second column", np.zeros((rows, 2 * columns), dtype)[:, ::2]
    yield "reversed", np.zeros(shape, dtype)[::-1]
    yield "rows of a larger one", np.zeros((rows + 4, columns + 1), dtype)[2:-2, :-1]


@pytest.mark.mpi(np=RANKS)
@pytest.mark.parametrize("op", sorted(REDUCE))
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8", "u1", "?"])
def test_reductions(world, op, dtype):
    if op == "mean" and dtype not in ("f4", "f8") or op == "sum" and dtype == "?":
        with pytest.raises(ValueError, match=f"the {op} of"):
            world.all_reduce(np.zeros(3, dtype), op)
        return
    expected = REDUCE[op](inputs(world, (4, 3), dtype)).astype(dtype)
    x = input_of(world.rank, (4, 3), dtype)
    assert world.all_reduce(x, op) is x
    np.testing.assert_array_equal(x, expected)
    y = input_of(world.rank, (4, 3), dtype)
    for root in range(world.size):
        result = world.reduce(y, root, op)
        if world.rank == root:
            np.testing.assert_array_equal(result, expected)
        else:
            assert result is None
    np.testing.assert_array_equal(y, input_of(world.rank, (4, 3), dtype))


@pytest.mark.mpi(np=RANKS)
def test_the_view_that_was_passed_holds_the_result(world):
    shape = (4, 6)
    total, first = inputs(world, shape).sum(0), input_of(0, shape)
    for name, x in layouts(shape):
        around = x.base.copy() if x.base is not None else None
        x[...] = input_of(world.rank, shape)
        assert world.all_reduce(x) is x
        np.testing.assert_array_equal(x, total, name)
        x[...] = input_of(world.rank, shape)
        world.broadcast(x, 0)
        np.testing.assert_array_equal(x, first, name)
        if around is not None:
            x[...] = 0                      # what lies between the elements of the view was not touched
            np.testing.assert_array_equal(x.base, around, name)


@pytest.mark.mpi(np=[2, 3])
def test_each_rank_may_have_its_own_layout(world):
    shape = (4, 6)
    x = list(layouts(shape))[world.rank][1]
    x[...] = input_of(world.rank, shape)
    np.testing.assert_array_equal(world.all_reduce(x), inputs(world, shape).sum(0))
    gathered = world.all_gather(list(layouts(shape))[world.rank + 1][1] + world.rank)
    np.testing.assert_array_equal(gathered[::4, 0], np.arange(world.size))


@pytest.mark.mpi(np=2)
def test_plain_mpi_would_transpose(comm):
    """Negative control: what the packing is for. MPI sends a Fortran array in memory order."""
    x, out = np.asfortranarray(np.arange(9.0).reshape(3, 3)), np.empty((3, 3))
    comm.Allreduce(x, out)
    assert (out != 2 * x).any() and (out == 2 * x.T).all()


@pytest.mark.mpi(np=RANKS)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("even", [True, False])
def test_gather_and_scatter_along_an_axis(world, axis, even):
    whole = (
        np.arange(8 * 12 * 24.0).reshape(8, 12, 24)[:, :, ::2]
        if even
        else np.arange(9 * 7 * 11.0).reshape(9, 7, 11)
    )
    whole = whole if whole.shape[axis] % world.size == 0 or not even else whole[:6, :6, :6]
    sizes = split_sizes(whole.shape[axis], world.size)
    if even:
        assert len(set(sizes)) == 1
    parts = np.split(whole, np.cumsum(sizes)[:-1], axis)
    mine, given = parts[world.rank], None if even else sizes
    np.testing.assert_array_equal(world.all_gather(mine, axis, given), whole)
    out = np.empty(whole.shape, order="F")
    assert world.all_gather(mine, axis, given, out=out) is out
    np.testing.assert_array_equal(out, whole)
    root = world.size - 1
    gathered = world.gather(mine, root, axis, given)
    if world.rank == root:
        np.testing.assert_array_equal(gathered, whole)
        scattered = world.scatter(whole, root, axis, given)
    else:
        assert gathered is None
        scattered = world.scatter(None, root, axis, given, shape=mine.shape, dtype=mine.dtype)
    np.testing.assert_array_equal(scattered, mine)
    out = np.zeros(mine.shape[::-1]).T
    assert world.scatter(whole if world.rank == root else None, root, axis, given, out=out) is out
    np.testing.assert_array_equal(out, mine)


@pytest.mark.mpi(np=RANKS)
@pytest.mark.parametrize("op", sorted(REDUCE))
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("even", [True, False])
def test_reduce_scatter(world, op, axis, even):
    shape = (12, 12, 12) if even else (5, 7, 9)
    sizes = split_sizes(shape[axis], world.size)
    stack = inputs(world, shape)
    expected = np.split(REDUCE[op](stack), np.cumsum(sizes)[:-1], axis)[world.rank]
    for x in (stack[world.rank].copy(), np.asfortranarray(stack[world.rank])):
        result = world.reduce_scatter(x, axis, op, None if even else sizes)
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(x, stack[world.rank])
    out = np.zeros(expected.shape[::-1]).T
    assert world.reduce_scatter(x, axis, op, sizes, out=out) is out
    np.testing.assert_array_equal(out, expected)


@pytest.mark.mpi(np=RANKS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_to_all(world, axis):
    stack = inputs(world, (12, 12, 24))
    parts = [np.split(x, world.size, axis)[world.rank] for x in stack]
    x = np.asfortranarray(stack[world.rank])
    np.testing.assert_array_equal(world.all_to_all(x, axis), np.concatenate(parts, axis))


@pytest.mark.mpi(np=RANKS)
def test_all_to_all_with_different_parts(world):
    rows = np.random.default_rng(5).integers(0, 4, (world.size, world.size))        # from, to; some are 0
    send, receive = rows[world.rank], rows[:, world.rank]
    x = np.array(
        [[100 * world.rank + to, row] for to in range(world.size) for row in range(send[to])], "f8"
    ).reshape(-1, 2)
    expected = [
        [100 * source + world.rank, row] for source in range(world.size) for row in range(receive[source])
    ]
    np.testing.assert_array_equal(
        world.all_to_all_v(x, send, receive), np.array(expected, "f8").reshape(-1, 2)
    )


@pytest.mark.mpi(np=[2, 3, 4])
def test_send_and_receive(world):
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    for (name, x), (_, out) in zip(layouts((3, 5)), layouts((3, 5))):
        x[...] = input_of(world.rank, (3, 5))
        pending = world.send_start(x, right, tag=7)
        assert world.recv(out, left, tag=7) is out
        assert pending.wait() is None
        np.testing.assert_array_equal(out, input_of(left, (3, 5)), name)
    if world.rank == 0:
        world.send(np.arange(3), 1, tag=2)
        world.send(np.arange(3) + 10, 1, tag=1)
    elif world.rank == 1:
        first, second = np.zeros(3, int), np.zeros(3, int)
        pending = world.recv_start(second, 0, tag=2)
        world.recv(first, 0, tag=1)
        pending.wait()
        assert first.tolist() == [10, 11, 12] and second.tolist() == [0, 1, 2]
    world.barrier()


@pytest.mark.mpi(np=RANKS)
def test_arrays_without_elements(world):
    for shape in [(0,), (0, 3), (4, 0)]:
        for x in (np.zeros(shape), np.zeros(shape[::-1]).T):
            assert world.all_reduce(x, "mean") is x
            assert world.broadcast(x) is x
            assert world.reduce(x, 0) is None or world.rank == 0
            assert world.all_gather(x).shape == (shape[0] * world.size,) + shape[1:]
            gathered = world.gather(x, 0)
            assert gathered is None or gathered.shape == (shape[0] * world.size,) + shape[1:]
            sizes = split_sizes(shape[0], world.size)
            part = (sizes[world.rank],) + shape[1:]
            assert world.reduce_scatter(x, sizes=sizes).shape == part
            root = x if world.rank == 0 else None
            assert world.scatter(root, sizes=sizes, shape=part, dtype=x.dtype).shape == part
            assert world.all_to_all_v(x, sizes, [part[0]] * world.size).shape[1:] == shape[1:]
    if world.size > 1:
        pending = world.send_start(np.zeros((0, 3)), (world.rank + 1) % world.size)
        world.recv(np.zeros((0, 3)), (world.rank - 1) % world.size)
        pending.wait()
    assert world.all_to_all(np.zeros((0, 3))).shape == (0, 3)


@pytest.mark.mpi(np=[1, 3])
def test_an_array_without_axes(world):
    x = np.array(world.rank + 1.0)
    assert world.all_reduce(x) is x and x == world.size * (world.size + 1) / 2
    with pytest.raises(ValueError, match="axis 0 does not exist"):
        world.all_gather(x)


@pytest.mark.mpi(np=[1, 2])
def test_what_this_rank_can_see_is_refused_and_nothing_is_sent(world):
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    refused = [
        (TypeError, "not list", lambda: world.all_reduce([1.0, 2.0])),
        (TypeError, "not float64", lambda: world.all_reduce(np.float64(1))),
        (ValueError, "dtype float16", lambda: world.all_reduce(np.zeros(2, "f2"))),
        (ValueError, "dtype >f8", lambda: world.all_reduce(np.zeros(2, ">f8"))),
        (ValueError, "dtype object", lambda: world.broadcast(np.zeros(2, object))),
        (ValueError, "valid are sum, mean, min, max", lambda: world.all_reduce(np.zeros(2), "avg")),
        (ValueError, "read-only", lambda: world.all_reduce(read_only)),
        (ValueError, f"valid are 0 to {world.size - 1}", lambda: world.broadcast(np.zeros(2), root=5)),
        (ValueError, "does not exist", lambda: world.all_gather(np.zeros(2), axis=1)),
        (ValueError, "do not fit", lambda: world.reduce_scatter(np.zeros(6), sizes=[1] * world.size)),
        (ValueError, "give rank|do not fit", lambda: world.all_gather(np.zeros(6), sizes=[1] * world.size)),
        (
            ValueError,
            "sends itself|do not fit",
            lambda: world.all_to_all_v(
                np.zeros(2), [2] + [0] * (world.size - 1), [0] * (world.size - 1) + [1]
            ),
        ),
        (ValueError, "is this rank itself|not a rank", lambda: world.send(np.zeros(2), world.rank)),
        (ValueError, "not a rank", lambda: world.recv(np.zeros(2), world.size)),
    ]
    if world.size == 2:
        refused += [
            (ValueError, "out has shape", lambda: world.all_gather(np.zeros(2), out=np.zeros(2))),
            (ValueError, r"sizes=\[33, 32\]", lambda: world.reduce_scatter(np.zeros(65))),
            (ValueError, "tag=40000", lambda: world.send(np.zeros(2), 1 - world.rank, tag=40000)),
            (
                ValueError,
                "`shape` and `dtype`|not list",
                lambda: world.scatter(np.zeros(2) if 0 else None, 1 - world.rank),
            ),
        ]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()
    x = np.ones(3)
    world.all_reduce(x)                     # still in step
    assert (x == world.size).all()


@pytest.mark.mpi(np=1)
def test_a_group_of_one_returns_its_input_untouched(world):
    x = np.arange(6.0).reshape(2, 3).T
    for result in (
        world.all_reduce(x, "mean"),
        world.reduce(x),
        world.broadcast(x),
        world.all_gather(x, 1),
        world.gather(x),
        world.reduce_scatter(x),
        world.scatter(x),
        world.all_to_all(x),
        world.all_to_all_v(x, [3], [3]),
        world.all_reduce_start(x).wait(),
    ):
        assert result is x
    assert world.barrier() is None and world.comm is None
    np.testing.assert_array_equal(x, np.arange(6.0).reshape(2, 3).T)


@pytest.mark.mpi(np=4)
def test_the_numbers_of_the_lecture(world):
    x = np.arange(4.0) + world.rank
    assert world.reduce_scatter(x).tolist() == [[6, 10, 14, 18][world.rank]]
    assert (
        world.all_gather(world.reduce_scatter(x)).tolist() == world.all_reduce(x).tolist() == [6, 10, 14, 18]
    )
    assert world.all_to_all(np.arange(4.0) + 4 * world.rank).tolist() == [
        world.rank + 4 * i for i in range(4)
    ]


@pytest.mark.mpi(np=RANKS)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 8, 13])
def test_in_place(world, length):
    """reduce_scatter into this rank's part of x, all_gather from this rank's part of out; empty parts too."""
    sizes = split_sizes(length, world.size)[::-1]
    ends = np.cumsum([0, *sizes])
    mine = slice(ends[world.rank], ends[world.rank + 1])
    total = inputs(world, (length,)).sum(0)
    for op, expected in (("sum", total), ("mean", total / world.size)):
        x = input_of(world.rank, (length,))
        part = world.reduce_scatter(x, op=op, sizes=sizes, out=x[mine])
        np.testing.assert_array_equal(x[mine], expected[mine])
        assert part.base is x or world.size == 1
    out = np.full(length, -1.0)
    out[mine] = total[mine]
    assert world.all_gather(out[mine], sizes=sizes, out=out) is out
    np.testing.assert_array_equal(out, total)
    out[mine] = 2 * total[mine]                          # and without waiting
    world.all_gather_start(out[mine], sizes=sizes, out=out).wait()
    np.testing.assert_array_equal(out, 2 * total)


@pytest.mark.mpi(np=[2, 3], timeout=30)
@pytest.mark.parametrize("part", [4, 100_000])
def test_in_place_of_a_strided_array_on_one_rank(world, part):
    """The others' arrays are contiguous: all the same they make the same call, without which the larger one hung."""
    P, me = world.size, world.rank
    x = np.zeros((part * P, 2))[:, 0] if me == 0 else np.zeros(part * P)
    x[:] = np.arange(part * P) + me
    mine = x[part * me:part * me + part]
    assert world.reduce_scatter(x, out=mine) is mine
    np.testing.assert_array_equal(mine, P * np.arange(part * me, part * me + part) + P * (P - 1) / 2)


@pytest.mark.mpi(np=[2, 3])
def test_plain_arrays_need_no_plan(comm, monkeypatch):
    """The same results, whether a call is planned or handed to MPI as it is; and which calls are."""
    world = Mesh(comm, back_end="mpi").world

    def results():
        x, whole = input_of(world.rank, (6, 4), "f4"), np.zeros((6 * world.size, 4), "f4")
        part = np.zeros((6 // world.size, 4), "f4")
        return [world.all_reduce(x.copy(), op) for op in ("sum", "min", "max")] + [
            world.broadcast(x.copy(), 1), world.reduce_scatter(x, out=part).copy(), world.all_gather(x, out=whole).copy(),
            world.all_to_all(x), world.all_reduce(np.full(100_000, x[0, 0]))]

    direct = results()
    monkeypatch.setattr(world, "direct", False)
    assert all((a == b).all() for a, b in zip(direct, results()))
    monkeypatch.undo()
    planned = []
    monkeypatch.setattr(world, "_run", lambda plan: planned.append(plan.operation))
    results()
    assert planned == []
    x, out = np.zeros((6, 4), "f4"), np.zeros((6, 4), "f4")
    uneven = [6] + [0] * (world.size - 1)
    calls = [
        lambda: world.all_reduce(x, "mean"), lambda: world.all_reduce(x.T), lambda: world.all_reduce(np.zeros(3, "i4")),
        lambda: world.all_reduce(np.zeros(0, "f4")), lambda: world.broadcast(x.T), lambda: world.all_to_all(x.T, 1),
        lambda: world.all_gather(x), lambda: world.all_gather(x, axis=1), lambda: world.reduce_scatter(x),
        lambda: world.reduce_scatter(x, sizes=uneven, out=out[:uneven[world.rank]]),
    ]
    for call in calls:
        planned.clear()
        call()
        assert len(planned) == 1
    monkeypatch.setattr(world, "limit", 23)  # elements in one call
    for elements, plans in ((23, 0), (24, 1)):
        planned.clear()
        world.all_reduce(np.zeros(elements))
        assert len(planned) == plans


@pytest.mark.mpi(np=2)
def test_plain_arrays_that_do_not_fit_are_refused(world):
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    for call, words in ((lambda: world.all_reduce(np.zeros(3), "product"), "op='product' is unknown"),
                        (lambda: world.all_reduce(read_only), "read-only"), (lambda: world.all_reduce(np.zeros(3, ">f4")), "byte order"),
                        (lambda: world.all_gather(np.zeros(3), out=np.zeros(5)), "out has shape"),
                        (lambda: world.broadcast(np.zeros(3), 2), "root"),
                        (lambda: world.reduce_scatter(np.zeros(3), out=np.zeros(1)), "does not divide"),
                        (lambda: world.reduce_scatter(np.zeros(4), out=np.zeros(2, "f4")), "out has shape")):
        with pytest.raises(ValueError, match=words):
            call()
    x = np.arange(4.0)  # out within x: not handed over as it is
    assert (world.reduce_scatter(x, out=x[2 * world.rank:2 * world.rank + 2]) == world.size * np.arange(4.0)[2 * world.rank:][:2]).all()
