"""A fitted correction: apply it to later plates, keep it in a file, write what it found into AnnData."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd

from cellica.artifacts import PathLike, add_step, atomic, require_file, step
from cellica.components import LABELS
from cellica.joint import Joint
from cellica.methods import finite, parse
from cellica.normalize import Center, Coral
from cellica.removal import Regress
from cellica.roles import FOUND, Account, Affine, Chain, Means, Rebuild, Roles, Scale, Transform, roles_of
from cellica.schema import UNS, CellicaError, InputError, first_few

PER_BATCH = {Center: "center", Coral: "tvn", Regress: "mixed='regress'"}  # what is read from the rows' own controls


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
    batches, strata
        Names of those in the fit.
    trials
        Table of what ``tune`` tried.
    """

    method: str
    features: list[str] = dataclasses.field(repr=False)
    roles: dict[str, Any]
    anchors: list[str]
    transform_: Chain = dataclasses.field(repr=False)
    account: dict[str, Account] = dataclasses.field(default_factory=dict, repr=False)
    notes: list[str] = dataclasses.field(default_factory=list)
    batches: list[str] = dataclasses.field(default_factory=list)
    strata: list[str] = dataclasses.field(default_factory=list)
    trials: pd.DataFrame | None = None

    def transform(self, adata: ad.AnnData, *, use_rep: str | None = None, key_added: str | None = None) -> None:
        """Correct the wells of adata; what must be per plate or batch is taken from their own controls, and said.

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
        with np.errstate(over="ignore", invalid="ignore"):  # as a damaged file leads to: what comes of it is refused
            corrected = finite(self.transform_.apply(x, wells), self.method)
        notes = list(dict.fromkeys([*self.notes, *self._later(wells), *wells.notes]))
        write(adata, corrected, self, key_added or self.method, notes, {"use_rep": use_rep})

    def _later(self, wells: Roles) -> list[str]:
        """What is new in the wells, and what is read from them rather than from the fit."""
        own = [
            name for kind, name in PER_BATCH.items() if any(isinstance(part, kind) for part in _flat(self.transform_))
        ]
        new = sorted(set(wells.batch.astype(str)) - set(self.batches))
        found = []
        read = bool(own)
        if PER_BATCH[Regress] in own:
            own.remove(PER_BATCH[Regress])
            if new:
                found.append(
                    f"applied later: {PER_BATCH[Regress]} takes the offsets of new batches from their wells of perturbations "
                    "that the fit knew; those of its own batches are as they were fitted"
                )
        if own:
            found.append(
                f"applied later: {' and '.join(own)} takes its offsets from the controls or anchors of the plates and batches "
                "at hand, everything else is as it was fitted"
            )
        if new and self.batches:
            rest = "" if read else ", nothing is estimated from them"
            found.append(f"applied later: {len(new)} batches were not in the fit ({first_few(new)}){rest}")
        unseen = sorted(set(wells.strata.astype(str)) - set(self.strata))
        if unseen and self.strata:
            found.append(
                f"applied later: strata {first_few(unseen)} were not in the fit: each is centred on its own mean"
            )
        return found

    def save(self, path: PathLike, *, force: bool = False) -> None:
        """Write the fitted transform to one safetensors file: arrays, and JSON in its header. No pickle."""
        from safetensors.numpy import save_file

        joint = [part.method for part in self.transform_.parts if isinstance(part, Joint)]
        if joint:
            raise InputError(f"{first_few(joint)} corrects only the rows it was fitted on: there is nothing to save")
        arrays: dict[str, np.ndarray] = {}
        header = {
            "format": "cellica-corrector-1",
            **{name: getattr(self, name) for name in (*_HEADER, *_LATER)},
            "transform": _pack(self.transform_, "transform", arrays),
        }
        with atomic(path, force=force) as temporary:
            save_file(arrays, temporary, metadata={"cellica": json.dumps(header)})


_HEADER: dict[str, type] = {"method": str, "features": list, "roles": dict, "anchors": list, "notes": list}
_LATER: dict[str, type] = {"batches": list, "strata": list}  # may be absent


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
        fields = {name: header[name] for name in _HEADER} | {name: header[name] for name in _LATER if name in header}
        odd = [
            name
            for name, kind in (_HEADER | _LATER).items()
            if not isinstance(fields.get(name, []), kind) and name in fields
        ]
        if odd or not isinstance(chain, Chain):
            raise TypeError(f"{first_few(odd or ['transform'])} is of another kind")
        return Corrector(transform_=chain, **fields)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is a damaged correction ({type(error).__name__}: {error}): save it again") from error


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
        if len(x.shape) != 2:
            raise InputError(f"obsm[{use_rep!r}] has the shape {x.shape}: wells x features are needed")
        features = [f"{use_rep}_{name}" for name in getattr(x, "columns", range(x.shape[1]))]
        if isinstance(x, pd.DataFrame):
            odd = [str(name) for name in x if not pd.api.types.is_numeric_dtype(x[name])]
            if odd:
                raise InputError(f"obsm[{use_rep!r}] has columns that are not numbers: {first_few(odd)}")
            x = x.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        raise InputError(f"use_rep={use_rep!r} is not in obsm: it has {', '.join(adata.obsm) or 'nothing'}")
    if x is None:
        raise InputError(
            f"there is no X to correct: name a representation, of {', '.join(adata.obsm) or 'which there is none'}"
        )
    if np.iscomplexobj(x):
        raise InputError("the values are complex numbers: a correction takes real ones")
    x = np.asarray(x.todense() if hasattr(x, "todense") else x, dtype=np.float64)
    broken = ~np.isfinite(x)
    wells, columns = np.flatnonzero(broken.any(axis=1)), np.flatnonzero(broken.any(axis=0))
    if len(wells):
        raise InputError(
            f"{len(wells)} of {len(x)} wells hold values that are not finite ({first_few(adata.obs_names[wells])}), in {len(columns)} of "
            f"{len(features)} features ({first_few([features[i] for i in columns])}): leave out these wells or these features, or fill "
            "the values in"
        )
    if len(x) < 3:
        raise InputError(f"a correction needs at least 3 wells and found {len(x)}")
    return x, features


def write(
    adata: ad.AnnData,
    corrected: np.ndarray,
    corrector: Corrector,
    key: str,
    notes: Sequence[str],
    parameters: Mapping[str, Any],
) -> None:
    """Write corrected rows and the record of their correction; what an earlier one left under the key goes."""
    check_key(adata, key)
    for place, left in ((adata.obsm, f"{key}_sources"), (adata.varm, f"{key}_mixing")):
        if left in place:
            del place[left]
    adata.obsm[f"X_{key}"] = corrected.astype(np.float32)
    used = {name: value for name, value in {**corrector.roles, **parameters}.items() if value is not None}
    steps = {
        name: {field: value for field, value in account.items() if field not in FOUND}
        for name, account in corrector.account.items()
    }
    record: dict[str, Any] = {"method": corrector.method, "parameters": used, "steps": steps}
    record["notes"] = np.array(notes, dtype=object)
    if corrector.trials is not None and len(corrector.trials):
        record["trials"] = _named(corrector.trials)
    adata.uns.setdefault(UNS, {})[key] = record
    add_step(adata, step("correct", {"method": corrector.method, "key_added": key, **used}, notes=list(notes)))


def check_key(adata: ad.AnnData, key: str) -> None:
    """Raise an InputError where a correction cannot be written under a key."""
    if "/" in key:
        raise InputError(f"key {key!r} holds a '/', which AnnData files cannot: choose another key_added")
    record = adata.uns.get(UNS, {}).get(key)
    if key == "provenance" or (record is not None and not (isinstance(record, Mapping) and "method" in record)):
        raise InputError(f"key {key!r} is taken: uns['cellica'] keeps something else there; choose another key_added")


def write_components(adata: ad.AnnData, account: Account, key: str, *, of_x: bool) -> None:
    """Write what a method that removes components found; ``of_x``: X was corrected, and mixing has its features."""
    record = adata.uns[UNS][key]
    adata.obsm[f"{key}_sources"] = account["sources"]
    if of_x and len(account["mixing"]) == adata.n_vars:
        adata.varm[f"{key}_mixing"] = account["mixing"]
    record["components"] = component_table(account["components"])
    record["removal_path"] = component_table(account["path"])
    record["top_wells"] = account["top_wells"]


def sources(adata: ad.AnnData, key: str = "ica") -> ad.AnnData:
    """Wells by components: what a correction found, as an AnnData of its own for scanpy.

    ``sc.tl.rank_genes_groups`` on it names the components that mark a cluster, ``sc.pl.umap(..., color="component_3")`` paints one.

    Parameters
    ----------
    key
        A correction that found components: `ica`, `ica_drop`, `pca_drop`, `random_drop` or a chain that holds one.

    Returns
    -------
    AnnData whose X is ``obsm["KEY_sources"]`` (n, k), float32, of unit variance; obs and obsm (but for the sources) are those of
    ``adata``; var is the component table, named ``component_0``, ...; varm["mixing"] (k, features) where X was corrected.

    Raises
    ------
    InputError
        There are no components under that key.

    Examples
    --------
    >>> from cellica import correct, simulate
    >>> wells = simulate.profiles("small")
    >>> correct.run(wells, "ica")
    >>> components = correct.sources(wells, "ica")
    >>> components.var["label"].value_counts().index[0] in ("batch", "biology", "mixed", "other")
    True
    """
    place = f"{key}_sources"
    record = adata.uns.get(UNS, {}).get(key)
    if place not in adata.obsm or not isinstance(record, Mapping) or "components" not in record:
        there = [name.removesuffix("_sources") for name in adata.obsm if name.endswith("_sources")]
        held = f"obsm holds those of {first_few(there)}" if there else "no correction left any"
        raise InputError(f"there are no components of {key!r}: {held}; run ica or ica_drop, or name another key")
    var = record["components"].copy()
    var.index = pd.Index([f"component_{name}" for name in var.index], dtype=object)
    found = ad.AnnData(
        np.asarray(adata.obsm[place], dtype=np.float32),
        obs=adata.obs.copy(),
        var=var,
        obsm={name: value for name, value in adata.obsm.items() if name != place},
    )
    if f"{key}_mixing" in adata.varm:
        found.varm["mixing"] = np.asarray(adata.varm[f"{key}_mixing"]).T
    return found


def component_table(columns: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """Table of components, one row each; labels and actions are categories."""
    table = pd.DataFrame(dict(columns))
    table["label"] = pd.Categorical(table["label"], categories=list(LABELS))
    if "action" in table:
        table["action"] = pd.Categorical(table["action"], categories=["removed", "regressed", "kept"])
    return _named(table)


def _named(table: pd.DataFrame) -> pd.DataFrame:
    """The table with an index of strings that every anndata writes."""
    table = table.copy()
    table.index = pd.Index([str(i) for i in range(len(table))], dtype=object)
    return table


# -------------------------------------------------------------------------------------------------------- files


_SAVED = {kind.__name__: kind for kind in (Means, Scale, Affine, Coral, Chain, Center, Rebuild, Regress)}


def _flat(transform: Transform) -> list[Transform]:
    return [one for part in transform.parts for one in _flat(part)] if isinstance(transform, Chain) else [transform]


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


def _unpack(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, arrays) for item in value]
    if isinstance(value, dict) and "array" in value:
        return arrays[value["array"]]
    if isinstance(value, dict):
        fields = {key: _unpack(item, arrays) for key, item in value.items() if key != "class"}
        return _SAVED[value["class"]](**fields)
    return value
