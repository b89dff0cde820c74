"""The report: one HTML page that needs nothing else, of what was done, dropped, removed and scored.

The page loads nothing from anywhere: figures are in it, as SVG that takes the page's colours or as JPEG, and its content
policy forbids scripts and network. All that comes from the data is escaped. The same input gives the same page.
"""

import base64
import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
from markupsafe import Markup

from cellica import __version__, artifacts, glossary, plot, retrieval, schema
from cellica.artifacts import PathLike
from cellica.plates import Plate
from cellica.progress import track
from cellica.schema import (
    CELL_TYPE,
    CONTROL,
    EXPERIMENT,
    INTERVAL_COLUMNS,
    PERTURBATION,
    PLATE,
    SCORE_COLUMNS,
    UNS,
    WELL,
    InputError,
)
from cellica.score_plots import NOT_APPLICABLE
from cellica.scores import GAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PICTURES = 8
MAX_MAPS = 4, 6  # components, plates
INK = "#123457"  # stands for the page's text colour until a figure is in the page
SVG_STYLE: dict[str, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "svg.fonttype": "none",
}
PHOTO_STYLE: dict[str, Any] = {
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
    **dict.fromkeys(("text.color", "axes.edgecolor", "xtick.color", "ytick.color"), "#DDDDDD"),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "#161616"),
}
WORDS = {
    "n_rows": "rows read",
    "n_columns": "feature columns read",
    "n_sites": "sites read",
    "n_profiles": "rows kept",
    "n_features": "features kept",
    "rows_not_finite": "rows left out: features not finite",
    "features_not_finite": "features left out: not finite in a row that was kept",
    "features_constant": "features left out: constant",
    "embeddings_without_metadata": "embeddings left out: no metadata",
    "metadata_without_embedding": "rows of metadata left out: no embedding",
    "sites_not_finite": "sites left out: embedding not finite",
    "wells_without_sites": "wells left out: none of their sites is finite",
    "plates_without_sites": "plates lost: no image of theirs can be used",
    "plates_left_out": "plates left out by choice",
    "columns_left_out": "columns of obs left out: they differ within a well",
    "n_missing": "profiles left out: a value to group by is missing",
    "n_not_finite": "profiles left out: not finite",
}
EXAMPLES = {
    "embeddings_without_metadata": "examples_without_metadata",
    "metadata_without_embedding": "examples_without_embedding",
}


def write(
    adata: ad.AnnData,
    out: PathLike,
    *,
    scores: pd.DataFrame | None = None,
    plates: Sequence[Plate | PathLike] = (),
    force: bool = False,
) -> Path:
    """Write the report of wells and their corrections to one HTML file. Changes nothing in ``adata``.

    Parameters
    ----------
    adata
        Wells; what ``uns["cellica"]`` says of import, profiles, corrections and provenance is shown, as far as it is there.
    out
        HTML file.
    scores
        Score table of `retrieval.evaluate` or `retrieval.compare`, by default what ``uns["cellica"]["scores"]`` holds.
    plates
        Plates (or their stores) to show pictures of: 8 at most of those with sites, evenly chosen.

    Returns
    -------
    Path of the page.

    Raises
    ------
    OutputExistsError
        ``out`` is there and ``force`` is False.
    InputError
        ``out`` is a folder, adata is empty, or the score table lacks columns.
    MissingFileError, PlateError
        A plate is not there, or cannot be read.
    """
    from jinja2 import Environment, PackageLoader

    out = Path(out)
    if out.is_dir():
        raise InputError(f"{out} is a folder: name a file for the report, such as {out / 'report.html'}")
    artifacts.refuse_existing(out, force=force)
    if not adata.n_obs:
        raise InputError("there are no wells to report on: adata has no rows")
    scores = adata.uns.get(UNS, {}).get("scores") if scores is None else scores
    if scores is not None:
        schema.require_columns(scores, SCORE_COLUMNS, "the score table")
    opened = [plate if isinstance(plate, Plate) else Plate(plate) for plate in plates]
    steps = artifacts.provenance(adata)
    found = _corrections(adata, steps)
    page = {
        "version": __version__,
        "wells": adata.n_obs,
        "warnings": _warnings(adata, steps),
        "summary": _summary(adata, steps),
        "steps": [_step(list(same)) for _, same in groupby(steps, key=_kind)],
        "dropped": _dropped(adata, steps, opened),
        "pictures": _pictures(opened),
        "n_plates": len(opened),
        "before": _before(adata, found),
        "corrections": [_correction(adata, key, record) for key, record in track(list(found.items()), "Corrections")],
        "scores": None if scores is None else _scores(scores),
    }
    environment = Environment(loader=PackageLoader("cellica"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    artifacts.write_text(environment.get_template("report.html").render(page), out, force=force)
    return out


def read_scores(path: PathLike) -> pd.DataFrame:
    """Read a score table (CSV) that ``evaluate`` or ``compare`` wrote.

    Raises
    ------
    MissingFileError, InputError
        The file is not there, or is no score table.
    """
    path = artifacts.require_file(path, "score table")
    try:
        numeric = ["value", "chance", *INTERVAL_COLUMNS, *GAIN]
        table = pd.read_csv(path, keep_default_na=False, na_values={name: [""] for name in numeric})
        schema.require_columns(table, SCORE_COLUMNS, str(path))
        floats = {name: float for name in numeric if name in table and name != "n_units"}
        return table.astype({**floats, "n_queries": int, "n_dropped": int})
    except (ValueError, OSError) as error:
        raise InputError(f"{path} is no score table that evaluate or compare wrote ({error})") from error


# ---------------------------------------------------------------------------------------------- summary and provenance


def _summary(adata: ad.AnnData, steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Counts of what is there."""
    obs = adata.obs
    counts = [("sites" if schema.SITE in obs else "wells", f"{adata.n_obs:,}"), ("features", f"{adata.n_vars:,}")]
    if {EXPERIMENT, PLATE} <= set(obs):
        counts.append(("plates", f"{len(set(plot.plate_names(obs))):,}"))
    for key, name in ((EXPERIMENT, "experiments"), (PERTURBATION, "perturbations"), (CELL_TYPE, "cell types")):
        if key in obs:
            missing = int(obs[key].isna().sum())
            counts.append((name, f"{obs[key].nunique():,}" + (f" ({missing:,} wells without)" if missing else "")))
    counts.append(("negative controls", f"{schema.control_mask(obs).sum():,}"))
    counts += [("encoder", _encoder(step)) for step in steps if step["verb"] == "embed"]
    return counts


def _encoder(step: Mapping[str, Any]) -> str:
    known = step["parameters"]
    digest = step.get("weights_sha256")
    return f"{known.get('encoder', '?')}, weights: {known.get('weights', 'not recorded')}" + (
        f" (SHA-256 {digest[:12]})" if digest else ""
    )


def _warnings(adata: ad.AnnData, steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader has to know before any number."""
    found = []
    weights = [str(step["parameters"].get("weights", "")) for step in steps if step["verb"] == "embed"]
    if any(text.startswith("random") for text in weights):
        found.append(
            "The encoder's weights are random: it was never trained. Its embeddings show that the steps run, "
            "and say nothing about what a trained encoder sees."
        )
    if any(step["verb"] == "simulate" for step in steps):
        found.append("These profiles are simulated.")
    return found


def _kind(step: Mapping[str, Any]) -> tuple[str, ...]:
    return step["verb"], str(step.get("cellica")), str(step.get("parameters"))


def _step(same: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row for steps in succession that differ only in their inputs and counts."""
    first, apart = same[0], ("verb", "cellica", "anndata", "parameters", "inputs", "notes", "plates")
    inputs = {f"{name} {digest[:12]}": None for step in same for name, digest in step.get("inputs", {}).items()}
    other = {key: _range(step[key] for step in same if key in step) for key in first if key not in apart}
    return {
        "verb": first["verb"],
        "version": first.get("cellica", "") + (f" (anndata {first['anndata']})" if "anndata" in first else ""),
        "parameters": _items({**first.get("parameters", {}), **other}),
        "inputs": _first_few(inputs, 4),
    }


def _range(values: Iterable[Any]) -> str:
    """One value, the smallest and largest number, or all others where they are few; a SHA-256 is cut short."""
    distinct = list({repr(value): value for value in values}.values())
    if len(distinct) > 1 and all(isinstance(value, int) for value in distinct):
        return f"{min(distinct):,} to {max(distinct):,}"
    if len(distinct) > 1 and any(isinstance(value, Mapping | list) for value in distinct):
        return f"{len(distinct)} different ones, in the plates' own records"
    return ", ".join(value[:12] if re.fullmatch("[0-9a-f]{64}", value) else value for value in map(_value, distinct))


def _dropped(
    adata: ad.AnnData, steps: Sequence[Mapping[str, Any]], plates: Sequence[Plate]
) -> list[tuple[str, str, str, str]]:
    """Rows of stage, what, how many, which."""
    rows = []
    named = [item for step in steps if step["verb"] == "ingest" for item in step.get("plates", {}).items()]
    ingested = [count for _, count in named]
    for key, words in (("sites", "sites written"), ("set_aside", "sites set aside")):
        if ingested:
            rows.append(("ingest", words, f"{sum(count[key] for count in ingested):,}", f"{len(ingested)} plates"))
    for reason in dict.fromkeys(reason for count in ingested for reason in count.get("reasons", ())):
        of_plates = {name: count["reasons"].get(reason, 0) for name, count in named if "reasons" in count}
        where = [f"{name} ({n:,})" for name, n in of_plates.items() if n]
        rows.append(
            ("ingest, images or plates", f"set aside: {reason}", f"{sum(of_plates.values()):,}", _first_few(where, 5))
        )
    set_aside = pd.concat([plate.set_aside for plate in plates]) if plates else pd.DataFrame({"reason": []})
    for reason, images in set_aside.groupby(set_aside["reason"].astype(str).str.split(":").str[0]):
        names = images["site_id"] + " " + images["channel"]
        rows.append(("ingest, plates shown", f"images set aside: {reason}", f"{len(images):,}", _first_few(names, 3)))
    for stage in ("import", "profile", "consensus"):
        account = adata.uns.get(UNS, {}).get(stage, {})
        joined = [key for key in sorted(account) if key.startswith("join_")]
        for key in sorted(account, key=lambda key: (*WORDS, key).index(key)):
            if key in joined or key in EXAMPLES.values() or key == "by":
                continue
            value = account[key]
            few = account.get(EXAMPLES.get(key, ""), value if np.ndim(value) else ())
            count = np.size(value) if np.ndim(value) else value
            rows.append((stage, WORDS.get(key, key.replace("_", " ")), _number(count), _first_few(few, 5)))
        for i, table in enumerate(account.get("join_table", ())):
            counts = {key.removeprefix("join_").replace("_", " "): account[key][i] for key in joined}
            which = ", ".join(
                f"{name}: {value}" if isinstance(value, str) else f"{value:,} {name}"
                for name, value in counts.items()
                if name != "table" and value != ""
            )
            rows.append((stage, f"joined {table}", "", which))
    return rows


# ---------------------------------------------------------------------------------------------- corrections


def _corrections(adata: ad.AnnData, steps: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Records of the corrections that are there, in the order in which they were made."""
    records = adata.uns.get(UNS, {})
    made = [step["parameters"].get("key_added") for step in steps if step["verb"] == "correct"]
    keys = [key for key in dict.fromkeys([*made, *records]) if isinstance(records.get(key), Mapping)]
    return {key: records[key] for key in keys if "method" in records[key] and f"X_{key}" in adata.obsm}


def _before(adata: ad.AnnData, found: Mapping[str, Mapping[str, Any]]) -> list[Markup]:
    """Embeddings of what was corrected, z-scored."""
    records = list(found.values()) or [{}]
    figures = []
    for rep in dict.fromkeys(record.get("parameters", {}).get("use_rep") or "X" for record in records):
        x = adata.X if rep == "X" else adata.obsm.get(rep)
        if x is not None:
            view = ad.AnnData(obs=adata.obs, obsm={f"{rep}, z-scored": _z_scored(x)})
            figures += _embeddings(view, f"{rep}, z-scored", records[0])
    return figures


def _z_scored(x: Any) -> np.ndarray:
    x = np.asarray(x.toarray() if hasattr(x, "toarray") else x, dtype=np.float32)
    finite = x[np.isfinite(x).all(axis=1)]
    if not len(finite):
        return x
    scale = finite.std(axis=0)
    return (x - finite.mean(axis=0)) / np.where(scale > 0, scale, 1)


def _correction(adata: ad.AnnData, key: str, record: Mapping[str, Any]) -> dict[str, Any]:
    table = record.get("components")
    return {
        "key": key,
        "method": record["method"],
        "parameters": _items(record.get("parameters", {})),
        "fit": [
            f"{name.partition('_')[2] or name}: {', '.join(_items(step))}" for name, step in _steps_of(record) if step
        ],
        "notes": [str(note) for note in record.get("notes", ())],
        "embeddings": _embeddings(adata, f"X_{key}", record),
        "components": None if table is None else _component_rows(table),
        "columns": [] if table is None else list(table.columns),
        "associations": None if table is None else _figure(f"components of {key}", plot.components, adata, key),
        "maps": None if table is None else _plate_maps(adata, key, table),
    }


def _steps_of(record: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return sorted(record.get("steps", {}).items(), key=lambda item: int(item[0].partition("_")[0]))


def _embeddings(adata: ad.AnnData, rep: str, record: Mapping[str, Any]) -> list[Markup]:
    """The representation by batch, by control and, where there are several, by cell type."""
    colors: dict[str, Callable[[], Any]] = {
        "batch": lambda: record.get("parameters", {}).get("batch_key", EXPERIMENT),
        "control": lambda: _control(adata.obs, record),
    }
    if CELL_TYPE in adata.obs and len(set(schema.labels(adata.obs, CELL_TYPE))) > 1:
        colors["cell type"] = lambda: CELL_TYPE

    def draw(color: Callable[[], Any]) -> "Axes":
        return plot.embedding(adata, use_rep=rep, color=color())

    return [_figure(f"{rep} by {name}", draw, color) for name, color in colors.items()]


def _control(obs: pd.DataFrame, record: Mapping[str, Any]) -> pd.Series:
    """What the correction took for a control: "negative", "positive" or ""."""
    parameters = record.get("parameters", {})
    controls = parameters.get("controls")
    mask = schema.control_mask(
        obs, None if controls is None else list(controls), parameters.get("label_key", PERTURBATION)
    )
    positive = schema.labels(obs, CONTROL) == "positive" if CONTROL in obs else np.zeros(len(obs), dtype=bool)
    return pd.Series(np.select([mask, positive], ["negative", "positive"], default=""), name="control", dtype=object)


def _component_rows(table: pd.DataFrame) -> list[tuple[bool, list[str]]]:
    """Whether each component was removed, and its cells; removed ones first, then by the share of batch."""
    table = table.sort_values(["removed", "batch_r2"], ascending=False, kind="stable")
    cells = [[str(index), *map(_number, row)] for index, row in zip(table.index, table.to_numpy(dtype=object))]
    return list(zip(table["removed"].astype(bool), cells))


def _plate_maps(adata: ad.AnnData, key: str, table: pd.DataFrame) -> tuple[Markup, str] | None:
    """Removed components that batch explains most, on some plates; None without any."""
    removed = table["removed"].to_numpy(dtype=bool)
    order = np.argsort(-table["batch_r2"].to_numpy(dtype=float), kind="stable")
    order = order[removed[order]]
    sources = adata.obsm.get(f"{key}_sources")
    if not len(order) or sources is None:
        return None
    if not {EXPERIMENT, PLATE, WELL} <= set(adata.obs):
        return Markup('<p class="missing">{}</p>').format("Plate maps need the columns experiment, plate and well."), ""
    every = list(dict.fromkeys(plot.plate_names(adata.obs)))
    components, plates = order[: MAX_MAPS[0]], _spread(every, MAX_MAPS[1])

    def draw() -> "Axes":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(2.0 * len(plates), 1.55 * len(components) + 0.3), layout="constrained")
        grid = figure.subplots(len(components), len(plates), squeeze=False)
        for i, (component, row) in enumerate(zip(components, grid)):
            for plate, ax in zip(plates, row):
                plot.plate_map(adata, np.asarray(sources)[:, component], plate=plate, colorbar=False, ax=ax)
                ax.set(xticks=[], yticks=[])
                if i:
                    ax.set_title("")
            row[0].set_ylabel(f"component {table.index[component]}")
            figure.colorbar(row[-1].images[0], ax=row[-1])
        return grid[0, 0]

    caption = f"Removed components on plates ({len(components)} of {len(order)} that were removed, those that batch "
    caption += f"explains most; {len(plates)} of {len(every)} plates). Sources have unit variance; blank: no well."
    return _figure(f"removed components of {key} on plates", draw), caption


# ---------------------------------------------------------------------------------------------- scores


def _scores(scores: pd.DataFrame) -> dict[str, Any]:
    columns = [*SCORE_COLUMNS[:-1], *(name for name in (*INTERVAL_COLUMNS, *GAIN) if name in scores), SCORE_COLUMNS[-1]]
    value = retrieval.summary(scores)
    chance = retrieval.summary(scores.assign(value=scores["chance"])).reindex_like(value)
    cells = [
        [(NOT_APPLICABLE, "") if np.isnan(v) else (_number(v), _number(c)) for v, c in zip(*row)]
        for row in zip(value.to_numpy(), chance.to_numpy())
    ]
    known = scores[scores["value"].notna()]
    whole = [
        (_figure(f"{draw.__name__} of methods", draw, scores), caption)
        for draw, caption in (
            (plot.tradeoff, "Batch effect left against what is found: up is better, left alone is not."),
            (plot.gains, "Gain over uncorrected profiles; filled where the interval excludes zero."),
        )
        if {"batch_share", "low", *GAIN} <= {*known["metric"], *scores}
    ]
    return {
        "columns": list(value.columns),
        "wide": list(zip(value.index, cells)),
        "cautions": retrieval.cautions(scores),
        "bars": [
            *whole,
            *(
                (_figure(f"bars of {name}", plot.scores, scores, metric=name), _caption(name))
                for name in dict.fromkeys(known["metric"])
            ),
        ],
        "tidy_columns": columns,
        "tidy": [list(map(_number, row)) for row in scores[columns].to_numpy(dtype=object)],
    }


def _caption(name: str) -> str:
    metric = glossary.metric_of(name)
    return (
        ""
        if metric is None
        else f"{metric.question} Better: {metric.better}. Chance: {metric.chance}. {metric.source}."
    )


# ---------------------------------------------------------------------------------------------- figures


def _figure(alt: str, draw: Callable[..., "Axes"], *args: Any, **keywords: Any) -> Markup:
    """Inline SVG whose ink has the page's text colour; a sentence where the figure does not apply."""
    buffer = io.StringIO()
    with _style({**SVG_STYLE, "svg.hashsalt": alt}):  # a salt of its own, so that ids differ between figures
        try:
            figure: Any = draw(*args, **keywords).figure
        except InputError as error:
            return Markup('<p class="missing">{}: {}</p>').format(alt, error)
        figure.savefig(buffer, format="svg", dpi=120, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    used = set(re.findall(r'(?:url\(#|href="#)([\w-]+)', svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda match: match[0] if match[1] in used else "", svg)
    label = Markup('<svg role="img" aria-label="{}"').format(alt)
    return Markup(svg.replace(INK, "currentColor").replace("<svg", label, 1))


def _pictures(plates: Sequence[Plate]) -> list[tuple[str, str]]:
    """Plates and the channels of one site, as the address of a JPEG and a caption."""
    shown = _spread([plate for plate in plates if len(plate.sites)], MAX_PICTURES)
    pictures = [(_photo(plot.plate_picture, plate), f"Plate {plate.name}") for plate in track(shown, "Pictures")]
    if shown:
        site = shown[0].sites.index[len(shown[0].sites) // 2]
        pictures.append((_photo(plot.field, shown[0], site), f"Channels of site {site}"))
    return pictures


def _photo(draw: Callable[..., "Axes"], *args: Any) -> str:
    buffer = io.BytesIO()
    with _style(PHOTO_STYLE):
        figure: Any = draw(*args).figure
        figure.savefig(buffer, format="jpeg", dpi=110, pil_kwargs={"quality": 85})
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


@contextlib.contextmanager
def _style(settings: Any) -> Iterator[None]:
    """Matplotlib's settings for one figure, without warnings of letters that its font lacks: the browser has others."""
    import matplotlib

    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from")
        yield


# ---------------------------------------------------------------------------------------------- words and numbers


def _number(value: Any) -> str:
    """Numbers to 3 digits, yes and no, text as it is, a dash for what is missing."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if isinstance(value, float | np.floating):
        return "–" if np.isnan(value) else f"{value:.3g}"
    return "–" if value is None or value is pd.NA else str(value)


def _items(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in sorted(values.items()) if value is not None]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(_items(value)) + "}"
    if isinstance(value, list | tuple | np.ndarray):
        return "[" + _first_few(value, 5) + "]"
    return _number(value) if isinstance(value, float | np.floating | bool | np.bool_) else str(value)


def _first_few(names: Iterable[Any], most: int) -> str:
    names = [str(name) for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly chosen, the first and last among them.

    >>> _spread("abcdefg", 3), _spread("ab", 3)
    (['a', 'd', 'g'], ['a', 'b'])
    """
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int))]
