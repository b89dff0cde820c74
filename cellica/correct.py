"""Correction of batch effects in AnnData: methods, chains of them, fit once and apply later.

Every chain starts from z-scored features. A correction with key K (by default the method's name) writes
``obsm["X_K"]`` and ``uns["cellica"]["K"]``; X is never changed. ``METHODS`` maps each name to its function.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import anndata as ad
import numpy as np

from cellica import tuning
from cellica.artifacts import PathLike
from cellica.confounding import Confounding, check
from cellica.corrector import Corrector, check_key, load, representation, sources, write, write_components
from cellica.methods import CHAINS, FITS, chain_of, fit_chain, parse
from cellica.roles import Account, roles_of
from cellica.schema import EXPERIMENT, PERTURBATION, InputError
from cellica.tuning import Recommendation

__all__ = [
    "METHODS",
    "Confounding",
    "Corrector",
    "Recommendation",
    "confounding",
    "fit",
    "load",
    "parse",
    "recommend",
    "run",
    "sources",
]

log = logging.getLogger("cellica")
MOST_RIDGE = 1e6

DEFAULT_COMPARISON = (
    "none",
    "center",
    "sphere",
    "center+sphere",
    "wccn",
    "tvn",
    "combat",
    "harmony",
    "pca_drop+sphere",
    "random_drop+sphere",
    "ica_shrink",
    "wccn+ica_drop",
    "ica",
)


def fit(adata: ad.AnnData, method: str, **keywords: Any) -> Corrector:
    """Fit a method or chain, changing nothing in adata.

    Parameters
    ----------
    method
        A name of ``METHODS``, or several joined by ``+`` that act in that order, as in ``"center+sphere"``.
    batch_key, label_key, strata_key
        Columns of obs: batch (default ``experiment``), perturbation, stratum (default ``cell_type`` where present; None
        for no strata).
    controls, anchors
        Perturbations that are controls (default: where ``obs["control"] == "negative"``) and anchors (default: those
        present in more than half of the batches).
    use_rep
        Key of obsm to correct, by default X.
    random_state
        Seed of what is random, default 0.
    tune
        Choose the ridge by replicates in batches left out (``tuning.choose_ridge``); where no perturbation lies in several
        batches the default is kept, which the notes say.
    **options
        Options of the methods (``ridge``, ``n_components``, ...), given to each method of the chain that has them.

    Raises
    ------
    InputError
        Unknown method or option, wells that are not finite, or too few controls, anchors or batches.
    """
    return _fit(adata, method, **keywords)[0]


def run(
    adata: ad.AnnData,
    method: str,
    *,
    key_added: str | None = None,
    save: PathLike | None = None,
    **keywords: Any,
) -> None:
    """Fit a method or chain on adata and correct it; ``save`` keeps the fit in a file. Keywords are those of ``fit``.

    With K = ``key_added`` (by default the method's name) writes ``obsm["X_K"]`` (n x d, float32) and
    ``uns["cellica"]["K"]`` (parameters, steps, notes; ``trials`` where ``tune`` made some). ``ica_drop``, ``pca_drop`` and
    ``random_drop``, also in a chain, write ``obsm["K_sources"]`` (n x k, unit variance), ``varm["K_mixing"]`` (d x k, in
    z-scored features; where X was corrected) and in ``uns["cellica"]["K"]`` the tables ``components``, one row a
    component, and ``removal_path``, in the order in which they would go, and ``top_wells`` (k x 5), names of the wells
    where each is largest.

    Columns of ``components``: ``batch_r2``, ``perturbation_r2``, ``strata_r2``, ``kurtosis`` (`components.associations`), which decide;
    ``plate_r2``, ``row_r2``, ``column_r2``, ``edge_r2``, ``cell_count_r2``, ``intensity_r2`` (`components.nuisances`; NaN where nothing
    can be said) and ``batch_q`` (`components.batch_q`), which do not; ``converged``: a clearly non-Gaussian direction that settled;
    ``stability`` and its kin (`stability.Stability`); ``label``: batch, mixed, biology or other (`components.classify`); ``removed``.
    A component is removed where its label is batch, up to the cap on biology, whether it has converged or not: look at its
    stability, and at what other seeds remove, which the notes say.
    """
    key = key_added or method
    check_key(adata, key)
    corrector, corrected = _fit(adata, method, **keywords)
    parameters = {name: value for name, value in keywords.items() if name not in corrector.roles}
    write(adata, corrected, corrector, key, corrector.notes, {"random_state": 0, **parameters})
    for account in corrector.account.values():
        if "components" in account:
            write_components(adata, account, key, of_x=keywords.get("use_rep") in (None, "X"))
    if save is not None:
        corrector.save(save, force=True)


def confounding(
    adata: ad.AnnData,
    *,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    anchors: Sequence[str] | None = None,
    strata_key: str | None = "auto",
) -> Confounding:
    """Whether batch, strata and position can be told from perturbation in this design. Looks at obs alone.

    Keywords are those of ``fit``. ``run`` puts the sentences of the answer into its notes.
    """
    keys: dict[str, Any] = {"batch_key": batch_key, "label_key": label_key, "controls": controls}
    return check(roles_of(adata.obs, anchors=anchors, strata_key=strata_key, **keys))


def recommend(
    adata: ad.AnnData,
    methods: Sequence[str] = ("ica", "wccn+ica_drop", *tuning.PLAIN),
    *,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    anchors: Sequence[str] | None = None,
    strata_key: str | None = "auto",
    use_rep: str | None = None,
    random_state: int = 0,
    **options: Any,
) -> Recommendation:
    """Which of ``ica`` and the plain chains to use here, by replicates in batches left out. Changes nothing in adata.

    Every chain has the same ridges to choose from, each batch's chosen on the other batches. ``ica`` is recommended where its
    advantage over the best plain chain is established: where the paired 95 % interval over perturbations excludes zero.
    Keywords are those of ``fit``.

    Raises
    ------
    InputError
        Unknown method, wells that are not finite, or a column that is not there.
    """
    if isinstance(methods, str) or not len(methods):
        raise InputError(f"methods is {methods!r}: name several, as in methods=('ica', 'center+sphere')")
    if {"ridge", "tune"} & set(options):
        raise InputError("recommend tries ridges of its own: leave out ridge and tune")
    for method in methods:
        parse(method)
    parse("+".join(methods), options)
    x, _ = representation(adata, use_rep)
    keys: dict[str, Any] = {"batch_key": batch_key, "label_key": label_key, "controls": controls}
    wells = roles_of(adata.obs, anchors=anchors, strata_key=strata_key, **keys)
    return tuning.recommend(x, wells, methods, {**options, "random_state": random_state}, random_state)


def _fit(
    adata: ad.AnnData,
    method: str,
    *,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    anchors: Sequence[str] | None = None,
    strata_key: str | None = "auto",
    use_rep: str | None = None,
    random_state: int = 0,
    tune: bool = False,
    **options: Any,
) -> tuple[Corrector, np.ndarray]:
    """Fit the chain; give the corrected rows too."""
    steps = parse(method, options)
    ridge = options.get("ridge", 0.0)
    if not (isinstance(ridge, int | float | np.number) and 0 <= ridge <= MOST_RIDGE):
        raise InputError(f"ridge={ridge!r} is not allowed: use 0 to {MOST_RIDGE:g}, a multiple of the mean variance")
    roles: dict[str, Any] = {
        "batch_key": batch_key,
        "label_key": label_key,
        "controls": None if controls is None else [str(name) for name in controls],
        "strata_key": strata_key,
    }
    x, features = representation(adata, use_rep)
    wells = roles_of(adata.obs, anchors=anchors, **roles)
    wells.notes += check(wells).sentences
    anchored = sorted({name for name in wells.label[wells.anchor] if name is not None})
    trials = None
    if tune:
        choice = tuning.choose_ridge(x, wells, method, {**options, "random_state": random_state}, random_state)
        wells.notes.append(choice.sentence)
        trials = choice.trials
        options |= {} if choice.ridge is None else {"ridge": choice.ridge}
    chain, found, corrected = fit_chain(x, wells, chain_of(steps), {**options, "random_state": random_state})
    account: dict[str, Account] = {f"{i}_{name}": entry for i, (name, entry) in enumerate(found)}
    for note in wells.notes:
        log.info(note)
    corrector = Corrector(
        method,
        features,
        roles,
        anchored,
        chain,
        account,
        list(dict.fromkeys(wells.notes)),
        batches=sorted({str(name) for name in wells.batch}),
        strata=sorted({str(name) for name in wells.strata}),
        trials=trials,
    )
    return corrector, corrected


def _method(name: str) -> Callable[..., None]:
    def correct(adata: ad.AnnData, *, key_added: str | None = None, **keywords: Any) -> None:
        run(adata, name, key_added=key_added, **keywords)

    correct.__name__ = correct.__qualname__ = name
    source = FITS[name].__doc__ if name in FITS else f"Recommended chain: {CHAINS[name]}."
    correct.__doc__ = f"{source}\n\nKeywords and keys written: those of ``run``."
    return correct


METHODS: dict[str, Callable[..., None]] = {name: _method(name) for name in (*FITS, *CHAINS)}
