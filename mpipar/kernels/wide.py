"""Asking LLVM for its widest vectors, function by function."""
from numba import types
from numba.extending import intrinsic

from .host import host

BITS = 8 * host().vector_bytes


@intrinsic
def wide_vectors(context):
    """The loops of the enclosing function use whole registers.

    LLVM prefers half of AVX-512's registers on many CPUs, for the sake of code that uses vectors now and
    then; kernels use them all the time. llvmlite has no list entry for this attribute, so it is added below
    its check of names."""
    def generate(ctx, builder, signature, arguments):
        set.add(builder.function.attributes, f'"prefer-vector-width"="{BITS}"')
        return ctx.get_dummy_value()
    return types.void(), generate
