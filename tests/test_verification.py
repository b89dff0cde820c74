"""Embeddings against published ones: what agrees, what does not, and what has no partner."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellica import artifacts, encoder, profiles, verification
from cellica.schema import InputError, MissingFileError


def site_embeddings(n_wells=6, n_features=12, seed=0):
    """Two sites a well of one plate, and one well with a single site; neighbours are alike, as real ones are."""
    rng = np.random.default_rng(seed)
    wells = [f"B{2 + i // 2:02d}" for i in range(2 * n_wells - 1)]
    obs = pd.DataFrame(
        {"experiment": "HUVEC-01", "plate": "1", "well": wells, "site": [1 + i % 2 for i in range(len(wells))]}
    )
    obs.index = [f"HUVEC-01_1_{well}_{site}" for well, site in zip(obs["well"], obs["site"])]
    x = rng.normal(size=(1, n_features)) * 3 + rng.normal(size=(len(obs), n_features))
    return ad.AnnData(x.astype(np.float32), obs=obs)


def table_of(ids, values, key="well_id"):
    columns = [f"feature_{i}" for i in range(values.shape[1])]
    return pd.DataFrame(values, columns=columns).assign(**{key: list(ids)})


def well_means(adata):
    ids = adata.obs_names.str.rsplit("_", n=1).str[0]
    means = pd.DataFrame(adata.X.astype(np.float64)).groupby(np.asarray(ids)).mean()
    return list(means.index), means.to_numpy()


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".csv.gz", ".h5ad"])
@pytest.mark.parametrize("unit", ["wells", "sites"])
def test_the_same_embeddings_agree_whatever_their_file(tmp_path, suffix, unit):
    adata = site_embeddings()
    ids, values = well_means(adata) if unit == "wells" else (list(adata.obs_names), adata.X)
    order = np.random.default_rng(1).permutation(len(ids))
    table = table_of(np.array(ids)[order], values[order] * 2.5, "well_id" if unit == "wells" else "site_id")
    file = tmp_path / f"published{suffix}"
    if suffix == ".h5ad":
        key = table.columns[-1]
        published = ad.AnnData(
            table.drop(columns=key).to_numpy(np.float32), obs=pd.DataFrame(index=table[key].to_list())
        )
        artifacts.write_adata(published, file)
    else:
        table.to_parquet(file) if suffix == ".parquet" else table.to_csv(file, index=False)
    result = encoder.verify(adata, file)
    assert result.unit == unit
    assert result.agrees
    assert len(result.cosine) == len(ids)
    assert result.worst == pytest.approx(1, abs=1e-6)
    assert result.only_here == result.only_published == []
    assert result.unrelated < 0.99
    assert "WARNING" not in result.summary()
    assert result.own_nearest == 1


def test_wells_are_compared_with_published_wells(tmp_path):
    adata = site_embeddings()
    wells = profiles.wells(adata)
    table_of(*well_means(adata)).to_parquet(tmp_path / "p.parquet")
    of_sites, of_wells = encoder.verify(adata, tmp_path / "p.parquet"), encoder.verify(wells, tmp_path / "p.parquet")
    pd.testing.assert_series_equal(of_sites.cosine, of_wells.cosine, check_exact=False, atol=1e-6)


def test_cosines_are_those_of_the_definition(tmp_path):
    adata = site_embeddings()
    ids, values = well_means(adata)
    theirs = values + np.random.default_rng(2).normal(size=values.shape) * np.linspace(0, 1, len(ids))[:, None]
    table_of(ids, theirs).to_parquet(tmp_path / "p.parquet")
    result = encoder.verify(adata, tmp_path / "p.parquet")
    expected = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(values, theirs.astype(np.float32))]
    np.testing.assert_allclose(result.cosine, expected, rtol=1e-5)
    assert (result.median, result.worst) == pytest.approx((np.median(expected), min(expected)), rel=1e-5)
    assert not result.agrees
    below = [one for one, value in zip(ids, expected) if value < 0.99]
    told = result.summary()
    assert f"WARNING: these are NOT the published embeddings: {len(below)} of {len(ids)} wells" in told
    assert ids[int(np.argmin(expected))] in told


def test_alike_embeddings_of_other_wells_do_not_pass(tmp_path):
    """An encoder that makes nearly the same of every well: each cosine is high, and each well is another's."""
    adata = site_embeddings()
    adata.X = (adata.X / 1000 + 1).astype(np.float32)
    ids, values = well_means(adata)
    table_of(np.roll(ids, 1), values).to_parquet(tmp_path / "p.parquet")
    result = encoder.verify(adata, tmp_path / "p.parquet")
    assert result.worst > 0.99
    assert result.own_nearest < 0.5
    assert not result.agrees
    assert "ids may be shifted" in result.summary()
    table_of(ids, values).to_parquet(tmp_path / "right.parquet")
    assert encoder.verify(adata, tmp_path / "right.parquet").agrees


def test_what_has_no_partner_is_counted_both_ways(tmp_path):
    adata = site_embeddings()
    ids, values = well_means(adata)
    others = ["HUVEC-01_1_O23", "HUVEC-01_2_B02", "HUVEC-02_1_B02"]  # of this plate, and of plates that are not here
    table = table_of([*ids[1:], *others], np.vstack([values[1:], values[:3]]))
    table.to_csv(tmp_path / "p.csv", index=False)
    result = encoder.verify(adata, tmp_path / "p.csv")
    assert result.only_here == [ids[0]]
    assert result.only_published == ["HUVEC-01_1_O23"]
    assert "1 wells only published, of these plates: 'HUVEC-01_1_O23'" in result.summary()


def test_it_is_recorded(tmp_path):
    adata = site_embeddings()
    table_of(*well_means(adata)).to_parquet(tmp_path / "p.parquet")
    encoder.verify(adata, tmp_path / "p.parquet")
    artifacts.write_adata(adata, tmp_path / "sites.h5ad")
    again = artifacts.read_adata(tmp_path / "sites.h5ad")
    found = again.uns["cellica"]["verify"]
    assert (found["unit"], found["n_shared"], bool(found["agrees"])) == ("wells", 6, True)
    step = artifacts.provenance(again)[-1]
    assert (step["verb"], step["plates"]["HUVEC-01_1"]["median"]) == ("verify", pytest.approx(1))
    assert step["inputs"] == {"p.parquet": artifacts.sha256(tmp_path / "p.parquet")}


def test_features_are_in_order_of_their_numbers(tmp_path):
    adata = site_embeddings()
    table = table_of(*well_means(adata))
    table[sorted(table.columns)].to_parquet(tmp_path / "p.parquet")  # feature_0, feature_1, feature_10, feature_11, ...
    assert encoder.verify(adata, tmp_path / "p.parquet").agrees


def test_rows_that_are_not_finite_are_no_partners(tmp_path):
    adata = site_embeddings()
    ids, values = well_means(adata)
    values = values.copy()
    values[2, 3] = np.nan
    table_of(ids, values).to_parquet(tmp_path / "p.parquet")
    assert encoder.verify(adata, tmp_path / "p.parquet").only_here == [ids[2]]


def test_one_well_alone(tmp_path):
    adata = site_embeddings(1)
    table_of(*well_means(adata)).to_parquet(tmp_path / "p.parquet")
    result = encoder.verify(adata, tmp_path / "p.parquet")
    assert result.agrees
    assert np.isnan(result.unrelated)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.drop(columns="well_id"), "it needs a column well_id or site_id"),
        (lambda t: t[["well_id"]].assign(other=1.0), "columns feature_0"),
        (lambda t: t.drop(columns="feature_3"), "embeddings of 11 features, not of 12"),
        (lambda t: t.assign(well_id=t["well_id"].str.replace("HUVEC", "RPE")), "has none of the 6 wells"),
        (lambda t: pd.concat([t, t.iloc[:2]]), "has 2 ids twice"),
    ],
)
def test_files_that_cannot_be_compared(tmp_path, change, told):
    adata = site_embeddings()
    change(table_of(*well_means(adata))).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(InputError) as error:
        encoder.verify(adata, tmp_path / "p.parquet")
    assert told in str(error.value)
    assert "verify" not in adata.uns.get("cellica", {})


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(MissingFileError, match="published embeddings"):
        verification.read_published(tmp_path / "p.parquet")
