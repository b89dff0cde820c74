"""Files that claim absurd sizes, or nest without end: an error of ours, in bounded memory."""

import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from zarr.codecs import BloscCodec, ZstdCodec

from cellica import artifacts, fetch, images, plates, schema, shards, simulate


def written(folder: Path) -> Path:
    """A plate of three fields."""
    pixels = np.random.default_rng(0).integers(1, 255, size=(3, 64, 64), dtype=np.uint8)
    rows = []
    for well, field in zip(("B02", "C03", "D04"), pixels):
        (folder / f"{well}.png").write_bytes(images.imagecodecs.png_encode(field))
        rows.append(("E", "0", well, 1, "", str(folder / f"{well}.png")))
    sites = pd.DataFrame(rows, columns=["experiment", "plate", "well", "site", "control", "path_w1"])
    sites.index = pd.Index(schema.obs_names(sites))
    plates.ingest(sites, folder / "plates")
    return folder / "plates" / "E_0.zarr"


def tiff(side: int, strip: bytes, *, pages: int = 1, compression: int = 8) -> bytes:
    """Pages of ``side`` x ``side`` pixels of 8 bits, each of the one strip."""
    data = struct.pack("<2sHI", b"II", 42, 8 + len(strip)) + strip
    for page in range(pages):
        tags = {256: side, 257: side, 258: 8, 259: compression, 262: 1, 273: 8, 277: 1, 278: side, 279: len(strip)}
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
        after = len(data) + 2 + len(entries) + 4
        data += struct.pack("<H", len(tags)) + entries + struct.pack("<I", after if page < pages - 1 else 0)
    return data


def deflated(size: int) -> bytes:
    packer = zlib.compressobj(1)
    return b"".join(packer.compress(bytes([1]) * 2**20) for _ in range(size >> 20)) + packer.flush()


def png(side: int, rows: bytes, more: bytes = b"") -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return images.PNG + chunk(b"IHDR", head) + more + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def text_chunk(content: bytes) -> bytes:
    content = b"Comment\0\0" + content
    return struct.pack(">I", len(content)) + b"zTXt" + content + struct.pack(">I", zlib.crc32(b"zTXt" + content))


def many_components() -> bytes:
    data = images.imagecodecs.jpeg2k_encode(np.ones((64, 64), np.uint8), codecformat="j2k")
    return data[:8] + struct.pack(">II", 8000, 8000) + data[16:40] + struct.pack(">H", 16000) + data[42:]


def safetensors(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bombs")
    bomb = deflated(2**29)
    huge = {"a": {"dtype": "F32", "shape": [2**21, 2**21], "data_offsets": [0, 2**44]}}
    contents = {
        "size.tif": tiff(100_000, bomb[:1000]),
        "strip.tif": tiff(64, bomb),
        "stack.tif": tiff(64, bomb, pages=3),
        "text.png": png(64, zlib.compress((b"\0" + b"\7" * 64) * 64), text_chunk(bomb)),
        "size.png": png(100_000, bomb[:1000]),
        "rows.png": png(64, bomb),
        "components.jp2": many_components(),
        "huge.safetensors": safetensors(json.dumps(huge).encode()),
        "header.safetensors": safetensors(b"{", 2**60),
        "nested.safetensors": safetensors(b'{"__metadata__":' + b'{"a":' * 10**5),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


MEMORY = """
import resource, sys
from pathlib import Path
from cellica import checkpoints, correct, images, schema
lines = Path("/proc/self/status").read_text().splitlines()
now = next(int(line.split()[1]) for line in lines if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (now + 256 * 2**20, -1))
for file in sorted(Path(sys.argv[1]).iterdir()):
    read = checkpoints.read_checkpoint if file.suffix == ".safetensors" else lambda path: images.decode(path, "max")
    try:
        print(file.name, read(file).shape)
    except schema.CellicaError as error:
        print(file.name, type(error).__name__, str(error).replace(chr(10), " "))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the size of a process is read from /proc")
def test_files_that_claim_absurd_sizes_are_errors_of_ours_in_bounded_memory(bombs):
    """256 MiB more than the program itself are allowed; each file claims or unpacks to 512 MiB at least."""
    words = [sys.executable, "-c", MEMORY, str(bombs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert set(told) == {file.name for file in bombs.iterdir()}
    for name in ("size.tif", "size.png"):
        assert told[name].startswith("ImageError")
        assert "too large: 100000 x 100000" in told[name]
    assert "16000 components" in told["components.jp2"]
    for name in (name for name in told if name.endswith(".safetensors")):
        assert told[name].startswith("WeightsError")
    for name in (
        "strip.tif",
        "stack.tif",
        "text.png",
        "rows.png",
    ):  # whole pictures, with more behind them than is read
        assert told[name] == "(64, 64)" or told[name].startswith("ImageError"), (name, told[name])
        assert "emory" not in told[name]


def patched(archive: Path, size: int) -> None:
    """Let the directory of an archive of one member claim another size."""
    data = bytearray(archive.read_bytes())
    at = data.index(b"PK\1\2")
    data[at + 24 : at + 28] = struct.pack("<I", size)
    archive.write_bytes(data)


def test_a_zip_bomb_is_refused_or_cut_at_what_it_claims(tmp_path):
    with (
        zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.bin", "w") as file,
    ):
        for _ in range(64):
            file.write(bytes(2**20))
    (tmp_path / "out").mkdir()
    before = shutil.disk_usage(tmp_path).free
    patched(tmp_path / "bomb.zip", 1000)
    with pytest.raises(schema.FetchError, match=r"bomb\.zip cannot be unpacked: Bad CRC-32"):
        fetch.unpack_zip(tmp_path / "bomb.zip", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for i in range(before // 4_000_000_000 + 2):
            archive.writestr(f"{i}.bin", b"")
    data = bytearray((tmp_path / "many.zip").read_bytes())
    at = data.find(b"PK\1\2")
    while at >= 0:
        data[at + 24 : at + 28] = struct.pack("<I", 4_000_000_000)
        at = data.find(b"PK\1\2", at + 4)
    (tmp_path / "many.zip").write_bytes(data)
    with pytest.raises(schema.FetchError, match=r"unpacks to .* free: make room"):
        fetch.unpack_zip(tmp_path / "many.zip", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("codec", ["blosc", "zstd"])
def test_a_chunk_whose_header_claims_more_than_its_pixels_is_not_unpacked(tmp_path, codec):
    store = tmp_path / "E_1.zarr"
    plate = {"version": "0.5", "wells": [{"path": "B/02", "rowIndex": 0, "columnIndex": 0}], "rows": [], "columns": []}
    zarr.open_group(store, mode="w", attributes={"ome": {"version": "0.5", "plate": plate}})
    zarr.open_group(store / "B" / "02", mode="w", attributes={"ome": {"well": {"images": [{"path": "0"}]}}})
    datasets = [{"path": "0", "coordinateTransformations": []}]
    axes = [{"name": name} for name in "cyx"]
    group = zarr.open_group(
        store / "B" / "02" / "0", mode="w", attributes={"ome": {"multiscales": [{"datasets": datasets, "axes": axes}]}}
    )
    packer = BloscCodec(cname="lz4") if codec == "blosc" else ZstdCodec(level=1)
    array = group.create_array("0", shape=(1, 64, 64), dtype="uint8", chunks=(1, 64, 64), compressors=[packer])
    array[:] = np.random.default_rng(0).integers(1, 255, size=(1, 64, 64), dtype=np.uint8)
    assert next(plates.Plate(store).fields())[1].shape == (1, 1, 64, 64)
    chunk = store / "B/02/0/0/c/0/0/0"
    data = chunk.read_bytes()
    if codec == "blosc":
        chunk.write_bytes(data[:4] + struct.pack("<I", 2**31 - 1) + data[8:])
    else:  # a frame whose descriptor says that eight bytes of size follow its window
        chunk.write_bytes(data[:4] + bytes([0b11000000, 0]) + struct.pack("<Q", 2**40) + data[7:])
    with pytest.raises(schema.PlateError, match=r"claims to unpack to \d{10,} bytes"):
        list(plates.Plate(store).fields())


def test_a_chunk_of_ours_whose_header_claims_more_is_not_unpacked(tmp_path):
    store = written(tmp_path)
    chunk = store / "C/03/1/0/c/0/0/0/0/0"
    data = chunk.read_bytes()
    chunk.write_bytes(data[:4] + struct.pack("<I", 2**31 - 1) + data[8:])
    with pytest.raises(schema.PlateError, match="2147483647"):
        list(plates.Plate(store).fields())


@pytest.mark.parametrize(("shape", "chunks"), [((1, 8192, 8192), (1, 1, 1)), ((1, 64, 64), (1, 2**20, 2**20))])
def test_grids_of_absurd_chunks_are_set_aside_at_once(tmp_path, shape, chunks):
    one = written(tmp_path)
    attributes = json.loads((one / "zarr.json").read_bytes())
    attributes["attributes"].pop("cellica")  # as another tool would have written it
    (one / "zarr.json").write_text(json.dumps(attributes))

    def widen(file: Path) -> None:
        array = json.loads(file.read_bytes())
        array["shape"] = [1, 1, 1, *shape[1:]]
        array["chunk_grid"]["configuration"]["chunk_shape"] = [1, 1, 1, *chunks[1:]]
        file.write_text(json.dumps(array))

    widen(one / "C" / "03" / "1" / "0" / "zarr.json")
    plate = plates.Plate(one)
    assert plate.sites["well"].tolist() == ["B02", "D04"]
    assert "at most" in plate.set_aside["reason"][0]


def test_a_shard_that_unpacks_to_far_more_than_it_holds_is_refused(tmp_path):
    table = pa.table({"__key__": ["gene-001/Plate1/B02_s1_1"], "jp2": [bytes(64 * 2**20)]})
    pq.write_table(table, tmp_path / "train-00000-of-00001.parquet", compression="zstd")
    with pytest.raises(schema.InputError, match=r"claims to unpack to 671\d+ bytes"):
        shards.find_shards(tmp_path)


@pytest.mark.parametrize("text", ["[" * 10**5, "3", "[]", '{"verb": "ingest"}', '"text"'])
def test_provenance_of_another_kind_is_named(text):
    adata = simulate.profiles("small", n_features=4, random_state=0)
    adata.uns["cellica"] = {"provenance": np.array([text], dtype=object)}
    with pytest.raises(schema.InputError, match="is not as cellica writes it"):
        artifacts.provenance(adata)


@pytest.mark.parametrize(
    "attributes", ["[" * 10**5, '{"attributes": 3}', '{"attributes": {"ome": {"plate": {"wells": 3}}}}']
)
def test_metadata_of_another_kind_is_no_plate(tmp_path, attributes):
    store = tmp_path / "E_1.zarr"
    store.mkdir()
    (store / "zarr.json").write_text(attributes)
    with pytest.raises(schema.PlateError):
        plates.Plate(store)
