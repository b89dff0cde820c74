"""Plates from parquet shards: real JPEG 2000 images, scattered over shards as RxRx3-core has them."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import imagecodecs
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cellica import ingestion, screen, shards
from cellica.plates import Plate
from cellica.schema import InputError, MissingFileError

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
PLATES = ("gene-001_1", "gene-001_2", "compound-002_1")
WELLS = ("A01", "B02", "AF48")


def jp2(seed: int, shape=(8, 10)) -> bytes:
    pixels = np.random.default_rng(seed).integers(1, 255, shape, dtype=np.uint8)
    return imagecodecs.jpeg2k_encode(pixels, level=0, reversible=True)


def keys_of(plate: str, well: str) -> list[str]:
    experiment, _, number = plate.rpartition("_")
    return [f"{experiment}/Plate{number}/{well}_s1_{channel}" for channel in range(1, 7)]


def write_shards(
    folder: Path, rows: list[tuple[str, bytes | None]], n_shards=3, *, struct=False, **options
) -> list[Path]:
    """Write rows in turn to shards, so that a well's channels are scattered; row groups of a few rows."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    files = []
    for i in range(n_shards):
        part = rows[i::n_shards]
        images = [image and {"bytes": image, "path": None} if struct else image for _, image in part]
        table = pa.table(
            {"__key__": [key for key, _ in part], "jp2": pa.array(images, STRUCT if struct else pa.binary())}
        )
        files.append(folder / "data" / f"train-{i:05d}-of-{n_shards:05d}.parquet")
        pq.write_table(table, files[-1], **{"row_group_size": 5, **options})
    return files


def write_metadata(folder: Path, plates=PLATES, wells=WELLS) -> pd.DataFrame:
    rows = []
    for plate in plates:
        experiment, _, number = plate.rpartition("_")
        for i, well in enumerate(wells):
            gene = "EMPTY_control" if i == 0 else f"GENE{i}"
            named = {"well_id": f"{plate}_{well}", "experiment_name": experiment, "plate": number, "address": well}
            rest = {"gene": gene, "treatment": gene if i == 0 else f"{gene}_guide_1", "SMILES": None}
            rows.append({**named, **rest, "concentration": None, "perturbation_type": "CRISPR", "cell_type": "HUVEC"})
    folder.mkdir(exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / "metadata_rxrx3_core.csv", index=False)
    return screen.read_rxrx3_core(folder)


def made(plates=PLATES, wells=WELLS) -> dict[str, bytes]:
    keys = [key for plate in plates for well in wells for key in keys_of(plate, well)]
    return {key: jp2(seed) for seed, key in enumerate(keys)}


@pytest.fixture
def source(tmp_path) -> tuple[Path, pd.DataFrame, dict[str, bytes]]:
    images = made()
    write_shards(tmp_path / "core", list(images.items()))
    return tmp_path / "core", write_metadata(tmp_path / "core"), images


def pixels_of(store: Path) -> dict[str, np.ndarray]:
    plate = Plate(store)
    return {site_id: field for part, fields in plate.fields() for site_id, field in zip(part.index, fields)}


def stores_of(folder: Path) -> dict[str, bytes]:
    files = (file for store in folder.glob("*.zarr") for file in store.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def remains(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.suffix in (".part", ".spool"))


# ---------------------------------------------------------------------------------------------- whole


@pytest.mark.parametrize("struct", [False, True])
@pytest.mark.parametrize("options", [{}, {"row_group_size": 1000}, {"compression": "zstd", "use_dictionary": False}])
def test_scattered_channels_come_together(tmp_path, struct, options):
    images = made()
    order = np.random.default_rng(0).permutation(len(images))
    rows = [list(images.items())[i] for i in order]
    write_shards(tmp_path / "core", rows, struct=struct, **options)
    table = write_metadata(tmp_path / "core")
    report = shards.ingest(table, tmp_path / "core", tmp_path / "plates")
    assert [store.stem for store in report.plates] == list(PLATES)
    assert (report.n_sites, len(report.set_aside), report.notes) == (9, 0, [])
    for plate in PLATES:
        found = pixels_of(tmp_path / "plates" / f"{plate}.zarr")
        assert list(found) == [f"{plate}_{well}_1" for well in WELLS]
        for well in WELLS:
            expected = [imagecodecs.jpeg2k_decode(images[key]) for key in keys_of(plate, well)]
            np.testing.assert_array_equal(found[f"{plate}_{well}_1"], expected)
    opened = Plate(report.plates[0])
    assert opened.channels == [f"w{i}" for i in range(1, 7)]
    assert opened.sites["control"].tolist() == ["negative", "", ""]
    assert remains(tmp_path / "plates") == []


def test_a_real_well(tmp_path, shared):
    folder = shared / "data" / "rxrx3_jp2_sample"
    rows = [(key, (folder / f"AA41_s1_{i}.jp2").read_bytes()) for i, key in enumerate(keys_of("gene-001_9", "AA41"), 1)]
    write_shards(tmp_path / "core", rows, struct=True)
    table = write_metadata(tmp_path / "core", ["gene-001_9"], ["AA41"])
    (store,) = shards.ingest(table, tmp_path / "core" / "data", tmp_path / "plates").plates
    (field,) = pixels_of(store).values()
    assert field.shape == (6, 512, 512)
    np.testing.assert_array_equal(field, [imagecodecs.jpeg2k_decode(image) for _, image in rows])


def test_only_the_plates_asked_for(source, tmp_path):
    folder, table, _ = source
    report = shards.ingest(table, folder, tmp_path / "plates", plates=["gene-001_2"])
    assert [store.stem for store in report.plates] == ["gene-001_2"]
    assert len(report.set_aside) == 0
    report = shards.ingest(table, folder, tmp_path / "plates")
    assert ([store.stem for store in report.skipped], report.n_sites) == (["gene-001_2"], 9)
    with pytest.raises(InputError, match="1 plates are not in the screen table: 'gene-009_1'"):
        shards.ingest(table, folder, tmp_path / "plates", plates=["gene-009_1"])


def test_finished_plates_are_not_read_again_and_changed_shards_are_told(source, tmp_path, monkeypatch):
    folder, table, images = source
    first = shards.ingest(table, folder, tmp_path / "plates")
    monkeypatch.setattr(shards, "_rows", lambda file: pytest.fail("read again"))
    again = shards.ingest(table, folder, tmp_path / "plates")
    assert (again.skipped, again.outdated) == (first.plates, [])
    write_shards(folder, list(images.items())[:-1])
    assert shards.ingest(table, folder, tmp_path / "plates").outdated == first.plates


# ---------------------------------------------------------------------------------------------- faults


def test_every_fault_is_set_aside_counted_and_listed(tmp_path):
    images = made()
    a, b, c = (keys_of("gene-001_1", well) for well in WELLS)
    other = keys_of("gene-001_2", "A01")
    images[a[0]] = images[a[0]][:60]  # truncated
    images[a[1]] = b""
    del images[b[5]]  # a channel missing
    rows: list = list(images.items())
    rows += [(key, images[key]) for key in keys_of("gene-001_2", "B02")]  # equal copies
    rows += [(other[2], jp2(999))]  # another version
    rows += [(keys_of("gene-001_1", "C07")[0], jp2(1)), ("gene-777/Plate3/A01_s1_1", jp2(1)), ("nonsense", jp2(1))]
    rows = [
        (key, image) for key, image in rows if key not in keys_of("compound-002_1", "AF48")
    ]  # a well without images
    rows = [(key, None if key == c[3] else image) for key, image in rows]
    write_shards(tmp_path / "core", rows)
    table = write_metadata(tmp_path / "core")
    report = shards.ingest(table, tmp_path / "core", tmp_path / "plates")
    listed = report.set_aside
    assert report.n_sites == 9 - 5
    assert {store.stem: len(Plate(store).sites) for store in report.plates} == {"gene-001_2": 2, "compound-002_1": 2}
    reasons = {(row.site_id, row.channel): row.reason.split(":")[0] for row in listed.itertuples() if row.site_id}
    assert reasons == {
        ("gene-001_1_A01_1", "w1"): "truncated or damaged",
        ("gene-001_1_A01_1", "w2"): "empty file",
        ("gene-001_1_B02_1", "w6"): "no image in the shards",
        ("gene-001_1_AF48_1", "w4"): "empty file",
        ("gene-001_2_A01_1", "w3"): "in different versions",
        **{("compound-002_1_AF48_1", f"w{i}"): "no image in the shards" for i in range(1, 7)},
    }
    (path,) = listed.loc[(listed["site_id"] == "gene-001_1_A01_1") & (listed["channel"] == "w1"), "path"]
    assert path == f"train-00000-of-00003.parquet:{a[0]}"
    strays = listed[listed["site_id"] == ""].set_index("reason")
    assert strays.loc["not in the table: no such well or site", "path"].endswith(":gene-001/Plate1/C07_s1_1")
    assert strays.loc["plate not in the table: 1 images in the shards", ["experiment", "plate"]].tolist() == [
        "gene-777",
        "3",
    ]
    assert strays.loc["key not understood", "path"].endswith(":nonsense")
    assert len(strays) == 3
    on_disk = pd.read_csv(tmp_path / "plates" / "set_aside.csv", dtype=str, keep_default_na=False)
    assert sorted(map(tuple, on_disk.to_numpy())) == sorted(map(tuple, listed.to_numpy()))
    assert "set aside 1 plates: plate not in the table" in report.summary()
    again = shards.ingest(table, tmp_path / "core", tmp_path / "plates", plates=["gene-001_2", "compound-002_1"])
    assert len(again.set_aside) == 7


def test_shards_that_are_not_there_are_told(source, tmp_path):
    folder, table, _ = source
    (folder / "data" / "train-00001-of-00003.parquet").unlink()
    report = shards.ingest(table, folder, tmp_path / "plates")
    assert report.notes == ["2 of 3 shards are here: wells whose images lie in the others are set aside"]
    assert report.n_sites == 0
    assert len(report.set_aside) == 3 * 6


@pytest.mark.parametrize("damage", ["empty", "truncated", "no rows"])
def test_damaged_shards_stop_before_any_work(source, tmp_path, damage, monkeypatch):
    folder, table, _ = source
    file = folder / "data" / "train-00002-of-00003.parquet"
    data = file.read_bytes()
    if damage == "no rows":
        pq.write_table(pq.read_table(file).slice(0, 0), file)
    else:
        file.write_bytes(b"" if damage == "empty" else data[: len(data) // 2])
    monkeypatch.setattr(shards, "_rows", lambda file: pytest.fail("read"))
    with pytest.raises(
        InputError, match=r"1 of 3 shards are damaged, empty or of other types; fetch them again: train-00002-of-00003"
    ):
        shards.ingest(table, folder, tmp_path / "plates")
    assert not (tmp_path / "plates").exists()


@pytest.mark.parametrize("column", ["__key__", "jp2"])
def test_columns_of_other_types_stop_before_any_work(source, tmp_path, column):
    folder, table, _ = source
    file = folder / "data" / "train-00002-of-00003.parquet"
    shard = pq.read_table(file)
    at = shard.schema.get_field_index(column)
    pq.write_table(shard.set_column(at, column, pa.array(range(len(shard)))), file)
    with pytest.raises(InputError, match=rf"fetch them again: train-00002-of-00003.*{column} (is )?int64"):
        shards.ingest(table, folder, tmp_path / "plates")


def test_damage_inside_a_shard_is_named_and_the_shards_before_it_are_kept(source, tmp_path, monkeypatch):
    folder, table, _ = source
    file = folder / "data" / "train-00001-of-00003.parquet"
    data = file.read_bytes()
    file.write_bytes(data[:4] + bytes(len(data) // 2) + data[4 + len(data) // 2 :])
    with pytest.raises(InputError, match=r"shard .*00001-of-00003\.parquet is damaged .* 1 finished shards are kept"):
        shards.ingest(table, folder, tmp_path / "plates")
    assert not list((tmp_path / "plates").glob("*.zarr"))
    file.write_bytes(data)
    read, rows = [], shards._rows
    monkeypatch.setattr(shards, "_rows", lambda file: (read.append(file.name[:11]), rows(file))[1])
    assert shards.ingest(table, folder, tmp_path / "plates").n_sites == 9
    assert read == ["train-00001", "train-00002"]


def test_folders_without_shards_and_the_table_of_another_data_set(source, tmp_path):
    folder, table, _ = source
    with pytest.raises(MissingFileError, match="does not exist"):
        shards.ingest(table, tmp_path / "nowhere", tmp_path / "plates")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(MissingFileError, match="no parquet shards in"):
        shards.ingest(table, tmp_path / "nothing", tmp_path / "plates")
    pq.write_table(pa.table({"well_id": ["a"], "feature_0": [0.5]}), tmp_path / "nothing" / "embeddings.parquet")
    with pytest.raises(InputError, match=r"has the columns __key__ and jp2: embeddings\.parquet \('well_id'"):
        shards.ingest(table, tmp_path / "nothing", tmp_path / "plates")
    foreign = write_metadata(tmp_path / "other", ["gene-100_1"])
    with pytest.raises(
        InputError, match=r"none of the keys in .* is in the screen table.* is it the table of this data"
    ):
        shards.ingest(foreign, folder, tmp_path / "plates")
    assert remains(tmp_path / "plates") == []


# ---------------------------------------------------------------------------------------------- killed and resumed


class Killed(BaseException):
    pass


@pytest.mark.parametrize("where", ["spool", "ledger", "plate", "between"])
@pytest.mark.parametrize("nth", [2, 3])
def test_a_killed_run_goes_on_and_leaves_what_one_run_leaves(source, tmp_path, monkeypatch, where, nth):
    folder, table, _ = source
    shards.ingest(table, folder, tmp_path / "whole")
    monkeypatch.setattr(shards, "BUFFER", 400)  # many appends
    owner, name = {
        "spool": (shards.Spool, "_append"),
        "ledger": (shards.artifacts, "write_text"),
        "plate": (ingestion, "_write_field"),
        "between": (ingestion, "_set_aside_table"),
    }[where]
    call, calls = getattr(owner, name), []

    def kill(*args, **options):
        calls.append(name)
        if len(calls) == nth * (4 if where == "spool" else 1):
            raise Killed
        return call(*args, **options)

    monkeypatch.setattr(owner, name, kill)
    with pytest.raises(Killed):
        shards.ingest(table, folder, tmp_path / "plates")
    monkeypatch.setattr(owner, name, call)
    (spool,) = (tmp_path / "plates").glob("*.spool")
    ledger = spool / "ledger.json"
    done = json.loads(ledger.read_text())["shards"] if ledger.exists() else []
    if where != "spool":
        assert len(done) == (nth - 1 if where == "ledger" else 3)
    finished = list((tmp_path / "plates").glob("*.zarr"))
    assert not {store.stem for store in finished} & {file.stem for file in spool.glob("*.images")}
    for file in spool.glob("*.images"):
        file.write_bytes(file.read_bytes() + b"\x09\x00\x00")  # a record that was being written
    read, rows = [], shards._rows
    monkeypatch.setattr(shards, "_rows", lambda file: (read.append(file.name), rows(file))[1])
    report = shards.ingest(table, folder, tmp_path / "plates")
    assert not set(read) & set(done)
    assert len({*read, *done}) == 3
    assert report.n_sites == 9
    assert stores_of(tmp_path / "plates") == stores_of(tmp_path / "whole")
    assert remains(tmp_path / "plates") == []


def test_kill_signals_at_any_moment(tmp_path):
    plates = [f"gene-001_{i}" for i in range(1, 9)]
    write_shards(tmp_path / "core", list(made(plates).items()), n_shards=8)
    table = write_metadata(tmp_path / "core", plates)
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from cellica import screen, shards, ingestion\n"
        "def slow(call):\n"
        "    return lambda *args, **options: (time.sleep(0.01), call(*args, **options))[1]\n"
        "shards.Spool._append, ingestion._write_field = slow(shards.Spool._append), slow(ingestion._write_field)\n"
        "root = Path(sys.argv[1])\n"
        "table = screen.read_rxrx3_core(root / 'core')\n"
        "print('ready', flush=True)\n"
        "shards.ingest(table, root / 'core', root / 'plates')\n"
    )
    for delay in (0.03, 0.1, 0.25):
        run = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        time.sleep(delay)
        run.send_signal(signal.SIGKILL)
        run.wait()
        run.stdout.close()
    report = shards.ingest(table, tmp_path / "core", tmp_path / "plates")
    shards.ingest(table, tmp_path / "core", tmp_path / "whole")
    assert (report.n_sites, len(report.set_aside)) == (24, 0)
    assert stores_of(tmp_path / "plates") == stores_of(tmp_path / "whole")
    assert remains(tmp_path / "plates") == []


def test_what_was_left_beside_a_finished_plate_goes_with_the_next_run(source, tmp_path):
    """As by a kill between the plate's name and the end of its folder of work."""
    folder, table, _ = source
    shards.ingest(table, folder, tmp_path / "plates")
    store = next((tmp_path / "plates").glob("*.zarr"))
    left = store.with_name(f".{store.name}.abc.part")
    left.mkdir()
    with ingestion.FileLock(store.parent / ingestion.LOCKS / f"{store.name}.lock"):  # another run writes it again
        shards.ingest(table, folder, tmp_path / "plates")
        assert left.exists()
    shards.ingest(table, folder, tmp_path / "plates")
    assert not left.exists()
    assert remains(tmp_path / "plates") == []


def test_the_spool_of_another_selection_is_told(source, tmp_path, monkeypatch):
    folder, table, _ = source
    append = shards.Spool._append
    monkeypatch.setattr(shards.Spool, "_append", lambda *args: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        shards.ingest(table, folder, tmp_path / "plates", plates=["gene-001_2"])
    monkeypatch.setattr(shards.Spool, "_append", append)
    (note,) = shards.ingest(table, folder, tmp_path / "plates").notes
    assert ".spool is what an unfinished run with other plates left" in note


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_memory_stays_bounded_while_a_shard_of_one_row_group_streams(tmp_path):
    """115 MB of images in pages of one row group; the peak grows by far less."""
    keys = [key for well in range(1, 49) for key in keys_of("gene-001_1", f"A{well:02d}")]
    rng = np.random.default_rng(0)
    rows = [(key, rng.bytes(420_000)) for key in keys]
    write_shards(tmp_path / "core", rows, n_shards=1, row_group_size=10_000, write_batch_size=8, use_dictionary=False)
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "import pandas as pd\n"
        "from cellica import shards\n"
        "def peak():  # of this program alone: ru_maxrss begins with what its parent had\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('VmHWM')) / 1024\n"
        "sites = pd.DataFrame({'experiment': 'gene-001', 'plate': '1'}, index=[f'gene-001_1_A{w:02d}_1' for w in range(1, 49)])\n"
        "root = Path(sys.argv[1])\n"
        "shards.BUFFER = 2**24\n"
        "spool = shards.Spool(root / 'spool', ['gene-001_1'])\n"
        "before = peak()\n"
        "spool.fill(list((root / 'core' / 'data').iterdir()), sites, all_plates=True)\n"
        "print(peak() - before, sum(file.stat().st_size for file in (root / 'spool').iterdir()) / 2**20)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    grown, spooled = map(float, done.stdout.split())
    assert spooled > 110
    assert grown < 100, grown
