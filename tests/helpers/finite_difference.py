"""Derivatives by central differences, against which hand-written backward passes are checked."""
import numpy as np


def check_gradient(function, arrays, gradients, *, step=1e-6, samples=20, tolerance=1e-6, seed=0):
    """Compares `gradients` with central differences of the scalar `function()` or `function(*arrays)`.

    arrays: float64 arrays that function reads, a list or a dict by name; they are changed in place and
    restored. gradients: for each array an array of its shape, or None to leave it out. Of each, `samples`
    elements are tried (all, if it has no more), the one of largest gradient among them. With s the largest
    gradient of that array in size, an error above tolerance * max(s, 1e-3) raises AssertionError that names
    the array and the element; so do gradients that are not finite. step: the move of an element. Returns the
    largest error, so divided.
    """
    names = list(arrays) if isinstance(arrays, dict) else range(len(arrays))
    values = [arrays[name] for name in names]
    if isinstance(arrays, dict):
        gradients = [gradients.get(name) for name in names]
    evaluate = function if isinstance(arrays, dict) else lambda: function(*values)
    generator = np.random.default_rng(seed)
    worst = 0.0
    for name, array, gradient in zip(names, values, gradients):
        if gradient is None or array.size == 0:
            continue
        assert array.dtype == np.float64, f"array {name!r} is {array.dtype}: differences need float64"
        assert gradient.shape == array.shape, f"gradient {name!r} is {gradient.shape}, not {array.shape}"
        assert np.isfinite(gradient).all(), f"gradient {name!r} is not finite"
        scale = max(float(np.abs(gradient).max()), 1e-3)
        places = generator.permutation(array.size)[:samples]
        places[0] = np.abs(gradient).argmax()
        for place in places:
            index = np.unravel_index(place, array.shape)
            kept = array[index]
            array[index] = kept + step
            above = evaluate()
            array[index] = kept - step
            below = evaluate()
            array[index] = kept
            numeric = (above - below) / (2 * step)
            error = abs(numeric - gradient[index]) / scale
            assert error <= tolerance, (
                f"gradient {name!r}{tuple(int(i) for i in index)}: {gradient[index]:.12g} backward, "
                f"{numeric:.12g} by differences, error {error:.2e} of the largest, above {tolerance:.0e}")
            worst = max(worst, error)
    return worst
