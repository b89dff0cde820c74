"""Profiles: real published tables, joins, published embeddings, sites to wells to consensus profiles."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellica import artifacts, profiles
from cellica.schema import InputError, MissingFileError, labels

WELLS = {"experiment": "e", "plate": ["p1", "p1", "p2"], "well": ["A1", "A02", "A1"], "f_1": [0.0, 1.5, 3.0]}


def write(path, table):
    pd.DataFrame(table).to_csv(path, index=False)
    return path


def account(adata, verb="import"):
    return adata.uns["cellica"][verb]


def same_after_writing(adata, folder):
    for suffix in artifacts.SUFFIXES:
        artifacts.write_adata(adata, folder / f"x{suffix}")
        back = artifacts.read_adata(folder / f"x{suffix}")
        np.testing.assert_array_equal(back.X, adata.X)
        assert back.obs_names.tolist() == adata.obs_names.tolist()
        for name in adata.obs:
            assert labels(back.obs, name).tolist() == labels(adata.obs, name).tolist(), name
            assert pd.api.types.is_numeric_dtype(adata.obs[name]) == pd.api.types.is_numeric_dtype(back.obs[name]), name
        assert set(back.uns["cellica"]) == set(adata.uns["cellica"])
        assert artifacts.provenance(back) == artifacts.provenance(adata)


# ----------------------------------------------------------------------------------------------------------- real tables


@pytest.fixture(scope="module")
def bbbc021(shared):
    folder = shared / "data" / "bbbc021_profiles"
    plate, well = "Image_Metadata_Plate", "Image_Metadata_Well"
    compound, concentration = "Image_Metadata_Compound", "Image_Metadata_Concentration"
    return profiles.read_table(
        folder / "ljosa_jbiomolscreen_2013_per_well_mean.csv.gz",
        metadata=[
            f"{folder}/BBBC021_v1_image.csv.gz:{plate}={plate}_DAPI,{well}={well}_DAPI",
            f"{folder}/BBBC021_v1_moa.csv:{compound}=compound,{concentration}=concentration",
        ],
        columns={
            "plate": plate,
            "well": well,
            "experiment": "plate:^(Week[0-9]+)",
            "concentration": concentration,
            "perturbation": f"{{{compound}}}@{{{concentration}}}",
        },
        controls=["DMSO@0"],
    )


def test_bbbc021_has_its_known_design(bbbc021):
    obs = bbbc021.obs
    assert bbbc021.shape == (632, 516)
    assert (obs["plate"].nunique(), obs["experiment"].nunique()) == (55, 10)
    control = obs["control"] == "negative"
    assert (control.sum(), obs.loc[~control, "perturbation"].nunique()) == (330, 103)
    assert (obs.loc[control, "moa"] == "DMSO").all()
    assert obs.loc[~control, "moa"].nunique() == 12
    assert obs["concentration"].dtype == np.float64
    assert bbbc021.obs_names[0] == "Week10_Week10_40111_B02"
    assert account(bbbc021)["join_unmatched_rows"].tolist() == [0, 0]
    assert account(bbbc021)["join_unmatched_in_table"].tolist() == [2668, 0]
    assert [step["verb"] for step in artifacts.provenance(bbbc021)] == ["import"]
    assert len(artifacts.provenance(bbbc021)[0]["inputs"]) == 3


def test_bbbc021_joins_agree_with_a_table_that_others_joined(bbbc021, shared):
    other = pd.read_csv(shared / "data" / "bbbc021_profiles" / "BBBC021_feature_selected_mad_robustize.csv")
    other = other.set_index(["Metadata_Plate", "Metadata_Well"]).loc[
        list(zip(bbbc021.obs["plate"], bbbc021.obs["well"]))
    ]
    assert bbbc021.obs["Image_Metadata_Compound"].tolist() == other["Metadata_Compound"].tolist()
    assert bbbc021.obs["concentration"].tolist() == other["Metadata_Concentration"].tolist()
    assert bbbc021.obs["moa"].tolist() == other["Metadata_moa"].tolist()


def test_bbbc021_features_are_those_of_the_file(bbbc021, shared):
    file = shared / "data" / "bbbc021_profiles" / "ljosa_jbiomolscreen_2013_per_well_mean.csv.gz"
    table = pd.read_csv(file).drop(columns=["Image_Metadata_Plate", "Image_Metadata_Well"])
    assert bbbc021.var_names.tolist() == table.columns.tolist()
    assert bbbc021.X.dtype == np.float32
    np.testing.assert_array_equal(bbbc021.X, table.to_numpy(np.float32))


def test_bbbc021_survives_writing(bbbc021, tmp_path):
    same_after_writing(bbbc021, tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "n_controls"),
    [
        ("cytosummarynet_stain", (1440, 512), 0),
        ("dye_std4", (1535, 344), 96),
        ("varchamp_b14p2_raw", (1300, 3858), 80),
        ("varchamp_b20_21", (2240, 314), 160),
    ],
)
def test_real_profiles_of_several_batches(shared, name, shape, n_controls):
    file = shared / "data" / "multi_batch_profiles" / f"{name}.parquet"
    adata = profiles.read_table(file, columns={"experiment": "batch"})
    assert adata.shape == shape
    assert (adata.obs["control"] == "negative").sum() == n_controls
    assert adata.obs["experiment"].tolist() == adata.obs["batch"].tolist()
    assert adata.obs_names.is_unique
    assert ("well" in adata.obs) == (name != "cytosummarynet_stain")  # whose file says "?" throughout
    assert "experiment_original" in adata.obs


def test_a_numeric_label_is_no_feature(shared):
    file = shared / "data" / "cpjump1_control_profiles" / "JUMP_shared_treatments_jump_data.csv.gz"
    columns = {"experiment": "Metadata_Plate", "plate": "Metadata_Plate", "well": "Metadata_Well"}
    adata = profiles.read_table(file, columns={**columns, "perturbation": "Compound Name"}, controls=["DMSO"])
    assert adata.shape == (1593, 221)
    assert "injury_code" in adata.obs
    assert (adata.obs["control"] == "negative").sum() == 1522


# ----------------------------------------------------------------------------------------------------------------- joins


def joined(tmp_path, left, right, keys, **options):
    entry = f"{write(tmp_path / 'right.csv', right)}:{keys}"
    return profiles.read_table(write(tmp_path / "left.csv", left), metadata=[entry], **options)


def test_wells_match_whatever_their_zeros_and_the_unmatched_are_counted_on_both_sides(tmp_path):
    right = {"barcode": ["p1", "p1", "p2", "p3"], "position": ["A01", "a2", "B1", "A1"], "gene": ["x", "y", "z", "z"]}
    adata = joined(tmp_path, WELLS, right, "plate=barcode,well=position")
    assert adata.obs_names.tolist() == ["e_p1_A01", "e_p1_A02", "e_p2_A01"]
    assert labels(adata.obs, "gene").tolist() == ["x", "y", None]
    assert account(adata)["join_matched"].tolist() == [2]
    assert account(adata)["join_unmatched_rows"].tolist() == [1]
    assert account(adata)["join_unmatched_in_table"].tolist() == [2]
    assert not {"barcode", "position"} & set(adata.obs)


@given(order=st.permutations(range(6)))
@settings(max_examples=10)
def test_the_order_of_the_joined_table_does_not_matter(tmp_path_factory, order):
    folder = tmp_path_factory.mktemp("join")
    wells = [f"B{i + 1}" for i in range(6)]
    left = {"experiment": 1, "plate": 2, "well": wells[::-1], "f_1": np.arange(6) + 0.5}
    right = pd.DataFrame({"well": wells, "dose": np.arange(6) / 10}).iloc[list(order)]
    adata = joined(folder, left, right, "well=well")
    assert adata.obs["dose"].tolist() == [0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    assert adata.obs_names[0] == "1_2_B06"


def test_rows_with_the_same_keys_may_differ_only_where_nothing_is_asked(tmp_path):
    right = {"plate": ["p1", "p1", "p2"], "drug": ["x", "x", "y"], "image": [1, 2, 3]}
    adata = joined(tmp_path, WELLS, right, "plate=plate", columns={"perturbation": "drug"})
    assert adata.obs["perturbation"].tolist() == ["x", "x", "y"]
    assert "image" not in adata.obs
    assert account(adata)["join_columns_left_out"].tolist() == ["image"]
    with pytest.raises(InputError, match=r"right.csv: rows with the same plate differ in 'image'"):
        joined(tmp_path, WELLS, right, "plate=plate", columns={"perturbation": "image"})


def test_a_column_of_both_tables_stays_one_or_is_an_error(tmp_path):
    left = {**WELLS, "dose": [0.5, 1, 2], "batch": ["a", "a", None]}
    right = {"plate": ["p1", "p2"], "batch": ["a", None]}
    adata = joined(tmp_path, left, right, "plate=plate")
    assert adata.obs.columns.tolist() == ["experiment", "plate", "well", "control", "batch"]
    with pytest.raises(
        InputError, match=r"column 'batch' is in both tables and differs in 2 rows \('a and c', 'a and c'"
    ):
        joined(tmp_path, left, {**right, "batch": ["c", None]}, "plate=plate")


def test_joins_follow_each_other_and_compare_numbers_as_numbers(tmp_path):
    drugs = write(tmp_path / "drugs.csv", {"well": ["A01", "A02"], "drug": ["x", "y"], "dose": [0.30, 10]})
    moa = tmp_path / "moa.parquet"
    pd.DataFrame({"name": ["x", "y"], "um": np.array([0.3, 10], dtype=np.float32), "moa": ["m", "n"]}).to_parquet(moa)
    table = write(tmp_path / "t.csv", WELLS)
    metadata = [f"{drugs}:well=well", f"{moa}:drug=name,dose=um"]
    assert profiles.read_table(table, metadata=metadata).obs["moa"].tolist() == ["m", "n", "m"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("plate", "is not understood: write FILE:left=right"),
        ("plate=", "is not understood"),
        ("nope=plate", r"right.csv: what is read so far has no column 'nope'"),
        ("plate=nope", r"right.csv: this table has no column 'nope'; it has plate, x"),
    ],
)
def test_joins_that_cannot_be_made_are_explained(tmp_path, keys, message):
    with pytest.raises(InputError, match=message):
        joined(tmp_path, WELLS, {"plate": ["p1"], "x": [1]}, keys)


# --------------------------------------------------------------------------------------------------- features and ids


def wide(n=6, **changes):
    table = {
        "experiment": "e",
        "plate": "p",
        "well": [f"A{i + 1}" for i in range(n)],
        "perturbation": list("ccabab")[:n],
    }
    features = {f"f_{j}": np.random.default_rng(j).normal(size=n) for j in range(4)}
    return pd.DataFrame({**table, **features, **changes})


def test_what_cannot_be_used_is_left_out_by_name(tmp_path):
    table = wide(f_1=[1, 2, 3, np.nan, 5, 6], flat=1.5, huge=[1e39, 0, 1, 2, 3, 4], f_2=[np.inf, 1, 2, 3, 4, 5])
    table.loc[5, ["f_0", "f_1", "f_2", "f_3", "flat"]] = np.nan
    adata = profiles.read_table(write(tmp_path / "t.csv", table))
    assert adata.var_names.tolist() == ["f_0", "f_3"]
    assert account(adata)["rows_not_finite"].tolist() == ["e_p_A06"]
    assert account(adata)["features_not_finite"].tolist() == ["f_1", "f_2", "huge"]
    assert account(adata)["features_constant"].tolist() == ["flat"]
    assert (account(adata)["n_rows"], account(adata)["n_columns"]) == (6, 6)
    assert (account(adata)["n_profiles"], account(adata)["n_features"]) == (5, 2)
    same_after_writing(adata, tmp_path)


def test_nothing_left_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"nothing is left of 3 rows and 1 features: .* 1 features constant"):
        profiles.read_table(write(tmp_path / "t.csv", {**WELLS, "f_1": 1.0}))
    with pytest.raises(InputError, match="no feature columns; numeric columns are none"):
        profiles.read_table(write(tmp_path / "t.csv", {k: v for k, v in WELLS.items() if k != "f_1"}))


def test_features_by_the_stated_rule_or_by_a_regular_expression(tmp_path):
    more = {
        "f_count": [1, 2, 3, 4, 5, 6],
        "label": [0, 0, 1, 1, 2, 2],
        "Metadata_row": 0.5,
        "site": 1,
        "flag": [True, False] * 3,
    }
    table = wide(concentration=[0.1, np.nan, 1, 1, 1, 1], dose_nm=[1.5, 2, 3, 4, 5, 6.5], **more)
    table.to_csv(tmp_path / "t.csv")  # with pandas' row numbers in front
    adata = profiles.read_table(tmp_path / "t.csv", columns={"perturbation": "{perturbation}@{dose_nm}"})
    assert adata.var_names.tolist() == ["f_0", "f_1", "f_2", "f_3", "f_count"]
    assert adata.obs["concentration"].dtype == np.float64
    assert {"label", "Metadata_row", "flag", "Unnamed: 0", "dose_nm"} <= set(adata.obs)
    assert profiles.read_table(tmp_path / "t.csv", features="^f_[01]").var_names.tolist() == ["f_0", "f_1"]
    with pytest.raises(InputError, match=r"matches 1 columns that are not numeric: 'perturbation'"):
        profiles.read_table(tmp_path / "t.csv", features="^(f_|pert)")


def test_integers_are_features_where_there_is_nothing_else(tmp_path):
    adata = profiles.read_table(write(tmp_path / "t.csv", {**WELLS, "f_1": [1, 2, 3], "g": [3, 4, 9]}))
    assert adata.var_names.tolist() == ["f_1", "g"]


def test_files_are_put_below_one_another(tmp_path):
    first = write(tmp_path / "1.csv", wide())
    second = write(tmp_path / "2.csv", wide(plate="q", gene=None).drop(columns="f_3"))
    adata = profiles.read_table([first, second])
    assert adata.shape == (12, 3)
    assert account(adata)["features_not_finite"].tolist() == ["f_3"]
    assert set(artifacts.provenance(adata)[0]["inputs"]) == {str(first), str(second)}
    with pytest.raises(InputError, match=r"6 rows that occur more than once: 'e_p_A01'"):
        profiles.read_table([first, first])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"well": ["A1", "A01", "A2", "A3", "A4", "A5"]}, "1 rows that occur more than once: 'e_p_A01'"),
        (
            {"well": ["A1", "?", "ZZ9", "A3", "A4", "A5"]},
            r"2 rows whose well name is not understood .*: 'e_p_\?', 'e_p_ZZ9'",
        ),
        ({"plate": [None, "p", "p", "p", "p", "p"]}, r"1 rows without a value for 'plate'"),
        ({"control": ["empty"] * 6}, "6 rows whose 'control' is none of 'negative', 'positive', ''"),
        ({"perturbation": ["a"] * 6}, "controls 'c' not found in obs"),
        ({"a/b": ["x"] * 6, "a_b": ["y"] * 6}, "columns have one name: 'a_b'"),
    ],
)
def test_rows_at_fault_are_listed(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        profiles.read_table(write(tmp_path / "t.csv", wide(**changes)), controls=["c"])


def test_controls_are_marked_beside_those_the_table_has(tmp_path):
    table = wide(control=["", "", "positive", "", "", ""], when=pd.Timestamp("2020-01-02"))
    table.to_parquet(tmp_path / "t.parquet")
    adata = profiles.read_table(tmp_path / "t.parquet", controls=["c"])
    assert adata.obs["control"].tolist() == ["negative", "negative", "positive", "", "", ""]
    same_after_writing(adata, tmp_path)  # with a date


def test_what_a_table_lacks_is_asked_for(tmp_path):
    with pytest.raises(InputError, match=r"no column 'experiment': say which it is with --column experiment=COLUMN"):
        profiles.read_table(write(tmp_path / "t.csv", wide().drop(columns="experiment")))
    with pytest.raises(MissingFileError, match="absent"):
        profiles.read_table(tmp_path / "absent.csv")
    with pytest.raises(InputError, match="no table was given"):
        profiles.read_table([])


# ------------------------------------------------------------------------------------------------- published embeddings


def embedded(ids, key, seed=0):
    x = np.random.default_rng(seed).normal(size=(len(ids), 5)).astype(np.float32)
    return pd.DataFrame({key: ids, **{f"feature_{j}": x[:, j] for j in range(5)}})


def test_rxrx1_site_embeddings_find_their_plate_maps(shared, tmp_path):
    ids = [f"{e}_{p}_{w}_{s}" for e in ("HUVEC-01", "RPE-11") for p in (1, 4) for w in ("B02", "C03") for s in (1, 2)]
    table = embedded([*ids, "HUVEC-99_1_B02_1", "nonsense"], "site_id")
    table.loc[3, "feature_2"] = np.nan
    folder = shared / "data" / "rxrx1_metadata_kaggle"
    adata = profiles.read_embeddings(write(tmp_path / "embeddings.csv", table), folder, "rxrx1")
    assert adata.obs_names.tolist() == ids[:3] + ids[4:]
    assert account(adata)["rows_not_finite"].tolist() == [ids[3]]
    assert account(adata)["embeddings_without_metadata"] == 2
    assert account(adata)["examples_without_metadata"].tolist() == ["HUVEC-99_1_B02_1", "nonsense"]
    assert account(adata)["metadata_without_embedding"] == 2 * 62_755 - 16
    assert adata.obs.loc["RPE-11_4_B02_1", ["control", "cell_type", "perturbation"]].tolist() == [
        "negative",
        "RPE",
        "1138",
    ]
    np.testing.assert_array_equal(adata["RPE-11_4_C03_2"].X[0], table.iloc[15, 1:].to_numpy(np.float32))
    assert not adata.obs.columns.str.startswith("path_").any()
    same_after_writing(adata, tmp_path)


def test_rxrx1_well_embeddings_find_their_wells(shared, tmp_path):
    folder = shared / "data" / "rxrx1_metadata_kaggle" / "v2_named_sirna"
    table = embedded(["U2OS-05_4_B02", "HEPG2-01_1_B03"], "id_code")
    adata = profiles.read_embeddings(write(tmp_path / "embeddings.csv", table), folder)
    assert adata.obs_names.tolist() == ["U2OS-05_4_B02", "HEPG2-01_1_B03"]
    assert adata.obs["perturbation"].tolist() == ["UNTREATED", "sirna_250"]
    assert "site" not in adata.obs
    assert account(adata)["metadata_without_embedding"] == 62_759 - 2


def test_rxrx3_embeddings_report_the_unmatched_on_both_sides(shared, tmp_path):
    folder = shared / "data" / "rxrx3_metadata_example"
    ids = ["compound-001_19_D20", "gene-060_9_P28", "gene-001_1_A01"]
    embedded(ids, "well_id").to_parquet(tmp_path / "e.parquet")
    adata = profiles.read_embeddings(tmp_path / "e.parquet", folder, "rxrx3-core")
    assert adata.obs_names.tolist() == ids[:2]
    assert adata.obs["control"].tolist() == ["", "negative"]
    assert adata.obs["concentration"].iloc[0] == 0.25
    assert account(adata)["embeddings_without_metadata"] == 1
    assert account(adata)["metadata_without_embedding"] == 4
    assert "gene-079_8_H29" in account(adata)["examples_without_embedding"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (embedded(["a", "b"], "name"), "none of the columns site_id, well_id, id_code"),
        (embedded(["gene-060_9_P28"] * 2, "well_id"), "1 embeddings have the id of another: 'gene-060_9_P28'"),
        (
            embedded(["x_1_A01"], "well_id"),
            r"none of the 1 embeddings \('x_1_A01'\) is in the metadata \('gene-079_8_H29'",
        ),
    ],
)
def test_embeddings_that_cannot_be_placed_are_explained(shared, tmp_path, table, message):
    folder = shared / "data" / "rxrx3_metadata_example"
    with pytest.raises(InputError, match=message):
        profiles.read_embeddings(write(tmp_path / "e.csv", table), folder, "rxrx3-core")
    with pytest.raises(InputError, match="format 'rxrx2' is none of rxrx1, rxrx3-core"):
        profiles.read_embeddings(tmp_path / "e.csv", folder, "rxrx2")


# -------------------------------------------------------------------------------------------------------- sites to wells


def plate(name="p1", n_wells=4, n_sites=2, seed=0, encoder="camae-mini", dtype=np.float32):
    rng = np.random.default_rng(seed)
    wells = [f"B{i + 2:02d}" for i in range(n_wells) for _ in range(n_sites)]
    obs = pd.DataFrame({"experiment": "e", "plate": name, "well": wells, "site": list(range(1, n_sites + 1)) * n_wells})
    obs["perturbation"] = [f"g{i % 2}" for i in range(n_wells) for _ in range(n_sites)]
    obs["control"] = ["negative" if w == "B02" else "" for w in wells]
    obs["concentration"] = np.nan
    obs["intensity_w1"] = rng.uniform(size=len(obs))
    obs["file"] = [f"{i}.png" for i in range(len(obs))]
    obs.index = obs["experiment"] + "_" + name + "_" + obs["well"] + "_" + obs["site"].astype(str)
    adata = ad.AnnData(rng.normal(size=(len(obs), 3)).astype(dtype), obs=obs)
    adata.obsm["X_other"] = rng.normal(size=(len(obs), 2))
    for verb in ("ingest", "embed"):
        parameters = {"encoder": encoder, "device": "cpu"} if verb == "embed" else {}
        artifacts.add_step(adata, artifacts.step(verb, parameters, {name: f"{verb} {name}"}, weights_sha256="12ab"))
    return adata


@given(n_wells=st.integers(1, 5), n_sites=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_wells_are_the_means_of_their_sites_in_any_order(n_wells, n_sites, seed):
    sites = plate(n_wells=n_wells, n_sites=n_sites, seed=seed)
    order = np.random.default_rng(seed).permutation(sites.n_obs)
    result = profiles.wells(sites[order])
    keys = ["_".join(name.split("_")[:3]) for name in sites.obs_names]
    for values, got in ((sites.X, result.X), (sites.obsm["X_other"], result.obsm["X_other"])):
        expected = pd.DataFrame(values).astype(float).groupby(keys).mean().loc[result.obs_names]
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert got.dtype == np.float32
    intensity = sites.obs["intensity_w1"].groupby(keys).mean().loc[result.obs_names]
    np.testing.assert_allclose(result.obs["intensity_w1"], intensity)
    assert result.obs["n_sites"].tolist() == [n_sites] * n_wells
    assert result.n_obs == n_wells


def test_wells_have_the_means_of_what_was_measured_of_their_fields():
    sites = plate(n_wells=3)
    sites.obs["focus_w1"] = [-1.0, -2.0, np.nan, -1.0, np.nan, np.nan]
    sites.obs["saturation_w1"] = np.float32([0, 0.5, 0, 0, 1, 1])
    sites.obs["cell_count"] = np.array([10, 11, 0, 4, 7, 7], dtype=np.int32)
    sites.obs["empty"] = [False, False, True, False, False, False]
    wells = profiles.wells(sites)
    np.testing.assert_allclose(wells.obs["focus_w1"], [-1.5, -1.0, np.nan])
    assert wells.obs["saturation_w1"].tolist() == [0.25, 0, 1]
    assert wells.obs["cell_count"].tolist() == [10.5, 2, 7]
    assert wells.obs["empty"].tolist() == [0, 0.5, 0]
    assert not {"focus_w1", "cell_count", "empty"} & set(wells.uns["cellica"]["profile"]["columns_left_out"])

    sites.obs["intensity_w1"] = ["low", "1.5", "2", "high", "0", "0"]
    with pytest.raises(InputError, match=r"hold text where numbers are measured: intensity_w1 \(as 'low' in 2 rows\)"):
        profiles.wells(sites)


def test_wells_of_several_plates(tmp_path):
    plates = [plate("p1"), plate("p2", seed=1)]
    before = [p.copy() for p in plates]
    result = profiles.wells(iter(plates), inputs={"p1.h5ad": "aa", "p2.h5ad": "bb"})
    assert result.n_obs == 8
    assert result.obs_names[[0, -1]].tolist() == ["e_p1_B02", "e_p2_B05"]
    assert result.obs["control"].tolist() == (["negative"] + [""] * 3) * 2
    assert not {"site", "file"} & set(result.obs)
    assert account(result, "profile")["columns_left_out"].tolist() == ["file"]
    ingest, embed, profile = artifacts.provenance(result)
    assert ingest["inputs"] == {"p1": "ingest p1", "p2": "ingest p2"}
    assert (embed["verb"], embed["weights_sha256"]) == ("embed", "12ab")
    assert (profile["verb"], profile["inputs"]) == ("profile", {"p1.h5ad": "aa", "p2.h5ad": "bb"})
    for old, new in zip(before, plates):
        pd.testing.assert_frame_equal(old.obs, new.obs)
    same_after_writing(result, tmp_path)


def test_joined_plates_are_their_sites_below_one_another(tmp_path):
    plates = [plate("p1"), plate("p2", seed=1)]
    sites = profiles.join(plates)
    np.testing.assert_array_equal(sites.X, np.vstack([p.X for p in plates]))
    np.testing.assert_array_equal(sites.obsm["X_other"], np.vstack([p.obsm["X_other"] for p in plates]))
    pd.testing.assert_frame_equal(sites.obs, pd.concat([p.obs for p in plates]))
    assert [step["verb"] for step in artifacts.provenance(sites)] == ["ingest", "embed"]
    np.testing.assert_array_equal(profiles.wells(sites).X, profiles.wells(plates).X)
    same_after_writing(sites, tmp_path)


def test_wells_of_files_that_were_written(tmp_path):
    files = [tmp_path / "p1.h5ad", tmp_path / "p2.zarr"]
    for file, sites in zip(files, (plate("p1"), plate("p2", seed=1))):
        artifacts.write_adata(sites, file)
    read = profiles.wells(artifacts.read_adata(file) for file in files)
    np.testing.assert_array_equal(read.X, profiles.wells([plate("p1"), plate("p2", seed=1)]).X)
    assert read.obs["perturbation"].tolist() == ["g0", "g1"] * 4


def test_sites_that_are_not_finite_are_left_out_by_name():
    sites = plate()
    sites.X[0, 1] = np.nan
    sites.obsm["X_other"][[2, 3], 0] = np.inf
    result = profiles.wells(sites)
    assert account(result, "profile")["sites_not_finite"].tolist() == ["e_p1_B02_1", "e_p1_B03_1", "e_p1_B03_2"]
    assert account(result, "profile")["wells_without_sites"].tolist() == ["e_p1_B03"]
    assert result.obs["n_sites"].tolist() == [1, 2, 2]
    np.testing.assert_array_equal(result.X[0], sites.X[1])
    sites.X[:] = np.nan
    with pytest.raises(InputError, match="none of the 8 sites has a finite embedding"):
        profiles.wells(sites)


def test_half_precision_sites_become_float32_wells():
    sites = plate(dtype=np.float16)
    sites.X[:] = 60_000
    assert profiles.wells(sites).X.dtype == np.float32
    assert np.isfinite(profiles.wells(sites).X).all()


def other_features(sites):
    return ad.AnnData(sites.X[:, :2], obs=sites.obs, obsm=dict(sites.obsm))


def without_key(sites):
    del sites.obsm["X_other"]
    return sites


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (without_key(plate("p2")), r"obsm of plate 2 \('e_p2_B02_1' .*\) holds \[\], .*'e_p1_B02_1' .* \['X_other'\]"),
        (other_features(plate("p2")), r"plate 2 \('e_p2_B02_1' .*\) has other features than .* \(2 and 3\)"),
        (plate("p2", encoder="openphenom"), "embedded by different encoders.*openphenom"),
        (plate("p1"), r"sites occur more than once: 'e_p1_B02_1', .* and 3 more"),
    ],
)
def test_plates_that_do_not_fit_together_are_named(second, message):
    with pytest.raises(InputError, match=message):
        profiles.wells([plate("p1"), second])


def test_no_plates_is_an_error():
    with pytest.raises(InputError, match="no site embeddings were given"):
        profiles.wells([])


# ----------------------------------------------------------------------------------------------------- consensus profiles


def test_consensus_is_the_mean_of_each_group_and_counts_what_it_leaves_out(tmp_path):
    wells = profiles.wells([plate("p1", n_wells=6), plate("p2", n_wells=6, seed=1)])
    wells.obs["batch"] = [1, 2] * 6
    wells.obs.loc[wells.obs_names[3], "perturbation"] = None
    wells.X[4, 0] = np.nan
    result = profiles.consensus(wells, ["perturbation", "plate"])
    kept = wells[np.delete(np.arange(12), [3, 4])]
    keys = kept.obs["perturbation"] + "|" + kept.obs["plate"]
    expected = pd.DataFrame(kept.X).groupby(keys.to_numpy()).mean()
    np.testing.assert_allclose(result.X, expected.loc[result.obs_names], rtol=1e-6)
    assert result.obs["n_profiles"].tolist() == keys.value_counts()[result.obs_names].tolist()
    assert result.obs["batch"].tolist() == [1, 2, 1, 2]
    assert "well" not in result.obs
    assert (account(result, "consensus")["n_missing"], account(result, "consensus")["n_not_finite"]) == (1, 1)
    assert artifacts.provenance(result)[-1]["verb"] == "consensus"
    same_after_writing(result, tmp_path)


def test_consensus_of_another_representation():
    wells = profiles.wells(plate())
    result = profiles.consensus(wells, use_rep="X_other")
    assert result.obs_names.tolist() == ["g0", "g1"]
    np.testing.assert_allclose(result.X[0], wells.obsm["X_other"][[0, 2]].mean(axis=0), rtol=1e-6)
    assert result.var_names.tolist() == ["X_other_0", "X_other_1"]


def test_consensus_asks_for_what_is_not_there():
    wells = profiles.wells(plate())
    with pytest.raises(InputError, match="obs has no column 'gene'"):
        profiles.consensus(wells, ["gene"])
    with pytest.raises(InputError, match="obsm has no 'X_sphere'; it has X_other"):
        profiles.consensus(wells, use_rep="X_sphere")
    wells.obs["perturbation"] = None
    with pytest.raises(InputError, match="no profile has a value in each of perturbation"):
        profiles.consensus(wells)


def test_ids_that_collide_are_refused_and_a_feature_with_text_in_it_is_named(tmp_path):
    (tmp_path / "t.csv").write_text("experiment,plate,well,f_1,f_2\nE,1_1,A01,1.5,2.5\nE_1,1,A01,2.5,3.5\n")
    with pytest.raises(InputError, match=r"have one id \('E_1_1_A01'\): rename"):
        profiles.read_table(tmp_path / "t.csv")
    rows = "".join(f"E,1,A0{i},{i}.5,{'oops' if i == 2 else i},{i * i}.5\n" for i in range(1, 5))
    (tmp_path / "u.csv").write_text("experiment,plate,well,f_1,f_2,f_3\n" + rows)
    adata = profiles.read_table(tmp_path / "u.csv")
    assert list(adata.var_names) == ["f_1", "f_3"]
    assert adata.uns["cellica"]["import"]["columns_with_text"].tolist() == ["f_2"]
