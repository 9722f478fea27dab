"""What `exchange.py` can do. By itself, because the import of a kernel takes time that a rank alone need not spend."""

# SUM to MAX: all-reduce, PARTS: reduce-scatter, GATHER: all-gather, TRANSPOSE: all-to-all. MEET: all come, nothing else.
SUM, MIN, MAX, SUM_PARTS, MIN_PARTS, MAX_PARTS, GATHER, TRANSPOSE, BROADCAST, MEET = range(10)
REDUCTIONS = {"sum": SUM, "min": MIN, "max": MAX}
