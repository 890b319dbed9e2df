"""Arithmetic of weight quantization: grids, rounding to nearest, GPTQ, packing. No graph, no files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Grid:
    bits: int
    block_size: int
    symmetric: bool

    @property
    def top(self) -> int:
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        return 2 ** (self.bits - 1)


@dataclass(frozen=True)
class QuantizedMatrix:
    grid: Grid
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8] | None


SHRINKS = tuple(np.float32(1 - 0.025 * i) for i in range(21))


def blocked(w, bs):
    n, k = w.shape
    pad = -k % bs
    if pad:
        w = np.concatenate([w, np.zeros((n, pad), w.dtype)], 1)
    return w.reshape(n, -1, bs)


def fit(weight, grid, importance=None, shrinks=SHRINKS, refine=2, lo_hi=False):
    n, k = weight.shape
    w = blocked(weight, grid.block_size)
    h = np.ones((1, k), np.float32) if importance is None else (importance / importance.mean()).astype(np.float32)[None]
    h = blocked(h, grid.block_size)
    best = scales = zeros = None
    if grid.symmetric:
        at = np.abs(w).argmax(-1)[..., None]
        peak = np.take_along_axis(w, at, -1)[..., 0]
        cands = [(s * peak / d, grid.middle) for s in shrinks for d in (-grid.middle,)]
    else:
        lo, hi = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
        cands = []
        for s in shrinks:
            sc = (hi - lo) * s / grid.top
            sc = np.where(sc == 0, 1, sc)
            cands.append((sc, np.clip(np.rint(-lo * s / sc), 0, grid.top)))
            if lo_hi and s<1:
                for a,b in ((s,1),(1,s)):
                    sc = (hi*b - lo*a)  / grid.top
                    sc = np.where(sc == 0, 1, sc)
                    cands.append((sc, np.clip(np.rint(-lo * a / sc), 0, grid.top)))
    for sc, z in cands:
        sc = np.where(sc == 0, 1, sc).astype(np.float32)
        z = np.broadcast_to(np.asarray(z, np.float32), sc.shape)
        for it in range(refine + 1):
            q = np.clip(np.rint(w / sc[..., None]) + z[..., None], 0, grid.top) - z[..., None]
            err = (h * (w - q * sc[..., None]) ** 2).sum(-1)
            if best is None:
                best, scales, zeros = err.copy(), sc.copy(), z.copy()
            else:
                m = err < best
                best[m], scales[m], zeros[m] = err[m], sc[m], z[m]
            if it < refine:
                den = (h * q * q).sum(-1)
                s2 = np.where(den > 0, (h * w * q).sum(-1) / np.where(den > 0, den, 1), sc)
                sc = np.where(s2 == 0, sc, s2).astype(np.float32)
    return scales, zeros


def upper_factor(h):
    """R upper with R.T @ R = inv(h)."""
    low = np.linalg.cholesky(h[::-1, ::-1])
    return tri_inv(low[::-1, ::-1])


def tri_inv(u):
    n = len(u)
    if n <= 64:
        return np.triu(np.linalg.inv(u))
    m = n // 2
    out = np.zeros_like(u)
    a, c = tri_inv(u[:m, :m]), tri_inv(u[m:, m:])
    out[:m, :m], out[m:, m:] = a, c
    out[:m, m:] = -a @ (u[:m, m:] @ c)
    return out


def gptq(weight, hessian, grid, damping=0.01, scales=None, zeros=None, order=None, block=128, target=None):
    n, k = weight.shape
    h = hessian.astype(np.float64)
    h = h + damping * h.diagonal().mean() * np.eye(k)
    if scales is None:
        scales, zeros = fit(weight, grid, h.diagonal())
    if order is None:
        order = np.argsort(-h.diagonal(), kind="stable")
    r = upper_factor(h[np.ix_(order, order)]).astype(np.float32)
    w = np.ascontiguousarray((weight if target is None else target).T[order].astype(np.float32))
    codes = np.empty((k, n), np.float32)
    sT, zT = np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T)
    bs = grid.block_size
    for a in range(0, k, block):
        b = min(a + block, k)
        e = np.empty((b - a, n), np.float32)
        for j in range(a, b):
            g = order[j] // bs
            c = np.clip(np.rint(w[j] / sT[g]) + zT[g], 0, grid.top)
            codes[order[j]] = c
            e[j - a] = (w[j] - (c - zT[g]) * sT[g]) / r[j, j]
            if j + 1 < b:
                w[j + 1 : b] -= r[j, j + 1 : b, None] * e[j - a]
        w[b:] -= r[a:b, b:].T @ e
    return codes.T, scales, zeros


def deq(codes, scales, zeros, bs):
    k = codes.shape[1]
    return (codes - np.repeat(zeros, bs, 1)[:, :k]) * np.repeat(scales, bs, 1)[:, :k]
