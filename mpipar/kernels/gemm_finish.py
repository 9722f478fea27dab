"""What is done to a part of the product while it is still in a near cache, so that it costs no pass of its own."""

from .cache import jit
from .gelu import erf_value
from .polynomials import VECTOR_FLAGS
from .vector import stand_alone
from .wide import wide_vectors

NOTHING, GELU, ADD = 0, 1, 2
SUMS = 3  # results stay sums of float32 where operands are bfloat16


@jit(fastmath=VECTOR_FLAGS)
def finish_part(finish, out, out_start, out_row, other, other_start, other_row, rows, columns):
    """GELU: other = GeLU(out). ADD: out += other. Of a part of `rows` x `columns` elements.

    out, other: flat memory; their parts begin at out_start and other_start, and a row later lies out_row and
    other_row elements further on.
    """
    stand_alone(out_start)
    wide_vectors()
    for i in range(rows):
        x = out[out_start + i * out_row:]
        y = other[other_start + i * other_row:]
        if finish == GELU:
            for j in range(columns):
                y[j] = erf_value(x[j])
        else:
            for j in range(columns):
                x[j] += y[j]
