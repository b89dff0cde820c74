"""Files of others: they run no code, lead out of no folder, and claim no memory."""

import ast
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cellica import checkpoints, cli, fetch, images, plates, schema, screen

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "cellica").glob("*.py"), *(ROOT / "workflows").rglob("*.py")])

# ---------------------------------------------------------------------------------------------- no code

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "code", "runpy"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {"read_pickle", "to_pickle", "load_module"}
LOADERS = {
    ("joblib", "load"),
    ("joblib", "dump"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("hub", "load"),
    ("os", "system"),
    ("os", "popen"),
}


def unsafe(source: str) -> list[str]:
    """What in a source would run code that a file brings."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"import {name}" for name in names if name.partition(".")[0] in MODULES]
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = getattr(getattr(node.func, "value", None), "id", "")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        builtin = isinstance(node.func, ast.Name) and name in BUILTINS
        if builtin or name in CALLS or (owner, name) in LOADERS:
            found.append(f"{owner}.{name}")
        if "allow_pickle" in given and getattr(given["allow_pickle"], "value", True) is not False:
            found.append("allow_pickle")
        if "shell" in given and getattr(given["shell"], "value", True) is not False:
            found.append("shell")
        if "trust_remote_code" in given:
            found.append("trust_remote_code")
        if (owner, name) == ("torch", "load") and getattr(given.get("weights_only"), "value", None) is not True:
            found.append("torch.load")
    return found


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_source_runs_what_a_file_brings(file):
    assert unsafe(file.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "exec(text)",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=flag)",
        "joblib.load(f)",
        "pd.read_pickle(f)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "yaml.load(f)",
    ],
)
def test_the_scan_finds_what_it_looks_for(source):
    assert unsafe(source)


def test_a_checkpoint_runs_no_code(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / "weights.pt").write_bytes(pickle.dumps({"state_dict": Payload()}))
    with pytest.raises(schema.WeightsError, match="cannot be read as weights"):
        checkpoints.read_checkpoint(tmp_path / "weights.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("config", ["[1]", "3", '"text"', '{"max_in_chans": "2"}', '{"max_in_chans": 0}', "[" * 10**5])
def test_a_configuration_of_another_kind_is_named(tmp_path, config):
    shutil.copyfile(ROOT / "cellica" / "weights" / "camae-mini.safetensors", tmp_path / "w.safetensors")
    tensors, _ = checkpoints.read_checkpoint(tmp_path / "w.safetensors", checkpoints.PREFIX)
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "w.safetensors")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(schema.WeightsError, match=r"w\.safetensors"):
        checkpoints.read_geometry(*checkpoints.read_checkpoint(tmp_path / "w.safetensors"), tmp_path / "w.safetensors")


# ---------------------------------------------------------------------------------------------- plates


@pytest.fixture
def two_plates(tmp_path):
    """A plate whose attributes a test changes, and another one, beside it, that it must not reach."""
    pixels = np.random.default_rng(0).integers(1, 255, size=(2, 3, 64, 64), dtype=np.uint8)
    for plate in (0, 1):
        rows = []
        for i, well in enumerate(("B02", "C03", "D04")):
            file = tmp_path / f"{plate}_{i}.png"
            file.write_bytes(images.imagecodecs.png_encode(pixels[plate, i]))
            rows.append(("E", str(plate), well, 1, "", str(file)))
        sites = pd.DataFrame(rows, columns=["experiment", "plate", "well", "site", "control", "path_w1"])
        sites.index = pd.Index(schema.obs_names(sites))
        plates.ingest(sites, tmp_path / "plates")
    return tmp_path / "plates" / "E_0.zarr", tmp_path / "plates" / "E_1.zarr"


def change(file: Path, how) -> None:
    attributes = json.loads(file.read_bytes())
    how(attributes["attributes"])
    file.write_text(json.dumps(attributes))


def made_foreign(store: Path) -> Path:
    """The same plate as another tool would have written it."""
    change(store / "zarr.json", lambda attributes: attributes.pop("cellica"))
    return store


def link(inner: Path, to: Path) -> None:
    shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
    inner.symlink_to(to)


WAYS_OUT = {
    "absolute well": lambda one, other: change(
        one / "zarr.json", lambda a: a["ome"]["plate"]["wells"][1].update(path=str(other / "C" / "03"))
    ),
    "relative well": lambda one, other: change(
        one / "zarr.json", lambda a: a["ome"]["plate"]["wells"][1].update(path=f"../{other.name}/C/03")
    ),
    "root well": lambda one, other: change(
        one / "zarr.json", lambda a: a["ome"]["plate"]["wells"][1].update(path="/C/03")
    ),
    "field": lambda one, other: change(
        one / "C" / "03" / "zarr.json",
        lambda a: a["ome"]["well"]["images"][0].update(path=f"../../../{other.name}/C/03/1"),
    ),
    "array": lambda one, other: change(
        one / "C" / "03" / "1" / "zarr.json",
        lambda a: a["ome"]["multiscales"][0]["datasets"][0].update(path=f"../../../../{other.name}/C/03/1/0"),
    ),
    "NUL": lambda one, other: change(
        one / "C" / "03" / "zarr.json", lambda a: a["ome"]["well"]["images"][0].update(path="1\0")
    ),
    "linked well": lambda one, other: link(one / "C" / "03", other / "C" / "03"),
    "linked field": lambda one, other: link(one / "C" / "03" / "1", other / "C" / "03" / "1"),
    "linked array": lambda one, other: link(one / "C" / "03" / "1" / "0", other / "C" / "03" / "1" / "0"),
    "circle": lambda one, other: link(one / "C" / "03" / "1", one / "C" / "03" / "1"),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_no_well_or_field_of_a_plate_leads_out_of_it(two_plates, way):
    one, other = two_plates
    WAYS_OUT[way](made_foreign(one), other)
    plate = plates.Plate(one)
    assert plate.sites["well"].tolist() == ["B02", "D04"]
    assert len(plate.set_aside) == 1
    reason = "well name not understood" if way in ("absolute well", "relative well") else "outside of the plate: "
    assert plate.set_aside["reason"][0].startswith(reason)
    assert sum(len(part) for part, _ in plate.fields()) == 2


OWN_NAMES = {
    "site": "../../../E_1.zarr/C/03/1",
    "experiment": "../E",
    "plate": "..",
    "name with a NUL": "a\0b",
    "hidden": ".E",
    "backslash": "a\\..\\b",
}


@pytest.mark.parametrize("name", OWN_NAMES)
def test_a_plate_of_ours_names_nothing_out_of_it(two_plates, name):
    column = name if name in ("site", "plate") else "experiment"

    def rename(attributes):
        attributes["cellica"]["sites"]["columns"][column][1] = OWN_NAMES[name]
        attributes["cellica"]["sites"]["dtypes"].pop(column, None)

    change(two_plates[0] / "zarr.json", rename)
    with pytest.raises(schema.PlateError, match="would lead out of a folder"):
        plates.Plate(two_plates[0])


def test_a_linked_chunk_is_not_read(two_plates):
    one, other = two_plates
    chunk = Path("C/03/1/0/c/0/0/0/0/0")
    link(one / chunk, other / chunk)
    with pytest.raises(schema.PlateError, match="outside of the plate"):
        list(plates.Plate(one).fields())


# ---------------------------------------------------------------------------------------------- tables


def rxrx1(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    rows = {
        "experiment": "E-01",
        "plate": 1,
        "well": "B02",
        "site": 1,
        "sirna": "EMPTY",
        "well_type": "negative_control",
    }
    pd.DataFrame([{**rows, "dataset": "train", **changes}]).to_csv(folder / "metadata.csv", index=False)
    return folder


@pytest.mark.parametrize("column", ["experiment", "plate", "site"])
@pytest.mark.parametrize("name", ["../../secret", "/etc", "..", ".hidden", "a\\b"])
def test_names_of_a_data_set_that_lead_out_of_its_folder_are_refused(tmp_path, capsys, column, name):
    root = rxrx1(tmp_path / "rxrx1", **{column: name})
    with pytest.raises(SystemExit) as done:
        cli.main(["ingest", "rxrx1", str(root), str(tmp_path / "plates")])
    assert done.value.code == 2
    told = capsys.readouterr().err
    assert "cannot name a file" in told or "neither numbers nor letters" in told
    assert not (tmp_path / "plates").exists()


def test_a_data_set_s_table_names_no_files_and_one_s_own_may_name_any(tmp_path):
    table = screen.read_rxrx1(rxrx1(tmp_path / "rxrx1", path_w1="/etc/passwd", path_w7="/etc/passwd"))
    paths = table.filter(like=screen.PATH)
    assert list(paths) == [f"path_w{i}" for i in range(1, 7)]
    assert paths.iloc[0].str.startswith(str(tmp_path / "rxrx1" / "images")).all()
    head = "well_id,gene,treatment,SMILES,concentration,perturbation_type,cell_type,path_w1\n"
    (tmp_path / "metadata_core.csv").write_text(f"{head}gene-001_1_B02,g,g_1,,,CRISPR,HUVEC,/etc/passwd\n")
    assert not list(screen.read_rxrx3_core(tmp_path).filter(like=screen.PATH))
    (tmp_path / "own.csv").write_text(
        "experiment,plate,well,path_a,path_b,path_c\nE,1,B02,/data/a.png,../b.png,c.png\n"
    )
    own = screen.read_table(tmp_path / "own.csv").filter(like=screen.PATH).iloc[0].tolist()
    assert own == ["/data/a.png", f"{tmp_path}/../b.png", f"{tmp_path}/c.png"]


def test_sums_of_files_elsewhere_are_left_alone(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "checksums.json").write_text(json.dumps({"../elsewhere": {"sha256": "0" * 64, "size": 1}}))
    (folder / "a.csv").write_text("a")
    manifest = tmp_path / "own.toml"
    manifest.write_text(
        'name = "own"\ntitle = "Own"\npurpose = "test"\nlicence = "CC0"\nlicence_url = "u"\nnon_commercial = false\n'
        '[[files]]\npath = "a.csv"\nsource = "http://127.0.0.1:9/{path}"\nsize = 1\n'
    )
    assert [one.status for one in fetch.fetch(manifest, folder)] == ["there"]
    assert (tmp_path / "elsewhere").read_text() == "mine"
