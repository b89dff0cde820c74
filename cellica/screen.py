"""Screen tables, one row a site: RxRx1 in each of its editions, RxRx3-core, and screens of one's own.

Every reader returns the columns of ``schema.OBS_COLUMNS``, then what else the source has, then ``path_*`` (one image
file a channel) where there are images. The index holds the site ids, ``{experiment}_{plate}_{well}_{site}``.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cellica.artifacts import PathLike, require_file
from cellica.progress import say
from cellica.schema import (
    CELL_TYPE,
    CONCENTRATION,
    CONTROL,
    CONTROL_VALUES,
    EXPERIMENT,
    OBS_COLUMNS,
    PERTURBATION,
    PERTURBATION_TYPE,
    PLATE,
    SITE,
    WELL,
    InputError,
    MissingFileError,
    control_mask,
    first_few,
    format_well,
    obs_names,
    parse_well,
    require_columns,
    row_letters,
)

SITE_KEYS = (EXPERIMENT, PLATE, WELL, SITE)
PATH = "path_"
RESERVED = "_index"
# digits that are a name: with leading zeros (plate 01), in the form of a power (1E4), or more than a number keeps
_NAME_OF_DIGITS = r"[+-]?0\d+|\d+[eE]\d+|\d{16,}"
_TEXT_ROLES = (EXPERIMENT, PLATE, CELL_TYPE, PERTURBATION, PERTURBATION_TYPE)

# ---------------------------------------------------------------------------------------------- tables and columns


def load_table(path: PathLike) -> pd.DataFrame:
    """Read a CSV or TSV file (compressed or not) or a parquet file.

    Raises
    ------
    MissingFileError, InputError
        The file is not there, or is not a table.
    """
    file = require_file(path, "table")
    if not file.is_file():
        raise InputError(f"{file} is not a regular file: give a CSV, TSV or parquet file")
    try:
        if file.suffix == ".parquet":
            table = _without_lists(pd.read_parquet(file), file)
        else:
            table = _read_csv(file, "\t" if ".tsv" in file.suffixes else ",")
        if RESERVED in table.columns:
            raise ValueError(f"AnnData keeps the name {RESERVED!r} for itself: name that column otherwise")
        return table
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not text in UTF-8 ({error}): save it as CSV in UTF-8") from error
    except Exception as error:
        raise InputError(
            f"{file} cannot be read as a table ({type(error).__name__}: {error}): give a CSV, TSV or parquet file"
        ) from error


def _read_csv(file: Path, separator: str) -> pd.DataFrame:
    """Read a CSV; names that a number would not keep stay as they are written, and words read as missing are counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            table = pd.read_csv(file, sep=separator, low_memory=False, index_col=False)
        except pd.errors.ParserWarning as error:
            raise ValueError("rows have more fields than the header: name every column, row names too") from error
    if table.shape[1] == 1 and re.search("[;,\t|]", str(table.columns[0])):
        raise ValueError(f"its fields are not separated by {separator!r}: the header is {str(table.columns[0])[:60]!r}")
    looked_at = [i for i in range(table.shape[1]) if not _is_measured(table.iloc[:, i])]
    if looked_at:
        written = pd.read_csv(file, sep=separator, usecols=looked_at, dtype=str, keep_default_na=False, index_col=False)
        for i, name in enumerate(table.columns[looked_at]):
            values, texts = table[name], written.iloc[:, i]
            broken = texts[texts.str.contains("\n", regex=False)]
            if len(broken):
                say(
                    f"{file}: {len(broken)} cells of {name!r} hold line breaks, as where a closing quote is missing: "
                    f"{first_few(broken.str[:40], 2)}"
                )
            words = texts[values.isna() & (texts != "")]
            if len(words):
                say(f"{file}: {len(words)} cells of {name!r} are read as missing: {first_few(words.unique())}")
            if pd.api.types.is_numeric_dtype(values) and texts[values.notna()].str.fullmatch(_NAME_OF_DIGITS).any():
                table[name] = texts.astype(object).where(values.notna(), None)
    return table


def _without_lists(table: pd.DataFrame, file: Path) -> pd.DataFrame:
    """A table without columns whose cells are lists or tables."""
    nested = [
        name for name in table.columns if table[name].map(lambda cell: isinstance(cell, list | dict | np.ndarray)).any()
    ]
    if nested:
        say(f"{file}: {len(nested)} columns hold lists and are left out: {first_few(nested)}")
    return table.drop(columns=nested)


def _is_measured(column: pd.Series) -> bool:
    """Whether a column holds fractions: no names."""
    return pd.api.types.is_float_dtype(column) and not (column.isna() | (column % 1 == 0)).all()


def text(column: pd.Series) -> pd.Series:
    """Values as text, numbers as short as they can be, missing ones as None (object dtype).

    >>> text(pd.Series([10.0, 0.3, None])).tolist()
    ['10', '0.3', None]
    """
    codes, found = pd.factorize(column)
    values = np.asarray(found) if found.dtype.kind == "f" else found  # an Index hands out float32 as longer floats
    names = np.array([*map(_short, values), None], dtype=object)
    return pd.Series(names[codes], index=column.index, name=column.name, dtype=object)


def well_names(column: pd.Series) -> pd.Series:
    """Well names as ``A01``; what is no well name stays as it is.

    >>> well_names(pd.Series(["a1", "AF48", "DMSO"])).tolist()
    ['A01', 'AF48', 'DMSO']
    """
    names = text(column)
    return text(names.map({name: _well_name(name) or name for name in names.dropna().unique()}))


def apply_columns(table: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
    """Add a column for each role, made from other columns as its SPEC says.

    Parameters
    ----------
    table
        Any table.
    columns
        Role to SPEC: the name of a column; a join of columns, ``{compound}@{concentration}``, missing where a part is
        missing; or a part of a column by a regular expression with one group, ``plate:^(Week[0-9]+)``. SPECs act in
        the order given, and later ones see the columns of earlier ones.

    Returns
    -------
    A new table. A column that has the role's name already is kept as ``{role}_original``.

    Raises
    ------
    InputError
        A SPEC names no column, its expression is not valid, or values do not match it.

    >>> wells = pd.DataFrame({"p": ["Week1_22"], "drug": ["taxol"], "dose": [3.0]})
    >>> made = apply_columns(wells, {"experiment": "p:^(Week[0-9]+)", "perturbation": "{drug}@{dose}"})
    >>> made["experiment"][0], made["perturbation"][0]
    ('Week1', 'taxol@3')
    """
    table = table.copy()
    for role, spec in columns.items():
        values = _resolve(table, role, spec)
        if role in table and role != spec:
            table = table.rename(columns={role: f"{role}_original"})
        table[role] = values
    return table


def spec_uses(spec: str, column: str) -> bool:
    """Whether a SPEC of :func:`apply_columns` names the column."""
    return spec == column or f"{{{column}}}" in spec or spec.startswith(f"{column}:")


def collapse(table: pd.DataFrame, keys: Sequence[str]) -> tuple[pd.DataFrame, np.ndarray, list[str]]:
    """One row for each combination of the keys, in order of appearance.

    Returns
    -------
    The columns that are constant within every group; the group of each row of ``table`` (int); and the names of the
    other columns.
    """
    groups = table.groupby(list(keys), sort=False, observed=True, dropna=False).ngroup().to_numpy()
    first = np.unique(groups, return_index=True)[1]
    codes = {name: pd.factorize(table[name])[0] for name in table.columns}
    varying = [name for name, code in codes.items() if (code != code[first][groups]).any()]
    return table.iloc[first].drop(columns=varying), groups, varying


def conventions(table: pd.DataFrame) -> pd.DataFrame:
    """Columns as every stage expects them: ids and labels as text, wells as ``A01``, ``control`` never missing."""
    roles = {name: text(table[name]) for name in _TEXT_ROLES if name in table}
    if WELL in table:
        roles[WELL] = well_names(table[WELL])
    roles[CONTROL] = text(table[CONTROL]).fillna("") if CONTROL in table else pd.Series("", table.index, dtype=object)
    table = table.assign(**roles)
    ordered = [name for name in OBS_COLUMNS if name in table]
    return table[ordered + [name for name in table.columns if name not in ordered]]


def validate(screen: pd.DataFrame, keys: Sequence[str] = SITE_KEYS) -> None:
    """Check a table of sites (or of wells): every fault of every row in one error.

    Parameters
    ----------
    screen
        A screen table; the columns in ``keys`` and ``control`` are needed, labels may be missing.
    keys
        Columns that together name a row.

    Raises
    ------
    InputError
        A column is not there; a key is missing, a well name is not understood, a row occurs twice, or ``control`` is
        none of "negative", "positive" and "".
    """
    require_columns(screen, [*keys, CONTROL], "the screen table")
    ids = _ids(screen, keys)
    problems = [(f"without a value for {key!r}", ids[screen[key].isna()]) for key in keys]
    if WELL in keys:
        wells = text(screen[WELL])
        bad = {name for name in wells.dropna().unique() if _well_name(name) is None}
        problems.append(("whose well name is not understood (as in 'A1', 'B02', 'AF48')", ids[wells.isin(bad)]))
    problems.append(("that occur more than once", ids[screen.duplicated(list(keys))]))
    unknown = screen.loc[~screen[CONTROL].isin(CONTROL_VALUES), CONTROL]
    problems.append((f"whose 'control' is none of {', '.join(map(repr, CONTROL_VALUES))}", unknown))
    found = [f"{len(rows)} rows {what}: {first_few(rows)}" for what, rows in problems if len(rows)]
    if found:
        raise InputError("the screen table has faults; correct or remove these rows:\n  " + "\n  ".join(found))


# ---------------------------------------------------------------------------------------------- RxRx1


def read_rxrx1(root: PathLike, metadata: PathLike | None = None) -> pd.DataFrame:
    """Read the screen table of RxRx1 (Sypetkowski et al. 2023, arXiv:2301.05768), from rxrx.ai or from Kaggle.

    Parameters
    ----------
    root
        Folder with the images and, unless ``metadata`` says otherwise, the tables. Images need not be there.
    metadata
        Folder with the tables, or one of them: ``metadata.csv`` (rxrx.ai), or ``train.csv``, ``test.csv``,
        ``train_controls.csv`` and ``test_controls.csv`` (Kaggle).

    Returns
    -------
    One row a site. Kaggle's tables list wells: each has two sites. ``perturbation`` is the siRNA as the file names
    it, missing for Kaggle's test wells; the untreated wells are ``EMPTY`` (rxrx.ai), ``1138`` or ``UNTREATED``
    (Kaggle's two editions, whose numberings differ) and have ``control == "negative"`` and
    ``perturbation_type == "control"``. ``concentration`` is missing. Further columns: ``dataset`` (train, test),
    ``edition`` (rxrx.ai, kaggle-1, kaggle-2), ``well_type``, what else the file has, and ``path_w1`` to ``path_w6``
    (absolute; not checked here).

    Raises
    ------
    MissingFileError, InputError
        No table is found, tables of two editions lie together, or rows are at fault.
    """
    files = _rxrx1_files(Path(metadata if metadata is not None else root))
    tables = {file: load_table(file) for file in files}
    edition = _edition(tables)
    sites = _without_paths(_rxrx_ai_sites(tables) if edition == "rxrx.ai" else _kaggle_sites(tables))
    sites = sites.rename(columns={"sirna": PERTURBATION})
    sites["well_type"] = text(sites["well_type"]).fillna("treatment")
    sites[CONTROL] = _vocabulary(
        sites["well_type"], {"negative_control": "negative", "positive_control": "positive", "treatment": ""}
    )
    sites[PERTURBATION_TYPE] = np.where(sites[CONTROL] == "negative", "control", "siRNA")
    if CELL_TYPE not in sites:
        sites[CELL_TYPE] = sites[EXPERIMENT].str.rpartition("-")[0]
    sites = conventions(sites.assign(edition=edition, **{CONCENTRATION: np.nan}))
    sites = _index_by_id(sites, given=("site_id", "well_id", "id_code"))
    return _with_png_paths(sites, _rxrx1_image_folder(Path(root).absolute(), sites))


_KAGGLE_FILES = ("train.csv", "test.csv", "train_controls.csv", "test_controls.csv")


def _rxrx1_files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    official = [file for file in (place / "metadata.csv", place / "rxrx1" / "metadata.csv") if file.is_file()][:1]
    kaggle = [place / name for name in _KAGGLE_FILES if (place / name).is_file()]
    if official and kaggle:
        raise InputError(
            f"{place} holds tables of two editions of RxRx1, {official[0].name} and "
            f"{', '.join(file.name for file in kaggle)}: name the one to use with --metadata (metadata=)"
        )
    if not official and not kaggle:
        raise MissingFileError(
            f"no RxRx1 table in {str(place)!r}: looked for metadata.csv (rxrx.ai) and for {', '.join(_KAGGLE_FILES)} "
            "(Kaggle); where they lie elsewhere, say so with metadata="
        )
    return official or kaggle


def _edition(tables: Mapping[Path, pd.DataFrame]) -> str:
    """Edition by what the siRNA column holds: Kaggle's first edition has integers, its second names."""
    editions: dict[str, list[str]] = {}
    for file, table in tables.items():
        if "site" in table:
            editions.setdefault("rxrx.ai", []).append(file.name)
        elif "sirna" in table:
            numbered = text(table["sirna"].dropna()).str.fullmatch("[0-9]+")
            for edition, found in (("kaggle-1", numbered.any()), ("kaggle-2", not numbered.all())):
                if found:
                    editions.setdefault(edition, []).append(file.name)
    if len(editions) > 1:
        listed = "; ".join(f"{', '.join(names)}: {edition}" for edition, names in editions.items())
        raise InputError(
            f"tables of different editions of RxRx1 lie together ({listed}); their siRNA numbers do not mean the same: "
            "keep the tables of one edition in the folder"
        )
    return next(iter(editions), "kaggle")


def _rxrx_ai_sites(tables: Mapping[Path, pd.DataFrame]) -> pd.DataFrame:
    (table,) = tables.values()
    require_columns(table, [EXPERIMENT, PLATE, WELL, SITE, "sirna", "well_type", "dataset"], "metadata.csv of RxRx1")
    return table


def _kaggle_sites(tables: Mapping[Path, pd.DataFrame]) -> pd.DataFrame:
    for file, table in tables.items():
        require_columns(table, ["id_code", EXPERIMENT, PLATE, WELL], str(file))
    wells = pd.concat(
        [table.assign(dataset=file.name.partition("_")[0].partition(".")[0]) for file, table in tables.items()],
        ignore_index=True,
    )
    wells = wells.reindex(columns=wells.columns.union(["sirna", "well_type"], sort=False))
    sites = wells.loc[wells.index.repeat(2)].reset_index(drop=True)
    sites[SITE] = np.tile([1, 2], len(wells))
    return sites


def _rxrx1_image_folder(root: Path, sites: pd.DataFrame) -> str | pd.Series:
    for folder in (root / "images", root / "rxrx1" / "images"):
        if folder.is_dir():
            return str(folder)
    kaggle = (sites["edition"] != "rxrx.ai").all() or (root / "train").is_dir() or (root / "test").is_dir()
    return f"{root}/" + text(sites["dataset"]) if kaggle else str(root / "images")


# ---------------------------------------------------------------------------------------------- RxRx3-core


def read_rxrx3_core(root: PathLike, metadata: PathLike | None = None) -> pd.DataFrame:
    """Read the screen table of RxRx3-core or of RxRx3 (Fay et al. 2023; Kraus et al. 2025).

    Parameters
    ----------
    root
        Folder with the images and, unless ``metadata`` says otherwise, ``metadata*.csv``.
    metadata
        The table, or the folder where it lies.

    Returns
    -------
    One row a site: each well has one. ``perturbation`` is ``treatment`` up to the first ``_``, so that the guides of
    a gene share it, but whole where it holds ``_control``. ``control`` is "negative" for ``EMPTY_control`` and
    "positive" for ``CRISPR_control``: that one is a control, hence no treatment to score, but not the untreated state
    that wells are centred on. ``concentration`` (uM) is missing for CRISPR. ``SMILES`` stays as the file has it, with
    a ``|...|`` suffix here and there. ``path_w1`` to ``path_w6`` only where there is a folder ``root/images`` of PNG
    files (RxRx3); the images of RxRx3-core lie in parquet shards, found by experiment, plate, well and site.

    Raises
    ------
    MissingFileError, InputError
        No table is found, or rows are at fault.
    """
    file = _rxrx3_file(Path(metadata if metadata is not None else root))
    table = _without_paths(load_table(file))
    needed = ["well_id", "gene", "treatment", "SMILES", CONCENTRATION, PERTURBATION_TYPE, CELL_TYPE]
    require_columns(table, needed, str(file))
    parts = text(table["well_id"]).str.extract(r"^(.+)_([^_]+)_([^_]+)$").set_axis(list(SITE_KEYS[:3]), axis=1)
    sites = table.drop(columns=["experiment_name", "address", PLATE], errors="ignore").assign(**parts, **{SITE: 1})
    treatment = text(table["treatment"])
    is_control = treatment.str.contains("_control", na=False)
    sites[PERTURBATION] = treatment.where(is_control, treatment.str.partition("_")[0])
    sites[CONTROL] = np.where(treatment == "EMPTY_control", "negative", np.where(is_control, "positive", ""))
    sites[CONCENTRATION] = pd.to_numeric(table[CONCENTRATION], errors="coerce")
    worded = table.loc[sites[CONCENTRATION].isna() & table[CONCENTRATION].notna(), CONCENTRATION]
    if len(worded):
        raise InputError(f"{len(worded)} rows have a concentration that is no number (in uM): {first_few(worded)}")
    sites = _index_by_id(conventions(sites), given=("well_id",))
    _same_parts(table, sites, {"experiment_name": EXPERIMENT, PLATE: PLATE, "address": WELL})
    images = Path(root).absolute() / "images"
    return _with_png_paths(sites, str(images)) if images.is_dir() else sites


def _rxrx3_file(place: Path) -> Path:
    if place.is_file():
        return place
    found = sorted(place.glob("metadata*.csv"))
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(
            f"{place} holds several tables, {first_few(f.name for f in found)}: name one with --metadata (metadata=)"
        )
    raise MissingFileError(f"no table of RxRx3 in {str(place)!r}: looked for metadata*.csv, as metadata_rxrx3_core.csv")


def _same_parts(table: pd.DataFrame, sites: pd.DataFrame, columns: Mapping[str, str]) -> None:
    for name, role in columns.items():
        if name in table:
            told = well_names(table[name]) if role == WELL else text(table[name])
            wrong = table.loc[told.to_numpy() != sites[role].to_numpy(), "well_id"]
            if len(wrong):
                raise InputError(f"{len(wrong)} rows have a {name!r} other than their well_id says: {first_few(wrong)}")


# ---------------------------------------------------------------------------------------------- screens of one's own


def read_table(
    path: PathLike,
    columns: Mapping[str, str] | None = None,
    *,
    controls: Sequence[str] = (),
    z: int | str | None = None,
    t: int | None = None,
) -> pd.DataFrame:
    """Read the table of a screen: one row a site, or one row an image file.

    Parameters
    ----------
    path
        CSV or parquet file.
    columns
        Role to SPEC, see :func:`apply_columns`. Roles are the obs columns (``experiment``, ``plate``, ``well``,
        ``site``, ``perturbation``, ``control``, ...), ``row`` and ``column`` of the well (counted from 1, rows also as
        letters), and the image files: ``path_DNA`` and so on for each channel, or, where each row is a file,
        ``channel`` and ``path``. Columns ``z`` and ``t`` say which plane and time point a row's files are.
    controls
        Perturbations that are negative controls. No other word is taken for a control: "empty" means untreated cells
        in one screen and no cells in another.
    z
        Where a site has several planes: "max" or "mean" keeps all of them, for `cellica.plates.ingest` to reduce, a
        number keeps one, counted from 0 among the values of ``z``.
    t
        Where a site has several time points: the one to keep, counted from 0 among the values of ``t``.

    Returns
    -------
    One row a site. Without a site column, sites are numbered 1; without controls, ``control`` is "". Relative image
    paths are taken from the table's folder. A table of one's own may name any file, with absolute paths and ``..`` too;
    the tables of `read_rxrx1` and `read_rxrx3_core` name none. The planes of a stack are a tuple of paths.

    Raises
    ------
    MissingFileError, InputError
        The file is not there, a needed column is not, planes need a choice, the well and its row and column disagree,
        a channel of a site has several files, or rows are at fault.
    """
    table = _place_wells(apply_columns(load_table(path), columns or {}))
    if SITE not in table:
        table[SITE] = 1
    for key in SITE_KEYS:
        if key not in table:
            raise InputError(
                f"{path} has no column {key!r}: name it, as in columns={{{key!r}: 'COLUMN'}} or --column {key}=COLUMN; "
                f"columns are {first_few(table.columns, 20)}"
            )
    rows = _mark_controls(conventions(table), controls)
    long = {"channel", "path"} <= set(rows.columns)
    keys = [*SITE_KEYS, "channel"] if long else list(SITE_KEYS)
    images = ["path"] if long else list(rows.columns[rows.columns.str.startswith(PATH)])
    rows = _choose_planes(rows, keys, images, "t", t)
    if not isinstance(z, str):
        rows = _choose_planes(rows, keys, images, "z", z)
    folder = Path(path).absolute().parent
    for name in images:
        rows[name] = text(rows[name]).map(lambda file: str(folder / file), na_action="ignore").astype(object)
    if isinstance(z, str) and "z" in rows and rows.duplicated(keys).any():
        rows = _join_planes(rows, keys, images)
    sites = _one_row_a_site(rows) if long else rows
    for name in [name for name in sites.columns if str(name).startswith(PATH)]:
        sites[name] = sites[name].astype(object).where(sites[name].notna(), None)
    return _index_by_id(sites)


def _choose_planes(
    rows: pd.DataFrame, keys: Sequence[str], images: Sequence[str], axis: str, chosen: int | None
) -> pd.DataFrame:
    """Rows of one plane or time point, where the images of a site have several; without paths where it has not that one."""
    if axis not in rows or axis not in collapse(rows, keys)[2]:
        return rows
    values = _in_order(rows[axis])
    named = first_few(map(_short, values))
    if chosen is None:
        how = "--z max, mean or a number" if axis == "z" else "--t and a number"
        raise InputError(
            f"images have several values of {axis!r}, {named}: choose with {how}, counted from 0 in this order"
        )
    if not 0 <= chosen < len(values):
        raise InputError(f"{axis} is {chosen}: the table has {len(values)} values, counted from 0: {named}")
    ids = _ids(rows, keys)
    kept = rows[axis] == values[chosen]
    without = ~ids.isin(ids[kept]) & ~ids.duplicated()
    rows.loc[without, list(images)] = None
    return rows[kept | without].drop(columns=axis).reset_index(drop=True)


def _join_planes(rows: pd.DataFrame, keys: Sequence[str], images: Sequence[str]) -> pd.DataFrame:
    """One row a site (and channel) whose images are tuples of paths, in the order of z."""
    repeated = rows[rows.duplicated([*keys, "z"])]
    if len(repeated):
        raise InputError(f"{len(repeated)} planes occur more than once: {first_few(_ids(repeated, [*keys, 'z']))}")
    order = {value: i for i, value in enumerate(_in_order(rows["z"]))}
    rows = rows.iloc[rows["z"].map(order).argsort(kind="stable")]
    stacks = rows.groupby(list(keys), sort=False, dropna=False)[list(images)].agg(_stack)
    joined, _, _ = collapse(rows.drop(columns=["z", *images]), keys)
    return joined.merge(stacks.reset_index(), on=list(keys), how="left").reset_index(drop=True)


def _stack(files: pd.Series) -> tuple[str, ...] | None:
    return tuple(files) if files.notna().all() else None


def _in_order(values: pd.Series) -> list[Any]:
    """Distinct values, numbers (also as text) by size, else as text."""
    distinct = list(values.dropna().unique())
    numbers = pd.to_numeric(pd.Series(distinct, dtype=object), errors="coerce")
    return [distinct[i] for i in numbers.argsort(kind="stable")] if numbers.notna().all() else sorted(distinct, key=str)


def _mark_controls(table: pd.DataFrame, controls: Sequence[str]) -> pd.DataFrame:
    if controls:
        require_columns(table, [PERTURBATION], "the table, whose controls are named,")
        table.loc[control_mask(table, controls), CONTROL] = "negative"
    elif (table[CONTROL] == "").all():
        say("no well is marked as a control: name negative controls with --control, or in a column 'control'")
    return table


# ---------------------------------------------------------------------------------------------- plate maps


def read_layout(
    path: PathLike, columns: Mapping[str, str] | None = None, *, controls: Sequence[str] = ()
) -> pd.DataFrame:
    """Read a plate map: one row a well (or site), with what was done to it.

    Parameters
    ----------
    path, columns, controls
        As for :func:`read_table`; ``well`` is needed, ``experiment``, ``plate`` and ``site`` narrow it down.

    Raises
    ------
    MissingFileError, InputError
        The file is not there, or has no wells.
    """
    table = _place_wells(apply_columns(load_table(path), columns or {}))
    require_columns(table, [WELL], f"the plate map {path}")
    return _mark_controls(conventions(table), controls)


def annotate(sites: pd.DataFrame, layout: pd.DataFrame) -> pd.DataFrame:
    """Add the columns of a plate map to the sites of one plate.

    Parameters
    ----------
    sites
        Site table of a plate.
    layout
        Plate map, see :func:`read_layout`. Rows of other experiments and plates are passed over.

    Returns
    -------
    A new table, same rows and index. The layout's columns replace those of the same name; wells that it does not hold
    have missing values, and wells that the plate does not hold are told.

    Raises
    ------
    InputError
        The layout has no row for the plate, rows that contradict each other, or values that are not allowed.
    """
    require_columns(layout, [WELL], "the plate map")
    layout = conventions(layout)
    for key in (EXPERIMENT, PLATE):
        if key in layout:
            plate = text(sites[key]).iloc[0]
            known = layout[key].dropna().unique()
            layout = layout[layout[key] == plate]
            if layout.empty:
                raise InputError(f"the plate map has no {key} {plate!r}; it holds {first_few(known, 10)}")
    keys = [WELL, SITE] if SITE in layout else [WELL]
    theirs, ours = _ids(layout, keys), _ids(sites, keys)
    if theirs.duplicated().any():
        raise InputError(f"the plate map holds wells more than once: {first_few(theirs[theirs.duplicated()].unique())}")
    matched = ours.isin(theirs)
    if not matched.any():
        raise InputError(f"no well of the plate ({first_few(ours)}) is in the plate map ({first_few(theirs)})")
    if not matched.all():
        say(f"{(~matched).sum()} sites of the plate are not in the plate map: {first_few(sites.index[~matched])}")
    if not theirs.isin(ours).all():
        absent = theirs[~theirs.isin(ours)]
        say(f"{len(absent)} wells of the plate map are not in the plate: {first_few(absent)}")
    new = layout.drop(columns=list(SITE_KEYS), errors="ignore").set_axis(theirs).reindex(ours).set_axis(sites.index)
    annotated = conventions(sites.drop(columns=new.columns, errors="ignore").join(new))
    validate(annotated)
    return annotated


def _place_wells(table: pd.DataFrame) -> pd.DataFrame:
    """Take wells from rows and columns, or check them against these."""
    if not {"row", "column"} <= set(table.columns):
        return table
    letters = text(table["row"]).map(lambda row: row_letters(int(row) - 1) if row.isdigit() else row, "ignore")
    placed = well_names(letters + text(table["column"]))
    if WELL not in table:
        return table.assign(**{WELL: placed})
    named = well_names(table[WELL])
    wrong = (named != placed) & named.notna()
    if wrong.any():
        listed = [
            f"{well} in row {row}, column {column}"
            for well, row, column in table.loc[wrong, [WELL, "row", "column"]].itertuples(index=False)
        ]
        raise InputError(f"{wrong.sum()} wells are not where row and column (counted from 1) say: {first_few(listed)}")
    return table


def _one_row_a_site(images: pd.DataFrame) -> pd.DataFrame:
    keys = list(SITE_KEYS)
    unnamed = images.index[images["channel"].isna()]
    if len(unnamed):
        raise InputError(
            f"{len(unnamed)} image rows have no channel (rows {first_few(unnamed)}): name it, or leave them out"
        )
    repeated = images[images.duplicated([*keys, "channel"], keep=False)]
    if len(repeated):
        listed = _ids(repeated, [*keys, "channel"]).unique()
        raise InputError(f"{len(listed)} sites have several files for one channel: {first_few(listed)}")
    sites, groups, varying = collapse(images, keys)
    varying = [name for name in varying if name not in ("channel", "path")]
    if varying:
        say(f"{len(varying)} columns differ between the images of a site and are left out: {first_few(varying)}")
    sites = sites.drop(columns=["channel", "path"], errors="ignore").reset_index(drop=True)
    channels = text(images["channel"])
    for channel in channels.dropna().unique():
        chosen = (channels == channel).to_numpy()
        files = dict(zip(groups[chosen], images.loc[chosen, "path"]))
        sites[PATH + channel] = pd.Series([files.get(i) for i in sites.index], sites.index, dtype=object)
    return sites


# ---------------------------------------------------------------------------------------------- shared by the readers


def _vocabulary(column: pd.Series, words: Mapping[str, str]) -> pd.Series:
    unknown = column[~column.isin(list(words))]
    if len(unknown):
        raise InputError(
            f"{len(unknown)} rows have a {column.name} other than {', '.join(words)}: {first_few(unknown.unique())}"
        )
    return column.map(words)


def _index_by_id(sites: pd.DataFrame, given: Sequence[str] = ()) -> pd.DataFrame:
    """Validate, index by site id, and drop the source's own ids where they say the same (else an error)."""
    validate(sites)
    sites = sites.set_index(obs_names(sites))
    for name in given:
        if name in sites:
            made = sites.index if name == "site_id" else obs_names(sites.drop(columns=SITE))
            wrong = sites.loc[text(sites[name]).to_numpy() != made, name]
            if len(wrong):
                raise InputError(f"{len(wrong)} rows have a {name} other than their columns say: {first_few(wrong)}")
            sites = sites.drop(columns=name)
    return sites


def _without_paths(table: pd.DataFrame) -> pd.DataFrame:
    """A table that came with a data set, without columns that would name image files: its folder says where they are."""
    named = [name for name in table if str(name).startswith(PATH)]
    if named:
        say(f"columns {first_few(named)} are left out: the images of a data set are found by its folder")
    return table.drop(columns=named)


def _with_png_paths(sites: pd.DataFrame, folder: str | pd.Series) -> pd.DataFrame:
    """Add ``path_w1`` to ``path_w6``: ``{folder}/{experiment}/Plate{plate}/{well}_s{site}_w{channel}.png``."""
    stem = folder + ("/" + sites[EXPERIMENT] + "/Plate" + sites[PLATE] + "/" + sites[WELL])
    stem = stem + "_s" + sites[SITE].astype(str) + "_w"
    return sites.assign(**{f"{PATH}w{channel}": stem + f"{channel}.png" for channel in range(1, 7)})


def _short(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return str(int(value)) if value.is_integer() else f"{float(str(value)):.12g}"
    return str(value)


def _well_name(name: str) -> str | None:
    try:
        return format_well(*parse_well(name))
    except InputError:
        return None


def _ids(table: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    ids = text(table[keys[0]]).fillna("?")
    for key in keys[1:]:
        ids = ids + "_" + text(table[key]).fillna("?")
    return ids


def _resolve(table: pd.DataFrame, role: str, spec: str) -> pd.Series:
    column, colon, pattern = spec.partition(":")
    if spec in table:
        return table[spec]
    if colon and column in table:
        return _extract(text(table[column]), role, pattern)
    names = re.findall(r"\{([^{}]+)\}", spec)
    if not names:
        raise InputError(
            f"{role}={spec}: there is no such column; write a column's name, '{{a}}@{{b}}' to join columns, or "
            f"'column:^(expression)' to take a part; columns are {first_few(table.columns, 20)}"
        )
    require_columns(table, names, f"{role}={spec}: the table")
    pieces = re.split(r"\{([^{}]+)\}", spec)
    joined = pd.Series(pieces[0], index=table.index, dtype=object)
    for name, literal in zip(pieces[1::2], pieces[2::2]):
        joined = joined + text(table[name]).fillna("") + literal
    return joined.mask(table[names].isna().any(axis=1), None)


def _extract(column: pd.Series, role: str, pattern: str) -> pd.Series:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise InputError(f"{role}: {pattern!r} is not a regular expression ({error})") from error
    if groups != 1:
        raise InputError(f"{role}: {pattern!r} has {groups} groups in parentheses; write one, around the part to take")
    part = column.str.extract(pattern, expand=False)
    unmatched = column[part.isna() & column.notna()].unique()
    if len(unmatched):
        raise InputError(f"{role}: {pattern!r} does not match {len(unmatched)} values: {first_few(unmatched)}")
    return part.astype(object)
