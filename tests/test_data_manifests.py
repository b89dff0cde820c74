import re
import tomllib
from pathlib import Path

import pytest

from cellica.artifacts import sha256

FOLDER = Path(__file__).parents[1] / "data_manifests"
MANIFESTS = sorted(FOLDER.glob("*.toml"))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_says_what_a_user_needs(path):
    manifest = tomllib.loads(path.read_text())
    assert manifest["name"] == path.stem
    assert {"title", "purpose", "licence", "licence_url", "non_commercial", "files"} <= set(manifest)
    for file in manifest["files"]:
        assert file["size"] > 0
        assert not Path(file["path"]).is_absolute()
        assert ".." not in Path(file["path"]).parts
        assert re.fullmatch(r"[0-9a-f]{64}", file.get("sha256", "0" * 64))


def test_manifest_describes_the_real_relationship_files(shared):
    manifest = tomllib.loads((FOLDER / "relationships.toml").read_text())
    for file in manifest["files"]:
        real = shared / "data" / "efaar_truth" / file["path"]
        assert (real.stat().st_size, sha256(real)) == (file["size"], file["sha256"])
