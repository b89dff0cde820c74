import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from cellica import artifacts, correct, report, retrieval, schema
from cellica.plates import ingest
from cellica.schema import InputError, MissingFileError, OutputExistsError, PlateError

SECTIONS = (
    "Summary",
    "What was done",
    "What was dropped, and why",
    "Plates",
    "Before correction",
    "Corrections",
    "Scores",
)
ATTACK = "<script>alert('x')</script>"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """The page as its reader sees it: text, rows of tables, addresses, ids; every element is closed in its turn."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.rows: list[list[str]] = []
        self.removed: list[list[str]] = []
        self.words: list[str] = []
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "data", "action", "srcset"):
                self.addresses.append(str(value))
            if name == "id":
                self.ids.append(str(value))
        if tag == "tr":
            self.rows.append([])
            if ("class", "removed") in attrs:
                self.removed.append(self.rows[-1])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data.strip()

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def wells(experiments: tuple[str, ...] = ("E-0", "E-1", "E-2"), n_wells: int = 24) -> ad.AnnData:
    """Plates of one experiment each, with a strong batch effect in one direction and unlike cell types."""
    rng = np.random.default_rng(0)
    layout = [(e, w) for e in range(len(experiments)) for w in range(n_wells)]
    obs = pd.DataFrame(
        {
            "experiment": [experiments[e] for e, _ in layout],
            "plate": "1",
            "well": [schema.format_well(w // 6, w % 6) for _, w in layout],
            "perturbation": ["EMPTY" if w < 6 else f"gene_{w // 2}" for _, w in layout],
            "control": ["negative" if w < 6 else "" for _, w in layout],
        }
    )
    obs.index = schema.obs_names(obs)
    biology = rng.standard_normal((n_wells, 8))
    x = np.array([biology[w // 2] for _, w in layout]) + rng.standard_normal((len(layout), 8))
    x[:, 0] += 6 * np.array([e for e, _ in layout])
    return ad.AnnData(x.astype(np.float32), obs=obs)


@pytest.fixture(scope="module")
def corrected() -> ad.AnnData:
    adata = wells()
    weights = {"encoder": "camae-mini", "weights": "random (truncated normal, seed 0)"}
    artifacts.add_step(
        adata, artifacts.step("ingest", {}, {"screen": "12" * 32}, plates={"E-0_1": {"sites": 24, "set_aside": 0}})
    )
    artifacts.add_step(
        adata, artifacts.step("ingest", {}, {"screen": "34" * 32}, plates={"E-1_1": {"sites": 23, "set_aside": 1}})
    )
    artifacts.add_step(
        adata, artifacts.step("embed", weights, {"E-0_1.zarr": "abcdef012345" + "6" * 52}, weights_sha256="9" * 64)
    )
    adata.uns["cellica"]["profile"] = {
        "n_sites": 150,
        "sites_not_finite": np.array([f"site_{i}" for i in range(8)], dtype=object),
        "wells_without_sites": np.array([], dtype=object),
    }
    adata.uns["cellica"]["import"] = {
        "n_rows": 12345,
        "embeddings_without_metadata": 2,
        "examples_without_metadata": np.array(["lost_1", "lost_2"], dtype=object),
        "join_table": np.array(["moa.csv"], dtype=object),
        "join_matched": np.array([70]),
        "join_columns_left_out": np.array(["ImageNumber"], dtype=object),
        "join_unmatched_rows": np.array([2]),
        "join_unmatched_in_table": np.array([5]),
    }
    correct.run(adata, "pca_drop+sphere", key_added="drop")
    correct.run(adata, "center")
    return adata


@pytest.fixture(scope="module")
def scores() -> pd.DataFrame:
    rows = [
        ("X", "replicate_map", "all", 0.25, 0.125, 54, 3, "3 wells left out: all-zero"),
        ("X_drop", "replicate_map", "all", 0.75, 0.125, 54, 0, "fitted on the scored wells (transductive)"),
        ("X", "batch_share", "all", np.nan, np.nan, 0, 0, "not applicable: one batch"),
        ("X_tvn", "all", "all", np.nan, np.nan, 0, 0, "tvn needs at least 2 controls"),
        ("baseline:position", "replicate_map", "all", 0.1, 0.125, 54, 0, ""),
    ]
    return pd.DataFrame(rows, columns=list(schema.SCORE_COLUMNS))


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("plates")
    rows = []
    for plate in "123456789":
        row = {"experiment": "E", "plate": plate, "well": "A1", "site": 1, "perturbation": "EMPTY", "control": ""}
        for channel in ("DNA", "ER"):
            row[f"path_{channel}"] = str(folder / f"{plate}_{channel}.png")
            Image.fromarray(np.full((16, 16), 99, np.uint8)).save(row[f"path_{channel}"])
        rows.append({**row, "perturbation_type": "", "cell_type": "", "concentration": 0.0})
    rows.append({**rows[0], "well": "A2", "path_ER": str(folder / "absent.png"), "path_DNA": rows[1]["path_DNA"]})
    rows[1] |= {"path_DNA": str(folder / "2b.png")}
    Image.fromarray(np.eye(16, dtype=np.uint8)).save(rows[1]["path_DNA"])
    table = pd.DataFrame(rows)
    table.index = schema.obs_names(table)
    return ingest(table, folder / "plates").plates


@pytest.fixture(scope="module")
def page(corrected, scores, stores, tmp_path_factory) -> Page:
    out = tmp_path_factory.mktemp("report") / "report.html"
    assert report.write(corrected, out, scores=scores, plates=stores) == out
    return Page(out)


# ---------------------------------------------------------------------------------------------- the page


def test_every_section_is_there_in_order(page):
    found = re.findall("<h2>(.*?)</h2>", page.source)
    assert tuple(html.unescape(title) for title in found) == SECTIONS
    assert [address for address in page.addresses if address.startswith("#") and address[1:] not in page.ids] == []


def test_the_page_loads_nothing(page):
    assert page.addresses
    assert all(address.startswith(("#", "data:image/")) for address in page.addresses)
    assert not {"script", "link", "iframe", "object", "embed"} & set(page.tags)
    assert not re.search(r"https?:|@import|url\((?!#)", page.source)
    assert "default-src 'none'" in page.source


def test_ids_are_unique(page):
    assert len(page.ids) == len(set(page.ids))


def test_figures_take_the_colour_of_the_page(page):
    assert (
        page.tags.count("svg") == 2 + 2 + 2 + 1 + 1 + 1
    )  # before, two corrections, shares, plate maps, bars of what has values
    assert report.INK not in page.source
    assert "currentColor" in page.source
    assert "prefers-color-scheme: dark" in page.source


def test_random_weights_are_said_first(page):
    assert page.text.index("weights are random") < page.text.index("What was done")
    assert page.tags.count("p") > 0
    assert 'class="warning"' in page.source


def test_trained_weights_raise_no_warning(tmp_path):
    adata = wells()
    artifacts.add_step(adata, artifacts.step("embed", {"encoder": "openphenom", "weights": "model.safetensors"}))
    text = Page(report.write(adata, tmp_path / "r.html")).text
    assert "openphenom, weights: model.safetensors" in text
    assert "weights are random" not in text


def test_plates_with_ranges_of_their_own_are_one_row(tmp_path):
    adata = wells()
    for i in range(2):
        ranges = {"w1": [i, 200], "w2": [0, 100 + i]}
        artifacts.add_step(adata, artifacts.step("ingest", {}, {f"p{i}": "0" * 64}, intensity_ranges=ranges))
    text = Page(report.write(adata, tmp_path / "r.html")).source
    assert "2 different ones, in the plates" in text


def test_summary_counts(page):
    for name, value in {"wells": 72, "plates": 3, "experiments": 3, "features": 8, "negative controls": 18}.items():
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page.source


def test_provenance_is_whole_with_short_hashes(page):
    steps = [row for row in page.rows if row[0] in ("ingest", "embed", "correct") and "(anndata" in row[1]]
    assert [row[0] for row in steps] == ["ingest", "embed", "correct", "correct"]
    ingested, embedded, drop, _ = steps
    assert ingested[2] == ""
    assert "screen 121212121212, screen 343434343434" in ingested[3]
    assert "weights = random (truncated normal, seed 0)" in embedded[2]
    assert embedded[3] == "E-0_1.zarr abcdef012345"
    assert "9" * 12 in embedded[2]
    assert "9" * 13 not in page.source
    assert "method = pca_drop+sphere" in drop[2]


def test_what_was_dropped_is_counted_and_named(page):
    rows = {(row[0], row[1]): row[2:] for row in page.rows if len(row) == 4}
    assert rows["ingest", "sites set aside"] == ["1", "2 plates"]
    assert rows["ingest", "sites written"] == ["47", "2 plates"]
    assert rows["ingest, plates shown", "images set aside: file absent"] == ["1", "E_1_A2_1 ER"]
    assert rows["import", "rows read"] == ["12,345", ""]
    assert rows["import", "embeddings left out: no metadata"] == ["2", "lost_1, lost_2"]
    assert (
        rows["import", "joined moa.csv"][1]
        == "columns left out: ImageNumber, 70 matched, 5 unmatched in table, 2 unmatched rows"
    )
    assert rows["profile", "sites left out: embedding not finite"] == [
        "8",
        "site_0, site_1, site_2, site_3, site_4 and 3 more",
    ]
    assert rows["profile", "wells left out: none of their sites is finite"] == ["0", ""]


def test_notes_of_each_correction_are_there(page, corrected):
    for key in ("drop", "center"):
        assert f"<h3>{key}</h3>" in page.source
        for note in corrected.uns["cellica"][key]["notes"]:
            assert f"<li>{html.escape(note, quote=False)}</li>" in page.source.replace("&#39;", "'")
    assert "components removed as batch" in page.text


def test_component_table_is_whole(page, corrected):
    table = corrected.uns["cellica"]["drop"]["components"]
    start = page.rows.index(["component", *table.columns])
    rows = {row[0]: row[1:] for row in page.rows[start + 1 : start + 1 + len(table)]}
    assert set(rows) == set(table.index)
    for index, cells in rows.items():
        shown = dict(zip(table.columns, cells))
        assert float(shown["batch_r2"]) == pytest.approx(table.loc[index, "batch_r2"], rel=5e-3)
        assert shown["stability"] == "–"  # principal components have none
        assert shown["label"] == table.loc[index, "label"]
        assert shown["removed"] == ("yes" if table.loc[index, "removed"] else "no")
    assert {row[0] for row in page.removed} == set(table.index[table["removed"]])
    assert 0 < len(page.removed) < len(table)
    assert page.rows[start + 1] in page.removed


def test_maps_of_removed_components_name_component_and_plate(page, corrected):
    table = corrected.uns["cellica"]["drop"]["components"]
    assert all(page.words.count(plate) == 1 for plate in ("E-0_1", "E-1_1", "E-2_1"))
    shown = table[table["removed"]].sort_values("batch_r2", ascending=False).index[: report.MAX_MAPS[0]]
    assert [word for word in page.words if word.startswith("component ")] == [f"component {index}" for index in shown]


def test_scores_stand_with_chance_and_notes(page, scores):
    start = page.rows.index(["representation", "replicate_map", "batch_share"])
    assert page.rows[start + 1 : start + 5] == [
        ["X", "0.25chance 0.125", "not applicable"],
        ["X_drop", "0.75chance 0.125", "not applicable"],
        ["X_tvn", "not applicable", "not applicable"],
        ["baseline:position", "0.1chance 0.125", "not applicable"],
    ]
    assert "<li>X_tvn: tvn needs at least 2 controls</li>" in page.source
    tidy = page.rows[page.rows.index(list(schema.SCORE_COLUMNS)) + 1 :]
    assert len(tidy) == len(scores)
    assert tidy[0] == ["X", "replicate_map", "all", "0.25", "0.125", "54", "3", "3 wells left out: all-zero"]
    assert tidy[2][3:5] == ["–", "–"]
    assert [row[-1] for row in tidy] == list(scores["note"])


def test_pictures_are_a_choice_of_the_plates(page):
    assert page.tags.count("img") == report.MAX_PICTURES + 1
    assert "8 of 9 plates" in page.text
    shown = re.findall("<figcaption>Plate (.*?)</figcaption>", page.source)
    assert (shown[0], shown[-1]) == ("E_1", "E_9")


# ---------------------------------------------------------------------------------------------- inputs


def test_what_users_name_is_escaped(tmp_path, scores):
    adata = wells(("E-0", ATTACK, '" onload="x'))
    adata.obs["perturbation"] = ["EMPTY" if c else ATTACK for c in adata.obs["control"]]
    artifacts.add_step(adata, artifacts.step("import", {"columns": {ATTACK: ATTACK}}, {ATTACK: "0" * 64}))
    adata.uns["cellica"]["import"] = {"rows_not_finite": np.array([ATTACK], dtype=object), ATTACK: 3}
    correct.run(adata, "pca_drop", key_added=ATTACK.replace("/", "|"))
    adata.uns["cellica"][ATTACK.replace("/", "|")]["notes"] = [ATTACK]
    scores = scores.assign(note=ATTACK, group=ATTACK, rep=ATTACK + scores["rep"])
    page = Page(report.write(adata, tmp_path / "r.html", scores=scores))
    assert "script" not in page.tags
    assert page.text.count(ATTACK) > 10
    assert len([tag for tag in page.tags if tag == "svg"]) > 5


def test_what_is_missing_is_said(tmp_path):
    page = Page(report.write(ad.AnnData(np.eye(4, dtype=np.float32)), tmp_path / "r.html"))
    assert tuple(re.findall("<h2>(.*?)</h2>", page.source)) == SECTIONS
    for sentence in (
        "No provenance is recorded",
        "No account of an import",
        "No plates were given",
        "These wells hold no corrections",
        "No score table was given",
        "obs has no column 'experiment'",
    ):
        assert sentence in page.text


def test_too_few_wells_for_a_figure_are_said(tmp_path):
    page = Page(report.write(wells(("E",), 2), tmp_path / "r.html"))
    assert "an embedding plot needs 3 finite wells" in page.text


def test_a_correction_that_no_longer_fits_the_wells_is_no_crash(corrected, tmp_path):
    adata = corrected[corrected.obs["control"] == ""].copy()
    adata.uns["cellica"]["drop"]["parameters"]["controls"] = ["EMPTY"]
    del adata.uns["cellica"]["drop"]["parameters"]["batch_key"]
    adata.obs = adata.obs.drop(columns="well")
    page = Page(report.write(adata, tmp_path / "r.html"))
    assert "controls 'EMPTY' not found" in page.text
    assert "Plate maps need the columns experiment, plate and well" in page.text


def test_several_cell_types_are_drawn(tmp_path):
    adata = wells()
    assert Page(report.write(adata, tmp_path / "a.html")).tags.count("svg") == 2
    adata.obs["cell_type"] = ["HUVEC", "RPE"] * (adata.n_obs // 2)
    page = Page(report.write(adata, tmp_path / "b.html"))
    assert page.tags.count("svg") == 3
    assert {"HUVEC", "RPE"} <= set(page.words)


def test_names_in_any_script_are_shown(tmp_path):
    assert "薬剤" in Page(report.write(wells(("薬剤", "E")), tmp_path / "r.html")).words


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
def test_a_file_gives_the_same_page_as_memory(corrected, scores, tmp_path, suffix):
    artifacts.write_adata(corrected, tmp_path / f"wells{suffix}")
    artifacts.write_table(scores, tmp_path / "scores.csv")
    read = artifacts.read_adata(tmp_path / f"wells{suffix}")
    first = report.write(corrected, tmp_path / "1.html", scores=scores)
    second = report.write(read, tmp_path / "2.html", scores=report.read_scores(tmp_path / "scores.csv"))
    assert first.read_text() == second.read_text()


def test_the_data_is_left_as_it_is(corrected, scores, tmp_path):
    before, table = corrected.copy(), scores.copy()
    report.write(corrected, tmp_path / "r.html", scores=scores)
    pd.testing.assert_frame_equal(corrected.obs, before.obs)
    pd.testing.assert_frame_equal(scores, table)
    assert set(corrected.obsm) == set(before.obsm)
    assert list(corrected.uns["cellica"]) == list(before.uns["cellica"])
    np.testing.assert_array_equal(corrected.X, before.X)


def test_a_large_screen_stays_small(tmp_path):
    adata = ad.concat([wells()] * 280, index_unique="-")
    adata.X += np.random.default_rng(0).standard_normal(adata.shape).astype(np.float32)
    assert adata.n_obs > 20_000
    assert report.write(adata, tmp_path / "r.html").stat().st_size < 600_000


# ---------------------------------------------------------------------------------------------- faults


def test_nothing_is_overwritten_unasked(tmp_path):
    out = tmp_path / "r.html"
    out.write_text("mine")
    with pytest.raises(OutputExistsError, match="exists already"):
        report.write(wells(), out)
    assert out.read_text() == "mine"
    report.write(wells(), out, force=True)
    assert "Report on 72 wells" in out.read_text()
    with pytest.raises(InputError, match="is a folder: name a file"):
        report.write(wells(), tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_bad_input_is_named_before_anything_is_written(tmp_path, scores):
    with pytest.raises(InputError, match="the score table has no column 'chance'"):
        report.write(wells(), tmp_path / "r.html", scores=scores.drop(columns="chance"))
    with pytest.raises(InputError, match="no wells to report on"):
        report.write(wells()[:0], tmp_path / "r.html")
    with pytest.raises(MissingFileError, match=r"plate '.*none\.zarr' does not exist"):
        report.write(wells(), tmp_path / "r.html", plates=[tmp_path / "none.zarr"])
    (tmp_path / "empty.zarr").mkdir()
    with pytest.raises(PlateError, match="is not a plate"):
        report.write(wells(), tmp_path / "r.html", plates=[tmp_path / "empty.zarr"])
    assert not (tmp_path / "r.html").exists()


def test_score_tables_round_trip_and_others_are_refused(tmp_path, scores):
    artifacts.write_table(scores, tmp_path / "s.csv")
    pd.testing.assert_frame_equal(report.read_scores(tmp_path / "s.csv"), scores, check_dtype=False)
    with pytest.raises(MissingFileError, match="score table"):
        report.read_scores(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="is no score table"):
        report.read_scores(tmp_path / "other.csv")
    (tmp_path / "words.csv").write_text(",".join(schema.SCORE_COLUMNS) + "\nX,map,all,high,0,1,0,\n")
    with pytest.raises(InputError, match="is no score table"):
        report.read_scores(tmp_path / "words.csv")


def test_a_report_needs_neither_torch_nor_pyplot(tmp_path):
    code = (
        "import sys, numpy, anndata; import cellica.report as r;"
        "assert 'matplotlib' not in sys.modules, 'matplotlib at import';"
        f"r.write(anndata.AnnData(numpy.eye(4, dtype='float32')), {str(tmp_path / 'r.html')!r});"
        "bad = {'torch', 'timm', 'scanpy', 'matplotlib.pyplot', 'plotly'} & set(sys.modules);"
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_scores_that_are_kept_with_the_wells_are_shown(tmp_path):
    adata = wells()
    table = retrieval.compare(adata, ["none", "center"], scores=["retrieval", "batch"])
    adata.uns.setdefault("cellica", {})["scores"] = table
    page = Page(report.write(adata, tmp_path / "r.html"))
    assert "tradeoff of methods" in page.source
    assert "gains of methods" in page.source
    assert "do wells find the same perturbation in other batches? Better: higher." in page.text
    assert "over batches" not in page.text.split("All scores and their notes")[0]
