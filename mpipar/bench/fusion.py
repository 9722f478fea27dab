"""`python -m mpipar.bench fusion`: three loops against one, and a convolution with its whole patch matrix
against one that makes a tile of it at a time (lecture section 2.6, items 3 and 4)."""

import functools
import statistics
import time

import numpy as np

from ..kernels.convolution import METHODS, convolution_bytes, convolution_forward, output_shape
from ..kernels.fusion import COUNTS, add_mul_add, add_mul_add_unfused, bytes_moved, intensity
from ..kernels.threads import limit_threads
from .report import conditions, integers, print_conditions, print_table, sizes, spread, write_json

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}  # of the largest result
REPEAT_BYTES = 1 << 26  # a measurement repeats small loops until they have moved so much


def add_arguments(parser):
    """The options of `mpipar.bench fusion`."""
    parser.add_argument("--elements", default=f"{1 << 24},{1 << 16}", metavar="COUNT,...",
                        help="of each array: more than caches hold, and few (default: %(default)s)")
    parser.add_argument("--image", default="8x32x64x64", metavar="NxCxHxW", help="(default: %(default)s)")
    parser.add_argument("--kernel", default="64x3x3", metavar="KxRxS", help="(default: %(default)s)")
    parser.add_argument("--padding", type=int, default=1, help="of the image (default: %(default)s)")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--runs", type=int, default=9, help="alternated measurements (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")


def run(arguments):
    """Prints both comparisons: the best time beside the quartiles of all; ratios are medians of the pairs."""
    if arguments.runs < 1:
        raise ValueError(f"--runs is {arguments.runs}; valid values: integers from 1")
    counts = integers("--elements", arguments.elements)
    image, kernel = sizes("--image", arguments.image, 4), sizes("--kernel", arguments.kernel, 3)
    weight = (kernel[0], image[1], *kernel[1:])
    output_shape(image, weight, padding=arguments.padding)
    limit_threads(arguments.threads)
    dtype = np.dtype(arguments.dtype)
    report = conditions(dtype, arguments.runs)
    print_conditions(report)
    report["loops"] = [compare_loops(count, dtype, arguments.runs) for count in counts]
    report["convolution"] = compare_convolutions(image, weight, arguments.padding, dtype, arguments.runs)
    for pair in report["loops"]:
        _print_loops(pair)
    _print_convolution(report["convolution"])
    write_json(report, arguments.json)


def compare_loops(count, dtype, runs):
    """Unfused and fused add-mul-add on `count` elements; the results must have the same bits."""
    generator = np.random.default_rng(0)
    operands = [generator.random(count, np.float32).astype(dtype) for _ in range(4)]
    work = np.empty(count, dtype), np.empty(count, dtype)
    outs = {form: np.empty(count, dtype) for form in COUNTS}
    functions = {"unfused": lambda: add_mul_add_unfused(*operands, outs["unfused"], work=work),
                 "fused": lambda: add_mul_add(*operands, outs["fused"])}
    forms = {form: {"operations": COUNTS[form][0] * count, "intensity": intensity(form),
                    "bytes": bytes_moved(form, count, dtype.itemsize)} for form in COUNTS}
    ratios = _alternate(functions, forms, runs, max(1, REPEAT_BYTES // forms["unfused"]["bytes"]))
    if not np.array_equal(outs["unfused"], outs["fused"]):
        raise AssertionError("the fused loop gives other numbers than the three")
    return {"elements": count, "forms": forms, "speedup": statistics.median(ratios), "speedups": ratios,
            "expected": forms["unfused"]["bytes"] / forms["fused"]["bytes"]}


def compare_convolutions(image, weight, padding, dtype, runs):
    """im2col and implicit on x of shape `image` and w of shape `weight`; the results must agree."""
    generator = np.random.default_rng(0)
    x, w = generator.standard_normal(image).astype(dtype), generator.standard_normal(weight).astype(dtype)
    shape = output_shape(image, weight, padding=padding)
    outs = {method: np.empty(shape, dtype) for method in METHODS}
    flops = 2 * int(np.prod(shape)) * int(np.prod(weight[1:]))
    forms, functions = {}, {}
    for method in reversed(METHODS):
        moved, patches = convolution_bytes(image, weight, dtype.itemsize, padding=padding, method=method)
        forms[method] = {"bytes": moved, "patch_bytes": patches, "flops": flops, "intensity": flops / moved}
        functions[method] = functools.partial(convolution_forward, x, w, outs[method], padding=padding,
                                              method=method)
    ratios = _alternate(functions, forms, runs, 1)
    error = float(np.abs(outs["im2col"] - outs["implicit"]).max() / max(np.abs(outs["im2col"]).max(), 1e-300))
    if not error <= TOLERANCE[dtype.name]:
        raise AssertionError(f"the two convolutions differ by {error:.1e} of the largest result")
    return {"image": image, "weight": weight, "padding": padding, "forms": forms, "error": error,
            "speedup": statistics.median(ratios), "speedups": ratios}


def _alternate(functions, forms, runs, repeats):
    """Runs two functions by turns, adds "seconds" to their forms; returns first over second of each turn."""
    for function in functions.values():
        function()  # compiles, and touches all memory
    for form in forms.values():
        form["seconds"] = []
    for turn in range(runs):
        for name in list(functions)[::1 if turn % 2 == 0 else -1]:
            start = time.perf_counter()
            for _ in range(repeats):
                functions[name]()
            forms[name]["seconds"].append((time.perf_counter() - start) / repeats)
    first, second = (forms[name]["seconds"] for name in functions)
    return [one / other for one, other in zip(first, second)]


def _print_loops(pair):
    print(f"\n(a + b) * c + d on {pair['elements']} elements")
    print_table([
        ("", "", lambda form: form["name"]),
        ("operations/element moved", ".3f", lambda form: form["intensity"]),
        ("MB moved", ".2f", lambda form: form["bytes"] / 1e6),
        *_time_columns(),
        ("GB/s", ".1f", lambda form: form["bytes"] / min(form["seconds"]) / 1e9),
    ], _named(pair["forms"]))
    print(f"one loop is {pair['speedup']:.2f} times as fast ({spread(pair['speedups'])}); "
          f"by the bytes {pair['expected']:.2f}")


def _print_convolution(result):
    (n, c, h, w), (k, _, r, s) = result["image"], result["weight"]
    print(f"\nconvolution of [{n}, {c}, {h}, {w}] with [{k}, {c}, {r}, {s}], padding {result['padding']}")
    print_table([
        ("", "", lambda form: form["name"]),
        ("MB moved", ".2f", lambda form: form["bytes"] / 1e6),
        ("MB of patches", ".3f", lambda form: form["patch_bytes"] / 1e6),
        ("FLOP/byte", ".1f", lambda form: form["intensity"]),
        *_time_columns(),
        ("GFLOP/s", ".1f", lambda form: form["flops"] / min(form["seconds"]) / 1e9),
    ], _named(result["forms"]))
    explicit, implicit = (result["forms"][name] for name in ("im2col", "implicit"))
    print(f"implicit moves {implicit['bytes'] / explicit['bytes']:.2f} of the bytes (all patches: "
          f"R S = {r * s} times the image) and is {result['speedup']:.2f} times as fast "
          f"({spread(result['speedups'])}); largest difference {result['error']:.1e}")


def _time_columns():
    return (("best ms", ".4f", lambda form: 1e3 * min(form["seconds"])),
            ("quartiles", "", lambda form: spread([1e3 * seconds for seconds in form["seconds"]])))


def _named(forms):
    return [{"name": name, **form} for name, form in forms.items()]
