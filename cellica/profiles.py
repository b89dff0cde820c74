"""Profiles: published embeddings and tables as AnnData, sites to wells, wells to consensus profiles.

What is left out on the way is named in ``uns["cellica"]`` (``"import"``, ``"profile"``, ``"consensus"``) with its reason.
"""

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_datetime64_any_dtype, is_float_dtype, is_numeric_dtype

from cellica.artifacts import PathLike, add_step, provenance, require_file, sha256, step
from cellica.hcs import store_name
from cellica.progress import say
from cellica.schema import (
    CONTROL,
    EXPERIMENT,
    OBS_COLUMNS,
    PERTURBATION,
    PLATE,
    SITE,
    UNS,
    WELL,
    InputError,
    control_mask,
    first_few,
    numbers,
    obs_names,
    quality_columns,
    require_columns,
)
from cellica.screen import (
    PATH,
    SITE_KEYS,
    apply_columns,
    collapse,
    conventions,
    load_table,
    read_rxrx1,
    read_rxrx3_core,
    spec_uses,
    text,
    validate,
    well_names,
)

WELL_KEYS = (EXPERIMENT, PLATE, WELL)
PROFILE_NUMBER = "profile_number"
_NO_WELL = ("", "?")
_EMBEDDING_READERS = {"rxrx1": read_rxrx1, "rxrx3-core": read_rxrx3_core}

# ---------------------------------------------------------------------------------------------- tables of profiles


def read_table(
    files: PathLike | Sequence[PathLike],
    *,
    metadata: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
    controls: Sequence[str] = (),
    features: str | None = None,
) -> ad.AnnData:
    """Read a table of profiles, one row a well (or a site), and join what further tables say of them.

    Parameters
    ----------
    files
        CSV, TSV or parquet files of the same kind, put below one another.
    metadata
        Further tables, ``FILE:left=right,...``: column ``left`` of what is read so far equals ``right`` in FILE. Numbers
        and text are compared as text, wells whatever their zeros. Rows of FILE with the same keys must agree in the
        columns that a SPEC or a later join names; their other differing columns are left out. Rows without a partner
        stay, with missing values.
    columns
        Role to SPEC, see :func:`cellica.screen.apply_columns`; applied after the joins.
    controls
        Perturbations that are negative controls.
    features
        Regular expression for the names of feature columns. By default features are the numeric columns of ``files``
        that no SPEC and no join names, whose name is no obs column's, does not contain ``Metadata`` and is not
        ``Unnamed: N``; beside columns of floats, one that holds integers or nothing only where it shares the first word
        of its name (up to ``_``) with one of them, so that a code or a count stays in ``obs``.

    Returns
    -------
    AnnData of float32 with the obs columns of ``schema.OBS_COLUMNS`` first. Rows of which less than half of the features
    are finite are left out, then features that are not finite everywhere or constant. Where the table knows no wells
    (none, or "?" throughout), rows are numbered within a plate in ``obs["profile_number"]``. Columns with "/" in their
    name get "_". ``uns["cellica"]["import"]`` names what was left out and counts, for each join, rows without a partner
    and combinations of keys in its table that no row has.

    Raises
    ------
    MissingFileError, InputError
        A file or column is not there, a join is ambiguous, two tables disagree in a column, ids are not unique, or no
        features are left.
    """
    files = _file_list(files)
    columns, joins = dict(columns or {}), [_parse_join(entry) for entry in metadata]
    table = _concatenate(files)
    used = {name for name in table.columns for spec in columns.values() if spec_uses(spec, name)}
    names = _feature_names(table, used.union(*(join.left for join in joins)), features)
    texts = _almost_numeric(table, used.union(*(join.left for join in joins)))
    if texts:
        say(
            f"{len(texts)} columns hold numbers and some text, or decimal commas, and are kept in obs, not as features: "
            f"{first_few(texts)}"
        )
    obs, joined = table.drop(columns=names), []
    for i, join in enumerate(joins):
        later = [*columns.values(), *(key for following in joins[i + 1 :] for key in following.left)]
        obs, report = _add_table(obs, join, later, columns.get(WELL, WELL))
        joined.append(report)
    obs = _obs(apply_columns(obs, columns), controls)
    adata, dropped = _adata(table[names], obs)
    report = {"n_rows": len(table), "n_columns": len(names), "columns_with_text": _names(texts), **dropped}
    for key in joined[0] if joined else ():
        values = [one[key] for one in joined]
        report[f"join_{key}"] = _names(values) if isinstance(values[0], str) else np.array(values)
    parameters = {"format": "table", "metadata": list(metadata), "columns": columns, "controls": list(controls)}
    return _imported(adata, report, {**parameters, "features": features}, [*files, *(join.file for join in joins)])


def read_embeddings(
    files: PathLike | Sequence[PathLike],
    metadata: PathLike | None = None,
    format: str = "rxrx1",
    *,
    features: str | None = None,
) -> ad.AnnData:
    """Read published embeddings of RxRx1, RxRx3 or RxRx3-core.

    Parameters
    ----------
    files
        CSV or parquet files with ``site_id``, ``well_id`` or ``id_code``, and one column a feature.
    metadata
        The data set's table or the folder where it lies; by default the folder of the first file.
    format
        ``rxrx1`` or ``rxrx3-core``. For tables of other kinds there is :func:`read_table`.
    features
        Regular expression for the names of feature columns; by default all numeric columns but those of the metadata.

    Returns
    -------
    AnnData of float32, one row a site or a well as the ids are, with the obs of :func:`cellica.screen.read_rxrx1` or
    ``read_rxrx3_core`` (without image paths). Embeddings without metadata and metadata without embeddings are left out
    and counted, rows that are not finite left out and named, in ``uns["cellica"]["import"]``.

    Raises
    ------
    MissingFileError, InputError
        A file is not there, there are no ids, ids occur twice, or none of them is in the metadata.
    """
    if format not in _EMBEDDING_READERS:
        raise InputError(
            f"format {format!r} is none of {', '.join(_EMBEDDING_READERS)}; for other tables use read_table"
        )
    files = _file_list(files)
    table = _concatenate(files)
    key = next((name for name in ("site_id", "well_id", "id_code") if name in table), None)
    if key is None:
        raise InputError(
            f"{files[0]} has none of the columns site_id, well_id, id_code; it has {first_few(table.columns)}"
        )
    obs = _EMBEDDING_READERS[format](require_file(files[0]).parent, metadata)
    obs = obs.drop(columns=obs.columns[obs.columns.str.startswith(PATH)])
    if key != "site_id":
        obs = collapse(obs.drop(columns=SITE), WELL_KEYS)[0]
        obs.index = obs_names(obs)
    ids = text(table[key])
    if ids.duplicated().any():
        raise InputError(
            f"{ids.duplicated().sum()} embeddings have the id of another: {first_few(ids[ids.duplicated()])}"
        )
    known = ids.isin(obs.index).to_numpy()
    if not known.any():
        raise InputError(
            f"none of the {len(ids)} embeddings ({first_few(ids, 2)}) is in the metadata ({first_few(obs.index, 2)})"
        )
    names = _feature_names(table, {key, *obs.columns}, features)
    without = obs.index[~obs.index.isin(ids)]
    for rows, what in ((ids[~known], "embeddings have no metadata"), (without, "rows of metadata have no embedding")):
        if len(rows):
            say(f"{len(rows)} {what} and are left out: {first_few(rows)}")
    adata, dropped = _adata(table.loc[known, names], obs.loc[ids[known]], fixed_features=True)
    report = {
        "n_rows": len(table),
        "embeddings_without_metadata": int((~known).sum()),
        "metadata_without_embedding": len(without),
        "examples_without_metadata": _names(ids[~known][:20]),
        "examples_without_embedding": _names(without[:20]),
        **dropped,
    }
    return _imported(adata, report, {"format": format, "metadata": metadata and str(metadata)}, files)


# ---------------------------------------------------------------------------------------------- sites to wells and on


def join(adatas: ad.AnnData | Iterable[ad.AnnData]) -> ad.AnnData:
    """Put the sites of several plates below one another.

    Parameters
    ----------
    adatas
        Site embeddings: same features, same ``obsm`` keys, same encoder.

    Returns
    -------
    AnnData with ``X``, ``obs``, ``obsm`` and the provenance of all; steps that differ in their inputs alone become one.
    Of plates without a site only the provenance is there.

    Raises
    ------
    InputError
        There is none, they differ in features, ``obsm`` keys or encoder, or a site occurs twice.
    """
    sources = [adatas] if isinstance(adatas, ad.AnnData) else list(adatas)
    if not sources:
        raise InputError("no site embeddings were given: name at least one file of sites")
    plates = [plate for plate in sources if plate.n_obs]
    if not plates:
        raise InputError(f"not one of {len(sources)} plates has a site: see what ingest set aside, and why")
    _same_kind(plates)
    obs = pd.concat([_uncategorical(plate.obs) for plate in plates])
    if obs.index.has_duplicates:
        raise InputError(f"sites occur more than once: {first_few(obs.index[obs.index.duplicated()])}")
    obsm = {key: np.vstack([np.asarray(plate.obsm[key]) for plate in plates]) for key in plates[0].obsm}
    x = np.vstack([_dense(plate.X) for plate in plates])
    sites = ad.AnnData(X=x, obs=obs, var=plates[0].var.copy(), obsm=obsm)
    _merge_provenance(sites, sources)
    return sites


def wells(
    adatas: ad.AnnData | Iterable[ad.AnnData],
    *,
    inputs: Mapping[str, str] | None = None,
    left_out: Mapping[str, str] | None = None,
) -> ad.AnnData:
    """Average sites to wells, over one or several plates.

    Parameters
    ----------
    adatas
        Site embeddings that :func:`join` can put together.
    inputs
        Names and SHA-256 of the files they come from, for the provenance.
    left_out
        Names and reasons of plates of the screen that are not among them, for the account.

    Returns
    -------
    AnnData with the mean of the finite sites of each well (``X`` and each ``obsm``, float32), in order of appearance.
    ``obs`` keeps the columns that are constant within every well, the means of what was measured of the fields
    (``schema.QUALITY``; of ``empty`` the share of empty sites), and ``n_sites``.
    ``uns["cellica"]["profile"]`` names sites left out because they are not finite, wells lost with them, columns left
    out, and plates without a site or left out altogether. Provenance is that of all plates, and this step.

    Raises
    ------
    InputError
        The plates cannot be put together, no site is finite, what was measured of the fields is text, or a plate that is
        left out is among them.
    """
    sites = join(adatas)
    require_columns(sites.obs, WELL_KEYS, "obs")
    there = {store_name(*key) for key in zip(sites.obs[EXPERIMENT], sites.obs[PLATE])}
    if both := sorted(there & set(left_out or {})):
        raise InputError(
            f"left_out (--left-out) names {first_few(both)}, which is among the sites: take one of the two out"
        )
    measured = numbers(sites.obs, quality_columns(sites.obs))
    arrays = {"X": sites.X, **sites.obsm}
    finite = np.logical_and.reduce([np.isfinite(values).all(axis=1) for values in arrays.values()])
    if not finite.any():
        raise InputError(f"none of the {len(finite)} sites has a finite embedding: were the images readable?")
    if not finite.all():
        say(f"{(~finite).sum()} sites have no finite embedding and are left out: {first_few(sites.obs_names[~finite])}")
    nowhere = sites.obs_names[sites.obs[list(WELL_KEYS)].isna().any(axis=1)]
    if len(nowhere):
        raise InputError(
            f"{len(nowhere)} sites miss one of {', '.join(WELL_KEYS)} ({first_few(nowhere)}): fill it in, or leave them out"
        )
    obs, groups, varying = collapse(sites.obs[finite], WELL_KEYS)
    obs[measured.columns] = measured[finite].groupby(groups).mean().to_numpy()
    obs = obs.drop(columns=SITE, errors="ignore").assign(n_sites=np.bincount(groups))
    obs.index = _unique(obs_names(obs))
    means = {key: _group_means(values[finite], groups) for key, values in arrays.items()}
    adata = ad.AnnData(X=means.pop("X"), obs=obs, var=sites.var.copy(), obsm=means)
    everywhere = obs_names(sites.obs.drop(columns=SITE, errors="ignore")).unique()
    _merge_provenance(adata, [sites])
    adata.uns.setdefault(UNS, {})["profile"] = {
        "n_sites": sites.n_obs,
        "sites_not_finite": _names(sites.obs_names[~finite]),
        "wells_without_sites": _names(everywhere[~everywhere.isin(adata.obs_names)]),
        "columns_left_out": _names(name for name in varying if name not in obs and name != SITE),
        "plates_without_sites": _names(_plates_without_sites(sites)),
        "plates_left_out": _names(f"{name}: {reason}" for name, reason in (left_out or {}).items()),
    }
    add_step(adata, step("profile", {"n_sites": sites.n_obs, "n_wells": adata.n_obs}, inputs))
    return adata


def consensus(adata: ad.AnnData, by: Sequence[str] = (PERTURBATION,), use_rep: str | None = None) -> ad.AnnData:
    """Average profiles that share the values of ``by``.

    Parameters
    ----------
    adata
        Wells (or sites).
    by
        Columns of ``obs``.
    use_rep
        Key in ``obsm`` to average; ``X`` by default.

    Returns
    -------
    AnnData of float32, one row a combination, named by its values (joined by ``|``). ``obs`` keeps the columns that are
    constant within every group, and ``n_profiles``. Rows that miss a value or are not finite are left out and counted in
    ``uns["cellica"]["consensus"]``.

    Raises
    ------
    InputError
        A column or key is not there, or no row is left.
    """
    by = [by] if isinstance(by, str) else list(by)
    require_columns(adata.obs, by, "obs")
    if use_rep is not None and use_rep not in adata.obsm:
        raise InputError(f"obsm has no {use_rep!r}; it has {', '.join(adata.obsm) or 'nothing'}")
    values = _dense(adata.X if use_rep is None else adata.obsm[use_rep])
    named = adata.obs[by].notna().all(axis=1).to_numpy()
    finite = np.isfinite(values).all(axis=1)
    keep = named & finite
    if not keep.any():
        raise InputError(f"no profile has a value in each of {', '.join(by)} and is finite")
    obs, groups, _ = collapse(adata.obs[keep], by)
    obs["n_profiles"] = np.bincount(groups)
    ids = text(obs[by[0]])
    for key in by[1:]:
        ids = ids + "|" + text(obs[key])
    obs.index = pd.Index(ids.to_numpy(), name=None)
    var = (
        adata.var.copy() if use_rep is None else pd.DataFrame(index=[f"{use_rep}_{i}" for i in range(values.shape[1])])
    )
    result = ad.AnnData(X=_group_means(values[keep], groups), obs=obs, var=var)
    _merge_provenance(result, [adata])
    report = {"by": _names(by), "n_missing": int((~named).sum()), "n_not_finite": int((named & ~finite).sum())}
    result.uns.setdefault(UNS, {})["consensus"] = report
    if not keep.all():
        say(f"{(~keep).sum()} profiles miss one of {', '.join(by)} or are not finite and are left out")
    add_step(result, step("consensus", {"by": by, "use_rep": use_rep}))
    return result


# ---------------------------------------------------------------------------------------------- reading and joining


class _Join(NamedTuple):
    file: str
    left: list[str]
    right: list[str]


def _file_list(files: PathLike | Sequence[PathLike]) -> list[PathLike]:
    found: list[PathLike] = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not found:
        raise InputError("no table was given: name at least one CSV, TSV or parquet file")
    return found


def _concatenate(files: Sequence[PathLike]) -> pd.DataFrame:
    with warnings.catch_warnings():  # columns that are empty in one file are no news
        warnings.filterwarnings("ignore", "The behavior of DataFrame concatenation", FutureWarning)
        table = pd.concat([load_table(file) for file in files], ignore_index=True)
    return table.rename(columns=str)


def _unique(ids: pd.Index) -> pd.Index:
    """The ids, or an error where different rows read the same, as experiment E_1, plate 1 and experiment E, plate 1_1 do."""
    if ids.has_duplicates:
        raise InputError(
            f"rows of different experiment, plate or well have one id ({first_few(ids[ids.duplicated()].unique())}): rename "
            "the experiments or plates so that ids joined by '_' differ"
        )
    return ids


def _almost_numeric(table: pd.DataFrame, used: set[str]) -> list[str]:
    """Columns of text that hold numbers in most rows, decimal commas too: features that text keeps out."""
    words = [n for n in table.columns if n not in used and not is_numeric_dtype(table[n]) and n not in OBS_COLUMNS]

    def share(name: str) -> float:
        numbers = table[name].astype(str).str.replace(",", ".", regex=False)
        return float(pd.to_numeric(numbers, errors="coerce").notna().mean())

    return [n for n in words if "Metadata" not in n and share(n) > 0.5]


def _feature_names(table: pd.DataFrame, used: set[str], pattern: str | None) -> list[str]:
    numeric = [name for name in table.columns if is_numeric_dtype(table[name]) and not is_bool_dtype(table[name])]
    if pattern is not None:
        try:
            matches = re.compile(pattern).search
        except re.error as error:
            raise InputError(f"features={pattern!r} (--features) is no regular expression: {error}") from error
        names = [name for name in table.columns if matches(name)]
        bad = [name for name in names if name not in numeric]
        if bad:
            raise InputError(f"features={pattern!r} matches {len(bad)} columns that are not numeric: {first_few(bad)}")
    else:
        kept = {*used, *OBS_COLUMNS}
        names = [n for n in numeric if n not in kept and "Metadata" not in n and not n.startswith("Unnamed: ")]
        sure = {n for n in names if is_float_dtype(table[n]) and table[n].notna().any()}
        words = {name.partition("_")[0] for name in sure}
        names = [n for n in names if not words or n in sure or n.partition("_")[0] in words]
    if not names:
        raise InputError(
            f"there are no feature columns{f' that match {pattern!r}' if pattern else ''}; numeric columns are "
            f"{first_few(numeric) or 'none'}: name features with a regular expression (features=)"
        )
    return names


def _parse_join(entry: str) -> _Join:
    file, _, keys = entry.rpartition(":")
    pairs = [pair.partition("=") for pair in keys.split(",")]
    if not file or not all(left and right for left, _, right in pairs):
        raise InputError(f"metadata {entry!r} is not understood: write FILE:left=right or FILE:left=right,left2=right2")
    return _Join(file, [left.strip() for left, _, _ in pairs], [right.strip() for _, _, right in pairs])


def _add_table(obs: pd.DataFrame, join: _Join, later: Sequence[str], well: str) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Many rows to one: add the columns of the join's table. ``later`` holds SPECs and keys that come after it."""
    table = load_table(join.file).rename(columns=str)
    require_columns(obs, join.left, f"metadata {join.file}: what is read so far")
    require_columns(table, join.right, f"metadata {join.file}: this table")
    is_well = [left == well or "well" in left.lower() or "well" in right.lower() for left, right in zip(*join[1:])]
    left, right = _keys(obs[join.left], is_well), _keys(table[join.right], is_well)
    known = right.notna()
    table, _, varying = collapse(table[known].assign(**{_KEY: right[known]}), [_KEY])
    needed = [name for name in varying if name in obs or any(spec_uses(spec, name) for spec in later)]
    needed = [name for name in needed if name not in join.right]
    if needed:
        raise InputError(
            f"metadata {join.file}: rows with the same {', '.join(join.right)} differ in {first_few(needed)}: "
            "join by more columns, or give a table with one row for each"
        )
    found = left.isin(table[_KEY])
    partners = table.set_index(_KEY).drop(columns=join.right, errors="ignore").reindex(left)
    partners = partners.set_axis(obs.index, axis=0)
    shared = [name for name in partners.columns if name in obs]
    for name in shared:
        mine, theirs = text(obs.loc[found, name]), text(partners.loc[found, name])
        differ = (mine != theirs) & ~(mine.isna() & theirs.isna())
        if differ.any():
            pairs = [f"{a} and {b}" for a, b in zip(mine[differ], theirs[differ])]
            raise InputError(
                f"metadata {join.file}: column {name!r} is in both tables and differs in {len(pairs)} rows "
                f"({first_few(pairs)}): rename it in one of them, or join by it too"
            )
    report = {
        "table": join.file,
        "columns_left_out": ", ".join(varying),
        "matched": int(found.sum()),
        "unmatched_rows": int((~found).sum()),
        "unmatched_in_table": int((~table[_KEY].isin(left)).sum()) + int((~known).sum()),
    }
    say("metadata {table}: {matched} rows matched, {unmatched_rows} not; {unmatched_in_table} unused".format(**report))
    if varying:
        say(f"  left out, as they differ between rows with the same keys: {first_few(varying)}")
    return pd.concat([obs, partners.drop(columns=shared)], axis=1), report


_KEY = "join key"


def _keys(table: pd.DataFrame, is_well: Sequence[bool]) -> pd.Series:
    """Keys as one text a row, None where one is missing."""
    parts = [(well_names if well else text)(table.iloc[:, i]).reset_index(drop=True) for i, well in enumerate(is_well)]
    joined = parts[0].astype(object)
    for part in parts[1:]:
        joined = joined.str.cat(part, sep="\t")
    return joined.set_axis(table.index)


# ---------------------------------------------------------------------------------------------- obs, X and the account


def _obs(table: pd.DataFrame, controls: Sequence[str]) -> pd.DataFrame:
    """Rows by the conventions, checked and named; numbered where the table knows no wells."""
    for key in (EXPERIMENT, PLATE):
        if key not in table:
            raise InputError(
                f"the table has no column {key!r}: say which it is with --column {key}=COLUMN (columns={{{key!r}: ...}}); "
                f"it has {first_few(table.columns, 20)}"
            )
    obs = conventions(table.rename(columns=lambda name: name.replace("/", "_")))
    if not obs.columns.is_unique:
        raise InputError(f"columns have one name: {first_few(obs.columns[obs.columns.duplicated()])}")
    for name in obs.columns[[is_datetime64_any_dtype(dtype) for dtype in obs.dtypes]]:
        obs[name] = text(obs[name])
    if WELL in obs and not obs[WELL].isin(_NO_WELL).all() and obs[WELL].notna().any():
        keys = [key for key in SITE_KEYS if key in obs]
        validate(obs, keys)
        obs.index = _unique(obs_names(obs))
    else:
        obs = obs.drop(columns=WELL, errors="ignore")
        obs[PROFILE_NUMBER] = obs.groupby([EXPERIMENT, PLATE], dropna=False).cumcount() + 1
        validate(obs, (EXPERIMENT, PLATE, PROFILE_NUMBER))
        say(f"the table names no wells: its {len(obs)} rows are numbered within each plate")
        obs.index = obs_names(obs.assign(**{WELL: obs[PROFILE_NUMBER]}).drop(columns=SITE, errors="ignore"))
    if controls:
        obs.loc[control_mask(obs, controls), CONTROL] = "negative"
    return obs


def _adata(values: pd.DataFrame, obs: pd.DataFrame, fixed_features: bool = False) -> tuple[ad.AnnData, dict[str, Any]]:
    """AnnData without rows and features that are not finite, and the account of them."""
    with np.errstate(over="ignore"):
        x = values.to_numpy(dtype=np.float32, na_value=np.nan)
    finite = np.isfinite(x)
    rows = finite.all(axis=1) if fixed_features else finite.mean(axis=1) >= 0.5
    whole = finite[rows].all(axis=0)
    constant = np.zeros(len(whole), dtype=bool)
    if rows.any() and not fixed_features:
        constant = whole & (x[rows].min(axis=0) == x[rows].max(axis=0))
    columns = whole & ~constant
    account = {"rows_not_finite": obs.index[~rows], "features_not_finite": values.columns[~whole]}
    account["features_constant"] = values.columns[constant]
    for what, names in account.items():
        if len(names):
            say(f"left out, {what.replace('_', ' ')}: {len(names)}: {first_few(names)}")
    if not rows.any() or not columns.any():
        raise InputError(
            f"nothing is left of {x.shape[0]} rows and {x.shape[1]} features: {(~rows).sum()} rows and "
            f"{(~whole).sum()} features are not finite, {constant.sum()} features constant"
        )
    var = pd.DataFrame(index=values.columns[columns].to_numpy(dtype=object))
    adata = ad.AnnData(X=np.ascontiguousarray(x[rows][:, columns]), obs=obs[rows].copy(), var=var)
    return adata, {what: _names(names) for what, names in account.items()}


def _imported(
    adata: ad.AnnData, report: Mapping[str, Any], parameters: Mapping[str, Any], files: Sequence[PathLike]
) -> ad.AnnData:
    adata.uns[UNS] = {"import": {**report, "n_profiles": adata.n_obs, "n_features": adata.n_vars}}
    add_step(adata, step("import", parameters, {str(file): sha256(file) for file in files}))
    return adata


def _names(names: Iterable[Any]) -> np.ndarray:
    return np.array([str(name) for name in names], dtype=object)


# ---------------------------------------------------------------------------------------------- averaging


def _uncategorical(obs: pd.DataFrame) -> pd.DataFrame:
    categorical = obs.select_dtypes("category").columns
    return obs.assign(**{name: obs[name].astype(obs[name].cat.categories.dtype) for name in categorical})


def _dense(values: Any) -> np.ndarray:
    return np.asarray(values.toarray() if hasattr(values, "toarray") else values)


def _group_means(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Mean of the rows of each group, summed in float64."""
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(groups.max() + 1))
    sums = np.add.reduceat(values[order], starts, axis=0, dtype=np.float64)
    return (sums / np.bincount(groups)[:, None]).astype(np.float32)


def _same_kind(plates: Sequence[ad.AnnData]) -> None:
    """Raise an InputError that names the plate which differs from the first in features, obsm keys or embedding."""
    first = plates[0]
    for i, plate in enumerate(plates[1:], 2):
        here, there = f"plate {i} ({plate.obs_names[0]!r} ...)", f"plate 1 ({first.obs_names[0]!r} ...)"
        if not plate.var_names.equals(first.var_names):
            raise InputError(
                f"{here} has other features than {there} ({plate.n_vars} and {first.n_vars}): embed both alike"
            )
        if set(plate.obsm) != set(first.obsm):
            raise InputError(
                f"obsm of {here} holds {sorted(plate.obsm)}, that of {there} {sorted(first.obsm)}: make all alike"
            )
        if _encoders(plate) != _encoders(first):
            raise InputError(
                f"{here} and {there} were embedded by different encoders or of different channels, {_encoders(plate)} and "
                f"{_encoders(first)}: embed all plates alike"
            )


def _encoders(adata: ad.AnnData) -> list[dict[str, Any]]:
    """What decides an embedding, of each ``embed`` step."""
    steps = [{**known["parameters"], **known} for known in provenance(adata) if known["verb"] == "embed"]
    keys = ("encoder", "weights_sha256", "crop_size", "channels", "plate_channels")
    return [{key: known.get(key) for key in keys} for known in steps]


def _plates_without_sites(adata: ad.AnnData) -> list[str]:
    """Plates of which an ingest could use no image, with what was wrong."""
    ingested = [known.get("plates", {}) for known in provenance(adata) if known["verb"] == "ingest"]
    counts = {name: count for plates in ingested for name, count in plates.items()}
    return [
        f"{name}: {', '.join(count.get('reasons', {})) or 'no reason known'}"
        for name, count in counts.items()
        if not count["sites"]
    ]


def _merge_provenance(adata: ad.AnnData, sources: Sequence[ad.AnnData]) -> None:
    """Steps of all sources in order; those that differ in their inputs and plates alone become one."""
    merged: dict[str, dict[str, Any]] = {}
    for known in (known for source in sources for known in provenance(source)):
        own = {key: known[key] for key in ("inputs", "plates") if key in known}
        same = json.dumps({key: value for key, value in known.items() if key not in own}, sort_keys=True)
        one = merged.setdefault(same, {**known, **{key: {} for key in own}})
        for key, value in own.items():
            one[key].update(value)
    for known in merged.values():
        add_step(adata, known)
