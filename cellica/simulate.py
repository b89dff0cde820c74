"""Simulated screens with known biology and known batch effects: images on disk, or profiles alone.

Both start from a design (which perturbation stands in which well of which experiment) and the same kind of truth: a
perturbation moves a few factors, most of them shared with its class, and experiments and plates move others. All
draws are super-Gaussian, as real effects are; the preset ``gaussian`` takes the same normal draws without that shaping.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
from scipy import ndimage, special

from cellica import artifacts, schema
from cellica.progress import track
from cellica.screen import read_rxrx1

MOA = "moa"
EMPTY = "EMPTY"  # the label of negative controls, as in RxRx1

# ---------------------------------------------------------------------------------------------- designs


@dataclass(frozen=True)
class Design:
    """Which perturbation stands in which well. Counts of wells are per plate."""

    n_experiments: int
    n_plates: int
    n_treatments: int
    n_controls: int
    n_anchors: int
    n_classes: int
    cell_types: tuple[str, ...] = ("HUVEC",)
    split: bool = False  # each plate holds treatments of its own, else all plates of an experiment hold the same
    confounded: bool = False  # each treatment in one experiment only
    nonlinear: bool = False  # batch effects that no linear map undoes
    gaussian: bool = False  # Gaussian factors
    effect: float = 0.45  # share of the variance of biology, in profiles, that perturbations explain


SMALL = Design(n_experiments=4, n_plates=2, n_treatments=32, n_controls=8, n_anchors=0, n_classes=8)
HARD = replace(SMALL, confounded=True, nonlinear=True)
RXRX1 = Design(
    n_experiments=51,
    n_plates=4,
    n_treatments=277,
    n_controls=1,
    n_anchors=30,
    n_classes=100,
    cell_types=("HEPG2",) * 11 + ("HUVEC",) * 24 + ("RPE",) * 11 + ("U2OS",) * 5,
    split=True,
    effect=0.8,
)
PRESETS = {  # by function
    "screen": {"small": SMALL, "hard": HARD},
    "profiles": {"small": SMALL, "rxrx1-like": RXRX1, "hard": HARD, "gaussian": replace(RXRX1, gaussian=True)},
}
_WELLS = [schema.format_well(row, column) for row in range(1, 15) for column in range(1, 23)]  # B02 to O23


def _design(function: str, preset: str, **sizes: int | None) -> Design:
    if preset not in PRESETS[function]:
        raise schema.InputError(
            f"simulate.{function} has no preset {preset!r}: choose one of {', '.join(map(repr, PRESETS[function]))}"
        )
    asked: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    design = replace(PRESETS[function][preset], **asked)
    counts = (design.n_controls, design.n_anchors, design.n_treatments)
    if min(design.n_experiments, design.n_plates, design.n_treatments, design.n_classes) < 1 or min(counts) < 0:
        raise schema.InputError(
            f"a design needs at least one experiment, plate, treatment and class, and no negative count: got {design}"
        )
    if sum(counts) > len(_WELLS):
        raise schema.InputError(
            f"{sum(counts)} wells a plate (controls, anchors and treatments {counts}) do not fit the {len(_WELLS)} "
            f"wells {_WELLS[0]} to {_WELLS[-1]}: ask for fewer"
        )
    return design


def _plate_maps(design: Design, rng: np.random.Generator) -> pd.DataFrame:
    """One row a well: controls and anchors in fixed wells, treatments and anchors in a new order on every plate."""
    n_wells = design.n_controls + design.n_anchors + design.n_treatments
    wells = np.array(_WELLS, dtype=object)[_spread(len(_WELLS), n_wells)]
    is_control = np.isin(np.arange(n_wells), _spread(n_wells, design.n_controls))
    free = np.flatnonzero(~is_control)
    is_anchor = np.isin(np.arange(n_wells), free[_spread(len(free), design.n_anchors)])

    shape = (design.n_experiments if design.confounded else 1, design.n_plates if design.split else 1)
    sets = np.arange(np.prod(shape) * design.n_treatments).reshape(*shape, design.n_treatments)
    n_perturbations = sets.size + design.n_anchors
    cell_types = [design.cell_types[i] for i in _spread(len(design.cell_types), design.n_experiments)]
    plates = []
    for e, cell_type in enumerate(cell_types):
        for p in range(design.n_plates):
            held = sets[e if design.confounded else 0, p if design.split else 0]
            code = np.full(n_wells, n_perturbations)
            code[is_anchor] = sets.size + rng.permutation(design.n_anchors)
            code[~is_control & ~is_anchor] = rng.permutation(held)
            experiment = f"{cell_type}-{cell_types[: e + 1].count(cell_type):02d}"
            plates.append(pd.DataFrame({"code": code, "experiment": experiment, "plate": str(p + 1), "well": wells}))
            plates[-1]["cell_type"] = cell_type
            plates[-1]["control"] = np.select([is_control, is_anchor], ["negative", "positive"], "")
    table = pd.concat(plates, ignore_index=True)
    names = np.array([f"s{10001 + i}" for i in range(n_perturbations)] + [EMPTY], dtype=object)
    code = table.pop("code").to_numpy()
    negative = code == n_perturbations
    return table.assign(
        perturbation=names[code],
        perturbation_type=np.where(negative, "control", "siRNA"),
        concentration=np.nan,
        moa=_class_names(np.where(negative, -1, code % design.n_classes)),
    )


def _perturbations(obs: pd.DataFrame, n_classes: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Perturbation of each well as a code, the last one for controls, and the class of each code but the last.

    Wells without a label get the effect of one of the treatments, unknown to the reader.
    """
    label = pd.Series(schema.labels(obs, schema.PERTURBATION))
    control = schema.labels(obs, schema.CONTROL) if schema.CONTROL in obs else np.full(len(obs), "")
    negative = control == "negative"
    code, names = pd.factorize(label.mask(negative))
    code[negative] = len(names)
    missing = code < 0
    treatments = np.unique(code[(control != "positive") & ~negative & ~missing])
    if not len(treatments):
        raise schema.InputError("the layout names no treatment in 'perturbation': there is no effect to simulate")
    code[missing] = rng.choice(treatments, missing.sum())
    if MOA not in obs:
        return code, np.arange(len(names)) % n_classes
    given = pd.Series(schema.labels(obs, MOA)).groupby(code).first().reindex(range(len(names)))
    return code, pd.factorize(given.fillna(pd.Series(names)))[0]


def _spread(n: int, k: int) -> np.ndarray:
    """K of n places, evenly apart, the first one included; repeated in turn where k > n."""
    return np.arange(k) * n // max(k, 1)


def _class_names(codes: np.ndarray) -> np.ndarray:
    """Names of classes, None for code -1."""
    return np.array([f"class_{code:02d}" if code >= 0 else None for code in codes], dtype=object)


# ---------------------------------------------------------------------------------------------- draws and effects

Draw = Callable[[np.ndarray], np.ndarray]  # shapes standard normal values


def _normal(g: np.ndarray) -> np.ndarray:
    return g


def _heavy(g: np.ndarray) -> np.ndarray:
    """Unit variance, excess kurtosis 8.7: the levels of batches and cell types."""
    return g * np.abs(g) / np.sqrt(3)


def _outlying(g: np.ndarray) -> np.ndarray:
    """Unit variance, excess kurtosis 43: the odd wells of a screen."""
    return g**3 / np.sqrt(15)


def _sparse(g: np.ndarray, share: float = 0.2) -> np.ndarray:
    """Unit variance, zero but for a share of the values: which factors a perturbation moves, and how far."""
    t = -special.ndtri(share / 2)
    variance = 2 * ((1 + t**2) * special.ndtr(-t) - t * np.exp(-(t**2) / 2) / np.sqrt(2 * np.pi))
    return np.sign(g) * np.maximum(np.abs(g) - t, 0) / np.sqrt(variance)


def _effects(classes: np.ndarray, n_factors: int, rng: np.random.Generator, shape: Draw = _sparse) -> np.ndarray:
    """Effect of each perturbation on each factor, half of its variance shared by the class; a last row of zeros."""
    shared = shape(rng.standard_normal((classes.max() + 1, n_factors)))[classes]
    own = shape(rng.standard_normal((len(classes), n_factors)))
    return np.vstack([np.sqrt(0.5) * (shared + own), np.zeros(n_factors)])


def _generators(random_state: int, n: int) -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in np.random.SeedSequence(random_state).spawn(n)]


# ---------------------------------------------------------------------------------------------- profiles

# Shares of a factor's variance, by what it varies with. Biology: perturbation (Design.effect) and well.
PARTS = ("experiment", "plate", "cell_type", "perturbation", "well")
SHARES = {"batch": (0.5, 0.15, 0, 0, 0.35), "cell_type": (0, 0, 0.8, 0, 0.2), "noise": (0, 0, 0, 0, 1)}
ROLES = ("batch", "cell_type", "biology", "noise")
STRENGTH = {"batch": 1.0, "cell_type": 2.0, "biology": 1.0, "noise": 0.5}  # of a factor's mixing column, before decay
FEATURE_NOISE = 0.15  # standard deviation, where the factors' part of a feature has about 1


def profiles(
    preset: str = "rxrx1-like",
    *,
    layout: pd.DataFrame | None = None,
    n_experiments: int | None = None,
    n_plates: int | None = None,
    n_treatments: int | None = None,
    n_controls: int | None = None,
    n_anchors: int | None = None,
    n_classes: int | None = None,
    n_features: int = 64,
    n_factors: int = 48,
    random_state: int = 0,
) -> ad.AnnData:
    """Simulate well profiles: non-Gaussian factors of known origin, mixed linearly, plus noise.

    Parameters
    ----------
    preset
        ``rxrx1-like``: RxRx1's design, one untreated well (B02) and 30 anchors (``control == "positive"``) a plate,
        four fixed sets of 277 treatments, each treatment once an experiment and in a new well each time, one cell
        type an experiment. ``gaussian``: the same draws with Gaussian factors, which no ICA can find. ``small``: 4
        experiments of 2 plates, 32 treatments once a plate, 8 negative controls. ``hard``: as ``small``, but each
        treatment in one experiment only, and each feature bent by a curve of its own in each experiment.
    layout
        An obs table to lay the simulation over, one row a well, instead of the preset's design: ``experiment``,
        ``plate``, ``well``, ``perturbation``, and, where known, ``cell_type``, ``control`` and ``moa``. A well without
        a perturbation gets the effect of one of the treatments, at random, and keeps its missing label.
    n_experiments, n_plates, n_treatments, n_controls, n_anchors, n_classes
        Sizes other than the preset's; treatments, negative controls and anchors are counted per plate.
    n_features, n_factors
        Columns of ``X``, and sources: a sixth batch, a twelfth cell type, a sixth noise, the others biology.
    random_state
        Seed.

    Returns
    -------
    AnnData of wells, ``X`` float32. ``obs`` as everywhere in cellica, with the class of each treatment in ``moa``
    (missing for controls); ``obsm["factors"]`` (wells x factors, float32), ``varm["true_mixing"]`` (features x
    factors, float32), ``uns["cellica"]["simulation"]`` with the parameters and ``roles``, one of "batch", "cell_type",
    "biology" and "noise" for each factor, and the provenance. Except in ``hard``, ``X`` is ``factors @ true_mixing.T``
    plus Gaussian noise. There are no effects of the well's position.

    Raises
    ------
    InputError
        The preset is unknown, a size is out of range, or the layout lacks a column, an id or every label, or has wells
        twice.

    Notes
    -----
    Strengths were set so that uncorrected profiles look like real ones, never on how well a correction does:

    ==============================  =============  ===========  ==============  ============
    set (batches)                   replicate mAP  batch share  kurtosis batch  kurtosis all
    ==============================  =============  ===========  ==============  ============
    dye_std4 (4 plates)             .42            .03          8.6             26
    VarChAMP 20-21 (8 plates)       .25            .10          12              4.6
    VarChAMP 14, raw (4 plates)     .26            .15          2.3             29
    CytoSummaryNet stains (4)       .12            .07          11              14
    BBBC021 (10 weeks)              none           .53          11              12
    ``rxrx1-like``, HUVEC (6)       .16 to .27     .10 to .12   2.7 to 4.8      5.1 to 6.3
    ``gaussian``, HUVEC (6)         .18            .15          0.4             0.8
    ``small`` (4)                   .20 to .32     .12 to .17   3.2 to 7.4      8.3 to 11
    ``hard`` (4)                    none           .25          4.9             11
    ``screen("small")`` (4)         .24 to .36     .25 to .30   2.9 to 3.7      4.3 to 6.1
    ``screen("hard")`` (4)          none           .33          3.5             4.7
    ==============================  =============  ===========  ==============  ============

    Replicate mAP: treated wells (1,500 at random where there are more) ranked by cosine of z-scored features, clipped
    at 10, among treated wells of other batches. Batch share: share of 40 FastICA components with adjusted eta^2 of
    the batch above .1 among controls and anchors, their perturbations' means removed (all wells of a set without
    controls); kurtosis: median absolute excess kurtosis of those, and of all components, over all wells. Simulated
    ranges are over 3 or 4 seeds. Screens were measured on 91 simple image features (intensity quantiles, contrast at
    four scales, correlations of channels, nuclear area and number). With few batches the kurtosis of batch components
    depends much on the seed.
    """
    design = _design(
        "profiles",
        preset,
        n_experiments=n_experiments,
        n_plates=n_plates,
        n_treatments=n_treatments,
        n_controls=n_controls,
        n_anchors=n_anchors,
        n_classes=n_classes,
    )
    if n_factors < 12 or n_features < 1:
        raise schema.InputError(
            f"{n_factors} factors, {n_features} features: ask for at least 12 factors and 1 feature"
        )
    layout_rng, truth_rng, well_rng, mixing_rng, noise_rng = _generators(random_state, 5)
    obs = _plate_maps(design, layout_rng) if layout is None else _checked(layout)
    code, classes = _perturbations(obs, design.n_classes, layout_rng)
    if MOA not in obs:
        known = obs[schema.PERTURBATION].notna().to_numpy()
        obs[MOA] = _class_names(np.where(known, np.append(classes, -1)[code], -1))
    obs.index = schema.obs_names(obs)

    roles = _roles(n_factors)
    factors = _factors(obs, code, classes, roles, design, truth_rng, well_rng)
    mixing = _mixing(n_features, roles, mixing_rng)
    X = factors @ mixing.T
    if design.nonlinear:
        X = _bend(X, obs, mixing_rng)
    X += FEATURE_NOISE * noise_rng.standard_normal(X.shape)

    names = [f"feature_{j}" for j in range(n_features)]
    adata = ad.AnnData(X.astype(np.float32), obs=obs, var=pd.DataFrame(index=names))
    adata.obsm["factors"] = factors.astype(np.float32)
    adata.varm["true_mixing"] = mixing.astype(np.float32)
    parameters = {"preset": preset, "n_features": n_features, "n_factors": n_factors, "random_state": random_state}
    adata.uns[schema.UNS] = {"simulation": {**parameters, "roles": roles}}
    artifacts.add_step(adata, artifacts.step("simulate", asdict(design) | parameters))
    return adata


def _checked(layout: pd.DataFrame) -> pd.DataFrame:
    """Copy of a layout, ids as text; an error where rows have no id or share one."""
    keys = [schema.EXPERIMENT, schema.PLATE, schema.WELL]
    schema.require_columns(layout, [*keys, schema.PERTURBATION], "the layout")
    empty = layout.index[layout[keys].isna().any(axis=1)]
    if len(empty):
        raise schema.InputError(
            f"{len(empty)} rows of the layout have no {', '.join(keys)}: {list(empty[:5])}; fill or drop them"
        )
    obs = layout.assign(**{key: layout[key].astype(str) for key in keys})
    names = schema.obs_names(obs)
    twice = names[names.duplicated()].unique()
    if len(twice):
        raise schema.InputError(f"{len(twice)} wells occur twice in the layout: {list(twice[:5])}; keep one row a well")
    return obs


def _roles(n_factors: int) -> np.ndarray:
    counts = {"batch": n_factors // 6, "cell_type": n_factors // 12, "noise": n_factors // 6}
    counts["biology"] = n_factors - sum(counts.values())
    return np.repeat(np.array(ROLES, dtype=object), [counts[role] for role in ROLES])


def _factors(
    obs: pd.DataFrame,
    code: np.ndarray,
    classes: np.ndarray,
    roles: np.ndarray,
    design: Design,
    truth_rng: np.random.Generator,
    well_rng: np.random.Generator,
) -> np.ndarray:
    """Sum of what each factor varies with, each part of unit variance times its share."""
    level, effect, outlying = (_normal, _normal, _normal) if design.gaussian else (_heavy, _sparse, _outlying)
    groups = {
        "experiment": pd.factorize(obs[schema.EXPERIMENT])[0],
        "plate": pd.factorize(obs[schema.EXPERIMENT] + "_" + obs[schema.PLATE])[0],
        "cell_type": pd.factorize(schema.strata_labels(obs))[0],
    }
    n_factors = len(roles)
    shares = SHARES | {"biology": (0, 0, 0, design.effect, 1 - design.effect)}
    weights = dict(zip(PARTS, np.sqrt([shares[role] for role in roles]).T))
    z = weights["perturbation"] * _effects(classes, n_factors, truth_rng, effect)[code]
    for part, group in groups.items():
        levels = level(truth_rng.standard_normal((group.max() + 1, n_factors)))
        if (
            part == "cell_type" and len(levels) > 1
        ):  # so few levels have the variance that their share says only if made to
            levels = (levels - levels[group].mean(axis=0)) / levels[group].std(axis=0)
        z += (weights[part] * levels)[group]
    return z + weights["well"] * outlying(well_rng.standard_normal(z.shape))


def _mixing(n_features: int, roles: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Gaussian columns, of strengths that fall off in an order of their own; rows of unit length on average."""
    n_factors = len(roles)
    decay = rng.permutation(np.exp(-2 * np.arange(n_factors) / n_factors))
    mixing = rng.standard_normal((n_features, n_factors)) * decay * np.array([STRENGTH[role] for role in roles])
    return mixing / np.sqrt((mixing**2).sum() / n_features)


def _bend(X: np.ndarray, obs: pd.DataFrame, rng: np.random.Generator) -> np.ndarray:
    """Bend each feature in each experiment by a monotone curve of its own."""
    group = pd.factorize(obs[schema.EXPERIMENT])[0]
    curve = rng.uniform(-0.9, 0.9, (group.max() + 1, X.shape[1]))
    return X + curve[group] * (np.sqrt(1 + X**2) - 1)


# ---------------------------------------------------------------------------------------------- images

# A factor of biology moves one property of the cells: its value at 0, and its change in logarithm per unit.
BIOLOGY = {
    "nucleus_size": (9.5, 0.08),  # radius, px
    "nucleus_elongation": (1.3, 0.10),
    "nucleus_intensity": (60.0, 0.15),  # grey levels, as are the amounts
    "cell_count": (36.0, 0.15),  # in 256 x 256 px
    "cell_size": (28.0, 0.08),  # radius, px
    "texture_scale": (7.0, 0.15),  # px
    "er_amount": (60.0, 0.15),
    "er_spread": (9.0, 0.20),  # distance from the nucleus, px
    "actin_amount": (34.0, 0.15),
    "actin_fibres": (40.0, 0.20),
    "nucleoli": (45.0, 0.20),
    "mito_amount": (75.0, 0.15),
    "mito_spread": (11.0, 0.20),
    "golgi_amount": (60.0, 0.15),
    "golgi_spread": (4.5, 0.15),
}
LENGTHS = ("nucleus_size", "cell_size", "texture_scale", "er_spread", "mito_spread", "golgi_spread")  # of them, in px
# A parameter of the batch: its value at 0 and its step per unit, in logarithm except for the illumination's slopes.
BATCH = {
    **{f"gain_w{w}": (1.0, 0.12) for w in range(1, 7)},
    **{f"offset_w{w}": (5.0, 0.20) for w in range(1, 7)},  # grey levels
    "blur": (0.8, 0.20),  # standard deviation, px
    "bleed_through": (0.05, 0.40),  # of each channel into the next
    "illumination_x": (0.0, 0.10),  # from the centre to the edge
    "illumination_y": (0.0, 0.10),
}
EFFECT, WELL_VARIATION, PLATE_VARIATION = 0.9, 0.35, 0.35  # standard deviations, in units of a factor


def screen(
    out_dir: artifacts.PathLike,
    preset: str = "small",
    *,
    n_experiments: int | None = None,
    n_plates: int | None = None,
    n_treatments: int | None = None,
    n_controls: int | None = None,
    n_anchors: int | None = None,
    n_classes: int | None = None,
    n_sites: int = 1,
    image_size: int = 256,
    magnification: float = 1.0,
    batch_strength: float = 1.0,
    random_state: int = 0,
    force: bool = False,
) -> pd.DataFrame:
    """Render a six-channel screen from known factors, in the files and tables of RxRx1.

    Nuclei, endoplasmic reticulum, actin, nucleoli and RNA, mitochondria, Golgi: each cell is an ellipse with a
    direction of its own, each pixel belongs to the nearest cell, and textures follow the cells. Then comes the
    microscope of the batch, see :func:`expose`.

    Parameters
    ----------
    out_dir
        Folder to write: ``images/{experiment}/Plate{plate}/{well}_s{site}_w{channel}.png`` (8-bit grey),
        ``metadata.csv`` (RxRx1's columns and ``moa``) and ``factors.csv``, the truth: one row a well, a column for
        each factor of ``BIOLOGY`` (in its units, 0 the untreated mean) and for each parameter of ``BATCH``
        (constant on a plate; most of it constant in an experiment).
    preset
        ``small``: 4 experiments of 2 plates, 32 treatments of 8 classes once a plate, 8 negative controls: 320 sites.
        ``hard``: each treatment in one experiment only, classes spread over experiments, a tilted focal plane and
        bleed-through that grows with the square of the light.
    n_experiments, n_plates, n_treatments, n_controls, n_anchors, n_classes
        Sizes other than the preset's; treatments, negative controls and anchors are counted per plate.
    n_sites
        Sites a well.
    image_size
        Height and width, px, at least 64; the density and size of cells in px stay the same.
    magnification
        Of all lengths of the cells in px (``LENGTHS``); as many fewer cells are in the picture.
    batch_strength
        Of all steps of the batch's parameters (``BATCH``).
    random_state
        Seed.
    force
        Replace ``out_dir`` if it is there.

    Returns
    -------
    The screen table, as ``screen.read_rxrx1(out_dir)`` reads it.

    Raises
    ------
    InputError, OutputExistsError
        The preset is unknown or a size is out of range; ``out_dir`` exists and ``force`` is False.

    Notes
    -----
    :func:`profiles` compares the raw properties of the images with those of real profiles.
    """
    design = _design(
        "screen",
        preset,
        n_experiments=n_experiments,
        n_plates=n_plates,
        n_treatments=n_treatments,
        n_controls=n_controls,
        n_anchors=n_anchors,
        n_classes=n_classes,
    )
    if image_size < 64 or n_sites < 1:
        raise schema.InputError(f"image_size={image_size}, n_sites={n_sites}: ask for at least 64 px and 1 site")
    if not (0.25 <= magnification <= 4 and 0 <= batch_strength <= 4):
        raise schema.InputError(
            f"magnification={magnification}, batch_strength={batch_strength}: ask for 0.25 to 4 and for 0 to 4"
        )
    layout_rng, truth_rng, well_rng, batch_rng, texture_rng = _generators(random_state, 5)
    wells = _plate_maps(design, layout_rng)
    biology = _well_biology(wells, design, layout_rng, truth_rng, well_rng)
    batch = _batch_parameters(wells, batch_strength, batch_rng)
    sites = _rxrx1_metadata(wells, n_sites)
    texture = _texture(texture_rng)
    with artifacts.atomic(out_dir, force=force) as folder:
        for plate in sites["folder"].unique():
            (folder / plate).mkdir(parents=True)
        write = partial(
            _write_site,
            folder,
            sites,
            biology,
            batch,
            texture,
            image_size,
            magnification,
            design.nonlinear,
            random_state,
        )
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in track(pool.map(write, range(len(sites))), "rendering sites", total=len(sites)):
                pass
        sites.drop(columns=["folder", "row"]).to_csv(folder / "metadata.csv", index=False)
        truth = pd.concat([sites.drop_duplicates("row")["well_id"].reset_index(drop=True), biology, batch], axis=1)
        truth.to_csv(folder / "factors.csv", index=False, float_format="%.6g")
    return read_rxrx1(out_dir)


def _well_biology(
    wells: pd.DataFrame,
    design: Design,
    layout_rng: np.random.Generator,
    truth_rng: np.random.Generator,
    well_rng: np.random.Generator,
) -> pd.DataFrame:
    code, classes = _perturbations(wells, design.n_classes, layout_rng)
    effects = EFFECT * _effects(classes, len(BIOLOGY), truth_rng)[code]
    variation = WELL_VARIATION * _heavy(well_rng.standard_normal(effects.shape))
    return pd.DataFrame(np.clip(effects + variation, -4, 4), columns=list(BIOLOGY))


def _batch_parameters(wells: pd.DataFrame, strength: float, rng: np.random.Generator) -> pd.DataFrame:
    experiment = pd.factorize(wells["experiment"])[0]
    plate = pd.factorize(wells["experiment"] + "_" + wells["plate"])[0]
    of_experiment = _heavy(rng.standard_normal((experiment.max() + 1, len(BATCH))))[experiment]
    of_plate = _heavy(rng.standard_normal((plate.max() + 1, len(BATCH))))[plate]
    z = strength * np.clip(of_experiment + PLATE_VARIATION * of_plate, -3, 3)
    centre, step = np.array(list(BATCH.values())).T
    values = np.where(centre == 0, step * z, centre * np.exp(step * z))
    return pd.DataFrame(values, columns=list(BATCH))


def _rxrx1_metadata(wells: pd.DataFrame, n_sites: int) -> pd.DataFrame:
    """The columns of RxRx1's metadata.csv, and ``moa``; ``row`` and ``folder`` say where a site's truth and images are."""
    names = [*sorted(set(wells["perturbation"]) - {EMPTY}), EMPTY]
    row = np.repeat(np.arange(len(wells)), n_sites)
    table = wells.iloc[row].reset_index(drop=True)
    site = np.tile(np.arange(1, n_sites + 1), len(wells))
    well_id = schema.obs_names(table)
    kinds = {"negative": "negative_control", "positive": "positive_control", "": "treatment"}
    return pd.DataFrame(
        {
            "site_id": well_id + "_" + site.astype(str),
            "well_id": well_id,
            "cell_type": table["cell_type"],
            "dataset": "train",
            "experiment": table["experiment"],
            "plate": table["plate"],
            "well": table["well"],
            "site": site,
            "well_type": table["control"].map(kinds),
            "sirna": table["perturbation"],
            "sirna_id": table["perturbation"].map({name: i for i, name in enumerate(names)}),
            "moa": table["moa"],
            "row": row,
            "folder": "images/" + table["experiment"] + "/Plate" + table["plate"],
        }
    )


def _write_site(
    folder: Path,
    sites: pd.DataFrame,
    biology: pd.DataFrame,
    batch: pd.DataFrame,
    texture: np.ndarray,
    image_size: int,
    magnification: float,
    nonlinear: bool,
    random_state: int,
    i: int,
) -> None:
    import imagecodecs

    site = sites.iloc[i]
    rng = np.random.default_rng([random_state, i])
    light = paint(biology.iloc[site["row"]].to_dict(), image_size, texture, rng, magnification=magnification)
    image = expose(light, batch.iloc[site["row"]].to_dict(), rng, nonlinear=nonlinear)
    for channel, plane in enumerate(image, start=1):
        path = folder / site["folder"] / f"{site['well']}_s{site['site']}_w{channel}.png"
        path.write_bytes(imagecodecs.png_encode(plane, level=1))


def _texture(rng: np.random.Generator, size: int = 512, scale: float = 8.0) -> np.ndarray:
    """Smooth periodic noise of unit variance, clipped at 2; looked up at any scale and direction."""
    noise = ndimage.gaussian_filter(rng.standard_normal((size, size)), scale, mode="wrap")
    return np.clip(noise / noise.std(), -2, 2).astype(np.float32)


def _at(texture: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    wrap = len(texture) - 1  # sizes are powers of two
    return texture.take((y.astype(np.int32) & wrap) * len(texture) + (x.astype(np.int32) & wrap))


def _cells(
    biology: Mapping[str, float], size: int, magnification: float, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Properties of each cell (float32), varied from cell to cell, and its place, direction and elongation."""
    mean = {name: centre * np.exp(step * biology[name]) for name, (centre, step) in BIOLOGY.items()}
    mean |= {name: magnification * mean[name] for name in LENGTHS}
    spacing = magnification * 256 / np.sqrt(mean.pop("cell_count"))
    lattice = np.arange(-spacing, size + spacing, spacing)
    y, x = (axis.ravel() for axis in np.meshgrid(lattice, lattice, indexing="ij"))
    x = x + spacing / 2 * (np.round(y / spacing) % 2)
    x, y = np.stack([x, y])[:, rng.random(len(x)) > 0.08]  # a few gaps
    x, y = np.stack([x, y]) + 0.25 * spacing * rng.standard_normal((2, len(x)))
    geometry = ("nucleus_size", "nucleus_elongation", "cell_size", "texture_scale")
    cells = {
        name: value * np.exp((0.1 if name in geometry else 0.2) * rng.standard_normal(len(x)))
        for name, value in mean.items()
    }
    cells |= {"x": x, "y": y, "angle": rng.uniform(0, np.pi) + 0.7 * rng.standard_normal(len(x))}
    cells["elongation"] = np.exp(0.25 + 0.12 * rng.standard_normal(len(x)))
    return {name: value.astype(np.float32) for name, value in cells.items()}


def _owners(cells: Mapping[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cell that each pixel is nearest to, and how near: 0 at its centre, 1 at its edge, at most 1.2 (background)."""
    squared = np.full(x.shape, 1.44, dtype=np.float32)
    owner = np.zeros(x.shape, dtype=np.int32)
    long, short = cells["cell_size"] * cells["elongation"], cells["cell_size"] / cells["elongation"]
    cos, sin = np.cos(cells["angle"]), np.sin(cells["angle"])
    for i, (row, column) in enumerate(zip(cells["y"], cells["x"])):
        reach = 1.2 * long[i] + 8
        window = tuple(slice(max(int(c - reach), 0), max(int(c + reach), 0)) for c in (row, column))
        dx, dy = x[window] - column, y[window] - row
        distance = ((dx * cos[i] + dy * sin[i]) / long[i]) ** 2 + ((dy * cos[i] - dx * sin[i]) / short[i]) ** 2
        nearer = distance < squared[window]
        squared[window][nearer], owner[window][nearer] = distance[nearer], i
    return owner, np.sqrt(squared)


def paint(
    biology: Mapping[str, float],
    size: int,
    texture: np.ndarray,
    rng: np.random.Generator,
    *,
    magnification: float = 1.0,
) -> np.ndarray:
    """Light that cells of the given factors send out, before any microscope: float32 (6, size, size)."""
    cells = _cells(biology, size, magnification, rng)
    y, x = np.mgrid[:size, :size].astype(np.float32)
    a, b, c, d = rng.integers(0, len(texture), 4)
    x, y = x + 4 * _at(texture, 0.6 * x + a, 0.6 * y + b), y + 4 * _at(texture, 0.6 * x + c, 0.6 * y + d)
    owner, edge = _owners(cells, x, y)
    of = {name: value.take(owner) for name, value in cells.items()}

    # coordinates along and across each cell, in px and in units of its nucleus
    dx, dy, cos, sin = x - of["x"], y - of["y"], np.cos(cells["angle"]).take(owner), np.sin(cells["angle"]).take(owner)
    u, v = dx * cos + dy * sin, dy * cos - dx * sin
    stretch, radius = np.sqrt(of["nucleus_elongation"]), of["nucleus_size"]
    nu, nv = u / (radius * stretch), v * stretch / radius
    from_centre = np.sqrt(nu**2 + nv**2)
    outside = np.maximum(from_centre - 1, 0) * radius

    inside = np.clip(8 * (1.1 - edge), 0, 1)
    thick = inside * np.clip(1.1 - 0.75 * edge**2, 0.15, 1)
    nucleus = np.clip((1 - from_centre) * radius / 2 + 0.5, 0, 1)
    cytoplasm = thick * (1 - 0.8 * nucleus)
    cortex = inside * np.exp(-(((edge - 0.95) / 0.1) ** 2))

    # textures follow each cell's direction; ridges of smooth noise are filaments
    shift = rng.integers(0, len(texture), len(cells["x"])).astype(np.float32).take(owner)
    u_scaled, v_scaled = u * 8 / of["texture_scale"], v * 8 / of["texture_scale"]
    grain = _at(texture, 3 * u_scaled + shift, 3 * v_scaled + a)
    network = np.exp(-3 * np.abs(_at(texture, 2.5 * u_scaled + shift, 3.5 * v_scaled + b)))
    fibres = np.exp(-3 * np.abs(_at(texture, 0.45 * u_scaled + c, 5 * v_scaled + shift)))
    chromatin = _at(texture, 4 * u + d, 4 * v + shift)

    er = of["er_amount"] * cytoplasm * (0.15 + np.exp(-outside / of["er_spread"])) * (1 + 0.25 * grain)
    mito = of["mito_amount"] * cytoplasm * (0.08 + np.exp(-outside / of["mito_spread"])) * (0.15 + 1.2 * network)
    side = 0.85 * 1.25 * radius
    golgi = np.exp(-((u / stretch - 0.5 * side) ** 2 + (v - side) ** 2) / (2 * of["golgi_spread"] ** 2))
    light = np.stack(
        [
            of["nucleus_intensity"] * nucleus * (1 - 0.3 * np.minimum(from_centre, 1) ** 2) * (1 + 0.15 * chromatin)
            + 1.5 * thick,
            er,
            of["actin_amount"] * (0.5 * thick + 0.5 * cortex) + of["actin_fibres"] * fibres * thick,
            0.6 * er + nucleus * (12 + of["nucleoli"] * _nucleoli(len(cells["x"]), owner, nu, nv, rng)),
            mito + 3 * thick,
            of["golgi_amount"] * golgi * thick * (1 + 0.3 * grain)
            + 14 * thick * (1 + 0.2 * grain)
            + 10 * nucleus
            + 9 * cortex,
        ]
    )
    return (light + _debris(size, rng)).astype(np.float32, copy=False)


def _nucleoli(n_cells: int, owner: np.ndarray, nu: np.ndarray, nv: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Three round spots in each nucleus."""
    spots = np.zeros_like(nu)
    for _ in range(3):
        u, v, width = np.vstack([0.45 * rng.standard_normal((2, n_cells)), 0.16 + 0.1 * rng.random(n_cells)])
        u, v, width = (value.astype(np.float32).take(owner) for value in (u, v, width))
        spots += np.exp(-((nu - u) ** 2 + (nv - v) ** 2) / width**2)
    return np.minimum(spots, 1.3)


def _debris(size: int, rng: np.random.Generator) -> np.ndarray:
    """Bright specks in a few sites: real screens owe many of their outlying wells to them."""
    y, x = np.mgrid[:size, :size].astype(np.float32)
    specks = np.zeros((6, size, size), dtype=np.float32)
    for row, column in rng.uniform(0, size, (rng.poisson(0.15), 2)):
        brightness = 150 * rng.uniform(0.3, 1, (6, 1, 1)).astype(np.float32)
        specks += brightness * np.exp(-((y - row) ** 2 + (x - column) ** 2) / (2 * rng.uniform(3, 9) ** 2))
    return specks


def expose(
    light: np.ndarray, batch: Mapping[str, float], rng: np.random.Generator, *, nonlinear: bool = False
) -> np.ndarray:
    """What the microscope of a batch makes of the light: uint8 (6, size, size).

    In this order: out-of-focus haze, bleed-through of each channel into the next, blur, uneven illumination, gain,
    offset, shot noise. With ``nonlinear``, bleed-through grows with the square of the light, and the focal plane is
    tilted: blur grows from left to right.
    """
    size = light.shape[-1]
    haze = ndimage.uniform_filter(ndimage.uniform_filter(light, (1, 25, 25)), (1, 25, 25))
    light = 0.85 * light + 0.3 * haze
    bleeding = light[:-1] * (light[:-1] / 50 if nonlinear else 1)
    light[1:] += batch["bleed_through"] * bleeding
    image = _blurred(light, batch["blur"])
    ramp = np.linspace(-1, 1, size, dtype=np.float32)
    if nonlinear:
        image += (_blurred(light, 3 * batch["blur"]) - image) * (ramp + 1) / 2
    image *= 1 + batch["illumination_x"] * ramp + batch["illumination_y"] * ramp[:, None]
    image *= np.array([batch[f"gain_w{w}"] for w in range(1, 7)], dtype=np.float32)[:, None, None]
    image += np.array([batch[f"offset_w{w}"] for w in range(1, 7)], dtype=np.float32)[:, None, None]
    image += np.sqrt(0.15 * image + 0.5) * rng.standard_normal(image.shape, dtype=np.float32)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def _blurred(light: np.ndarray, width: float) -> np.ndarray:
    return np.stack([ndimage.gaussian_filter(channel, width, truncate=2.5) for channel in light])
