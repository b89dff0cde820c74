"""Figures of score tables: what is drawn is what the tables hold."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba

from cellica import plot, retrieval, simulate
from cellica.schema import InputError
from cellica.scores import score_row, score_table


@pytest.fixture(scope="module")
def wells() -> ad.AnnData:
    return simulate.profiles("small", n_features=16, random_state=0)


@pytest.fixture(scope="module")
def compared(wells) -> pd.DataFrame:
    return retrieval.compare(wells, ["none", "sphere", "center"], scores=["retrieval", "batch"])


def drawn_points(ax):
    return np.concatenate([points.get_offsets().data for points in ax.collections if hasattr(points, "get_offsets")])


def test_tradeoff_puts_each_method_at_its_batch_share_and_score(compared):
    ax = plot.tradeoff(compared)
    wide = compared[compared["group"] == "all"].pivot_table("value", "rep", "metric")
    metric = "replicate_map_held_out"
    assert ax.get_ylabel() == f"{metric} (higher is better)"
    assert ax.get_title(loc="left") == f"without {metric}: baseline:position"
    found = {tuple(np.round(bars[0].get_xydata()[0], 6)) for bars in ax.containers}
    known = wide[[metric, "batch_share"]].dropna()
    assert found == {tuple(np.round(pair, 6)) for pair in known[["batch_share", metric]].to_numpy()}
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["none", "sphere", "center"]
    other = plot.tradeoff(compared, metric="replicate_map")
    assert other.get_ylabel() == "replicate_map (higher is better)"
    assert [text.get_text() for text in other.get_legend().get_texts()][-1] == "baseline:position"
    with pytest.raises(InputError, match="no representation has both 'nsc' and 'batch_share'"):
        plot.tradeoff(compared, metric="nsc")


def test_gains_are_open_where_zero_is_within(compared):
    table = compared.copy()
    chosen = (table["metric"] == "replicate_map") & table["gain"].notna()
    n = chosen.sum()
    table.loc[chosen, ["gain", "gain_low", "gain_high"]] = [[0.2, 0.1, 0.3], [0.1, -0.1, 0.3], [-0.2, -0.3, -0.1]][:n]
    ax = plot.gains(table, metric="replicate_map")
    points = next(one for one in ax.collections if len(one.get_offsets()) == n)
    assert points.get_offsets().data[:, 0].tolist() == [0.2, 0.1, -0.2][:n]
    filled = [face[3] > 0 for face in points.get_facecolors()]
    assert filled == [True, False, True][:n]
    assert [label.get_text() for label in ax.get_yticklabels()][:2] == ["sphere", "center"]
    with pytest.raises(InputError, match="no gains in 'nsc' over 'none'"):
        plot.gains(table, metric="nsc")


def test_activity_fills_who_passes(wells):
    detail = retrieval.activity(wells, null_size=200)
    ax = plot.activity(detail)
    points = drawn_points(ax)
    assert len(points) == len(detail)
    expected = np.column_stack([detail["mean_average_precision"], -np.log10(detail["p_adjusted"])])
    assert sorted(map(tuple, points.round(9))) == sorted(map(tuple, expected.round(9)))
    assert f"{(detail['p_adjusted'] < 0.05).sum()} below 0.05" in [t.get_text() for t in ax.get_legend().get_texts()]
    with pytest.raises(InputError, match="'p_adjusted'"):
        plot.activity(detail.drop(columns="p_adjusted"))


def test_concentrations_are_in_order_of_dose():
    rows = [
        score_row(rep, "compound_gene_ap", value, 0.3, 9, 0, [], group=dose, interval=(value - 0.1, value + 0.1, 9))
        for rep, shift in (("X", 0.0), ("X_ica", 0.1))
        for dose, value in (("10", 0.5 + shift), ("0.1", 0.35 + shift), ("1", 0.4 + shift), ("max", 0.6 + shift))
    ]
    ax = plot.concentrations(score_table(rows))
    lines = [bars[0].get_xydata() for bars in ax.containers]
    np.testing.assert_allclose(lines[0], [[0.1, 0.35], [1, 0.4], [10, 0.5]])
    np.testing.assert_allclose(lines[1][:, 1], [0.45, 0.5, 0.6])
    assert ax.get_xscale() == "log"
    with pytest.raises(InputError, match="no values of 'compound_gene_auroc'"):
        plot.concentrations(score_table(rows), metric="compound_gene_auroc")


def test_probes_show_every_auroc():
    detail = pd.DataFrame({"held_out": list("aabb"), "auroc": [0.9, 0.7, 0.5, 0.6], "perturbation": list("xyxy")})
    ax = plot.probes(detail)
    assert sorted(drawn_points(ax)[:, 0]) == [0.5, 0.6, 0.7, 0.9]
    means = [line.get_xdata()[0] for line in ax.lines[:2]]
    assert means == pytest.approx([0.8, 0.55])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]


def test_clusters_show_within_against_between():
    detail = pd.DataFrame({"within": [0.5, 0.1], "between": [0.0, 0.1], "similar": [True, False]})
    ax = plot.clusters(detail)
    assert sorted(map(tuple, drawn_points(ax))) == [(0.0, 0.5), (0.1, 0.1)]
    assert tuple(ax.collections[0].get_facecolors()[0]) == to_rgba("#4477AA")


def test_all_of_them_draw_on_given_axes_and_save(compared, tmp_path):
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    assert plot.tradeoff(compared, ax=ax) is ax
    ax.get_figure().savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
