"""The types of numbers that a model can be made of, by name; nothing here needs Numba.

bfloat16 is the upper half of a float32 (8 bits of exponent, 8 of precision). NumPy has no such type: it comes from the
package ml_dtypes, which is imported only by those who ask for it. Compiled code sees its bits, as uint16.
"""

import numpy as np

NAMES = ("float32", "float64", "bfloat16")


def as_dtype(name) -> np.dtype:
    """The dtype of a name of NAMES, or of a dtype; ValueError for any other."""
    if isinstance(name, str) and name == "bfloat16":
        return bfloat16()
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in NAMES:
        raise ValueError(f"dtype is {name}; valid values: {', '.join(NAMES)}")
    return dtype


def bfloat16() -> np.dtype:
    """ml_dtypes' bfloat16; ValueError where that package is missing."""
    try:
        import ml_dtypes
    except ImportError:
        raise ValueError("bfloat16 needs the package ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)


def is_bfloat16(dtype: np.dtype) -> bool:
    """Whether a dtype is bfloat16; costs nothing for the types of NumPy's own."""
    if dtype.kind != "V":
        return False
    known = _is_bfloat16.get(dtype.num)  # the name of a dtype is made anew whenever it is asked for
    if known is None:
        known = _is_bfloat16[dtype.num] = dtype.name == "bfloat16"
    return known


def sums_dtype(dtype) -> np.dtype:
    """The type in which sums over numbers of `dtype` are kept (gradients, moments, statistics of rows): float32 for
    bfloat16, else the same."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if is_bfloat16(dtype) else dtype


def bits(x: np.ndarray) -> np.ndarray:
    """An array as compiled code takes it: bfloat16 as uint16, any other as it is. A view."""
    return x.view(np.uint16) if is_bfloat16(x.dtype) else x


_is_bfloat16 = {}  # by the number that NumPy gave a type
