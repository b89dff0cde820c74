import time
import warnings

import imagecodecs
import numpy as np
import pandas as pd
import pytest
from scipy import ndimage, stats
from sklearn.decomposition import FastICA

from cellica import artifacts, schema, simulate
from cellica.screen import read_rxrx1

# Ranges on real profile sets, see the table in simulate.profiles.
REAL_REPLICATE_MAP = (0.12, 0.42)
REAL_BATCH_SHARE = (0.03, 0.53)
REAL_KURTOSIS = (4.6, 28.6)  # median over components


def standardised(X):
    X = np.asarray(X, dtype=float)
    return (X - X.mean(axis=0)) / X.std(axis=0)


def replicate_map(X, obs):
    """Mean average precision of treated wells among treated wells of other experiments, cosine."""
    treated = (obs["control"] == "").to_numpy()
    Z = standardised(X)[treated]
    Z /= np.linalg.norm(Z, axis=1, keepdims=True)
    label, batch = (obs.loc[treated, key].to_numpy() for key in ("perturbation", "experiment"))
    values = []
    for i in range(len(Z)):
        other = batch != batch[i]
        hits = (label[other] == label[i])[np.argsort(-Z[other] @ Z[i])]
        ranks = np.flatnonzero(hits) + 1
        values.append(np.mean(np.arange(1, len(ranks) + 1) / ranks))
    return np.mean(values)


def batch_share(values, batch):
    """Adjusted eta^2 of each column."""
    frame = pd.DataFrame(np.asarray(values, dtype=float))
    within = (frame - frame.groupby(np.asarray(batch)).transform("mean")).pow(2).sum()
    n, k = len(frame), len(set(batch))
    return (1 - within / (frame - frame.mean()).pow(2).sum() * (n - 1) / (n - k)).to_numpy()


def components(X, n_components):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether it converges is not the question here
        ica = FastICA(n_components, whiten="unit-variance", random_state=0, max_iter=60, tol=1e-3)
        return ica.fit_transform(standardised(X))


# ---------------------------------------------------------------------------------------------- profiles


@pytest.fixture(scope="module")
def rxrx1_like():
    return simulate.profiles(n_experiments=9)


def test_profiles_follow_the_conventions(rxrx1_like):
    adata = rxrx1_like
    assert adata.X.dtype == np.float32
    assert adata.shape == (9 * 4 * 308, 64)
    assert adata.obs_names.is_unique
    assert (adata.obs_names == schema.obs_names(adata.obs)).all()
    assert adata.obs["plate"].map(type).eq(str).all()
    assert set(adata.obs["control"]) == set(schema.CONTROL_VALUES)
    assert adata.obsm["factors"].shape == (adata.n_obs, 48)
    assert adata.varm["true_mixing"].shape == (64, 48)
    roles = adata.uns["cellica"]["simulation"]["roles"]
    assert pd.Series(roles).value_counts().to_dict() == {"biology": 28, "batch": 8, "noise": 8, "cell_type": 4}
    assert artifacts.provenance(adata)[0]["parameters"]["n_experiments"] == 9


def test_the_same_seed_gives_the_same_profiles(rxrx1_like):
    again = simulate.profiles(n_experiments=9)
    np.testing.assert_array_equal(again.X, rxrx1_like.X)
    pd.testing.assert_frame_equal(again.obs, rxrx1_like.obs)
    other = simulate.profiles(n_experiments=9, random_state=1)
    assert np.corrcoef(other.X.ravel(), rxrx1_like.X.ravel())[0, 1] < 0.1
    assert not other.obs["perturbation"].equals(rxrx1_like.obs["perturbation"])


def test_rxrx1_like_has_the_design_of_rxrx1(rxrx1_like):
    obs = rxrx1_like.obs
    negative, positive = obs[obs["control"] == "negative"], obs[obs["control"] == "positive"]
    treated = obs[obs["control"] == ""]
    plates = ["experiment", "plate"]
    assert set(negative["well"]) == {"B02"}
    assert negative.groupby(plates).size().tolist() == [1] * 36
    assert positive.groupby(plates)["perturbation"].nunique().tolist() == [30] * 36
    assert positive["perturbation"].nunique() == 30
    assert positive["well"].nunique() == 30
    assert treated.groupby(plates)["perturbation"].nunique().tolist() == [277] * 36
    assert treated.groupby("perturbation")["plate"].nunique().tolist() == [1] * 1108
    assert treated.groupby(["perturbation", "experiment"]).size().tolist() == [1] * (1108 * 9)
    assert treated.groupby("perturbation")["well"].nunique().mean() > 8  # a new place in every experiment
    assert obs.groupby("experiment")["cell_type"].nunique().max() == 1
    assert obs["cell_type"].nunique() > 2
    assert set(obs["well"]) == {schema.format_well(r, c) for r in range(1, 15) for c in range(1, 23)}


@pytest.mark.parametrize("preset", ["small", "hard"])
def test_small_designs(preset):
    obs = simulate.profiles(preset).obs
    treated = obs[obs["control"] == ""]
    assert obs.groupby(["experiment", "plate"]).size().tolist() == [40] * 8
    assert (obs["control"] == "negative").groupby([obs["experiment"], obs["plate"]]).sum().tolist() == [8] * 8
    assert treated.groupby(["perturbation", "experiment"]).size().eq(2).all()
    assert treated.groupby("perturbation")["experiment"].nunique().eq(4 if preset == "small" else 1).all()
    assert treated.groupby("moa")["experiment"].nunique().tolist() == [4] * 8
    assert treated.groupby("perturbation")["moa"].nunique().eq(1).all()
    assert obs.loc[obs["control"] == "negative", "moa"].isna().all()


def test_profiles_are_the_factors_mixed_plus_noise():
    adata = simulate.profiles("small")
    noise = adata.X - adata.obsm["factors"] @ adata.varm["true_mixing"].T
    assert noise.std() == pytest.approx(simulate.FEATURE_NOISE, rel=0.03)
    assert abs(np.corrcoef(noise.ravel(), adata.X.ravel())[0, 1]) < 0.25
    hard = simulate.profiles("hard")
    bent = hard.X - hard.obsm["factors"] @ hard.varm["true_mixing"].T
    assert bent.std() > 1.5 * noise.std()


def test_each_kind_of_factor_varies_with_what_it_should(rxrx1_like):
    obs, factors = rxrx1_like.obs, rxrx1_like.obsm["factors"]
    roles = rxrx1_like.uns["cellica"]["simulation"]["roles"]
    share = {
        "experiment": batch_share(factors, obs["experiment"]),
        "cell_type": batch_share(factors, obs["cell_type"]),
        "perturbation": batch_share(factors, obs["perturbation"]),
    }
    mean = {(role, key): share[key][roles == role].mean() for role in set(roles) for key in share}
    assert mean["batch", "experiment"] > 0.25
    assert mean["cell_type", "cell_type"] > 0.5
    assert mean["biology", "perturbation"] > 0.6
    for role, key in [
        ("biology", "experiment"),
        ("biology", "cell_type"),
        ("batch", "perturbation"),
        ("noise", "experiment"),
        ("noise", "perturbation"),
    ]:
        assert mean[role, key] < 0.02, (role, key)


def test_classes_share_their_factors():
    adata = simulate.profiles("small", random_state=3)
    biology = adata.uns["cellica"]["simulation"]["roles"] == "biology"
    treated = (adata.obs["control"] == "").to_numpy()
    effects = pd.DataFrame(adata.obsm["factors"][treated][:, biology])
    effects = effects.groupby(adata.obs.loc[treated, "perturbation"].to_numpy()).mean()
    moa = adata.obs[treated].groupby("perturbation")["moa"].first().loc[effects.index].to_numpy()
    cosine = np.corrcoef(effects)
    pair = ~np.eye(len(moa), dtype=bool)
    same = moa[:, None] == moa
    assert cosine[same & pair].mean() > 0.3
    assert abs(cosine[~same].mean()) < 0.1


def test_the_gaussian_preset_differs_in_the_distribution_of_the_factors_only(rxrx1_like):
    gaussian = simulate.profiles("gaussian", n_experiments=9)
    pd.testing.assert_frame_equal(gaussian.obs, rxrx1_like.obs)
    np.testing.assert_array_equal(gaussian.varm["true_mixing"], rxrx1_like.varm["true_mixing"])
    noise = [a.X - a.obsm["factors"] @ a.varm["true_mixing"].T for a in (gaussian, rxrx1_like)]
    np.testing.assert_allclose(*noise, atol=1e-4)
    shaped, plain = rxrx1_like.obsm["factors"], gaussian.obsm["factors"]
    assert np.median(stats.kurtosis(shaped)) > 4
    assert abs(np.median(stats.kurtosis(plain))) < 0.3
    within = [pd.DataFrame(z).groupby(gaussian.obs["experiment"].to_numpy()).transform("std") for z in (shaped, plain)]
    np.testing.assert_allclose(within[0].mean(), within[1].mean(), rtol=0.25)
    correlation = [stats.spearmanr(a, b).statistic for a, b in zip(shaped.T, plain.T)]
    assert min(correlation) > 0.6  # the same normal draws


@pytest.mark.parametrize("preset", ["small", "rxrx1-like"])
def test_profiles_have_the_raw_properties_of_real_ones(preset, rxrx1_like):
    adata = simulate.profiles("small") if preset == "small" else rxrx1_like
    adata = adata[adata.obs["cell_type"] == "HUVEC"]
    assert adata.obs["experiment"].nunique() >= 4
    assert REAL_REPLICATE_MAP[0] < replicate_map(adata.X, adata.obs) < REAL_REPLICATE_MAP[1]
    sources = components(adata.X, 40)
    anchors = (adata.obs["control"] != "").to_numpy()
    residuals = pd.DataFrame(sources[anchors])
    residuals -= residuals.groupby(adata.obs.loc[anchors, "perturbation"].to_numpy()).transform("mean")
    is_batch = batch_share(residuals, adata.obs.loc[anchors, "experiment"]) > 0.1
    assert REAL_BATCH_SHARE[0] <= is_batch.mean() <= REAL_BATCH_SHARE[1]
    assert REAL_KURTOSIS[0] < np.median(np.abs(stats.kurtosis(sources))) < REAL_KURTOSIS[1]
    assert np.median(np.abs(stats.kurtosis(sources[:, is_batch]))) > 2


def toy_layout():
    treated = [f"s{i}" for i in range(40)]
    rows = [
        (e, 1, schema.format_well(1, i % 22 + 1) if i < 22 else schema.format_well(2, i % 22 + 1), p)
        for e in ("HUVEC-01", "RPE-01", "HUVEC-02")
        for i, p in enumerate([*treated, "EMPTY", "p0"])
    ]
    layout = pd.DataFrame(rows, columns=["experiment", "plate", "well", "perturbation"])
    layout["cell_type"] = layout["experiment"].str.rpartition("-")[0]
    layout["control"] = layout["perturbation"].map({"EMPTY": "negative", "p0": "positive"}).fillna("")
    unlabelled = (layout["experiment"] == "HUVEC-02") & (layout["control"] == "")
    layout.loc[unlabelled, "perturbation"] = None
    return layout.assign(batch_of_reagents=7)


def test_profiles_on_a_layout_with_missing_labels():
    layout = toy_layout()
    before = layout.copy()
    adata = simulate.profiles(layout=layout)
    pd.testing.assert_frame_equal(layout, before)
    missing = layout["perturbation"].isna().to_numpy()
    assert missing.sum() == 40
    np.testing.assert_array_equal(adata.obs["perturbation"].isna(), missing)
    np.testing.assert_array_equal(adata.obs["moa"].isna(), missing | (layout["control"] == "negative"))
    assert adata.obs["batch_of_reagents"].eq(7).all()
    assert adata.obs_names[0] == "HUVEC-01_1_B02"

    biology = adata.obsm["factors"][:, adata.uns["cellica"]["simulation"]["roles"] == "biology"]
    known = (layout["perturbation"].notna() & (layout["control"] == "")).to_numpy()
    assert np.var(biology[missing]) == pytest.approx(np.var(biology[known]), rel=0.4)
    effects = pd.DataFrame(biology[known]).groupby(layout.loc[known, "perturbation"].to_numpy()).mean().to_numpy()
    nearest = np.corrcoef(biology[missing], effects)[: missing.sum(), missing.sum() :].max(axis=1)
    assert np.median(nearest) > 0.7  # the effect of some known treatment


def test_profiles_keep_the_classes_of_a_layout():
    layout = toy_layout()
    layout["moa"] = layout["perturbation"].map({"s1": "kinase", "s2": "kinase"})
    adata = simulate.profiles(layout=layout)
    assert adata.obs["moa"].dropna().unique().tolist() == ["kinase"]


def test_profiles_on_the_real_plate_maps(shared):
    folder = shared / "data" / "rxrx1_metadata_kaggle"
    tables = [pd.read_csv(folder / f"{name}.csv") for name in ("train", "train_controls", "test", "test_controls")]
    layout = pd.concat(tables, ignore_index=True).rename(columns={"sirna": "perturbation"})
    layout["cell_type"] = layout["experiment"].str.rpartition("-")[0]
    kinds = {"negative_control": "negative", "positive_control": "positive"}
    layout["control"] = layout["well_type"].map(kinds).fillna("")
    start = time.process_time()
    adata = simulate.profiles(layout=layout.drop(columns=["id_code", "well_type"]))
    assert time.process_time() - start < 15
    assert adata.shape == (62_755, 64)
    assert np.isfinite(adata.X).all()
    assert adata.obs["perturbation"].isna().sum() == len(tables[2])
    assert set(adata.obs_names) == set(layout["id_code"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: pd.concat([t, t.iloc[:3]]), "3 wells occur twice.*HUVEC-01_1_B02"),
        (lambda t: t.assign(well=t["well"].mask(t.index == 5)), "1 rows of the layout have no .*well"),
        (lambda t: t.drop(columns="plate"), "the layout has no column 'plate'"),
        (lambda t: t[t["control"] != ""], "no treatment"),
    ],
)
def test_faulty_layouts_are_refused(spoil, message):
    with pytest.raises(schema.InputError, match=message):
        simulate.profiles(layout=spoil(toy_layout()))


def test_faulty_options_are_refused(tmp_path):
    with pytest.raises(schema.InputError, match=r"'rxrx2'.*'small', 'rxrx1-like', 'hard', 'gaussian'"):
        simulate.profiles("rxrx2")
    with pytest.raises(schema.InputError, match=r"'gaussian'.*'small', 'hard'"):
        simulate.screen(tmp_path / "screen", "gaussian")
    with pytest.raises(schema.InputError, match="308 wells B02 to O23"):
        simulate.profiles("small", n_treatments=301)
    with pytest.raises(schema.InputError, match="at least one experiment"):
        simulate.profiles("small", n_experiments=0)
    with pytest.raises(schema.InputError, match="12 factors"):
        simulate.profiles("small", n_factors=11)
    with pytest.raises(schema.InputError, match="64 px"):
        simulate.screen(tmp_path / "screen", image_size=32)
    with pytest.raises(schema.InputError, match=r"magnification=0, batch_strength=1.0: ask for 0.25 to 4"):
        simulate.screen(tmp_path / "screen", magnification=0)
    assert not (tmp_path / "screen").exists()


# ---------------------------------------------------------------------------------------------- images

SIZE = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("simulate") / "screen"
    table = simulate.screen(out, n_experiments=3, n_treatments=16, n_controls=4, image_size=SIZE)
    pd.testing.assert_frame_equal(table, read_rxrx1(out))
    return out


@pytest.fixture(scope="module")
def sites(folder):
    return read_rxrx1(folder)


@pytest.fixture(scope="module")
def images(sites):
    paths = sites[[f"path_w{w}" for w in range(1, 7)]].to_numpy()
    return np.array([[imagecodecs.imread(path) for path in site] for site in paths])


def nuclear_area(image):
    smooth = ndimage.gaussian_filter(image[0].astype(float), 1)
    low, high = np.percentile(smooth, [20, 99])
    mask = smooth > low + 0.35 * (high - low)
    return mask.sum() / max(ndimage.label(mask)[1], 1)


def features(image):
    image = image.astype(np.float32)
    values = []
    for channel in image:
        fine = channel - ndimage.gaussian_filter(channel, 1)
        coarse = channel - ndimage.gaussian_filter(channel, 5)
        values += [channel.mean(), fine.std(), coarse.std(), *np.percentile(channel, [5, 25, 50, 75, 95])]
    correlations = np.corrcoef(image.reshape(6, -1))[np.triu_indices(6, 1)]
    return np.array([*values, *correlations, nuclear_area(image)])


def test_screen_is_written_as_rxrx1_is(folder, sites):
    metadata = pd.read_csv(folder / "metadata.csv")
    layout = "site_id well_id cell_type dataset experiment plate well site well_type sirna sirna_id moa"
    assert metadata.columns.tolist() == layout.split()
    assert len(metadata) == len(sites) == 3 * 2 * 20
    assert (sites.index == metadata["site_id"]).all()
    named = {
        folder / "images" / row.experiment / f"Plate{row.plate}" / f"{row.well}_s{row.site}_w{w}.png"
        for row in metadata.itertuples()
        for w in range(1, 7)
    }
    assert set(folder.rglob("*.png")) == named
    assert set(sites.filter(like="path_").to_numpy().ravel()) == {str(path) for path in named}
    assert (metadata["sirna"] == "EMPTY").equals(metadata["well_type"] == "negative_control")
    assert metadata.groupby("sirna")["sirna_id"].nunique().eq(1).all()
    assert sites["moa"].notna().equals(sites["control"] == "")

    factors = pd.read_csv(folder / "factors.csv")
    assert factors.columns.tolist() == ["well_id", *simulate.BIOLOGY, *simulate.BATCH]
    assert factors["well_id"].tolist() == metadata["well_id"].tolist()
    per_plate = factors.groupby(factors["well_id"].str.rpartition("_")[0])[list(simulate.BATCH)]
    assert per_plate.nunique().eq(1).all(axis=None)


def test_images_are_eight_bit_and_well_exposed(images):
    assert images.dtype == np.uint8
    assert images.shape == (120, 6, SIZE, SIZE)
    assert (images == 255).mean(axis=(2, 3)).max() < 0.01
    assert images.mean(axis=(2, 3)).min() > 3
    assert images.std(axis=(2, 3)).min() > 2


def test_planted_factors_show_in_the_images(folder, images):
    factors = pd.read_csv(folder / "factors.csv")
    area = [nuclear_area(image) for image in images]
    assert stats.spearmanr(area, factors["nucleus_size"]).statistic > 0.4
    background = np.percentile(images[:, 0], 1, axis=(1, 2))
    assert stats.spearmanr(background, factors["offset_w1"]).statistic > 0.7


def test_images_have_the_raw_properties_of_real_profiles(sites, images):
    X = np.array([features(image) for image in images])
    assert REAL_REPLICATE_MAP[0] < replicate_map(X, sites) < REAL_REPLICATE_MAP[1]
    controls = (sites["control"] == "negative").to_numpy()
    sources = components(X, 30)
    is_batch = batch_share(sources[controls], sites.loc[controls, "experiment"]) > 0.1
    assert REAL_BATCH_SHARE[0] <= is_batch.mean() <= REAL_BATCH_SHARE[1]


def test_the_same_seed_gives_the_same_files(tmp_path):
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        simulate.screen(
            tmp_path / name, n_experiments=1, n_plates=1, n_treatments=2, n_controls=1, n_sites=2, image_size=64,
            random_state=seed,
        )  # fmt: skip
    assert artifacts.sha256(tmp_path / "a") == artifacts.sha256(tmp_path / "b")
    assert artifacts.sha256(tmp_path / "a") != artifacts.sha256(tmp_path / "c")
    first, second = (imagecodecs.imread(tmp_path / f"a/images/HUVEC-01/Plate1/B02_s{s}_w1.png") for s in (1, 2))
    assert (first != second).mean() > 0.5


def test_a_screen_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    sizes = {"n_experiments": 1, "n_plates": 1, "n_treatments": 2, "n_controls": 1, "image_size": 64}
    out = tmp_path / "screen"
    simulate.screen(out, **sizes)
    with pytest.raises(schema.OutputExistsError, match="force"):
        simulate.screen(out, **sizes)
    assert len(simulate.screen(out, **sizes, force=True)) == 3

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(simulate, "expose", fail)
    with pytest.raises(OSError, match="disk full"):
        simulate.screen(tmp_path / "other", **sizes)
    assert [path.name for path in tmp_path.iterdir()] == ["screen"]


def render(biology=(), batch=(), nonlinear=False, magnification=1.0):
    """One site, with the same random draws whatever is changed."""
    texture = simulate._texture(np.random.default_rng(0))
    factors = dict.fromkeys(simulate.BIOLOGY, 0.0) | dict(biology)
    parameters = {name: centre for name, (centre, _) in simulate.BATCH.items()} | dict(batch)
    light = simulate.paint(factors, 192, texture, np.random.default_rng(1), magnification=magnification)
    return simulate.expose(light, parameters, np.random.default_rng(2), nonlinear=nonlinear).astype(float)


def nuclei(image):
    smooth = ndimage.gaussian_filter(image[0], 1)
    return ndimage.label(smooth > 25)[1]


def band(channel, fine, coarse):
    return (ndimage.gaussian_filter(channel, fine) - ndimage.gaussian_filter(channel, coarse)).std()


def spread(channel):
    return lambda image: np.percentile(image[channel], 60) / np.percentile(image[channel], 95)


@pytest.mark.parametrize(
    ("factor", "statistic"),
    [
        ("nucleus_size", lambda image: (ndimage.gaussian_filter(image[0], 1) > 25).sum()),
        ("nucleus_intensity", lambda image: np.percentile(image[0], 98)),
        ("cell_count", nuclei),
        ("cell_size", lambda image: (image[2] > 12).sum()),
        ("er_amount", lambda image: image[1].mean()),
        ("er_spread", spread(1)),
        ("actin_amount", lambda image: image[2].mean()),
        ("actin_fibres", lambda image: image[2].std()),
        ("nucleoli", lambda image: image[3][image[0] > 40].mean()),
        ("mito_amount", lambda image: image[4].mean()),
        ("mito_spread", lambda image: image[4].mean()),
        ("golgi_amount", lambda image: np.percentile(image[5], 98)),
        ("golgi_spread", lambda image: (image[5] > 50).sum()),
        ("texture_scale", lambda image: band(image[4], 2, 4) / band(image[4], 1, 2)),
    ],
)
def test_a_factor_moves_what_it_is_named_after(factor, statistic):
    low, middle, high = (statistic(render({factor: value})) for value in (-2.5, 0, 2.5))
    assert low < middle < high


def test_magnification_gives_fewer_and_larger_nuclei():
    areas, counts = {}, {}
    for factor in (0.7, 1.4):
        image = render(magnification=factor)
        counts[factor] = nuclei(image)
        areas[factor] = (ndimage.gaussian_filter(image[0], 1) > 25).sum() / counts[factor]
    assert 2 < areas[1.4] / areas[0.7] < 6  # 4, but nuclei touch
    assert 2 < counts[0.7] / counts[1.4] < 6


def test_batch_strength_scales_the_parameters_of_the_batch():
    wells = toy_layout().astype({"plate": str})
    weak, strong = (simulate._batch_parameters(wells, strength, np.random.default_rng(0)) for strength in (0.5, 1.0))
    centre = np.array([value for value, _ in simulate.BATCH.values()])
    multiplied = centre != 0
    np.testing.assert_allclose(
        2 * np.log(weak.loc[:, multiplied] / centre[multiplied]), np.log(strong.loc[:, multiplied] / centre[multiplied])
    )
    np.testing.assert_allclose(2 * weak.loc[:, ~multiplied], strong.loc[:, ~multiplied])
    assert strong.nunique().min() > 1


def test_elongation_stretches_nuclei_and_keeps_their_area():
    def elongation(image):
        labels, n = ndimage.label(ndimage.gaussian_filter(image[0], 1) > 25)
        spreads = [
            np.linalg.eigvalsh(np.cov(np.nonzero(labels == i))) for i in range(1, n + 1) if (labels == i).sum() > 50
        ]
        return np.median([long / short for short, long in spreads])

    area = [(ndimage.gaussian_filter(render({"nucleus_elongation": v})[0], 1) > 25).sum() for v in (0, 3)]
    assert elongation(render({"nucleus_elongation": 3})) > 1.3 * elongation(render())
    assert area[1] == pytest.approx(area[0], rel=0.15)


def test_batch_parameters_act_on_the_right_channels():
    plain = render()
    mean = plain.mean(axis=(1, 2))
    gain = render(batch={"gain_w2": 1.5}).mean(axis=(1, 2))
    np.testing.assert_allclose((gain - 5)[1], 1.5 * (mean - 5)[1], rtol=0.02)
    np.testing.assert_array_equal(np.delete(gain, 1), np.delete(mean, 1))
    offset = render(batch={"offset_w3": 9.0}).mean(axis=(1, 2))
    np.testing.assert_allclose(offset - mean, [0, 0, 4, 0, 0, 0], atol=0.05)
    bleeding = render(batch={"bleed_through": 0.2}).mean(axis=(1, 2))
    assert bleeding[0] == mean[0]
    assert (bleeding[1:] > mean[1:] + 0.5).all()
    shaded = render(batch={"illumination_x": 0.3}) / plain.mean()
    half = shaded.shape[2] // 2
    ratio = shaded[..., half:].mean(axis=(1, 2)) / shaded[..., :half].mean(axis=(1, 2))
    assert (ratio > 1.1 * plain[..., half:].mean(axis=(1, 2)) / plain[..., :half].mean(axis=(1, 2))).all()


def sharpness(image):
    return np.std(image - ndimage.gaussian_filter(image, (0, 1, 1)), axis=(1, 2))


def test_blur_blurs_and_a_tilted_plane_blurs_one_side():
    plain = render()
    assert (sharpness(render(batch={"blur": 2.0})) < 0.95 * sharpness(plain)).all()
    tilted = render(nonlinear=True)
    left, right = np.s_[:, :, :64], np.s_[:, :, -64:]
    assert (sharpness(tilted[right]) / sharpness(plain[right]) < sharpness(tilted[left]) / sharpness(plain[left])).all()
