from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from PIL import Image

from cellica import correct, plot, schema
from cellica.plates import Plate, ingest
from cellica.schema import InputError


@pytest.fixture(scope="module")
def wells() -> ad.AnnData:
    """Three experiments of two plates, 24 wells each; a strong batch effect in one direction."""
    rng = np.random.default_rng(0)
    layout = [(e, p, w) for e in range(3) for p in range(2) for w in range(24)]
    obs = pd.DataFrame(
        {
            "experiment": [f"E-{e}" for e, _, _ in layout],
            "plate": [str(p) for _, p, _ in layout],
            "well": [schema.format_well(w // 6, w % 6) for _, _, w in layout],
            "perturbation": ["EMPTY" if w < 6 else f"gene_{w // 2}" for _, _, w in layout],
            "control": ["negative" if w < 6 else "" for _, _, w in layout],
        }
    )
    obs.index = schema.obs_names(obs)
    biology = rng.standard_normal((24, 8))
    x = np.array([biology[w // 2] for _, _, w in layout]) + rng.standard_normal((len(layout), 8))
    x[:, 0] += 6 * np.array([e for e, _, _ in layout])
    return ad.AnnData(x.astype(np.float32), obs=obs)


@pytest.fixture(scope="module")
def corrected(wells) -> ad.AnnData:
    adata = wells.copy()
    correct.run(adata, "pca_drop+sphere", key_added="drop")
    return adata


def points(ax: Axes) -> np.ndarray:
    return np.concatenate([np.asarray(c.get_offsets()) for c in ax.collections if isinstance(c, PathCollection)])


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


# ---------------------------------------------------------------------------------------------- embedding


def test_embedding_is_the_first_two_principal_components(wells):
    ax = plot.embedding(wells)
    centred = wells.X - wells.X.mean(axis=0)
    u, s, _ = np.linalg.svd(centred.astype(float), full_matrices=False)
    drawn = points(ax)
    for column, expected in zip(drawn.T, (u * s).T):
        column, expected = np.sort(column), np.sort(expected)
        assert np.allclose(column, expected, atol=1e-3) or np.allclose(column, np.sort(-expected), atol=1e-3)
    assert ax.get_xlabel() == f"PC 1 ({100 * s[0] ** 2 / np.sum(s**2):.0f} %)"
    assert legend(ax) == ["E-0", "E-1", "E-2"]


@pytest.fixture
def plane(wells) -> tuple[ad.AnnData, np.ndarray]:
    """Two features, of which principal components are a rotation, and the distance of each well from the mean."""
    x = wells.X[:, 1:3]
    return ad.AnnData(x, obs=wells.obs.copy()), np.linalg.norm(x - x.mean(axis=0), axis=1)


def test_embedding_gives_each_well_the_colour_of_its_category(plane):
    adata, distance = plane
    rare = np.arange(adata.n_obs) < 10
    ax = plot.embedding(adata, color=np.where(rare, "b", "a"))
    drawn = np.linalg.norm(points(ax), axis=1)
    faces = np.array([to_hex(face) for c in ax.collections for face in c.get_facecolors()])
    for color, rows in zip(plot.COLORS, (~rare, rare)):
        np.testing.assert_allclose(np.sort(drawn[faces == color.lower()]), np.sort(distance[rows]), rtol=1e-3)
    assert ax.figure.get_axes() == [ax]  # no colour bar


def test_embedding_gives_each_well_the_colour_of_its_number(plane):
    adata, distance = plane
    adata.obs["distance"] = distance
    ax = plot.embedding(adata, color="distance")
    np.testing.assert_allclose(ax.collections[0].get_array(), np.linalg.norm(points(ax), axis=1), rtol=1e-3)


def test_categories_are_capped_and_the_rest_is_named(wells):
    many = np.array([f"{i % 15:02d}" for i in range(wells.n_obs)])
    many[:20], many[20:30] = "00", ""  # the largest category, and wells without
    ax = plot.embedding(wells, color=many)
    assert len(points(ax)) == wells.n_obs
    assert legend(ax)[0] == "00"
    assert legend(ax)[-2:] == ["other (3)", "none"]
    assert len(legend(ax)) == plot.MAX_CATEGORIES + 2
    looks = {(h.get_color(), h.get_marker()) for h in ax.get_legend().legend_handles[: plot.MAX_CATEGORIES]}
    assert len(looks) == plot.MAX_CATEGORIES


@pytest.mark.parametrize("name", ["$x^$", "_hidden", "<script>", "a $5 b", "薬" * 30, "-"])
def test_any_name_can_stand_in_a_legend(wells, name):
    ax = plot.embedding(wells, color=np.where(np.arange(wells.n_obs) % 2, name, "other name"))
    shown = [text.replace("\N{WORD JOINER}", "").replace(r"\$", "$") for text in legend(ax)]
    assert (name if len(name) <= 24 else name[:23] + "…") in shown


def test_numbers_are_drawn_on_a_scale_and_missing_ones_too(wells):
    values = np.arange(wells.n_obs, dtype=float)
    values[:7] = np.nan
    ax = plot.embedding(wells, color=pd.Series(values, name="cells"))
    assert len(points(ax)) == wells.n_obs
    assert np.ma.count_masked(np.ma.masked_invalid(ax.collections[0].get_array())) == 7
    assert [other.get_ylabel() for other in ax.figure.get_axes() if other is not ax] == ["cells"]


def test_wells_that_are_not_finite_are_counted(wells):
    broken = wells.copy()
    broken.X[:5, 2] = np.nan
    ax = plot.embedding(broken)
    assert len(points(ax)) == wells.n_obs - 5
    assert "5 wells not finite" in ax.get_title()


def test_embedding_of_a_representation_on_given_axes(corrected):
    ax = Figure().subplots()
    assert plot.embedding(corrected, use_rep="X_drop", color="control", ax=ax) is ax
    assert legend(ax) == ["negative", "none"]
    assert ax.get_title() == "X_drop"


def test_embedding_errors_name_what_is_there(wells):
    with pytest.raises(InputError, match="has no column 'batch'; it has experiment"):
        plot.embedding(wells, color="batch")
    with pytest.raises(InputError, match="'X_ica' is not in obsm: it has nothing"):
        plot.embedding(wells, use_rep="X_ica")
    with pytest.raises(InputError, match="2 values were given for 144 wells"):
        plot.embedding(wells, color=["a", "b"])
    with pytest.raises(InputError, match="needs 3 finite wells"):
        plot.embedding(wells[:2].copy())


# ---------------------------------------------------------------------------------------------- components


def test_components_are_drawn_at_their_shares(corrected):
    ax = plot.components(corrected, "drop")
    table = corrected.uns["cellica"]["drop"]["components"]
    removed = int(table["removed"].sum())
    assert removed > 0
    marks = points(ax)
    assert len(marks) == len(table) + removed
    np.testing.assert_allclose(
        np.sort(marks[: len(table)], axis=0), np.sort(table[["perturbation_r2", "batch_r2"]].to_numpy(), axis=0)
    )
    np.testing.assert_allclose(np.sort(marks[len(table) :, 1]), np.sort(table.loc[table["removed"], "batch_r2"]))
    assert f"removed ({removed})" in legend(ax)
    threshold, guard = ax.lines
    assert set(threshold.get_ydata()) == {0.4}
    assert list(guard.get_xdata()) == list(guard.get_ydata())


def test_components_without_guard_or_known_shares(corrected):
    adata = corrected.copy()
    record = adata.uns["cellica"]["drop"]
    record["components"]["perturbation_r2"] = np.nan
    record["steps"]["1_pca_drop"]["guard"] = False
    ax = plot.components(adata, "drop")
    assert len(ax.lines) == 1
    assert np.isfinite(points(ax)).all()
    assert (points(ax)[:, 0] < 0).all()
    assert [text.get_text() for text in ax.texts] == ["unknown"]


def test_components_error_names_the_corrections(corrected):
    with pytest.raises(InputError, match="'sphere' is no correction with components; there are drop"):
        plot.components(corrected, "sphere")
    with pytest.raises(InputError, match="there are none"):
        plot.components(ad.AnnData(np.ones((3, 2))), "ica")


# ---------------------------------------------------------------------------------------------- scores


def score_table(*rows: tuple) -> pd.DataFrame:
    filled = [(rep, metric, group, value, chance, 9, 0, "") for rep, metric, group, value, chance in rows]
    return pd.DataFrame(filled, columns=list(schema.SCORE_COLUMNS))


SCORES = score_table(
    ("baseline:position", "map", "all", 0.15, 0.1),
    ("X", "map", "all", 0.25, 0.1),
    ("X_$ica$", "map", "all", np.nan, np.nan),
    ("X", "recall", "CORUM", -0.5, 0.2),
)


def test_bars_have_the_values_and_their_chance():
    ax = plot.scores(SCORES)
    assert [bar.get_width() for bar in ax.patches] == [0.25, 0, 0.15]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["X", r"X_\$ica\$", "baseline:position"]
    assert [text.get_text() for text in ax.texts] == ["0.25", "not applicable", "0.15"]
    assert [text.xy[0] for text in ax.texts] == [0.25, 0, 0.15]  # beside bar and chance
    (chance,) = (c for c in ax.collections if isinstance(c, LineCollection))
    assert [segment[0][0] for segment in chance.get_segments() if len(segment)] == [0.1, 0.1]
    x, ica, baseline = ax.patches
    assert ica.get_y() - x.get_y() < baseline.get_y() - ica.get_y()  # baselines stand apart
    assert (x.get_hatch(), baseline.get_hatch()) == ("", "///")
    assert ax.yaxis_inverted()


def test_metric_is_chosen_by_name_and_groups_are_named():
    ax = plot.scores(SCORES, metric="recall")
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["X, CORUM"]
    assert [bar.get_width() for bar in ax.patches] == [-0.5]
    assert ax.texts[0].xy[0] == 0.2
    assert ax.get_title() == "recall"


def test_scores_errors():
    with pytest.raises(InputError, match="metric 'nsc' is not in the score table; it has map, recall"):
        plot.scores(SCORES, metric="nsc")
    with pytest.raises(InputError, match="has no column 'chance'"):
        plot.scores(SCORES.drop(columns="chance"))
    with pytest.raises(InputError, match="it has none"):
        plot.scores(SCORES[:0])


# ---------------------------------------------------------------------------------------------- plate maps


def test_plate_map_shows_each_value_at_its_well(wells):
    values = np.arange(wells.n_obs, dtype=float) + 1
    ax = plot.plate_map(wells, values, plate="E-1_0")
    (image,) = ax.images
    grid = image.get_array()
    assert grid.shape == (8, 12)
    np.testing.assert_array_equal(grid[:4, :6].ravel(), np.arange(49, 73))
    assert grid.mask.sum() == 8 * 12 - 24
    assert [label.get_text() for label in ax.get_yticklabels()] == list("ABCDEFGH")
    assert len(ax.figure.get_axes()) == 2  # with its scale


def test_plate_map_averages_sites_leaves_gaps_and_diverges_around_0():
    obs = pd.DataFrame({"experiment": "E", "plate": "1", "well": ["B02", "b2", "A1", None, "A2"]})
    obs["score"] = [1.0, 3.0, -4.0, 9.0, np.nan]
    obs.index = obs.index.astype(str)
    ax = plot.plate_map(ad.AnnData(obs=obs), "score", plate="E_1", colorbar=False)
    grid = ax.images[0].get_array()
    assert grid[1, 1] == 2
    assert grid[0, 0] == -4
    assert grid.mask.sum() == grid.size - 2
    low, high = ax.images[0].get_clim()
    assert low == -high
    assert ax.figure.get_axes() == [ax]


def test_plate_map_takes_truth_values(wells):
    ax = plot.plate_map(wells, (wells.obs["control"] == "negative").to_numpy(), plate="E-0_0")
    assert ax.images[0].get_array().sum() == 6


def test_plate_map_errors(wells):
    with pytest.raises(InputError, match="'perturbation' is not numeric"):
        plot.plate_map(wells, "perturbation", plate="E-0_0")
    with pytest.raises(InputError, match=r"plate 'E-9_0' is not there; there are E-0_0, .* \.\.\."):
        plot.plate_map(wells, np.zeros(wells.n_obs), plate="E-9_0")


@pytest.fixture
def measured(wells) -> pd.DataFrame:
    """Columns of two channels; plate E-1_0 is dark, and saturation and emptiness are nowhere."""
    rng = np.random.default_rng(0)
    obs, names = wells.obs.copy(), ("DNA", "ER")
    dark = (plot.plate_names(obs) == "E-1_0").astype(float)
    obs["cell_count"] = np.arange(len(obs))
    obs["empty"] = False
    for name in names:
        obs[f"intensity_{name}"] = 40 - 30 * dark + rng.random(len(obs))
        obs[f"focus_{name}"] = rng.normal(0, 0.5, len(obs))
        obs[f"saturation_{name}"] = 0.0
    return obs


def test_plate_summary_has_a_map_of_each_measure_on_the_scale_of_all_plates(wells, measured):
    names = [
        "cell_count",
        "empty",
        *(f"{what}_{c}" for what in ("intensity", "focus", "saturation") for c in ("DNA", "ER")),
    ]
    obs = measured.sample(frac=1, random_state=0)  # as a plain table, in any order
    for given_ in (obs, ad.AnnData(obs=obs)):
        figure = plot.plate_summary(given_, plate="E-1_0").figure
        maps = {ax.get_title(): ax.images[0] for ax in figure.axes if ax.get_title()}
        assert list(maps) == names
        on_plate = measured[plot.plate_names(measured) == "E-1_0"]
        for name, image in maps.items():
            np.testing.assert_allclose(image.get_array()[:4, :6].ravel(), on_plate[name].astype(float))
            assert image.get_array().mask.sum() == 8 * 12 - 24
            assert image.get_cmap().name == "cividis"  # focus lies around 0, which is nothing special
        np.testing.assert_allclose(maps["cell_count"].get_clim(), np.percentile(measured["cell_count"], (1, 99)))
        low, high = maps["intensity_DNA"].get_clim()
        assert maps["intensity_DNA"].get_array().max() < low + 0.1 * (high - low)
        assert figure.get_suptitle() == "E-1_0, 24 wells"
        figure.draw_without_rendering()


def test_plate_summary_draws_what_there_is_and_says_what_lacks(measured):
    measured["focus_DNA"] = np.nan
    figure = plot.plate_summary(measured.drop(columns=["cell_count", "empty", "focus_ER"]), plate="E-0_1").figure
    titles = [ax.get_title() for ax in figure.axes if ax.images]
    assert titles == ["intensity_DNA", "intensity_ER", "focus_DNA", "saturation_DNA", "saturation_ER"]
    figure.draw_without_rendering()
    with pytest.raises(InputError, match="obs needs columns such as intensity_, focus_"):
        plot.plate_summary(measured[["experiment", "plate", "well"]], plate="E-0_0")
    with pytest.raises(InputError, match=r"intensity_ER \(as 'dim' in 144 rows\)"):
        plot.plate_summary(measured.assign(intensity_ER="dim"), plate="E-0_0")
    with pytest.raises(InputError, match="plate 'E-9_0' is not there"):
        plot.plate_summary(measured, plate="E-9_0")


# ---------------------------------------------------------------------------------------------- pictures


@given(arrays(np.uint8, st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(1, 6))))
@settings(max_examples=40, deadline=None)
def test_composite_is_a_picture_whatever_the_channels(pixels):
    picture = plot.composite(pixels)
    assert picture.dtype == np.uint8
    assert picture.shape == (*pixels.shape[1:], 3)
    limits = {"low": np.zeros(len(pixels)), "high": np.full(len(pixels), 255.0)}
    many = plot.composite(np.stack([pixels, pixels // 2]), **limits)
    np.testing.assert_array_equal(many[0], plot.composite(pixels, **limits))
    np.testing.assert_array_equal(many[1], plot.composite(pixels // 2, **limits))


def test_composite_gives_each_channel_its_colour():
    pixels = np.zeros((3, 3, 3), np.uint8)
    for channel in range(3):
        pixels[channel, channel, channel] = 200
    picture = plot.composite(pixels, low=np.zeros(3), high=np.full(3, 200.0))
    assert [tuple(picture[i, i]) for i in range(3)] == [(0, 0, 255), (0, 255, 0), (255, 0, 0)]
    assert picture.sum() == 3 * 255
    assert not plot.composite(np.full((3, 4, 4), 7, np.uint8)).any()  # constant channels are black
    grey = plot.composite(np.arange(9, dtype=np.uint8).reshape(1, 3, 3))
    assert (grey == grey[..., :1]).all()
    assert (np.diff(grey[..., 0].ravel().astype(int)) >= 0).all()


@pytest.fixture(scope="module")
def plate(tmp_path_factory) -> Plate:
    """Wells A01 (dark) and B03 (bright left half) of a 6-well plate, two sites each; second sites are all bright."""
    folder = tmp_path_factory.mktemp("plate")
    rows = []
    for well in ("A01", "B03"):
        for site in (1, 2):
            row = {"experiment": "E", "plate": "1", "well": well, "site": site, "perturbation": "EMPTY"}
            for channel in ("DNA", "$ER$"):
                image = np.full((60, 80), 250 if site == 2 else 10, np.uint8)
                if well == "B03" and site == 1:
                    image[:, :40] = 200
                row[f"path_{channel}"] = str(folder / f"{well}_{site}_{len(row)}.png")
                Image.fromarray(image).save(row[f"path_{channel}"])
            rows.append({**row, "perturbation_type": "", "control": "negative", "cell_type": "", "concentration": 0.0})
    table = pd.DataFrame(rows)
    table.index = schema.obs_names(table)
    return Plate(ingest(table, folder / "plates").plates[0])


def test_plate_picture_puts_the_first_site_of_each_well_at_its_place(plate):
    ax = plot.plate_picture(plate, size=20)
    mosaic = np.asarray(ax.images[0].get_array())
    side = 20 + 1  # 60 x 80 px: the central 60 x 60 in blocks of 3
    assert mosaic.shape == (8 * side, 12 * side, 4)
    assert mosaic.dtype == np.uint8
    alpha = mosaic[..., 3]
    assert (alpha[:20, :20] == 255).all()
    assert (alpha[side : side + 20, 2 * side : 2 * side + 20] == 255).all()
    assert np.count_nonzero(alpha) == 2 * 20 * 20  # all other wells and the gaps are blank
    bright = mosaic[side : side + 20, 2 * side : 2 * side + 20, :3]
    assert bright[:, :9].min(axis=(0, 1)).any()
    assert not bright[:, -9:].any()
    assert not mosaic[:20, :20, :3].any()  # A01, of which the second site is bright
    assert ax.get_title() == "E_1"


def test_small_fields_are_not_enlarged(plate):
    ax = plot.plate_picture(plate, size=500)
    assert np.asarray(ax.images[0].get_array()).shape == (8 * 61, 12 * 61, 4)


def test_field_shows_all_channels_side_by_side(plate):
    ax = plot.field(plate, "E_1_B03_1")
    strip = np.asarray(ax.images[0].get_array())
    assert strip.shape == (60, 3 * 80 + 2 * 2, 4)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["all", "DNA", r"\$ER\$"]
    assert (strip[:, 82 : 82 + 40] == 255).all()  # DNA in grey, its bright half
    assert not strip[:, 82 + 40 : 82 + 80, :3].any()
    assert not strip[:, 80:82, 3].any()
    with pytest.raises(InputError, match="site 'E_1_C01_1' is not on plate E_1; its sites are E_1_A01_1"):
        plot.field(plate, "E_1_C01_1")


def test_drawing_leaves_the_plate_as_it_is(plate):
    before = list(plate.sites.index)
    plot.plate_picture(plate)
    plot.field(plate, before[0])
    assert list(plate.sites.index) == before


def test_pictures_of_real_plates(shared, tmp_path):
    """A public field of six channels: nothing saturates, and each channel is seen."""
    files = sorted((shared / "data" / "rxrx1_images" / "train").rglob("*_s1_w?.png"))[:6]
    row = {"experiment": "R", "plate": "1", "well": "B02", "site": 1, "perturbation": "EMPTY", "control": "negative"}
    row |= {"perturbation_type": "", "cell_type": "", "concentration": 0.0}
    table = pd.DataFrame([{**row, **{f"path_w{i}": str(file) for i, file in enumerate(files, 1)}}])
    table.index = schema.obs_names(table)
    plate = Plate(ingest(table, Path(tmp_path)).plates[0])
    strip = np.asarray(plot.field(plate, "R_1_B02_1").images[0].get_array())
    colour, *grey = (strip[:, i * 262 :][:, :256, :3] for i in range(7))
    assert colour.shape == (256, 256, 3)
    assert (colour == 255).all(axis=-1).mean() < 0.05
    assert all(10 < tile.mean() < 160 for tile in (colour, *grey))


def test_figures_use_the_ink_of_the_settings(wells):
    import matplotlib

    with matplotlib.rc_context({"text.color": "#123457"}):
        ax = plot.scores(SCORES)
    assert to_rgba(ax.texts[0].get_color()) == to_rgba("#123457")
