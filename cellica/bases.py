"""Bases in which batch is looked for: independent, principal and random components, and how stable they are."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import ortho_group

from cellica.ica import ICA
from cellica.progress import iterations
from cellica.roles import Roles
from cellica.schema import InputError
from cellica.whitening import Whitening

MAX_COMPONENTS = 100


@dataclass
class Basis:
    """Components found in residuals: sources = residuals @ unmixing.T, residuals ~ sources @ mixing.T."""

    unmixing: np.ndarray
    mixing: np.ndarray
    converged: np.ndarray
    model: Any = None  # the ICA, where it is one


def ica_basis(residuals: np.ndarray, k: int, random_state: int) -> Basis:
    """Independent components, at most ``k``: as many as the rank."""
    with warnings.catch_warnings():  # convergence is reported for each component, and their number too
        warnings.simplefilter("ignore", UserWarning)
        told = iterations(f"ICA of {len(residuals)} wells, {k} components")
        fit = ICA(k, random_state=random_state, callback=told).fit(residuals.astype(np.float32))
    return Basis(fit.components_, fit.mixing_, fit.converged_, fit)


def pca_basis(residuals: np.ndarray, k: int, random_state: int) -> Basis:
    """Principal components, unit variance."""
    whiten = Whitening(k).fit(residuals)
    return _settled(whiten.whitening_, whiten.dewhitening_)


def random_basis(residuals: np.ndarray, k: int, random_state: int) -> Basis:
    """Whitened principal components in a random rotation."""
    whiten = Whitening(k).fit(residuals)
    rotation = ortho_group.rvs(whiten.rank_, random_state=random_state) if whiten.rank_ > 1 else np.eye(1)
    return _settled(rotation @ whiten.whitening_, whiten.dewhitening_ @ rotation.T)


def _settled(unmixing: np.ndarray, mixing: np.ndarray) -> Basis:
    return Basis(unmixing, mixing, np.ones(len(unmixing), dtype=bool))


def choose_n_components(x: np.ndarray, asked: int | None, carried: int, roles: Roles) -> int:
    """Components to look for in x (n, d): ``asked``, or what the wells carry; at most 100 and the rank, and said."""
    rank = min(x.shape[0] - 1, x.shape[1])
    if asked is not None and not (isinstance(asked, int | np.integer) and asked >= 1):
        raise InputError(f"n_components={asked!r} is not allowed: use a whole number of 1 or more, or leave it out")
    k = asked or max(1, min(MAX_COMPONENTS, carried))
    if asked and asked > rank:
        roles.notes.append(f"n_components lowered from {asked} to {rank}: {x.shape[0]} wells x {x.shape[1]} features")
    return min(k, rank)
