"""Correction of batch effects in AnnData: methods, chains of them, fit once and apply later.

Every chain starts from z-scored features. A correction with key K (by default the method's name) writes
``obsm["X_K"]`` and ``uns["cellica"]["K"]``; X is never changed. ``METHODS`` maps each name to its function.
"""

import dataclasses
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd

from cellica import methods
from cellica.artifacts import PathLike, add_step, atomic, require_file, step
from cellica.components import LABELS
from cellica.methods import FITS, Account, Chain, Roles, Transform
from cellica.schema import (
    EXPERIMENT,
    PERTURBATION,
    PLATE,
    UNS,
    CellicaError,
    InputError,
    anchor_mask,
    control_mask,
    first_few,
    labels,
    strata_labels,
)

log = logging.getLogger("cellica")

CHAINS = {"ica": "ica_drop+sphere"}
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
    "ica",
)


def roles_of(
    obs: pd.DataFrame,
    *,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    anchors: Sequence[str] | None = None,
    strata_key: str | None = "auto",
) -> Roles:
    """Roles of wells, read from obs.

    Raises
    ------
    InputError
        A column or a name is not there, or a well has no batch.
    """
    batch = labels(obs, batch_key)
    missing = np.array([value is None for value in batch], dtype=bool)
    if missing.any():
        raise InputError(
            f"obs[{batch_key!r}] is missing in {missing.sum()} wells ({first_few(obs.index[missing])}): fill it in, or leave "
            "these wells out"
        )
    plate = batch
    if PLATE in obs and batch_key != PLATE:
        plate = np.array([f"{b}_{p}" for b, p in zip(batch, labels(obs, PLATE))], dtype=object)
    return Roles(
        batch=batch,
        plate=plate,
        label=labels(obs, label_key),
        strata=strata_labels(obs, strata_key),
        control=control_mask(obs, controls, label_key),
        anchor=anchor_mask(obs, anchors, batch_key=batch_key, label_key=label_key, controls=controls),
        batch_key=batch_key,
    )


@dataclasses.dataclass
class Corrector:
    """A fitted chain: correct later plates by the same transform.

    Attributes
    ----------
    method
        Name of the method or chain.
    features
        Names of the features, in order.
    roles
        Keywords that say what each well is (batch_key, label_key, controls, strata_key).
    anchors
        Perturbations that were anchors in the fit, and are on later plates.
    transform_
        The fitted transforms, one after the other.
    account
        What the fit used and found, step by step.
    notes
        What the user has to know about the fit.
    """

    method: str
    features: list[str]
    roles: dict[str, Any]
    anchors: list[str]
    transform_: Chain
    account: dict[str, Account] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def transform(self, adata: ad.AnnData, *, use_rep: str | None = None, key_added: str | None = None) -> None:
        """Correct the wells of adata; what must be per plate or batch is taken from their own controls.

        Writes ``obsm["X_{key_added}"]`` (n x d, float32) and ``uns["cellica"][key_added]``; ``key_added`` is by default
        the method's name.

        Raises
        ------
        InputError
            Other features than those of the fit, wells that are not finite, or a method that corrects only the rows
            it was fitted on.
        """
        x, features = representation(adata, use_rep)
        if features != self.features:
            odd = sorted(set(features) ^ set(self.features))
            raise InputError(
                f"this correction was fitted on {len(self.features)} features and the data has {len(features)}"
                + (f"; {first_few(odd)} not in both" if odd else ", in another order")
                + ": give the same features in the same order"
            )
        wells = roles_of(adata.obs, **self.roles)
        wells.anchor = wells.control | np.isin(wells.label, self.anchors)
        corrected = _finite(self.transform_.apply(x, wells), self.method)
        notes = list(dict.fromkeys([*self.notes, *wells.notes]))
        _write(adata, corrected, self, key_added or self.method, notes, {"use_rep": use_rep})

    def save(self, path: PathLike, *, force: bool = False) -> None:
        """Write the fitted transform to one safetensors file: arrays, and JSON in its header. No pickle."""
        from safetensors.numpy import save_file

        joint = [part.method for part in self.transform_.parts if isinstance(part, methods.Joint)]
        if joint:
            raise InputError(f"{first_few(joint)} corrects only the rows it was fitted on: there is nothing to save")
        arrays: dict[str, np.ndarray] = {}
        header = {
            "format": "cellica-corrector-1",
            "method": self.method,
            "features": self.features,
            "roles": self.roles,
            "anchors": self.anchors,
            "notes": self.notes,
            "transform": _pack(self.transform_, "transform", arrays),
        }
        with atomic(path, force=force) as temporary:
            save_file(arrays, temporary, metadata={"cellica": json.dumps(header)})


_HEADER: dict[str, type] = {"method": str, "features": list, "roles": dict, "anchors": list, "notes": list}


def load(path: PathLike) -> Corrector:
    """Read a Corrector written by ``Corrector.save``."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(require_file(path, "saved correction"), framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("cellica", "{}"))
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        if isinstance(error, CellicaError):
            raise
        raise InputError(f"{path} is not a saved correction ({error}): name a file that --save wrote") from error
    if not isinstance(header, dict) or header.get("format") != "cellica-corrector-1":
        raise InputError(f"{path} is no correction that this version reads: name a file that --save wrote")
    try:
        chain = _unpack(header["transform"], arrays)
        parse(header["method"])
        fields = {name: header[name] for name in _HEADER}
        odd = [name for name, kind in _HEADER.items() if not isinstance(fields[name], kind)]
        if odd or not isinstance(chain, Chain):
            raise TypeError(f"{first_few(odd or ['transform'])} is of another kind")
        return Corrector(transform_=chain, **fields)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is a damaged correction ({type(error).__name__}: {error}): save it again") from error


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
    ``uns["cellica"]["K"]`` (parameters, steps, notes). ``ica_drop``, ``pca_drop`` and ``random_drop``, also in a chain,
    write ``obsm["K_sources"]`` (n x k, unit variance), ``varm["K_mixing"]`` (d x k, in z-scored features; where X was
    corrected) and ``uns["cellica"]["K"]["components"]``, a table with one row a component.
    """
    corrector, corrected = _fit(adata, method, **keywords)
    if save is not None:
        corrector.save(save, force=True)
    key = key_added or method
    parameters = {name: value for name, value in keywords.items() if name not in corrector.roles}
    _write(adata, corrected, corrector, key, corrector.notes, {"random_state": 0, **parameters})
    for account in corrector.account.values():
        if "components" in account:
            adata.obsm[f"{key}_sources"] = account["sources"]
            if len(account["mixing"]) == adata.n_vars and keywords.get("use_rep") is None:
                adata.varm[f"{key}_mixing"] = account["mixing"]
            adata.uns[UNS][key]["components"] = component_table(account)


def component_table(account: Account) -> pd.DataFrame:
    """Table of components, one row each, in the order of the sources."""
    table = pd.DataFrame(account["components"])
    table["label"] = pd.Categorical(table["label"], categories=list(LABELS))
    table.index = pd.Index([str(i) for i in range(len(table))], dtype=object)
    return table


def parse(method: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """Names of the single methods that a chain stands for.

    >>> parse("center+sphere"), parse("ica")
    (['center', 'sphere'], ['ica_drop', 'sphere'])
    """
    steps: list[str] = []
    for name in method.split("+"):
        if name not in FITS and name not in CHAINS:
            raise InputError(
                f"method {name!r} is not known: use one of {', '.join([*FITS, *CHAINS])}, or a chain of them such as "
                "'center+sphere'"
            )
        steps += CHAINS[name].split("+") if name in CHAINS else [name]
    allowed = {option for name in steps for option in _options(FITS[name])}
    for option in options or ():
        if option not in allowed:
            raise InputError(f"{method} has no option {option!r}: it has {', '.join(sorted(allowed)) or 'none'}")
    return steps


def representation(adata: ad.AnnData, use_rep: str | None = None) -> tuple[np.ndarray, list[str]]:
    """Rows (n, d) in float64 and the names of their columns; X, or a key of obsm.

    Raises
    ------
    InputError
        The key is not there, or wells are not finite.
    """
    if use_rep in (None, "X"):
        x, features = adata.X, [str(name) for name in adata.var_names]
    elif use_rep in adata.obsm:
        x = adata.obsm[use_rep]
        features = [f"{use_rep}_{i}" for i in range(x.shape[1])]
    else:
        raise InputError(f"use_rep={use_rep!r} is not in obsm: it has {', '.join(adata.obsm) or 'nothing'}")
    if x is None:
        raise InputError(
            f"there is no X to correct: name a representation, of {', '.join(adata.obsm) or 'which there is none'}"
        )
    x = np.asarray(x.todense() if hasattr(x, "todense") else x, dtype=np.float64)
    broken = np.flatnonzero(~np.isfinite(x).all(axis=1))
    if len(broken):
        raise InputError(
            f"{len(broken)} of {len(x)} wells hold values that are not finite ({first_few(adata.obs_names[broken])}): leave these "
            "wells out, or drop the features that are missing"
        )
    if len(x) < 3:
        raise InputError(f"a correction needs at least 3 wells and found {len(x)}")
    return x, features


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
    **options: Any,
) -> tuple[Corrector, np.ndarray]:
    """Fit the chain; give the corrected rows too."""
    steps = parse(method, options)
    roles: dict[str, Any] = {
        "batch_key": batch_key,
        "label_key": label_key,
        "controls": None if controls is None else [str(name) for name in controls],
        "strata_key": strata_key,
    }
    x, features = representation(adata, use_rep)
    wells = roles_of(adata.obs, anchors=anchors, **roles)
    anchored = sorted({name for name in wells.label[wells.anchor] if name is not None})
    parts: list[Transform] = []
    account: dict[str, Account] = {}
    for fit_step in (methods.standardize, *(FITS[name] for name in steps)):
        given = {**options, "random_state": random_state}
        chosen = {name: given[name] for name in _options(fit_step) if name in given}
        try:
            part, found = fit_step(x, wells, **chosen)
        except (ValueError, np.linalg.LinAlgError) as error:
            if isinstance(error, CellicaError):
                raise
            raise InputError(f"{fit_step.__name__} cannot be fitted to these wells: {error}") from error
        account[f"{len(parts)}_{fit_step.__name__}"] = found
        x = _finite(part.apply(x, wells), fit_step.__name__)
        parts.append(part)
    for note in wells.notes:
        log.info(note)
    notes = list(dict.fromkeys(wells.notes))
    return Corrector(method, features, roles, anchored, Chain(parts), account, notes), x


def _finite(x: np.ndarray, method: str) -> np.ndarray:
    lost = int(np.sum(~np.isfinite(x).all(axis=1)))
    if lost:
        raise InputError(
            f"{method} gives {lost} of {len(x)} wells values that are not finite: wells or features may be identical, or an "
            "option out of range"
        )
    return x


def _write(
    adata: ad.AnnData,
    corrected: np.ndarray,
    corrector: Corrector,
    key: str,
    notes: Sequence[str],
    parameters: Mapping[str, Any],
) -> None:
    if "/" in key:
        raise InputError(f"key {key!r} holds a '/', which AnnData files cannot: choose another key_added")
    adata.obsm[f"X_{key}"] = corrected.astype(np.float32)
    used = {name: value for name, value in {**corrector.roles, **parameters}.items() if value is not None}
    steps = {
        name: {field: value for field, value in account.items() if field not in ("components", "sources", "mixing")}
        for name, account in corrector.account.items()
    }
    record = {"method": corrector.method, "parameters": used, "steps": steps, "notes": np.array(notes, dtype=object)}
    adata.uns.setdefault(UNS, {})[key] = record
    add_step(adata, step("correct", {"method": corrector.method, "key_added": key, **used}, notes=list(notes)))


def _options(function: Callable) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def _pack(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """JSON for a transform; its arrays go to ``arrays`` under dotted names."""
    if isinstance(value, np.ndarray):
        arrays[name] = np.ascontiguousarray(value)
        return {"array": name}
    if isinstance(value, list):
        return [_pack(item, f"{name}.{i}", arrays) for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        packed = {key: _pack(item, f"{name}.{key}", arrays) for key, item in fields.items()}
        return {"class": type(value).__name__, **packed}
    return value


_SAVED = {
    c.__name__: c
    for c in (
        methods.Means,
        methods.Scale,
        methods.Affine,
        methods.Coral,
        methods.Chain,
        methods.Center,
        methods.Rebuild,
    )
}


def _unpack(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, arrays) for item in value]
    if isinstance(value, dict) and "array" in value:
        return arrays[value["array"]]
    if isinstance(value, dict):
        fields = {key: _unpack(item, arrays) for key, item in value.items() if key != "class"}
        return _SAVED[value["class"]](**fields)
    return value


def _method(name: str) -> Callable[..., None]:
    def correct(adata: ad.AnnData, *, key_added: str | None = None, **keywords: Any) -> None:
        run(adata, name, key_added=key_added, **keywords)

    correct.__name__ = correct.__qualname__ = name
    source = FITS[name].__doc__ if name in FITS else f"Recommended chain: {CHAINS[name]}."
    correct.__doc__ = f"{source}\n\nKeywords and keys written: those of ``run``."
    return correct


METHODS: dict[str, Callable[..., None]] = {name: _method(name) for name in (*FITS, *CHAINS)}
