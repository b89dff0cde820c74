"""A table of 10,000 wells in which every fault that users have reported is mixed: each is named, counted or harmless."""

import numpy as np
import pandas as pd
import pytest

from cellica import artifacts, cli

N_FEATURES = 16
TREATMENTS = [f"c{i:02d}" for i in range(40)]
ONE_WELL, ODD_PLATE, NAN_WELL = 9, "07", 4321


def run(*words: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([str(word) for word in words])
    assert done.value.code == code


def letters(row: int) -> str:
    return chr(65 + row) if row < 26 else "A" + chr(65 + row - 26)


def plates() -> pd.DataFrame:
    """Four experiments of six plates of 384 wells, one well of a fifth, and half a plate of 1536 wells."""
    rows = [
        (experiment, f"{plate:02d}", f"{letters(row)}{column}")
        for experiment in (1, 2, 3, 4)
        for plate in range(6 * (experiment - 1), 6 * experiment)
        for row in range(16)
        for column in range(1, 25)
    ]
    rows += [(4, "1536", f"{letters(row)}{column}") for row in range(16, 32) for column in range(1, 49)]
    rows.append((ONE_WELL, "99", "A1"))
    return pd.DataFrame(rows, columns=["experiment", "plate", "well"])


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The table of features, and the plate maps that are joined to it: ``A1`` here is ``A01`` there."""
    folder = tmp_path_factory.mktemp("tables")
    rng = np.random.default_rng(0)
    wells = plates()
    n = len(wells)
    assert n > 9_900
    assert "AF48" in set(wells["well"])
    code = rng.integers(0, len(TREATMENTS), n)
    code[: n // 8] = rng.integers(0, 5, n // 8)  # most of a batch holds few of the perturbations
    negative = rng.random(n) < 0.1
    effects = rng.normal(size=(len(TREATMENTS), N_FEATURES))
    batch = rng.normal(size=(10, N_FEATURES))[wells["experiment"]]
    x = rng.standard_t(3, size=(n, N_FEATURES)) + np.where(negative[:, None], 0, effects[code]) + batch
    x[wells["plate"] == ODD_PLATE] *= 10
    features = pd.DataFrame(x, columns=[f"f_{i}" for i in range(N_FEATURES)])
    features["f_narrow"] = np.where(rng.random(n) < 0.02, 2.0, 1.0)  # its median absolute deviation is 0
    features["f_constant"] = 1.5
    features["f_gap"] = x[:, 0]
    features.loc[17, "f_gap"] = np.nan
    features["f_huge"] = np.where(np.arange(n) == 5, 1e39, x[:, 1])
    features["f_double"] = features["f_3"]
    features.loc[NAN_WELL] = np.nan
    features["f_text"] = features["f_2"].round(3).astype(str)
    features.loc[3, "f_text"] = "out of focus"
    features["code"] = 7
    table = pd.concat([wells, features], axis=1)
    table.to_csv(folder / "profiles.csv", index=False)
    maps = wells.assign(
        well=[
            f"{well.rstrip('0123456789')}{int(well.lstrip('ABCDEFGHIJKLMNOPQRSTUVWXYZ')):02d}" for well in wells["well"]
        ],
        perturbation=np.where(negative, "DMSO", np.array(TREATMENTS, dtype=object)[code]),
        concentration=np.where(rng.random(n) < 0.5, 0.1, np.nan),
        remark=np.where(rng.random(n) < 0.01, "3", "fine"),
    )
    maps.loc[[100, 101, 102], "perturbation"] = None
    maps.loc[103, "perturbation"] = "empty"
    maps["moa"] = [
        None if name in ("DMSO", "empty", None) else f"m{int(name[1:]) % 8}" for name in maps["perturbation"]
    ]
    maps = maps.drop(index=[200, 201])  # two wells that no map has, and one that no table has
    maps = pd.concat([maps, maps.iloc[[0]].assign(plate="0000")])
    maps.to_csv(folder / "maps.csv", index=False)
    return folder, n


@pytest.fixture(scope="module")
def wells(tables, tmp_path_factory):
    folder, _ = tables
    out = tmp_path_factory.mktemp("wells") / "wells.h5ad"
    metadata = f"{folder / 'maps.csv'}:experiment=experiment,plate=plate,well=well"
    run(
        "--quiet", "import", "table", folder / "profiles.csv", "--out", out, "--metadata", metadata, "--control", "DMSO"
    )
    return out


def test_import_loses_nothing_in_silence(tables, wells):
    _, n = tables
    adata = artifacts.read_adata(wells)
    account = adata.uns["cellica"]["import"]
    assert account["n_rows"] == n == adata.n_obs + len(account["rows_not_finite"])
    nan_well = plates().iloc[NAN_WELL]
    row, column = nan_well["well"][:1], int(nan_well["well"][1:])
    name = f"{nan_well['experiment']}_{nan_well['plate']}_{row}{column:02d}"
    assert account["rows_not_finite"].tolist() == [name]
    left_out = {*account["features_not_finite"], *account["features_constant"]}
    assert left_out == {"f_gap", "f_huge", "f_constant"}
    assert account["n_columns"] == adata.n_vars + len(left_out)
    assert account["columns_with_text"].tolist() == ["f_text"]
    assert (account["join_matched"][0], account["join_unmatched_rows"][0], account["join_unmatched_in_table"][0]) == (
        n - 2,
        2,
        1,
    )
    assert adata.obs_names.is_unique
    assert {"4_1536_AF48", "1_00_A01"} <= set(adata.obs_names)
    assert set(adata.obs["experiment"]) == {"1", "2", "3", "4", "9"}
    assert {"00", "07", "1536"} <= set(adata.obs["plate"])
    assert adata.obs["perturbation"].isna().sum() == 3 + 2
    assert "nan" not in set(adata.obs["perturbation"].astype(object).dropna())
    assert adata.obs["concentration"].dtype == np.float64
    assert set(adata.obs["remark"].astype(object).dropna()) == {"3", "fine"}
    assert adata.obs.loc[adata.obs["perturbation"] == "empty", "control"].tolist() == [""]
    assert adata.X.dtype == np.float32
    assert np.isfinite(adata.X).all()


@pytest.fixture(scope="module")
def without_the_one(wells):
    """The wells without that one which is a batch of its own."""
    adata = artifacts.read_adata(wells)
    artifacts.write_adata(adata[adata.obs["experiment"] != str(ONE_WELL)].copy(), wells.with_name("rest.h5ad"))
    return wells.with_name("rest.h5ad")


NEED_NO_BATCH = ("none", "sphere")
NEED_WELLS = (
    "center",
    "center_scale",
    "center+sphere",
    "tvn",
    "wccn",
    "combat",
    "harmony",
    "leace",
    "ica",
    "ica_shrink",
    "ruv",
)


@pytest.mark.parametrize("method", NEED_WELLS)
def test_a_batch_of_one_well_is_named(wells, tmp_path, capsys, method):
    run("correct", wells, "--out", tmp_path / "corrected.h5ad", "--method", method, code=2)
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "'9'" in told or "'9_99'" in told
    assert any(remedy in told for remedy in ("leave it out", "leave these wells out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", [*NEED_NO_BATCH, *NEED_WELLS])
def test_a_correction_is_finite_in_spite_of_all_other_faults(wells, without_the_one, tmp_path, method):
    file = wells if method in NEED_NO_BATCH else without_the_one
    run("--quiet", "correct", file, "--out", tmp_path / "corrected.h5ad", "--method", method)
    before, after = artifacts.read_adata(file), artifacts.read_adata(tmp_path / "corrected.h5ad")
    assert list(after.obs_names) == list(before.obs_names)
    np.testing.assert_array_equal(after.X, before.X)
    corrected = after.obsm[f"X_{method}"]
    assert np.isfinite(corrected).all()
    assert np.abs(corrected).max() < 1e4  # a scale that is nearly 0 would give more


SCORES = ("--score", "retrieval", "--score", "batch", "--score", "accuracy")


def test_scores_are_finite_or_say_why_and_count_the_wells_they_leave_out(wells, tmp_path):
    out = tmp_path / "scores.csv"
    run("evaluate", wells, "--out", out, *SCORES, "--class-key", "moa", "--max-queries", 200)
    scores = pd.read_csv(out, keep_default_na=False, na_values={"value": [""], "chance": [""]})
    assert len(scores) > 10
    values = scores["value"].to_numpy(dtype=float)
    assert (np.isfinite(values) | (scores["note"] != "")).all()
    assert np.isfinite(values).any()
    assert (scores.loc[scores["n_dropped"] > 0, "note"] != "").all()
    assert (scores["n_queries"] + scores["n_dropped"] <= artifacts.read_adata(wells).n_obs).all()


def test_a_method_that_the_faults_stop_does_not_stop_the_comparison(wells, tmp_path, capsys):
    out = tmp_path / "comparison.csv"
    methods = ("--method", "none", "--method", "combat", "--method", "sphere")
    words = ("--score", "retrieval", "--class-key", "moa", "--max-queries", 500, "--no-held-out", "--jobs", 1)
    run("compare", wells, "--out", out, *methods, *words, code=1)
    scores = pd.read_csv(out)
    stopped = scores[scores["metric"] == "all"]
    assert stopped["rep"].tolist() == ["X_combat"]
    assert "'9'" in stopped["note"].iloc[0]
    found = scores[(scores["metric"] == "replicate_map") & scores["rep"].isin(["X_none", "X_sphere"])]
    assert np.isfinite(found["value"]).all()
    assert len(found) == 2
    assert "combat" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("well", "A01", r"1 rows that occur more than once: '1_00_A01'"),
        ("well", "AZ99", r"1 rows whose well name is not understood"),
        ("plate", None, r"1 rows without a value for 'plate'"),
        ("control", "neg", r"1 rows whose 'control' is none of 'negative', 'positive', ''"),
    ],
)
def test_rows_that_cannot_be_placed_are_listed(tmp_path, capsys, column, value, message):
    rows = plates().head(24).assign(control="", perturbation="a", f_0=np.arange(24.0), f_1=np.arange(24.0) ** 2)
    rows.loc[5, column] = value
    rows.to_csv(tmp_path / "rows.csv", index=False)
    run("import", "table", tmp_path / "rows.csv", "--out", tmp_path / "wells.h5ad", code=2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "wells.h5ad").exists()


def test_where_all_perturbations_are_unique_scores_say_so(tmp_path, capsys):
    rows = plates()[lambda wells: wells["plate"].isin(["00", "06"]) & wells["well"].str.startswith("A")]
    x = np.random.default_rng(0).normal(size=(len(rows), 4))
    table = rows.assign(perturbation=[f"p{i}" for i in range(len(rows))], **{f"f_{i}": x[:, i] for i in range(4)})
    table.to_csv(tmp_path / "rows.csv", index=False)
    run("--quiet", "import", "table", tmp_path / "rows.csv", "--out", tmp_path / "wells.h5ad")
    run("evaluate", tmp_path / "wells.h5ad", "--out", tmp_path / "scores.csv", "--score", "retrieval", code=1)
    scores = pd.read_csv(tmp_path / "scores.csv")
    assert scores["value"].isna().all()
    assert scores["note"].str.contains("perturbation").any()
