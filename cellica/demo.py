"""The stages in a row on a simulated screen: images to a corrected, scored and reported result."""

from pathlib import Path

import pandas as pd

from cellica import artifacts, correct, encoder, plates, profiles, progress, report, retrieval, screen, simulate

ENCODER = "camae-mini"
CORRECTED = ("center+sphere", "ica")  # kept in corrected.h5ad and shown in the report


def run(
    out_dir: artifacts.PathLike, *, random_state: int = 0, force: bool = False, preset: str = "small"
) -> tuple[pd.DataFrame, Path]:
    """Simulate a screen, then ingest, embed, profile, correct, compare and report it.

    Writes to ``out_dir``: ``screen/`` (images and metadata in RxRx1's layout), ``plates/``, ``sites/``, ``wells.h5ad``,
    ``corrected.h5ad``, ``comparison.csv`` and ``report.html``.

    Returns
    -------
    The comparison of methods, and the path of the report.

    Raises
    ------
    OutputExistsError
        ``out_dir`` holds a demo already and ``force`` is False.
    """
    out = Path(out_dir)
    artifacts.refuse_existing(out, force=force or not any(out.iterdir()) if out.is_dir() else force)

    progress.say("1/6 simulate: six-channel images with known biology and known batch effects")
    simulate.screen(out / "screen", preset, random_state=random_state, force=force)

    progress.say("2/6 ingest: images to OME-Zarr plates")
    ingested = plates.ingest(screen.read_rxrx1(out / "screen"), out / "plates", force=force)

    progress.say(f"3/6 embed: {ENCODER}, a small encoder trained on simulated screens")
    model = encoder.load(ENCODER, device="auto", channels="concat")
    for plate in ingested.plates:
        artifacts.write_adata(encoder.embed(plate, model), out / "sites" / f"{plate.stem}.h5ad", force=force)

    progress.say("4/6 profile: sites to wells")
    files = sorted((out / "sites").glob("*.h5ad"))
    inputs = {file.name: artifacts.sha256(file) for file in files}
    wells = profiles.wells([artifacts.read_adata(file) for file in files], inputs=inputs)
    artifacts.write_adata(wells, out / "wells.h5ad", force=force)

    progress.say("5/6 correct and score: every method on the same wells")
    scores = retrieval.compare(wells, class_key="moa", random_state=random_state)
    artifacts.write_table(scores, out / "comparison.csv", force=force)
    for method in CORRECTED:
        correct.run(wells, method, random_state=random_state)
    artifacts.name_inputs(wells, {"wells.h5ad": artifacts.sha256(out / "wells.h5ad")}, steps=len(CORRECTED))
    artifacts.write_adata(wells, out / "corrected.h5ad", force=force)

    progress.say("6/6 report")
    page = report.write(wells, out / "report.html", scores=scores, plates=ingested.plates, force=force)
    return scores, page
