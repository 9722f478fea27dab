"""Checks of arguments that the plain and the compiled kernels share."""

GELU_FORMS = ("erf", "tanh")


def check_gelu_form(form):
    """ValueError unless form is one of GELU_FORMS."""
    if form not in GELU_FORMS:
        raise ValueError(f"unknown GeLU form {form!r}: use one of {', '.join(GELU_FORMS)}")


def check_probability(p):
    """ValueError unless 0 <= p < 1."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability {p!r}: use 0 <= p < 1")
