"""Every kernel of this folder in plain NumPy: the meaning of the compiled ones, and what the tests compare
them with.

Each function has the name and the signature of its compiled twin (`gelu.py`, `norm.py`, ...). Results are
written into the arrays that the caller gives. Nothing here is tuned; attention, for one, builds the whole T x
T matrix. A kernel over bfloat16 means: its arrays widened, these functions in float32, the results rounded.

Shapes: B batch, T tokens, D model width, H heads, V vocabulary, R rows (usually B * T).
"""
import math

import numpy as np

from .shapes import check_gelu_form, check_probability

_erf = np.frompyfunc(math.erf, 1, 1)


# bfloat16

def widen(x, out):
    """out = x; x: bfloat16, out: float32. A bfloat16 is the upper half of a float32."""
    out[...] = (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return out


def narrow(x, out):
    """out = x, rounded to the nearest bfloat16, ties to the one with an even last bit; NaN stays NaN."""
    word = np.ascontiguousarray(x).view(np.uint32)
    nearest = ((word.astype(np.uint64) + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)
    out.view(np.uint16)[...] = np.where(np.isnan(x), (word >> 16).astype(np.uint16) | 0x40, nearest)
    return out


def sum_parts(parts, out, *, factor=1.0):
    """out[n] = factor * (parts[0, n] + parts[1, n] + ...), summed in float32 in this order, then rounded once."""
    total = np.zeros(parts.shape[1], np.float32)
    for part in parts:
        total += widen(part, np.empty(part.shape, np.float32))
    return narrow(total * np.float32(factor), out)


# GeLU

def gelu_forward(x, out, *, form="erf"):
    """out = x * Phi(x), Phi the normal distribution function, exact ("erf") or by its tanh approximation
    ("tanh").

    Hendrycks and Gimpel 2016. x, out: any shape, contiguous; out may be x."""
    check_gelu_form(form)
    if form == "erf":
        out[...] = 0.5 * x * (1 + _erf(x / math.sqrt(2)).astype(x.dtype))
    else:
        out[...] = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return out


def gelu_backward(x, dy, dx, *, form="erf"):
    """dx = dy * gelu'(x); dx may be dy."""
    check_gelu_form(form)
    # erf:  y = x Phi(x),             y' = Phi(x) + x phi(x),  phi(x) = exp(-x^2/2) / sqrt(2 pi)
    # tanh: y = x (1 + tanh u) / 2,   y' = (1 + tanh u) / 2 + x (1 - tanh^2 u) u' / 2,  u = c (x + a x^3)
    if form == "erf":
        density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        slope = 0.5 * (1 + _erf(x / math.sqrt(2)).astype(x.dtype)) + x * density
    else:
        c, a = math.sqrt(2 / math.pi), 0.044715
        t = np.tanh(c * (x + a * x**3))
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * a * x * x)
    dx[...] = dy * slope
    return dx


def gelu_again(x, dy, *, form="erf"):
    """Replaces x by GeLU(x) and dy by dy * gelu'(x)."""
    gelu_backward(x.copy(), dy.copy(), dy, form=form)
    gelu_forward(x.copy(), x, form=form)


# Sums and scalings

def add_bias(x, bias, out):
    """out[..., n] = x[..., n] + bias[n]; out may be x."""
    return np.add(x, bias, out=out)


def add(a, b, out):
    """out = a + b; out may be either."""
    return np.add(a, b, out=out)


def scale(x, factor, out):
    """out = factor * x."""
    return np.multiply(x, x.dtype.type(factor), out=out)


def bias_residual(x, bias, residual, out):
    """out = x + bias + residual (the end of a block); out may be x or residual."""
    out[...] = x + bias + residual
    return out


def column_sum(dy, out, *, accumulate=True):
    """out[n] (+)= sum over r of dy[r, n]: the gradient of a bias."""
    total = dy.sum(axis=0)
    out[...] = out + total if accumulate else total
    return out


def sum_squares(x):
    """Sum of squares of all elements in float64, as a float."""
    return float(np.sum(np.square(x, dtype=np.float64)))


# Layer normalisation

def layernorm_forward(x, gamma, beta, out, mean, rstd, *, eps=1e-5):
    """out[r] = (x[r] - mean[r]) * rstd[r] * gamma + beta; mean and rstd [R] are kept for the backward pass.

    Ba, Kiros and Hinton 2016. x, out: [R, D]; gamma, beta: [D]; rstd = 1 / sqrt(biased variance + eps)."""
    mean[...] = x.mean(axis=1)
    centred = x - mean[:, None]
    rstd[...] = 1 / np.sqrt(np.mean(centred * centred, axis=1) + eps)
    out[...] = centred * rstd[:, None] * gamma + beta
    return out


def layernorm_again(x, gamma, beta, mean, rstd, out):
    """out = what layernorm_forward gave, from the row statistics it kept."""
    out[...] = (x - mean[:, None]) * rstd[:, None] * gamma + beta
    return out


def layernorm_backward(x, gamma, mean, rstd, dy, dx, dgamma, dbeta, *, residual=None):
    """dx = gradient through the norm (+ residual); dgamma and dbeta are added to. dx may be dy or
    residual."""
    # xhat = (x - mean) rstd, g = gamma dy:  dx = rstd (g - mean_D(g) - xhat mean_D(g xhat))
    # dgamma += sum_r dy xhat,  dbeta += sum_r dy
    xhat = (x - mean[:, None]) * rstd[:, None]
    g = dy * gamma
    gradient = rstd[:, None] * (
        g - g.mean(axis=1, keepdims=True) - xhat * np.mean(g * xhat, axis=1, keepdims=True))
    dgamma += np.sum(dy * xhat, axis=0)
    dbeta += np.sum(dy, axis=0)
    dx[...] = gradient if residual is None else gradient + residual
    return dx


# Attention

def _causal_probabilities(q, k):
    """(softmax of the causal scores [T, T], log of its row sums [T]) for [T, hd] operands."""
    scores = (q @ k.T) / q.dtype.type(math.sqrt(q.shape[1]))
    scores[np.triu_indices(len(q), 1)] = -np.inf
    maximum = scores.max(axis=1)
    lse = maximum + np.log(np.exp(scores - maximum[:, None]).sum(axis=1))
    return np.exp(scores - lse[:, None]), lse


def attention_forward(q, k, v, out, lse):
    """Causal attention, out = softmax(q k^T / sqrt(hd)) v; lse[b, h, t] is the log of the softmax's
    denominator.

    Vaswani et al. 2017. q, k, v, out: [B, T, H, hd], unit stride in hd, else any strides; lse: [B, H, T]."""
    B, T, H, _ = q.shape
    if T == 0:
        return out
    for b in range(B):
        for h in range(H):
            probabilities, lse[b, h] = _causal_probabilities(q[b, :, h], k[b, :, h])
            out[b, :, h] = probabilities @ v[b, :, h]
    return out


def attention_backward(q, k, v, out, lse, dout, dq, dk, dv):
    """Writes dq, dk, dv [B, T, H, hd] from what the forward pass read and wrote."""
    # P = exp(S - lse), O = P V:  dV = P^T dO,  dP = dO V^T,  dS = P (dP - rowsum(dO O))
    # S = Q K^T / sqrt(hd):       dQ = dS K / sqrt(hd),  dK = dS^T Q / sqrt(hd)
    B, T, H, hd = q.shape
    factor = q.dtype.type(1 / math.sqrt(hd)) if hd else q.dtype.type(1)
    if T == 0:
        return
    for b in range(B):
        for h in range(H):
            scores = factor * (q[b, :, h] @ k[b, :, h].T)
            probabilities = np.tril(np.exp(np.minimum(scores - lse[b, h][:, None], 0)))
            delta = np.sum(dout[b, :, h] * out[b, :, h], axis=1, keepdims=True)
            dscores = probabilities * (dout[b, :, h] @ v[b, :, h].T - delta)
            dv[b, :, h] = probabilities.T @ dout[b, :, h]
            dq[b, :, h] = factor * (dscores @ k[b, :, h])
            dk[b, :, h] = factor * (dscores.T @ q[b, :, h])


# Cross entropy over a vocabulary that may be divided over ranks

def row_max(logits, out):
    """out[r] = the largest of logits[r, :], -inf if this shard has no column."""
    out[...] = logits.max(axis=1, initial=-np.inf)
    return out


def cross_entropy_sums(logits, maximum, targets, lo, sum_exp, target_logit):
    """Per row: the sum of exp(logit - maximum) over this shard's columns, and the target's logit if it is
    here.

    logits: [R, Vlocal], columns lo .. lo + Vlocal of the whole; targets: int64 [R], negative ones are
    ignored. With both results summed over the ranks the loss of a row is log(sum_exp) + maximum -
    target_logit."""
    sum_exp[...] = np.exp(logits - maximum[:, None]).sum(axis=1)
    rows, columns = _targets_here(targets, lo, logits.shape[1])
    target_logit[...] = 0
    target_logit[rows] = logits[rows, columns]


def cross_entropy_backward(logits, maximum, sum_exp, targets, lo, scale, dlogits):
    """dlogits = (softmax - onehot(target)) * scale, zero in rows whose target is ignored; dlogits may be
    logits."""
    # loss_r = log sum_j exp(z_rj) - z_r,target:  d loss_r / d z_rj = softmax_rj - [j = target]
    rows, columns = _targets_here(targets, lo, logits.shape[1])
    dlogits[...] = np.exp(logits - maximum[:, None]) / sum_exp[:, None]
    dlogits[rows, columns] -= 1
    dlogits[targets < 0] = 0
    dlogits *= dlogits.dtype.type(scale)
    return dlogits


def _targets_here(targets, lo, width):
    """(rows whose target lies in columns lo .. lo + width, those targets' local columns)."""
    rows = np.flatnonzero((targets >= 0) & (targets >= lo) & (targets < lo + width))
    return rows, targets[rows] - lo


# Embedding

def embedding_forward(tokens, weight, lo, out):
    """out[r] = weight[tokens[r] - lo], zero where another shard holds the token's row.

    tokens: int64 [R]; weight: [Vlocal, D], rows lo .. lo + Vlocal of the whole; out: [R, D]."""
    rows, local = _targets_here(tokens, lo, len(weight))
    out[...] = 0
    out[rows] = weight[local]
    return out


def embedding_backward(tokens, dy, lo, dweight):
    """dweight[tokens[r] - lo] += dy[r] for the tokens of this shard."""
    rows, local = _targets_here(tokens, lo, len(dweight))
    np.add.at(dweight, local, dy[rows])
    return dweight


def add_positions(x, positions):
    """x[b, t] += positions[t], in place. x: [B, T, D]; positions: [Tmax, D] with Tmax >= T."""
    x += positions[:x.shape[1]]
    return x


def positions_backward(dy, dpositions):
    """dpositions[t] += sum over b of dy[b, t]."""
    dpositions[:dy.shape[1]] += dy.sum(axis=0)
    return dpositions


# Optimizers

def adamw(p, g, m, v, bounds, decay, *, lr, beta1, beta2, eps, step, grad_scale=1.0):
    """One AdamW step on flat arrays (Loshchilov and Hutter 2019, the form of torch.optim.AdamW).

    Segment i = [bounds[i], bounds[i + 1]) has weight decay decay[i]; step counts from 1; g is read as g *
    grad_scale."""
    number = p.dtype.type
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    for lo, hi, rate in zip(bounds[:-1], bounds[1:], decay):
        gradient = g[lo:hi] * number(grad_scale)
        p[lo:hi] *= number(1 - lr * rate)
        m[lo:hi] = number(beta1) * m[lo:hi] + number(1 - beta1) * gradient
        v[lo:hi] = number(beta2) * v[lo:hi] + number(1 - beta2) * gradient * gradient
        denominator = np.sqrt(v[lo:hi]) / number(math.sqrt(correction2)) + number(eps)
        p[lo:hi] -= number(lr / correction1) * (m[lo:hi] / denominator)


def sgd(p, g, bounds, decay, *, lr, grad_scale=1.0):
    """p -= lr * (g * grad_scale + decay * p), the segments as for `adamw`."""
    number = p.dtype.type
    for lo, hi, rate in zip(bounds[:-1], bounds[1:], decay):
        p[lo:hi] -= number(lr) * (g[lo:hi] * number(grad_scale) + number(rate) * p[lo:hi])


# Random numbers

def philox(counter, key):
    """Philox4x32-10 (Salmon et al. 2011): uint32 [..., 4] random words for counters [..., 4] and keys [...,
    2]."""
    c = [np.asarray(counter[..., i]).astype(np.uint64) for i in range(4)]
    k = [np.asarray(key[..., i]).astype(np.uint64) for i in range(2)]
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(product1 >> shift) ^ c[1] ^ k[0], product1 & low,
             (product0 >> shift) ^ c[3] ^ k[1], product0 & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, axis=-1).astype(np.uint32)


def _words(values):
    """The low and high 32-bit words of 64-bit integers, [..., 2]."""
    values = np.asarray(values).astype(np.uint64)
    return np.stack([values & np.uint64(0xFFFFFFFF), values >> np.uint64(32)], axis=-1)


def fill_normal(out, key, start, *, std):
    """out[i] = std * z(key, start + i), z normal. A pure function of its arguments: the range may be cut
    anywhere.

    Box and Muller 1958: elements 2j and 2j + 1 are the cosine and the sine of one pair of uniform numbers,
    which are words 0-1 and 2-3 of the Philox block with counter (j, 0). out: [n], float32 is the rounded
    float64 value."""
    index = np.arange(start, start + len(out), dtype=np.int64)
    pair = _words(index >> 1)
    words = philox(np.concatenate([pair, np.zeros_like(pair)], axis=-1), _words(key)).astype(np.uint64)
    u = (((words[:, 0::2] << np.uint64(32)) | words[:, 1::2]) >> np.uint64(11)).astype(np.float64)
    radius = np.sqrt(-2 * np.log((u[:, 0] + 0.5) * 2.0**-53))
    angle = 2 * math.pi * (u[:, 1] * 2.0**-53)
    out[...] = std * (radius * np.where(index & 1, np.sin(angle), np.cos(angle)))
    return out


def dropout(x, out, *, key, step, samples, offset, p):
    """out = x * keep / (1 - p), keep a pure function of (key, step, samples[b], offset + e); the same call on
    dy is the backward pass. Srivastava et al. 2014. x, out: [B, E]; samples: int64 [B]; 0 <= p < 1; out may
    be x.

    The words 0-1 of Philox(counter = (step, sample), key) are the key of a row; element e uses word e % 4 of
    Philox(counter = (e // 4, 1), that key), and is kept when the word is at least p * 2^32."""
    check_probability(p)
    steps = np.broadcast_to(_words(step), (len(samples), 2))
    row_keys = philox(np.concatenate([steps, _words(samples)], axis=-1), _words(key))[:, :2]
    index = np.arange(offset, offset + x.shape[1], dtype=np.int64)
    block = _words(index >> 2)
    counters = np.concatenate([block, np.broadcast_to(np.array([1, 0], np.uint64), block.shape)], axis=-1)
    for b in range(len(samples)):
        words = philox(counters, row_keys[b])
        word = np.take_along_axis(words, (index & 3)[:, None], axis=1)[:, 0]
        keep = word >= np.uint64(min(round(p * 2**32), 2**32 - 1))
        out[b] = np.where(keep, x[b] * x.dtype.type(1 / (1 - p)), 0)
    return out
