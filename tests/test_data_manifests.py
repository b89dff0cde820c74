"""The manifests of cellica say what a user needs, and those of users are read alike or refused with every fault named."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellica import encoder, fetch, manifests
from cellica.artifacts import sha256
from cellica.schema import InputError, MissingFileError

FOLDER = Path(__file__).parents[1] / "data_manifests"


@pytest.mark.parametrize("name", manifests.names())
def test_manifest_says_what_a_user_needs(name):
    manifest = manifests.read_manifest(name)
    assert manifest.name == name
    assert "cellica" in manifest.purpose
    assert manifest.licence_url.startswith("https://")
    assert manifest.non_commercial_files
    for file in manifest.files:
        assert manifest.url(file).startswith("https://")
        assert "{" not in manifest.url(file)
        assert manifest.url(file).endswith(file.path)


def test_all_manifests_are_found_and_none_is_left_out_of_a_wheel():
    assert manifests.names() == sorted(path.stem for path in FOLDER.glob("*.toml"))
    assert {"openphenom", "relationships", "rxrx1", "rxrx3-core"} <= set(manifests.names())
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"data_manifests": "cellica/data_manifests"}


def test_manifest_describes_the_real_relationship_files(shared):
    for file in manifests.read_manifest("relationships").files:
        real = shared / "data" / "efaar_truth" / file.path
        assert (real.stat().st_size, sha256(real)) == (file.size, file.sha256)


def test_files_of_relationships_that_are_there_are_verified_without_network(shared, tmp_path):
    for file in manifests.read_manifest("relationships").files:
        (tmp_path / file.path).write_bytes((shared / "data" / "efaar_truth" / file.path).read_bytes())
    outcomes = fetch.fetch("relationships", tmp_path, accept_license=True)
    assert [(one.status, one.note) for one in outcomes] == [("there", "verified")] * 5


def test_openphenom_is_a_release_that_the_encoder_knows():
    (weights,) = manifests.read_manifest("openphenom").files
    assert encoder.OPENPHENOM_RELEASES[weights.sha256].endswith(manifests.read_manifest("openphenom").revision)


def test_rxrx3_core_has_all_its_shards():
    manifest = manifests.read_manifest("rxrx3-core")
    shards = [file for file in manifest.files if file.path.startswith("data/")]
    assert [file.path for file in shards] == [f"data/train-{i:05d}-of-00035.parquet" for i in range(35)]
    assert sum(file.size for file in shards) == pytest.approx(17_390_577_507, abs=35)
    assert all(file.approximate for file in shards)
    here = (
        "https://huggingface.co/datasets/recursionpharma/rxrx3-core/resolve/078127e/data/train-00034-of-00035.parquet"
    )
    assert manifest.url(shards[-1]) == here


# ---------------------------------------------------------------------------------------------- own manifests

SET = """
name = "own"
title = "Own"
purpose = "cellica import table"
licence = "CC0"
licence_url = "https://example.org"
non_commercial = false
"""
FILE = """
[[files]]
path = "a.csv"
source = "https://example.org/{path}"
size = 12
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text)
    return path


def test_an_own_manifest_is_read_alike(tmp_path):
    more = (
        FILE.replace("a.csv", "part-{08..11}.csv").replace("12", "40")
        + 'licence = "CC BY-NC 4.0"\nnon_commercial = true\n'
    )
    manifest = manifests.read_manifest(written(tmp_path, SET + FILE + more))
    assert [file.path for file in manifest.files] == ["a.csv", *(f"part-{i}.csv" for i in ("08", "09", "10", "11"))]
    assert [file.size for file in manifest.files] == [12, 10, 10, 10, 10]
    assert manifest.size == 52
    assert manifest.url(manifest.files[1]) == "https://example.org/part-08.csv"
    assert [file.path for file in manifest.non_commercial_files] == [file.path for file in manifest.files[1:]]
    assert {file.licence for file in manifest.files} == {"CC0", "CC BY-NC 4.0"}


FAULTS = {
    "no key": (SET.replace('title = "Own"', "") + FILE, "title is missing"),
    "no terms": (SET.replace("non_commercial = false", "") + FILE, "non_commercial is missing"),
    "no files": (SET + "files = []", "files is empty"),
    "files are none": (SET + 'files = ["a.csv"]', "file 1: is no table"),
    "unknown key": (SET + FILE + 'md5 = "0"', "file 1: md5 is no key: use path, source"),
    "another type": (SET + FILE.replace("12", '"12"'), "file 1: size is '12', not a whole number of bytes"),
    "flag as number": (SET.replace("false", "0") + FILE, "non_commercial is 0, not true or false"),
    "no size": (SET + FILE.replace("12", "0"), "size is 0, not a positive"),
    "bad sum": (SET + FILE + 'sha256 = "ABC"', "sha256 'ABC' is not 64 digits"),
    "sum of a range": (
        SET + FILE.replace("a.csv", "{1..2}") + f'sha256 = "{"0" * 64}"',
        "range of files has no one sha256",
    ),
    "falling range": (SET + FILE.replace("a.csv", "{2..1}"), "range {2..1} must rise"),
    "two ranges": (SET + FILE.replace("a.csv", "{1..2}{1..2}"), "may hold one range"),
    "leaves the folder": (SET + FILE.replace("a.csv", "a/../../b"), "'a/../../b' must lie in the folder"),
    "absolute": (SET + FILE.replace("a.csv", "/etc/passwd"), "'/etc/passwd' must lie in the folder"),
    "reserved": (SET + FILE.replace("a.csv", "checksums.json"), "'checksums.json' must lie in the folder"),
    "no address": (SET + FILE.replace("https://", "ftp://"), "no address that starts with http:// or https://"),
    "unknown template": (SET + FILE.replace("{path}", "{name}"), "may hold {path} and {revision}"),
    "no revision": (SET + FILE.replace("{path}", "{revision}"), "needs revision"),
    "hub without repository": (SET + FILE.replace("https://example.org/{path}", "hf-model"), "needs repository ="),
    "branch": (
        SET + 'repository = "a/b"\nrevision = "main"' + FILE.replace("https://example.org/{path}", "hf-dataset"),
        "needs revision = the hash of a commit (7 to 40 digits), not 'main'",
    ),
    "twice": (SET + FILE + FILE, "names files twice: 'a.csv'"),
    "no TOML": ("name = ", "is no TOML"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_an_own_manifest_are_named(fault, tmp_path):
    text, message = FAULTS[fault]
    with pytest.raises(InputError) as caught:
        manifests.read_manifest(written(tmp_path, text))
    assert message in str(caught.value)
    assert "own.toml" in str(caught.value)


def test_all_faults_are_named_at_once(tmp_path):
    text = SET.replace('title = "Own"', "") + FILE.replace("12", "0").replace("a.csv", "../a")
    with pytest.raises(InputError, match=r"has 3 faults: 'title is missing', .file 1: path .*size is 0"):
        manifests.read_manifest(written(tmp_path, text))


def test_what_is_no_manifest_is_named(tmp_path):
    with pytest.raises(InputError, match=r"'rxrx2' is not known: choose one of .*rxrx1.*FILE\.toml"):
        manifests.read_manifest("rxrx2")
    with pytest.raises(MissingFileError, match=r"nowhere\.toml' does not exist"):
        manifests.read_manifest(tmp_path / "nowhere.toml")


@given(
    st.dictionaries(
        st.sampled_from(["path", "source", "size", "sha256", "approximate", "x"]),
        st.text("a{1.}/", max_size=8) | st.integers(),
    )
)
def test_no_entry_however_odd_is_more_than_an_error(entry):
    table = {"name": "n", "title": "t", "purpose": "p", "licence": "l", "licence_url": "u", "non_commercial": False}
    assert list(manifests._faults({**table, "files": [entry]}))
