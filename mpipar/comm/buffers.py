"""Arrays as messages: which arrays may be sent, how they are cut into parts and chunks, how a strided one is
packed.

Nothing here needs MPI. A message is a C-contiguous array of a type that MPI knows; an array in another memory
order is packed into one first, because MPI would send a Fortran array in memory order, that is transposed.
"""
import numpy as np

from mpipar.kernels.dtypes import bits, is_bfloat16

# Types of numpy that have an MPI type with arithmetic, in native byte order; bool is only moved and compared.
_ARITHMETIC = frozenset(np.dtype(letter) for letter in "fdbBhHiIlLqQ")
_BOOL = np.dtype(bool)
OPERATIONS = ("sum", "mean", "min", "max")


def split_sizes(n, parts):
    """Lengths of `parts` near-equal pieces of n: the first n % parts are one longer (65 in 2: [33, 32])."""
    if parts < 1 or n < 0:
        raise ValueError(f"cannot split {n} into {parts} parts: n >= 0 and parts >= 1 are needed")
    short, longer = divmod(n, parts)
    return [short + 1] * longer + [short] * (parts - longer)


def check_array(x, *, writable=False):
    """Raise unless x is an array that can be sent: TypeError for another object, ValueError for the kind."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"a group sends NumPy arrays, not {type(x).__name__}: wrap it, as in np.array(x)")
    if x.dtype not in _ARITHMETIC and x.dtype != _BOOL and not is_bfloat16(x.dtype):
        raise ValueError(
            f"dtype {x.dtype} cannot be sent: valid are float32, float64, bfloat16, integers and bool, "
            "in native byte order"
        )
    if writable and not x.flags.writeable:
        raise ValueError("the array is read-only, and the result is written into it")


def check_operation(x, op):
    """Raise ValueError unless `op` is defined for the type of x."""
    if op not in OPERATIONS:
        raise ValueError(f"op={op!r} is unknown: valid are {', '.join(OPERATIONS)}")
    if op == "mean" and x.dtype.kind != "f" and not is_bfloat16(x.dtype):
        raise ValueError(
            f"the mean of {x.dtype} is not a {x.dtype}: take the sum, or convert to float32 or float64"
        )
    if op == "sum" and x.dtype == _BOOL:
        raise ValueError(
            "the sum of bool is not a bool: take max for `any`, min for `all`, or convert to an integer"
        )


def check_axis(x, axis):
    """The axis counted from 0; ValueError if x has no such axis."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} does not exist in an array of shape {x.shape}")
    return axis % x.ndim


def packed(x):
    """x itself where it is C-contiguous, else a C-contiguous copy."""
    return x if x.flags.c_contiguous else np.ascontiguousarray(x)


def wire(x):
    """A C-contiguous array as MPI takes it: bool as bytes, so that min and max are defined, bfloat16 as its bits."""
    return x.view(np.uint8) if x.dtype == _BOOL else bits(x)


def chunks(x, limit):
    """The C-contiguous array x in near-equal pieces of at most `limit` elements (None: no limit); none
    where x is empty."""
    if limit is None or x.size <= limit:
        return (x,) if x.size else ()
    # Near-equal pieces: MPI libraries add very small messages in another order than the rest.
    flat, ends = x.reshape(-1), offsets(split_sizes(x.size, -(-x.size // limit)))
    return [flat[start:stop] for start, stop in zip(ends, ends[1:])]


def begin_together(a, b):
    """True where two arrays begin at the same address (also empty ones, as parts of a third may be)."""
    return a.__array_interface__["data"][0] == b.__array_interface__["data"][0]


def with_length(shape, axis, length):
    """The shape with `length` along `axis`."""
    return shape[:axis] + (length,) + shape[axis + 1:]


def counts(shape, axis, sizes):
    """Elements of each part of an array of `shape` that is cut along `axis` into `sizes`."""
    others = 1
    for i, length in enumerate(shape):
        if i != axis:
            others *= length
    return [size * others for size in sizes]


def offsets(lengths):
    """Where each part starts when the parts stand one after the other, and where the last one ends."""
    places = [0]
    for length in lengths:
        places.append(places[-1] + length)
    return places


def parts_in_order(shape, axis):
    """True where the parts along `axis` stand one after the other in a C-contiguous array of `shape`."""
    return all(length == 1 for length in shape[:axis])


def pack_parts(x, axis, sizes):
    """A flat array of x's parts along `axis`, one after the other; shares x's memory where it can."""
    if x.flags.c_contiguous and parts_in_order(x.shape, axis):
        return x.reshape(-1)
    flat = np.empty(x.size, x.dtype)
    ends, begins = offsets(counts(x.shape, axis, sizes)), offsets(sizes)
    for i, size in enumerate(sizes):
        part = x[(slice(None),) * axis + (slice(begins[i], begins[i + 1]),)]
        flat[ends[i]:ends[i + 1]].reshape(part.shape)[...] = part
    return flat


def unpack_parts(flat, out, axis, sizes):
    """The reverse of `pack_parts`: copies the parts in `flat` to their places in `out` (any strides)."""
    ends, begins = offsets(counts(out.shape, axis, sizes)), offsets(sizes)
    for i, size in enumerate(sizes):
        part = out[(slice(None),) * axis + (slice(begins[i], begins[i + 1]),)]
        part[...] = flat[ends[i]:ends[i + 1]].reshape(part.shape)


def check_sizes(sizes, length, parts, what):
    """Sizes of the parts of `length`: as given, or equal; ValueError where they do not fit."""
    if sizes is None:
        if length % parts:
            raise ValueError(
                f"{what} of length {length} does not divide among {parts} ranks: give the sizes, "
                f"as in sizes={split_sizes(length, parts)}"
            )
        return [length // parts] * parts
    sizes = [int(size) for size in sizes]
    if len(sizes) != parts or min(sizes) < 0 or sum(sizes) != length:
        raise ValueError(f"sizes={sizes} do not fit {what} of length {length} among {parts} ranks: they are "
                         f"{parts} numbers >= 0 with the sum {length}, as in {split_sizes(length, parts)}")
    return sizes


def check_out(out, shape, dtype):
    """`out` where given (ValueError if it does not fit), else a new array."""
    if out is None:
        return np.empty(shape, dtype)
    check_array(out, writable=True)
    if out.shape != tuple(shape) or out.dtype != dtype:
        raise ValueError(
            f"out has shape {out.shape} and dtype {out.dtype}: {tuple(shape)} and {dtype} are needed"
        )
    return out
