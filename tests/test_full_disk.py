"""Folders that are full or do not allow writing, and inputs that cannot be read: one message, exit code 2, nothing half-written."""

import os
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cellica import artifacts, cli, simulate

WEIGHTS = ["--encoder", "camae-mini", "--weights", "random", "--device", "cpu"]


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as done:
        cli.main(["--quiet", *map(str, words)])
    return done.value.code


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Inputs of every verb."""
    folder = tmp_path_factory.mktemp("source")
    sizes = {"n_experiments": 2, "n_plates": 1, "n_treatments": 6, "n_controls": 4, "n_classes": 3}
    simulate.screen(folder / "screen", image_size=64, random_state=0, **sizes)
    assert run("ingest", "rxrx1", folder / "screen", folder / "plates") == 0
    assert run("embed", *sorted((folder / "plates").glob("*.zarr")), "--out", folder / "sites", *WEIGHTS) == 0
    assert run("profile", *sorted((folder / "sites").glob("*.h5ad")), "--out", folder / "wells.h5ad") == 0
    assert run("correct", folder / "wells.h5ad", "--out", folder / "corrected.h5ad", "--method", "sphere") == 0
    adata = artifacts.read_adata(folder / "wells.h5ad")
    adata.obs.join(adata.to_df()).to_csv(folder / "table.csv", index=False)
    shards(folder / "core")
    (folder / "served").mkdir()
    (folder / "served" / "a.bin").write_bytes(np.random.default_rng(0).bytes(400_000))
    return folder


def shards(folder: Path) -> None:
    """RxRx3-core of one well, whose images are noise of 64 x 64 pixels."""
    from cellica.images import imagecodecs

    rng = np.random.default_rng(0)
    pixels = rng.integers(1, 255, size=(6, 64, 64), dtype=np.uint8)
    images = [imagecodecs.jpeg2k_encode(image, level=0) for image in pixels]
    (folder / "data").mkdir(parents=True)
    keys = [f"gene-001/Plate9/B02_s1_{i}" for i in range(1, 7)]
    pq.write_table(pa.table({"__key__": keys, "jp2": images}), folder / "data" / "train-00000-of-00001.parquet")
    (folder / "metadata_rxrx3_core.csv").write_text(
        "well_id,treatment,gene,SMILES,concentration,perturbation_type,cell_type\n"
        "gene-001_9_B02,EMPTY_control,EMPTY_control,,,CRISPR,HUVEC\n"
    )


VERBS = {
    "ingest": "ingest rxrx1 {source}/screen {out}/plates",
    "ingest shards": "ingest rxrx3-core {source}/core {out}/plates",
    "embed": "embed {source}/plates/HUVEC-01_1.zarr --out {out}/sites " + " ".join(WEIGHTS),
    "embed one file": "embed {source}/plates/HUVEC-01_1.zarr --out {out}/sites.h5ad " + " ".join(WEIGHTS),
    "profile": "profile {source}/sites/HUVEC-01_1.h5ad --out {out}/wells.h5ad",
    "import": "import table {source}/table.csv --out {out}/wells.h5ad",
    "import zarr": "import table {source}/table.csv --out {out}/wells.zarr",
    "correct": "correct {source}/wells.h5ad --out {out}/corrected.h5ad --method sphere",
    "correct, saved": "correct {source}/wells.h5ad --out {out}/corrected.h5ad --method sphere --save {out}/model.st",
    "evaluate": "evaluate {source}/corrected.h5ad --out {out}/scores.csv --score retrieval --score batch",
    "evaluate, stored": "evaluate {source}/corrected.h5ad --out {out}/scores.csv --store {out}/s.h5ad --score batch",
    "compare": "compare {source}/wells.h5ad --out {out}/comparison.csv --method none --method sphere --jobs 1 "
    "--score retrieval --figure {out}/figure.png",
    "report": "report {source}/corrected.h5ad --out {out}/report.html",
    "fetch": "fetch {source}/own.toml {out}",
}


@pytest.fixture
def disk(tmp_path):
    """A folder of its own file system, of one page."""
    folder = tmp_path / "a disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"mount cannot be run: {error}")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def mounted_again(folder: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True)


@pytest.fixture
def server(source):
    """Serves ``source / "served"``, of whose file the manifest knows but about how large it is."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(source / "served"))
    handler.func.log_message = lambda *_: None
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        (source / "own.toml").write_text(
            'name = "own"\ntitle = "Own"\npurpose = "test"\nlicence = "CC0"\nlicence_url = "u"\nnon_commercial = false\n'
            f'[[files]]\npath = "a.bin"\nsource = "http://127.0.0.1:{running.server_port}/{{path}}"\n'
            "size = 3000\napproximate = true\n"
        )
        yield running
        running.shutdown()


def words_of(verb: str, source: Path, out: Path) -> list[str]:
    return [word.format(source=source, out=out) for word in VERBS[verb].split()]


def named(folder: Path) -> list[str]:
    """What has a name: files that are in no folder of work."""
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(str(path) for path in paths if not any(part.startswith(".") for part in path.parts))


def only_error(capsys) -> str:
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\nerror: ") == 0
    assert "Traceback" not in told
    return told


@pytest.mark.parametrize("verb", VERBS)
def test_a_full_disk_is_one_message_and_with_room_the_same_command_finishes(verb, source, server, disk, capsys):
    words = words_of(verb, source, disk)
    assert run(*words) == 2
    told = only_error(capsys)
    assert "make room" in told
    assert str(disk) in told
    assert set(named(disk)) <= {"plates/set_aside.csv", "a.bin.part", "a.bin.part.etag"}
    mounted_again(disk, "size=64m")
    assert run(*words) == 0
    assert named(disk)
    assert {path.name for path in disk.rglob(".*") if path.parent.name != ".locks"} <= {".locks", ".fetch.lock"}


@pytest.mark.parametrize("verb", VERBS)
def test_a_folder_that_allows_no_writing_is_one_message(verb, source, server, disk, capsys):
    mounted_again(disk, "ro")
    assert run(*words_of(verb, source, disk)) == 2
    told = only_error(capsys)
    assert "does not allow it" in told
    assert "choose another folder" in told
    assert list(disk.iterdir()) == []


# ---------------------------------------------------------------------------------------------- inputs that cannot be read


def broken(folder: Path, whole: Path) -> dict[str, Path]:
    """Files of the suffix of a whole one that are none."""
    data = whole.read_bytes()
    rng = np.random.default_rng(0)
    contents = {
        "empty": b"",
        "random bytes": rng.bytes(5000),
        "cut": data[:-100],
        "half": data[: len(data) // 2],
        "hole": data[: len(data) // 3] + rng.bytes(len(data) // 3) + data[2 * len(data) // 3 :],
    }
    files = {name: folder / f"{name}{whole.suffix}" for name in contents}
    for name, content in contents.items():
        files[name].write_bytes(content)
    files["folder"] = folder / f"folder{whole.suffix}"
    files["folder"].mkdir()
    files["dangling link"] = folder / f"link{whole.suffix}"
    files["dangling link"].symlink_to(folder / "nowhere")
    files["device"] = Path(os.devnull)
    return files


READERS = {
    "profile {file} --out {out}.h5ad": "sites/HUVEC-01_1.h5ad",
    "correct {file} --out {out}.h5ad --method sphere": "wells.h5ad",
    "correct {source}/wells.h5ad --out {out}.h5ad --apply {file}": "model.safetensors",
    "evaluate {file} --out {out}.csv": "corrected.h5ad",
    "compare {file} --out {out}.csv --method none": "wells.h5ad",
    "report {file} --out {out}.html": "corrected.h5ad",
    "report {source}/wells.h5ad --out {out}.html --scores {file}": "scores.csv",
    "import table {file} --out {out}.h5ad": "table.parquet",
    "import rxrx1 {file} --out {out}.h5ad": "table.parquet",
    "ingest table {file} {out}": "table.parquet",
    "ingest rxrx3-core {source}/core {out} --metadata {file}": "core/data/train-00000-of-00001.parquet",
    "embed {source}/plates/HUVEC-01_1.zarr --out {out}.h5ad --encoder camae --weights {file}": "weights.safetensors",
    "embed {source}/plates/HUVEC-01_1.zarr --out {out}.h5ad --encoder camae-mini --weights random --verify {file}": (
        "table.parquet"
    ),
    "embed {source}/plates/HUVEC-01_1.zarr --out {out}.h5ad --encoder camae-mini --weights random --layout {file}": (
        "table.parquet"
    ),
    "embed {file} --out {out}.h5ad --encoder camae-mini --weights random": "sites/HUVEC-01_1.h5ad",
    "fetch {file} {out}": "own.toml",
    "evaluate {source}/corrected.h5ad --out {out}.csv --clusters {file}": "table.parquet",
    "evaluate {source}/corrected.h5ad --out {out}.csv --compound-gene {file}": "table.parquet",
    "evaluate {source}/corrected.h5ad --out {out}.csv --truth {file}": "table.parquet",
}


@pytest.fixture(scope="module")
def readable(source):
    """Whole files of every kind that a verb reads."""
    import pandas as pd

    wells = source / "wells.h5ad"
    saved = ["--out", source / "again.h5ad", "--save", source / "model.safetensors", "--method", "sphere"]
    assert run("correct", wells, *saved) == 0
    pd.read_csv(source / "table.csv").to_parquet(source / "table.parquet")
    assert run("evaluate", source / "corrected.h5ad", "--out", source / "scores.csv", "--score", "batch") == 0
    shutil.copyfile(Path(cli.__file__).parent / "weights" / "camae-mini.safetensors", source / "weights.safetensors")
    return source


@pytest.mark.parametrize("reader", READERS)
def test_what_cannot_be_read_is_one_message_and_nothing_is_written(reader, readable, server, tmp_path, capsys):
    (tmp_path / "bad").mkdir()
    (tmp_path / "out").mkdir()
    for name, file in broken(tmp_path / "bad", readable / READERS[reader]).items():
        words = [word.format(file=file, out=tmp_path / "out" / "it", source=readable) for word in reader.split()]
        assert run(*words) == 2, name
        told = only_error(capsys)
        assert "not foreseen" not in told, (name, told)
        if "not finite" not in told:  # values were damaged, nothing that shows in the file
            assert file.name in told, (name, told)
        assert named(tmp_path / "out") == [], name


# ---------------------------------------------------------------------------------------------- places that cannot be had


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize("reader", READERS)
def test_a_file_without_permission_is_one_message(reader, readable, server, tmp_path, capsys):
    file = tmp_path / Path(READERS[reader]).name
    shutil.copyfile(readable / READERS[reader], file)
    file.chmod(0)
    words = [word.format(file=file, out=tmp_path / "out" / "it", source=readable) for word in reader.split()]
    assert run(*words) == 2
    assert file.name in only_error(capsys)


WRITE_FOLDERS = ("ingest", "ingest shards", "embed", "fetch")


@pytest.mark.parametrize("verb", VERBS)
def test_an_output_below_a_file_is_one_message(verb, source, server, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert run(*words_of(verb, source, tmp_path / "file" / "below")) == 2
    told = only_error(capsys)
    assert "not foreseen" not in told
    assert "choose another" in told or "name a folder" in told
    assert named(tmp_path) == ["file"]


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in WRITE_FOLDERS])
def test_a_name_without_room_for_that_of_its_lock_is_one_message(verb, source, tmp_path, capsys):
    words = [word.replace("/out/", "/" + "x" * 241) for word in words_of(verb, source, tmp_path / "out")]
    assert run(*words) == 2
    assert "its name is too long: choose a shorter one" in only_error(capsys)
    assert list(tmp_path.iterdir()) == []
