import os
from pathlib import Path

import pandas as pd
import pytest


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(pd.errors, "Pandas4Warning"):  # raised inside anndata, on pandas 3 only
        config.addinivalue_line("filterwarnings", "ignore::pandas.errors.Pandas4Warning:anndata")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with ``data`` and ``reference``: ``$CELLICA_TEST_DATA``'s parent, or ``../shared`` beside the project."""
    named = os.environ.get("CELLICA_TEST_DATA")
    root = Path(named).parent if named else Path(__file__).parents[2] / "shared"
    if not (root / "data").is_dir():
        pytest.skip(f"test data not found at {root} (set CELLICA_TEST_DATA to the data folder)")
    return root
