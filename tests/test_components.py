"""Components: what they go with, how stable they are, what is removed and what is not."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ortho_group

from cellica import artifacts, bases, components, correct, progress, retrieval, roles, simulate, stability
from cellica.components import Rule
from cellica.ica import matched_correlation
from cellica.metrics import adjusted_eta2
from cellica.schema import InputError

NAMES = ("experiment", "plate", "well", "perturbation", "control", "cell_type")


def screen(n_batches: int = 4, n_plates: int = 2, move: bool = True, seed: int = 0) -> pd.DataFrame:
    """A layout: 8 controls and 24 perturbations a plate, in new wells on every plate."""
    rng = np.random.default_rng(seed)
    rows = []
    for batch in range(n_batches):
        for plate in range(n_plates):
            names = ["DMSO"] * 8 + [f"p{i:02d}" for i in range(24)]
            places = rng.permutation(32) if move else np.arange(32)
            for i, name in zip(places, names):
                rows.append((f"exp-{batch}", str(plate), f"{chr(65 + i // 8)}{i % 8 + 1:02d}", name, "", "a"))
    obs = pd.DataFrame(rows, columns=list(NAMES))
    obs["control"] = np.where(obs["perturbation"] == "DMSO", "negative", "")
    obs.index = pd.Index(
        [f"{e}_{p}_{w}" for e, p, w in zip(obs["experiment"], obs["plate"], obs["well"])], dtype=object
    )
    return obs


def profiles(obs: pd.DataFrame, planted: dict[int, np.ndarray], d: int = 10, seed: int = 1) -> ad.AnnData:
    """Laplace factors mixed into as many features; ``planted`` is added to a factor after it is made smaller."""
    rng = np.random.default_rng(seed)
    factors = rng.laplace(size=(len(obs), d))
    for i, effect in planted.items():
        factors[:, i] = 0.4 * factors[:, i] + effect
    adata = ad.AnnData((factors @ rng.normal(size=(d, d))).astype(np.float32), obs=obs.copy())
    adata.obsm["factors"] = factors
    return adata


def code(obs: pd.DataFrame, column: str) -> np.ndarray:
    return pd.factorize(obs[column], sort=True)[0].astype(float)


def effects(obs: pd.DataFrame, seed: int = 2, scale: float = 3) -> np.ndarray:
    values = scale * np.random.default_rng(seed).laplace(size=25)
    return np.append(0, values)[code(obs, "perturbation").astype(int)]


def table(adata: ad.AnnData, key: str = "ica_drop") -> pd.DataFrame:
    return adata.uns["cellica"][key]["components"]


def notes(adata: ad.AnnData, key: str = "ica_drop") -> str:
    return "\n".join(adata.uns["cellica"][key]["notes"])


# ------------------------------------------------------------------------------------------------- associations


def test_each_nuisance_shows_in_its_own_column():
    obs = screen(n_plates=8)
    row = np.array([ord(well[0]) for well in obs["well"]], dtype=float)
    obs["cell_count"], obs["intensity_w1"] = 100 + 10 * np.random.default_rng(3).laplace(size=(2, len(obs)))
    odd = 6.0 * (np.random.default_rng(4).random((4, 8)) < 0.2)
    plate = odd[code(obs, "experiment").astype(int), code(obs, "plate").astype(int)]
    planted = {
        0: 2 * code(obs, "experiment"),
        1: plate - plate.mean(),
        2: 2 * row,
        3: 0.3 * obs["cell_count"],
        4: effects(obs),
    }
    adata = profiles(obs, planted | {5: 0.3 * obs["intensity_w1"].to_numpy()})
    correct.run(adata, "ica_drop", check_stability=False)
    found, sources = table(adata), adata.obsm["ica_drop_sources"]
    expected = ["batch_r2", "plate_r2", "row_r2", "cell_count_r2", "perturbation_r2", "intensity_r2"]
    for factor, column in enumerate(expected):
        match = np.argmax(np.abs(np.corrcoef(adata.obsm["factors"][:, factor], sources.T)[0, 1:]))
        others = found[column].drop(str(match))
        assert found.loc[str(match), column] > max(0.3, 1.3 * others.max()), column
    assert found["label"].value_counts()[["batch", "biology"]].tolist() == [1, 1]


def test_top_wells_are_those_of_the_largest_sources_and_files_keep_all_tables(tmp_path):
    adata = profiles(screen(), {0: 2 * code(screen(), "experiment")})
    correct.run(adata, "ica_drop", check_stability=False)
    record = adata.uns["cellica"]["ica_drop"]
    largest = np.abs(adata.obsm["ica_drop_sources"]).argmax(axis=0)
    assert record["top_wells"][:, 0].tolist() == adata.obs_names[largest].tolist()
    artifacts.write_adata(adata, tmp_path / "a.h5ad")
    read = artifacts.read_adata(tmp_path / "a.h5ad").uns["cellica"]["ica_drop"]
    assert read["top_wells"].tolist() == record["top_wells"].tolist()
    np.testing.assert_allclose(read["removal_path"]["batch_share"], record["removal_path"]["batch_share"])
    assert list(read["removal_path"]["action"]) == list(record["removal_path"]["action"])


def test_position_of_fixed_wells_is_unknown_and_not_zero():
    obs = screen(move=False)
    obs.loc[obs["perturbation"] == "DMSO", "well"] = "A01"
    adata = profiles(obs.assign(plate=obs["plate"] + obs.groupby(["experiment", "plate"]).cumcount().astype(str)), {})
    correct.run(adata, "ica_drop", check_stability=False)
    assert table(adata)["row_r2"].isna().all()


def test_permutation_p_values_are_uniform_on_noise_and_small_on_batches():
    rng = np.random.default_rng(0)
    batch, cells = np.repeat(list("abcd"), 50), np.tile(["x", "y"], 100)
    noise = rng.normal(size=(200, 200))
    q = components.batch_q(noise, batch=batch, cells=cells, n_permutations=99)
    assert (q > 0.05).all()
    noise[:, :5] += 2 * np.repeat(np.arange(4), 50)[:, None]
    q = components.batch_q(noise, batch=batch, cells=cells, n_permutations=999)
    assert (q[:5] < 0.05).all()
    assert (q[5:] > 0.05).mean() > 0.95
    assert np.isnan(components.batch_q(noise, batch=batch, cells=np.arange(200).astype(str))).all()


def test_p_values_do_not_decide():
    obs = screen(n_batches=4, n_plates=8)
    adata = profiles(obs, {0: 0.15 * code(obs, "experiment")})
    correct.run(adata, "ica_drop", check_stability=False)
    assert table(adata)["batch_q"].min() < 0.05
    assert not table(adata)["removed"].any()


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=20))
def test_adjusted_p_values_are_scipys(p):
    from scipy.stats import false_discovery_control

    np.testing.assert_allclose(components.adjust(np.array(p)), false_discovery_control(p))


# ------------------------------------------------------------------------------------------------------ removal


@given(
    st.lists(st.tuples(st.floats(-0.1, 1), st.floats(-0.1, 1), st.floats(0.01, 5)), min_size=1, max_size=12),
    st.sampled_from(components.MIXED),
    st.floats(0, 1),
)
@settings(max_examples=60)
def test_the_path_removes_no_more_biology_than_allowed(shares, mixed, most):
    batch, perturbation, power = np.array(shares).T
    shares_of = {"variance_share": 1, "batch_share": batch.clip(min=0), "biology_share": perturbation.clip(min=0)}
    rule = Rule(mixed=mixed, max_biology=most)
    labels = components.classify(batch, perturbation, rule)
    path = components.removal_path(labels, batch, perturbation, power, rule)
    removed = path["component"][path["action"] == "removed"]
    biology = power * perturbation.clip(min=0)
    assert biology[removed].sum() <= most * biology.sum() + 1e-9
    assert sorted(path["component"]) == list(range(len(batch)))
    assert (batch[removed] > rule.batch_r2).all()
    if mixed != "remove":
        assert (perturbation[removed] < batch[removed]).all()
    for name in ("variance_share", "batch_share", "biology_share"):
        assert (np.diff(path[name]) >= 0).all()
        assert path[name][-1] == pytest.approx(1) or (power * shares_of[name]).sum() < 1e-12


def mixed_screen() -> ad.AnnData:
    obs = screen(n_plates=8)
    return profiles(obs, {0: np.array([0, 7, 0, 9])[code(obs, "experiment").astype(int)] + 2 * effects(obs)})


def test_mixed_components_are_kept_removed_or_regressed():
    adata = mixed_screen()
    for mixed in components.MIXED:
        correct.run(adata, "ica_drop", mixed=mixed, max_biology=1.0, key_added=mixed, check_stability=False)
        assert (table(adata, mixed)["label"] == "mixed").sum() == 1
    correct.run(adata, "none")
    batch, label = adata.obs["experiment"].to_numpy(), adata.obs["perturbation"].to_numpy()

    def shares(key: str) -> tuple[float, float]:
        x = adata.obsm[f"X_{key}"].astype(float)
        residual, mean = roles.within(x, label), roles.Means.of(x, label).at(label)
        return float((roles.Means.of(residual, batch).at(batch) ** 2).sum()), float((mean**2).sum())

    none, keep, remove, regress = (shares(key) for key in ("none", "keep", "remove", "regress"))
    assert keep == pytest.approx(none, rel=1e-3)
    assert remove[0] < 0.1 * none[0]
    assert remove[1] < 0.5 * none[1]
    assert regress[0] < 0.1 * none[0]
    assert regress[1] > 0.99 * none[1]
    assert "1 mixed freed" in notes(adata, "regress")


def test_the_cap_keeps_components_and_says_so():
    adata = mixed_screen()
    correct.run(adata, "ica_drop", mixed="remove", max_biology=0.1, check_stability=False)
    assert not table(adata)["removed"].any()
    assert "more than 10% of what perturbation explains" in notes(adata)


def test_regression_equals_least_squares_and_reads_a_new_batch_from_its_anchors(tmp_path):
    adata = mixed_screen()
    correct.run(adata, "ica_drop", mixed="regress", check_stability=False)
    chosen = np.flatnonzero(table(adata)["label"] == "mixed")
    s = adata.obsm["ica_drop_sources"][:, chosen].astype(float)
    design = np.hstack([pd.get_dummies(adata.obs[c]).to_numpy(float) for c in ("perturbation", "experiment")])
    effect = np.linalg.lstsq(design, s, rcond=None)[0][-4:]
    wanted = s - (effect - effect.mean(axis=0))[code(adata.obs, "experiment").astype(int)]
    z = (adata.X - adata.X.mean(axis=0)) / adata.X.std(axis=0)
    change = (z - adata.obsm["X_ica_drop"]) @ np.linalg.pinv(adata.varm["ica_drop_mixing"]).T
    np.testing.assert_allclose(s - change[:, chosen], wanted, atol=2e-3)

    train, later = (adata[(adata.obs["experiment"] == "exp-3") == new].copy() for new in (False, True))
    correct.fit(train, "ica_drop", mixed="regress", check_stability=False).save(tmp_path / "m.safetensors")
    loaded = correct.load(tmp_path / "m.safetensors")
    loaded.transform(later, key_added="later")
    loaded.transform(train, key_added="later")
    scale, (rebuild, regress) = loaded.transform_.parts[0], loaded.transform_.parts[1].parts
    before, after = (
        [(x @ regress.unmixing.T).mean() for x in both]
        for both in (
            [scale.apply(one.X, None) for one in (later, train)],
            [one.obsm["X_later"] for one in (later, train)],
        )
    )
    assert abs(before[0] - before[1]) > 1
    assert abs(after[0] - after[1]) < 0.2
    assert isinstance(rebuild, roles.Rebuild)
    assert "1 batches were not in the fit ('exp-3')" in notes(later, "later")
    later.obs["perturbation"], later.obs["control"] = later.obs_names, ""
    with pytest.raises(InputError, match="'exp-3' holds no perturbation of the fit"):
        loaded.transform(later)


def test_control_bases_remove_as_many_components_or_as_much_variance():
    adata = profiles(screen(), {0: 2 * code(screen(), "experiment"), 4: effects(screen())})
    correct.run(adata, "ica_drop", check_stability=False)
    ours = adata.uns["cellica"]["ica_drop"]
    gone = np.diff(ours["removal_path"]["variance_share"], prepend=0)[ours["removal_path"]["action"] == "removed"].sum()
    for method in ("random_drop", "pca_drop"):
        correct.run(adata, method, match="number")
        assert table(adata, method)["removed"].sum() == table(adata)["removed"].sum() == 1
        assert table(adata, method)["removed"].to_numpy()[table(adata, method)["batch_r2"].argmax()]
        correct.run(adata, method, match="variance")
        path = adata.uns["cellica"][method]["removal_path"]
        share = np.diff(path["variance_share"], prepend=0)
        theirs = share[path["action"] == "removed"].sum()
        assert abs(theirs - gone) <= share.max() / 2 + 1e-9
    with pytest.raises(InputError, match="match='score' is not known"):
        correct.run(adata, "random_drop", match="score")


@pytest.mark.parametrize(("option", "value"), [("mixed", "drop"), ("max_biology", 2), ("batch_r2", -0.1)])
def test_options_out_of_range_are_named(option, value):
    with pytest.raises(InputError, match=option):
        correct.run(mixed_screen(), "ica_drop", **{option: value})


# ---------------------------------------------------------------------------------------------------- stability


def test_stability_is_high_for_sources_low_for_noise_and_beside_chance():
    rng = np.random.default_rng(0)
    sources = np.hstack([rng.laplace(size=(3000, 5)), rng.normal(size=(3000, 5))])
    x = sources @ ortho_group.rvs(10, random_state=0)
    x -= x.mean(axis=0)
    basis = bases.ica_basis(x, 10, 0)
    found = stability.stability(x, basis, np.repeat(list("abcde"), 600)).columns
    real = matched_correlation(x @ basis.unmixing.T, sources[:, :5]) > 0.9
    assert real.sum() == 5
    for name in ("stability", "stability_bootstrap", "stability_batches", "stability_rows"):
        assert found[name][real].min() > 0.9
    assert found["stability_bootstrap"][~real].mean() < 0.9
    assert found["stability_batches"][~real].mean() < 0.9
    assert found["stability_chance"].max() < 0.1
    assert (found["stability_rows"] > found["stability_rows_chance"])[real].all()


@given(st.permutations(range(6)), st.integers(0, 2**6 - 1))
@settings(max_examples=25)
def test_matching_undoes_order_and_sign(order, signs):
    rng = np.random.default_rng(0)
    s, rows = rng.laplace(size=(200, 6)), rng.normal(size=(6, 9))
    sign = np.array([1 if signs >> i & 1 else -1 for i in range(6)])
    correlation, cosine = stability.matched(s, (s * sign)[:, order], rows, (rows * sign[:, None])[list(order)])
    np.testing.assert_allclose([correlation, cosine], 1, atol=1e-12)
    assert stability.matched(s, s[:, :4], rows, rows[:4])[0][4:].max() == 0


def test_the_same_components_go_with_every_seed_or_it_is_said(monkeypatch):
    adata = profiles(screen(n_plates=8), {0: 2 * code(screen(n_plates=8), "experiment")})
    for seed in (0, 5):
        correct.run(adata, "ica_drop", random_state=seed, key_added=f"seed{seed}")
        assert "2 other seeds remove the same" in notes(adata, f"seed{seed}")
    assert np.std(adata.obsm["X_seed0"] - adata.obsm["X_seed5"]) < 0.1

    monkeypatch.setattr(stability, "ica_basis", bases.random_basis)
    correct.run(adata, "ica_drop", key_added="unstable")
    assert "other seeds do not remove the same: 0, 0 components against 1 here" in notes(adata, "unstable")
    assert table(adata, "unstable")["stability"].max() < 0.95


def test_long_fits_say_where_they_are(monkeypatch):
    said = []
    monkeypatch.setattr(progress, "say", said.append)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    bases.ica_basis(np.random.default_rng(0).laplace(size=(400, 4)), 3, 0)
    assert said[0].startswith("ICA of 400 wells, 3 components: iteration 1, ")


def test_stability_without_batches_to_leave_out_or_components_to_rotate():
    x = np.random.default_rng(0).laplace(size=(60, 1))
    found = stability.stability(x - x.mean(), bases.ica_basis(x, 1, 0), np.full(60, "a")).columns
    assert np.isnan(found["stability_batches"]).all()
    assert found["stability"] == pytest.approx([1])


# --------------------------------------------------------------------------------------------------- do no harm


def strong(seed: int, strength: float = 1.5) -> tuple[ad.AnnData, np.ndarray]:
    """RxRx1's design with fewer wells, columns of batch factors made stronger."""
    adata = simulate.profiles("rxrx1-like", n_experiments=24, n_treatments=60, n_anchors=20, random_state=seed)
    factors, role = adata.obsm["factors"].astype(float), adata.uns["cellica"]["simulation"]["roles"]
    mixing = adata.varm["true_mixing"] * np.where(role == "batch", strength, 1)
    noise = 0.15 * np.random.default_rng(seed).standard_normal(adata.shape)
    adata.X = (factors @ mixing.T + noise).astype(np.float32)
    return adata, role


@pytest.mark.parametrize("seed", [0, 1])
def test_batch_factors_are_found_and_biology_and_cell_types_stay(seed):
    adata, role = strong(seed)
    correct.run(adata, "none")
    correct.run(adata, "ica_drop", check_stability=False)
    cell_type = adata.obs["cell_type"].to_numpy(dtype=object)
    factors = roles.within(adata.obsm["factors"].astype(float), cell_type)
    found = matched_correlation(factors[:, role == "batch"], adata.obsm["ica_drop_sources"])
    assert found.mean() > 0.9
    assert np.median(found) > 0.94
    biology = factors[:, role == "biology"]

    def explained(key: str) -> float:
        x = adata.obsm[key] - adata.obsm[key].mean(axis=0)
        return float(np.square(biology @ np.linalg.lstsq(biology, x, rcond=None)[0]).sum())

    def between(key: str, groups: np.ndarray) -> float:
        x = adata.obsm[key].astype(float)
        return float(np.square(roles.Means.of(x, groups).at(groups) - x.mean(axis=0)).sum())

    assert table(adata)["removed"].sum() >= 3
    assert explained("X_ica_drop") > 0.95 * explained("X_none")
    assert between("X_ica_drop", cell_type) > 0.95 * between("X_none", cell_type)
    within_type = {key: roles.within(adata.obsm[key].astype(float), cell_type) for key in ("X_none", "X_ica_drop")}
    share = {
        key: np.nanmean(adjusted_eta2(x, adata.obs["experiment"].to_numpy(), cell_type))
        for key, x in within_type.items()
    }
    assert share["X_ica_drop"] < 0.7 * share["X_none"]


def test_without_a_batch_effect_the_data_stay_as_they_are_even_with_fewer_components_than_features():
    adata = profiles(screen(), {4: effects(screen())}, d=30)
    correct.run(adata, "ica_drop", n_components=8, check_stability=False)
    correct.run(adata, "none")
    np.testing.assert_array_equal(adata.obsm["X_ica_drop"], adata.obsm["X_none"])
    assert "so the data stay as they are" in notes(adata)


@pytest.mark.parametrize("seed", [2, 3])
def test_the_guard_stops_removal_where_plates_were_standardised_over_different_biology(seed):
    """Each batch lacks half of the classes and is standardised on its own wells: only thereby its controls differ."""
    rng = np.random.default_rng(seed)
    obs = screen(n_batches=6, n_plates=4)
    batch, label = code(obs, "experiment").astype(int), code(obs, "perturbation").astype(int)
    kind = np.arange(25) % 6
    own = 0.7 * rng.laplace(size=(25, 8)) * (np.arange(25) > 0)[:, None]
    shared = 4 * rng.laplace(size=(6, 8)) * (rng.random((6, 8)) < 0.5)
    there = (label == 0) | ~np.isin((kind[label] - batch) % 6, [0, 1, 2])
    factors = rng.laplace(size=(len(obs), 8)) + own[label] + shared[kind[label]] * (label > 0)[:, None]
    x, batch = (factors @ rng.normal(size=(8, 8)))[there], batch[there]
    for i in range(6):
        x[batch == i] = (x[batch == i] - x[batch == i].mean(axis=0)) / x[batch == i].std(axis=0)
    adata = ad.AnnData(x.astype(np.float32), obs=obs[there].copy())
    adata.obs["experiment"] = adata.obs["experiment"].astype(str)
    score = {}
    for key, guard in (("guarded", True), ("unguarded", False)):
        correct.run(adata, "ica_drop", guard=guard, anchors=["DMSO"], key_added=key, check_stability=False)
        score[key] = retrieval.replicate_retrieval(adata, use_rep=f"X_{key}")["value"].iloc[0]
    assert table(adata, "unguarded")["removed"].any()
    assert not table(adata, "guarded")["removed"].any()
    assert "kept as mixed by the biology guard" in notes(adata, "guarded")
    assert score["guarded"] > score["unguarded"] + 0.02


def test_pure_noise_gains_nothing():
    obs = screen(n_batches=4, n_plates=4)
    x = np.random.default_rng(5).normal(size=(len(obs), 12)).astype(np.float32)
    adata = ad.AnnData(x, obs=obs)
    for method in ("none", "ica", "center+sphere"):
        correct.run(adata, method)
        score = retrieval.replicate_retrieval(adata, use_rep=f"X_{method}").iloc[0]
        assert score["value"] == pytest.approx(score["chance"], abs=0.02)


# ---------------------------------------------------------------------------------------------- for scanpy


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
def test_components_become_an_anndata_of_their_own(tmp_path, suffix):
    wells = simulate.profiles("small")
    correct.run(wells, "ica")
    artifacts.write_adata(wells, tmp_path / f"w{suffix}")
    for one in (wells, artifacts.read_adata(tmp_path / f"w{suffix}")):
        found = correct.sources(one, "ica")
        np.testing.assert_allclose(found.X, wells.obsm["ica_sources"], rtol=1e-6)
        assert found.X.dtype == np.float32
        assert list(found.obs_names) == list(wells.obs_names)
        assert list(found.var_names[:2]) == ["component_0", "component_1"]
        np.testing.assert_array_equal(found.var["removed"], wells.uns["cellica"]["ica"]["components"]["removed"])
        np.testing.assert_allclose(found.varm["mixing"].T, wells.varm["ica_mixing"], rtol=1e-6)
        assert "X_ica" in found.obsm
        assert "ica_sources" not in found.obsm
    found.write_h5ad(tmp_path / "components.h5ad")


def test_what_has_no_components_is_said():
    wells = simulate.profiles("small")
    correct.run(wells, "center+sphere")
    with pytest.raises(InputError, match=r"no components of 'ica': no correction left any; run ica"):
        correct.sources(wells)
    correct.run(wells, "ica_drop")
    with pytest.raises(InputError, match="of 'ica': obsm holds those of 'ica_drop'"):
        correct.sources(wells)
