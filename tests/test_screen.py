"""Screen tables: the real plate maps of RxRx1, real rows of RxRx3, and tables of one's own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellica import screen
from cellica.schema import InputError, MissingFileError

EDITIONS = [("", "kaggle-1", 62_755, "1138"), ("v2_named_sirna", "kaggle-2", 62_759, "UNTREATED")]
NAMES = st.text("abcXYZ019 -./_", min_size=1, max_size=6)


def write(folder, **tables):
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        pd.DataFrame(table).to_csv(folder / f"{name}.csv", index=False)
    return folder


def rxrx_ai(**changes):
    table = {
        "site_id": ["HUVEC-01_1_B02_1", "HUVEC-01_1_B02_2", "U2OS-03_4_O23_1"],
        "well_id": ["HUVEC-01_1_B02", "HUVEC-01_1_B02", "U2OS-03_4_O23"],
        "cell_type": ["HUVEC", "HUVEC", "U2OS"],
        "dataset": ["train", "train", "test"],
        "experiment": ["HUVEC-01", "HUVEC-01", "U2OS-03"],
        "plate": [1, 1, 4],
        "well": ["B02", "B02", "O23"],
        "site": [1, 2, 1],
        "well_type": ["negative_control", "negative_control", "treatment"],
        "sirna": ["EMPTY", "EMPTY", "s21721"],
        "sirna_id": [1138, 1138, 7],
        "moa": [None, None, "made up"],
    }
    return {**table, **changes}


def kaggle(sirna):
    wells = {"id_code": ["RPE-01_1_B03"], "experiment": ["RPE-01"], "plate": [1], "well": ["B03"]}
    return {**wells, "sirna": [sirna]}


# --------------------------------------------------------------------------------------------------------------- RxRx1


@pytest.fixture(scope="module", params=EDITIONS, ids=[edition[1] for edition in EDITIONS])
def edition(request, shared):
    return request.param


@pytest.fixture(scope="module")
def sites(edition, shared):
    return screen.read_rxrx1(shared / "data" / "rxrx1_images", shared / "data" / "rxrx1_metadata_kaggle" / edition[0])


@pytest.fixture(scope="module")
def wells(sites):
    return sites[sites["site"] == 1]


def test_rxrx1_has_every_well_of_the_files_twice(sites, wells, edition, shared):
    folder, name, n_wells, _ = edition
    files = ["train", "test", "train_controls", "test_controls"]
    read = [pd.read_csv(shared / "data" / "rxrx1_metadata_kaggle" / folder / f"{file}.csv") for file in files]
    assert len(wells) == n_wells
    assert len(sites) == 2 * n_wells
    assert set(sites.index) == {f"{code}_{site}" for table in read for code in table["id_code"] for site in (1, 2)}
    assert "HUVEC-01_1_B02_1" in sites.index
    assert (sites["edition"] == name).all()
    assert sites["plate"].map(type).eq(str).all()
    assert sites["site"].dtype == np.int64
    assert wells.groupby("dataset").experiment.nunique().to_dict() == {"test": 18, "train": 33}
    per_type = wells.groupby("cell_type").experiment.nunique().to_dict()
    assert per_type == {"HEPG2": 11, "HUVEC": 24, "RPE": 11, "U2OS": 5}


def test_rxrx1_controls(wells, edition):
    plates = wells.groupby(["experiment", "plate"])
    negative = wells[wells["control"] == "negative"]
    assert set(negative["perturbation"]) == {edition[3]}
    assert set(negative["perturbation_type"]) == {"control"}
    counts = negative.groupby(["experiment", "plate"]).size()
    single = negative.set_index(["experiment", "plate"])[
        counts.reindex(negative.set_index(["experiment", "plate"]).index).eq(1).to_numpy()
    ]
    assert (len(counts), len(single)) == (204, 172)
    assert set(single["well"]) == {"B02"}
    assert (negative["well"] == "B02").sum() == 204
    positive = plates["control"].agg(lambda control: (control == "positive").sum())
    assert positive.value_counts().to_dict() == {30: 183, 29: 19, 28: 2}
    assert wells.loc[wells["control"] == "positive", "perturbation"].nunique() == 30
    treated = plates["control"].agg(lambda control: (control == "").sum())
    assert (treated.min(), treated.max()) == (271, 277)


def test_rxrx1_names_a_treatment_once_an_experiment_and_none_for_the_test_set(wells):
    treated = wells[wells["control"] == ""]
    assert treated.loc[treated["dataset"] == "test", "perturbation"].isna().all()
    train = treated[treated["dataset"] == "train"]
    assert train["perturbation"].notna().all()
    assert train["perturbation"].nunique() == 1108
    assert not train.duplicated(["experiment", "perturbation"]).any()
    assert set(treated["perturbation_type"]) == {"siRNA"}


def test_rxrx1_paths_lead_to_the_images(sites):
    site = sites.loc["HEPG2-01_1_B02_1"]
    assert all(Path(site[f"path_w{channel}"]).is_file() for channel in range(1, 7))
    assert not Path(sites.loc["HEPG2-01_1_B02_2", "path_w6"]).exists()
    test_site = sites[sites["dataset"] == "test"].iloc[0]
    assert f"/test/{test_site['experiment']}/Plate{test_site['plate']}/" in test_site["path_w6"]


@pytest.mark.parametrize("inner", [".", "rxrx1"])
def test_rxrx_ai_layout(tmp_path, inner):
    write(tmp_path / inner, metadata=rxrx_ai())
    (tmp_path / inner / "images").mkdir()
    sites = screen.read_rxrx1(tmp_path)
    assert sites.index.tolist() == rxrx_ai()["site_id"]
    assert sites["control"].tolist() == ["negative", "negative", ""]
    assert sites["perturbation"].tolist() == ["EMPTY", "EMPTY", "s21721"]
    assert sites["edition"].unique().tolist() == ["rxrx.ai"]
    assert sites["path_w6"].iloc[2] == str(tmp_path / inner / "images" / "U2OS-03" / "Plate4" / "O23_s1_w6.png")
    assert sites["moa"].iloc[2] == "made up"
    assert sites["sirna_id"].tolist() == [1138, 1138, 7]
    assert sites["concentration"].isna().all()


def test_tables_may_lie_elsewhere_or_come_one_by_one(tmp_path):
    tables = write(tmp_path / "tables", train=kaggle(513))
    for metadata in (tables, tables / "train.csv"):
        sites = screen.read_rxrx1(tmp_path / "images_that_are_not_here", metadata)
        assert sites.index.tolist() == ["RPE-01_1_B03_1", "RPE-01_1_B03_2"]
        assert sites["perturbation"].tolist() == ["513", "513"]


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        (
            {"train": kaggle(513), "train_controls": {**kaggle("UNTREATED"), "well_type": ["negative_control"]}},
            "train_controls.csv",
        ),
        ({"train": kaggle(513), "metadata": rxrx_ai()}, "metadata.csv"),
    ],
)
def test_editions_are_never_mixed(tmp_path, tables, named):
    with pytest.raises(InputError, match="edition") as caught:
        screen.read_rxrx1(write(tmp_path, **tables))
    assert named in str(caught.value)
    assert "train.csv" in str(caught.value)


def test_rxrx1_faults_are_named(tmp_path):
    with pytest.raises(MissingFileError, match=r"looked for metadata\.csv"):
        screen.read_rxrx1(tmp_path)
    with pytest.raises(InputError, match=r"2 rows have a well_id other than .*'HUVEC-01_9_B02'"):
        screen.read_rxrx1(write(tmp_path, metadata=rxrx_ai(well_id=["HUVEC-01_9_B02"] * 2 + ["U2OS-03_4_O23"])))
    with pytest.raises(InputError, match=r"1 rows have a well_type other than .*'empty'"):
        screen.read_rxrx1(write(tmp_path, metadata=rxrx_ai(well_type=["empty", "treatment", "treatment"])))
    with pytest.raises(InputError, match="no column 'sirna'"):
        screen.read_rxrx1(write(tmp_path, metadata={k: v for k, v in rxrx_ai().items() if k != "sirna"}))


# --------------------------------------------------------------------------------------------------------------- RxRx3


def test_rxrx3_example_rows(shared):
    sites = screen.read_rxrx3_core(shared / "data" / "rxrx3_metadata_example")
    assert sites.index.tolist()[:2] == ["gene-079_8_H29_1", "gene-045_4_AD27_1"]
    expected = ["RPLP2", "RXRX3-43938", "EMPTY_control", "Dequalinium", "EMPTY_control", "CRISPR_control"]
    assert sites["perturbation"].tolist() == expected
    assert sites["control"].tolist() == ["", "", "negative", "", "negative", "positive"]
    assert sites["perturbation_type"].tolist() == ["CRISPR"] * 3 + ["COMPOUND"] * 3
    assert sites["plate"].tolist() == ["8", "4", "9", "19", "11", "43"]
    assert sites["concentration"].dtype == np.float64
    assert sites["concentration"].dropna().tolist() == [0.25]
    assert sites["SMILES"].iloc[3].endswith("|c:1,13,21,29,31,35,t:16,19,23,27|")
    assert sites["gene"].isna().tolist() == [False] * 3 + [True] * 3
    assert not sites.columns.str.startswith("path_").any()


def test_rxrx3_takes_an_eleventh_column_images_and_refuses_rows_that_disagree(shared, tmp_path):
    table = pd.read_csv(shared / "data" / "rxrx3_metadata_example" / "metadata_example_rows.csv")
    write(tmp_path, metadata_rxrx3_core=table.assign(well_type_label="x"))
    (tmp_path / "images").mkdir()
    sites = screen.read_rxrx3_core(tmp_path)
    assert sites["well_type_label"].eq("x").all()
    assert sites["path_w3"].iloc[1] == str(tmp_path / "images" / "gene-045" / "Plate4" / "AD27_s1_w3.png")
    write(tmp_path, metadata_rxrx3_core=table.assign(address="A01"))
    with pytest.raises(InputError, match=r"6 rows have a 'address' other than .*'gene-079_8_H29'.* and 1 more"):
        screen.read_rxrx3_core(tmp_path)
    write(tmp_path, metadata_rxrx3_core=table.assign(concentration="10 uM"))
    with pytest.raises(InputError, match="6 rows have a concentration that is no number"):
        screen.read_rxrx3_core(tmp_path)
    with pytest.raises(MissingFileError, match="metadata"):
        screen.read_rxrx3_core(tmp_path / "images")


# ----------------------------------------------------------------------------------------------------- screens of one's own

WIDE = {
    "Plate": ["p1"] * 4,
    "Well": ["A1", "a01", "B12", "AF48"],
    "Field": [1, 2, 1, 1],
    "Drug": ["DMSO", "DMSO", "taxol", None],
    "Dose": [np.nan, np.nan, 3.0, 0.1],
    "DNA": ["a.tif", "b.tif", "c.tif", "d.tif"],
    "ER": ["/elsewhere/a.tif", "f.tif", "g.tif", None],
}
ROLES = {"experiment": "Plate", "plate": "Plate", "well": "Well", "site": "Field", "perturbation": "Drug"}


def test_one_row_a_site_and_one_row_an_image_read_alike(tmp_path):
    write(tmp_path, wide=WIDE)
    wide = screen.read_table(tmp_path / "wide.csv", {**ROLES, "path_DNA": "DNA", "path_ER": "ER"})
    long = pd.DataFrame(WIDE).melt([*WIDE][:5], var_name="Stain", value_name="File").dropna(subset="File")
    write(tmp_path, long=long.assign(megabytes=range(len(long))))
    long = screen.read_table(tmp_path / "long.csv", {**ROLES, "channel": "Stain", "path": "File"})
    shown = ["experiment", "plate", "well", "site", "perturbation", "control", "Dose", "path_DNA", "path_ER"]
    pd.testing.assert_frame_equal(wide[shown], long[shown])
    assert wide.index.tolist() == ["p1_p1_A01_1", "p1_p1_A01_2", "p1_p1_B12_1", "p1_p1_AF48_1"]
    assert wide["path_DNA"].iloc[0] == str(tmp_path / "a.tif")
    assert wide["path_ER"].iloc[0] == "/elsewhere/a.tif"
    assert pd.isna(wide["path_ER"].iloc[3])
    assert wide["Dose"].dtype == np.float64


def test_parquet_reads_like_csv(tmp_path):
    write(tmp_path, wide=WIDE)
    pd.DataFrame(WIDE).to_parquet(tmp_path / "wide.parquet")
    one, other = (screen.read_table(tmp_path / f"wide.{suffix}", ROLES) for suffix in ("csv", "parquet"))
    assert one.columns.tolist() == other.columns.tolist()
    for name in one:
        assert screen.text(one[name]).tolist() == screen.text(other[name]).tolist()


def test_wells_come_from_rows_and_columns_or_must_agree_with_them(tmp_path):
    table = {"experiment": "e", "plate": 7, "row": ["A", 2, 32], "column": [10, 1, 48]}
    write(tmp_path, t=table)
    assert screen.read_table(tmp_path / "t.csv").index.tolist() == ["e_7_A10_1", "e_7_B01_1", "e_7_AF48_1"]
    write(tmp_path, t={**table, "well": ["A10", "B1", "AF48"]})
    assert screen.read_table(tmp_path / "t.csv")["well"].tolist() == ["A10", "B01", "AF48"]
    write(tmp_path, t={**table, "well": ["A10", "B2", "AF47"]})
    with pytest.raises(InputError, match=r"2 wells are not where.*B2 in row 2, column 1.*AF47 in row 32"):
        screen.read_table(tmp_path / "t.csv")
    write(tmp_path, t={**table, "well": ["A10", "B1", "AF48"], "column": [0, 1, 48]})
    with pytest.raises(InputError, match=r"1 wells are not where.*A10 in row A, column 0"):
        screen.read_table(tmp_path / "t.csv")


def test_columns_that_are_needed_are_asked_for(tmp_path):
    write(tmp_path, t=WIDE)
    with pytest.raises(InputError, match=r"no column 'experiment'.*--column experiment=COLUMN.*'Plate', 'Well'"):
        screen.read_table(tmp_path / "t.csv")


def test_a_channel_has_one_file_a_site(tmp_path):
    rows = {
        "experiment": "e",
        "plate": "p",
        "well": ["A1", "A1", "A2"],
        "channel": ["w1", "w1", "w1"],
        "path": ["a", "b", "c"],
    }
    write(tmp_path, t=rows)
    with pytest.raises(InputError, match="1 sites have several files for one channel: 'e_p_A01_1_w1'"):
        screen.read_table(tmp_path / "t.csv")


PLANES = {
    "experiment": "e",
    "plate": "p",
    "well": ["A1"] * 6 + ["A2"] * 2,
    "channel": ["w1", "w1", "w1", "w2", "w2", "w2", "w1", "w2"],
    "z": [10, 2, 1, 1, 2, 10, 2, 2],
    "path": ["w1_10", "w1_2", "w1_1", "w2_1", "w2_2", "w2_10", "A2_w1", "A2_w2"],
}


def test_planes_in_rows_are_chosen_by_number_or_joined_in_order(tmp_path):
    write(tmp_path, t=PLANES)
    with pytest.raises(
        InputError, match=r"several values of 'z', '1', '2', '10': choose with --z max, mean or a number"
    ):
        screen.read_table(tmp_path / "t.csv")
    one = screen.read_table(tmp_path / "t.csv", z=1)
    assert one["path_w2"].tolist() == [str(tmp_path / "w2_2"), str(tmp_path / "A2_w2")]
    assert "z" not in one
    first = screen.read_table(tmp_path / "t.csv", z=0)
    assert first.index.tolist() == ["e_p_A01_1", "e_p_A02_1"]  # a site without that plane is not lost
    assert first["path_w1"].tolist() == [str(tmp_path / "w1_1"), None]
    joined = screen.read_table(tmp_path / "t.csv", z="max")
    assert joined["path_w1"].tolist() == [
        tuple(str(tmp_path / f"w1_{z}") for z in (1, 2, 10)),
        (str(tmp_path / "A2_w1"),),
    ]
    with pytest.raises(InputError, match="z is 3: the table has 3 values, counted from 0"):
        screen.read_table(tmp_path / "t.csv", z=3)
    write(tmp_path, twice={**PLANES, "z": [10, 10, 1, 1, 2, 10, 2, 2]})
    with pytest.raises(InputError, match="1 planes occur more than once: 'e_p_A01_1_w1_10'"):
        screen.read_table(tmp_path / "twice.csv", z="mean")


def test_planes_and_time_points_of_a_table_with_one_column_a_channel(tmp_path):
    rows = [(well, t, z, f"{well}_{t}_{z}") for well in ("A1", "B2") for t in (0, 6) for z in ("z1", "z2")]
    write(tmp_path, t={"experiment": "e", "plate": "p", **dict(zip(("well", "t", "z", "path_a"), zip(*rows)))})
    with pytest.raises(InputError, match=r"several values of 't', '0', '6': choose with --t"):
        screen.read_table(tmp_path / "t.csv", z="max")
    table = screen.read_table(tmp_path / "t.csv", z="max", t=1)
    assert table["path_a"].tolist() == [
        tuple(str(tmp_path / f"{well}_6_z{z}") for z in (1, 2)) for well in ("A1", "B2")
    ]
    assert screen.read_table(tmp_path / "t.csv", z=0, t=0)["path_a"].tolist()[1] == str(tmp_path / "B2_0_z1")


def test_columns_named_z_and_t_that_are_one_value_a_site_need_no_choice(tmp_path):
    write(tmp_path, t={"experiment": "e", "plate": "p", "well": ["A1", "A2"], "z": [3, 4], "path_a": ["x", "y"]})
    assert screen.read_table(tmp_path / "t.csv")["z"].tolist() == [3, 4]


def test_no_word_is_taken_for_a_control_unless_it_is_named(tmp_path):
    words = ["empty", "DMSO", "EMPTY_control", "CRISPR_control", "untreated", "negative"]
    write(tmp_path, t={"experiment": "e", "plate": "p", "well": [f"A{i}" for i in range(1, 7)], "perturbation": words})
    assert screen.read_table(tmp_path / "t.csv")["control"].tolist() == [""] * 6
    named = screen.read_table(tmp_path / "t.csv", controls=["DMSO", "empty"])
    assert named["control"].tolist() == ["negative", "negative", "", "", "", ""]
    with pytest.raises(InputError, match="'Dmso'"):
        screen.read_table(tmp_path / "t.csv", controls=["Dmso"])
    write(tmp_path, u={"experiment": "e", "plate": "p", "well": ["A1", "A2"], "control": ["empty", "negative"]})
    with pytest.raises(InputError, match="1 rows whose 'control' is none of 'negative', 'positive', '': 'empty'"):
        screen.read_table(tmp_path / "u.csv")


def test_unreadable_tables_are_named(tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"PAR1 no more")
    (tmp_path / "empty.csv").write_text("")
    for name in ("t.parquet", "empty.csv"):
        with pytest.raises(InputError, match=f"{name} cannot be read as a table"):
            screen.load_table(tmp_path / name)
    with pytest.raises(MissingFileError, match=r"no\.csv"):
        screen.load_table(tmp_path / "no.csv")


# ------------------------------------------------------------------------------------------------- columns and checks


@given(st.lists(st.tuples(NAMES, st.floats(-1e6, 1e6)), min_size=1))
def test_joined_columns_can_be_taken_apart_again(rows):
    table = pd.DataFrame(rows, columns=["drug", "dose"])
    made = screen.apply_columns(
        table, {"both": "{drug}@{dose}", "perturbation": "both:^(.*)@", "number": "both:@(.*)$"}
    )
    assert made["perturbation"].tolist() == table["drug"].tolist()
    np.testing.assert_allclose(made["number"].astype(float), table["dose"], rtol=1e-11, atol=1e-300)
    pd.testing.assert_frame_equal(made[["drug", "dose"]], table)


def test_specs_name_columns_join_them_or_take_a_part():
    table = pd.DataFrame({"plate": ["Week1_2", "Week10_3"], "a:b": [1, 2], "compound": ["x", None], "well": [1.0, 2.0]})
    specs = {
        "experiment": "plate:^(Week[0-9]{1,2})",
        "batch": "a:b",
        "perturbation": "{compound}@{a:b}",
        "plate": "well",
    }
    made = screen.apply_columns(table, specs)
    assert made["experiment"].tolist() == ["Week1", "Week10"]
    assert made["batch"].tolist() == [1, 2]
    assert [p if isinstance(p, str) else None for p in made["perturbation"]] == ["x@1", None]
    assert made["plate"].tolist() == [1.0, 2.0]
    assert made["plate_original"].tolist() == ["Week1_2", "Week10_3"]
    assert table.columns.tolist() == ["plate", "a:b", "compound", "well"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("Plat", r"plate=Plat: there is no such column.*'name', 'batch'"),
        ("{name}_{no}", r"no column 'no'; it has name, batch"),
        ("no:^(x)", "there is no such column"),
        ("name:^(x", "not a regular expression"),
        ("name:^x", "has 0 groups"),
        ("name:^(y)", r"does not match 2 values: 'x1', 'x2'"),
    ],
)
def test_specs_that_cannot_be_followed_are_explained(spec, message):
    table = pd.DataFrame({"name": ["x1", "x2", None], "batch": [1, 2, 3]})
    with pytest.raises(InputError, match=message):
        screen.apply_columns(table, {"plate": spec})


@given(st.lists(st.one_of(st.none(), st.integers(-(2**53), 2**53)), min_size=1))
def test_text_of_whole_numbers_has_no_point_even_beside_missing_ones(values):
    column = pd.Series(values, dtype=float)
    assert screen.text(column).tolist() == [None if v is None else str(int(float(v))) for v in values]


def test_text_of_float32_and_categories():
    assert screen.text(pd.Series(np.array([0.3, 1e-4], dtype=np.float32))).tolist() == ["0.3", "0.0001"]
    assert screen.text(pd.Series(["b", None, "a"], dtype="category")).tolist() == ["b", None, "a"]


def test_wells_match_whatever_their_zeros():
    assert screen.well_names(pd.Series(["A1", "A01", "aa1", "A11", None])).tolist() == [
        "A01",
        "A01",
        "AA01",
        "A11",
        None,
    ]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1, 2]), st.sampled_from([0.5, np.nan])), min_size=1))
def test_collapse_keeps_what_is_constant_in_every_group(rows):
    table = pd.DataFrame(rows, columns=["key", "x", "y"])
    one, groups, varying = screen.collapse(table, ["key"])
    counts = table.groupby("key")[["x", "y"]].nunique(dropna=False).max()
    assert varying == [name for name in ("x", "y") if counts[name] > 1]
    pd.testing.assert_frame_equal(one.iloc[groups].reset_index(drop=True), table.drop(columns=varying))
    assert len(one) == table["key"].nunique()


def valid(n=8):
    wells = [f"A{i + 1:02d}" for i in range(n)]
    return pd.DataFrame({"experiment": "e", "plate": "1", "well": wells, "site": 1, "control": ""})


def test_validate_lists_all_faults_at_once_with_the_first_rows_and_the_count():
    screen.validate(valid())
    table = valid()
    table.loc[[0, 1, 2, 3, 4, 5], "well"] = ["X0", "1A", "ZZ1", "A49", "DMSO", "A-1"]
    table.loc[6, "control"] = "DMSO"
    table.loc[7, "plate"] = None
    table = pd.concat([table, table.iloc[[6]]])
    with pytest.raises(InputError) as caught:
        screen.validate(table)
    message = str(caught.value)
    assert "1 rows without a value for 'plate': 'e_?_A08_1'" in message
    assert "6 rows whose well name is not understood" in message
    assert "'e_1_X0_1', 'e_1_1A_1', 'e_1_ZZ1_1', 'e_1_A49_1', 'e_1_DMSO_1' and 1 more" in message
    assert "1 rows that occur more than once: 'e_1_A07_1'" in message
    assert "2 rows whose 'control' is none of 'negative', 'positive', '': 'DMSO', 'DMSO'" in message


def test_validate_asks_for_its_columns():
    with pytest.raises(InputError, match="the screen table has no column 'site', 'control'"):
        screen.validate(valid().drop(columns=["site", "control"]))


def test_tables_need_none_of_the_heavy_packages():
    program = (
        "import sys, cellica.screen, cellica.profiles\n"
        "heavy = {'torch', 'timm', 'scanpy', 'matplotlib', 'plotly'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_of_digits_stay_as_they_are_written(tmp_path):
    rows = [
        "plate,perturbation,barcode,dose,count",
        "1E4,007,12345678901234567,1.10,3",
        "10E3,7,12345678901234568,1.1,4",
        "10000,,,,",
    ]
    (tmp_path / "t.csv").write_text("\n".join(rows) + "\n")
    table = screen.load_table(tmp_path / "t.csv")
    assert table["plate"].tolist() == ["1E4", "10E3", "10000"]
    assert table["perturbation"].tolist() == ["007", "7", None]
    assert table["barcode"].nunique() == 2
    assert table["dose"].dropna().tolist() == [1.1, 1.1]
    assert table["count"].dropna().tolist() == [3, 4]


def test_words_that_are_read_as_missing_are_counted(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(screen, "say", said.append)
    (tmp_path / "t.csv").write_text("well,perturbation,dose\nA1,NA,1.5\nA2,None,\nA3,,nan\nA4,aspirin,2\n")
    table = screen.load_table(tmp_path / "t.csv")
    assert table["perturbation"].isna().sum() == 3
    assert len(said) == 1
    assert "2 cells of 'perturbation' are read as missing: 'NA', 'None'" in said[0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("plate,well\nr1,01,A01\nr2,02,A02\n", "rows have more fields than the header"),
        ("plate;well\n01;A01\n", "not separated by ','"),
        ("plate,_index\n01,A01\n", "'_index' for itself"),
        ("plate,well\nK\xf6ln,A01\n".encode("latin-1"), "save it as CSV in UTF-8"),
    ],
)
def test_tables_that_would_be_misread_are_refused(tmp_path, text, told):
    (tmp_path / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=told):
        screen.load_table(tmp_path / "t.csv")


def test_empty_fields_at_the_end_of_each_row_shift_nothing(tmp_path):
    (tmp_path / "t.csv").write_text("plate,well\n01,A01,\n02,A02,\n")
    table = screen.load_table(tmp_path / "t.csv")
    assert table["plate"].tolist() == ["01", "02"]
    assert table["well"].tolist() == ["A01", "A02"]


def test_line_breaks_in_cells_and_lists_are_told(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(screen, "say", said.append)
    (tmp_path / "t.csv").write_text('plate,name\n1,"c0\n2,c1\n3,c2"\n4,c3\n')
    assert len(screen.load_table(tmp_path / "t.csv")) == 2
    assert "1 cells of 'name' hold line breaks, as where a closing quote is missing" in said[0]
    pd.DataFrame({"plate": ["1"], "embedding": [[1.0, 2.0]]}).to_parquet(tmp_path / "t.parquet")
    assert list(screen.load_table(tmp_path / "t.parquet")) == ["plate"]
    assert "1 columns hold lists and are left out: 'embedding'" in said[1]


def test_a_table_that_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "t.csv")
    for path in (tmp_path / "t.csv", "/dev/zero", tmp_path):
        with pytest.raises(InputError, match="not a regular file"):
            screen.load_table(path)


def test_leading_zeros_of_a_plate_are_kept_and_numbers_stay_numbers(tmp_path):
    (tmp_path / "t.csv").write_text("plate,dose,well\n01,1,A1\n02,10,A2\n")
    table = screen.load_table(tmp_path / "t.csv")
    assert table["plate"].tolist() == ["01", "02"]
    assert table["dose"].tolist() == [1, 10]
