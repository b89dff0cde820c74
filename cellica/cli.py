"""The command line: each verb parses, makes one public call, and writes one artifact.

Exit codes: 0 done; 1 done in part, with the list of what failed; 2 the input or the options are wrong.
"""

import contextlib
import io
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cellica import __version__, progress
from cellica.errors import (
    CellicaError,
    DiskFullError,
    InputError,
    NotWritableError,
    OutputBusyError,
    OutputExistsError,
    first_few,
)

app = typer.Typer(
    help="Microscopy screens made comparable across experiments: plates to embeddings to corrected, scored profiles.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="--quiet and --verbose go anywhere. Exit codes: 0 done, 1 done in part, 2 wrong input or options.",
)
PACKAGES = ("torch", "timm", "anndata", "zarr", "scikit-learn", "pandas", "numpy")


class Benchmark(StrEnum):
    """Published screens with a task of their authors'."""

    RXRX1 = "rxrx1"
    RXRX3_CORE = "rxrx3-core"


class Kind(StrEnum):
    """Data sets with a layout of their own, and tables."""

    RXRX1 = "rxrx1"
    RXRX3_CORE = "rxrx3-core"
    TABLE = "table"


Force = Annotated[bool, typer.Option("--force", help="Replace an output that exists.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check everything that can be known before the work, and print what it would be."),
]
Seed = Annotated[int, typer.Option("--random-state", min=0, max=2**32 - 2, help="Seed of every random choice.")]
BatchKey = Annotated[str, typer.Option("--batch-key", help="Column of obs that names the batch.")]
LabelKey = Annotated[str, typer.Option("--label-key", help="Column of obs that names the perturbation.")]
StrataKey = Annotated[
    str | None,
    typer.Option(
        "--strata-key",
        help="Column within which batches are compared; 'none' for no strata. [default: cell_type where present]",
    ),
]
Controls = Annotated[
    list[str] | None, typer.Option("--control", help="Perturbation that is a negative control; repeatable.")
]
Anchors = Annotated[list[str] | None, typer.Option("--anchor", help="Perturbation that is an anchor; repeatable.")]
Rep = Annotated[list[str] | None, typer.Option("--rep", help="Key of obsm, or X; repeatable. [default: all]")]
ClassKey = Annotated[str | None, typer.Option("--class-key", help="Column of classes, such as a mechanism.")]
GroupKey = Annotated[
    str | None,
    typer.Option("--group-key", help="Column of what must differ for class retrieval, such as the compound."),
]
Truth = Annotated[Path | None, typer.Option("--truth", help="Folder of relationship tables (CORUM.txt, ...).")]
MaxQueries = Annotated[
    int, typer.Option("--max-queries", min=0, help="Score a seeded sample of about this many queries; 0 for all.")
]
Score = Annotated[
    list[str] | None,
    typer.Option(
        "--score",
        help="Kind of scores: retrieval, batch, activity, accuracy, relationships, probes, integration; repeatable. "
        "[default: all but the last two]",
    ),
]
Clusters = Annotated[Path | None, typer.Option("--clusters", help="File of known clusters: name<TAB>MEMBER MEMBER ...")]
CompoundGene = Annotated[
    Path | None, typer.Option("--compound-gene", help="CSV of treatment, gene_symbol, nM_value: targets of compounds.")
]
GenePositions = Annotated[
    Path | None,
    typer.Option("--gene-positions", help="CSV of gene, arm: means of chromosome arms are taken off before --truth."),
]
GuideKey = Annotated[
    str | None, typer.Option("--guide-key", help="Column of guides, GENE_guide_1: do guides of a gene agree?")
]
ActivityPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--activity-pairs",
        help="KEY=COLUMN[,COLUMN] for activity, KEY one of pos_sameby, pos_diffby, neg_sameby, neg_diffby, as in "
        "pos_diffby=well; repeatable.",
    ),
]
Details = Annotated[
    Path | None, typer.Option("--details", help="Folder for tables of single perturbations and classes (CSV).")
]
RankDevice = Annotated[str, typer.Option("--device", help="Where rankings are counted: cpu, cuda, or auto.")]
MANY_QUERIES = 20_000
EXAMPLES = {
    "--column": "role=SPEC, as in perturbation=compound",
    "--activity-pairs": "pos_diffby=well",
    "--left-out": "PLATE=REASON, as in 'HUVEC-01_1=out of focus'",
}


# ------------------------------------------------------------------------------------------------ images to wells


@app.command(epilog="Example: cellica demo demo")
def demo(
    out_dir: Annotated[Path, typer.Argument(help="Folder for everything the demo makes.")] = Path("demo"),
    force: Force = False,
    random_state: Seed = 0,
) -> None:
    """Simulate a screen and take it through all stages to a report; offline, under 3 minutes."""
    from cellica import demo as stages

    scores, report = stages.run(out_dir, random_state=random_state, force=force)
    _print_scores(scores)
    _print(f"report: {report}")


@app.command(epilog="Example: cellica fetch openphenom weights/ --accept-license")
def fetch(
    dataset: Annotated[str | None, typer.Argument(help="Data set (see --list), or an own manifest FILE.toml.")] = None,
    out_dir: Annotated[Path | None, typer.Argument(metavar="DIR", help="Folder to fetch into.")] = None,
    file: Annotated[
        list[str] | None, typer.Option("--file", help="Only this file, or files such as 'data/*'; repeatable.")
    ] = None,
    accept_license: Annotated[
        bool, typer.Option("--accept-license", help="Accept terms that allow no commercial use.")
    ] = False,
    unpack: Annotated[bool, typer.Option("--unpack", help="Also unpack zip archives, into DIR.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be fetched.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the data sets, or the files of DATASET.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Fetch again a file that is not as it should be.")] = False,
) -> None:
    """Fetch a public data set or weights: verified, and resumed where an earlier run stopped."""
    from cellica import fetch as fetching
    from cellica import manifests

    if list_:
        for name in [dataset] if dataset else manifests.names():
            manifest = manifests.read_manifest(name)
            _print(f"{manifest.name}: {manifest.title}")
            _print(f"  {fetching.in_words(manifest.size)}; {manifest.licence}, {manifest.licence_url}")
            for entry in fetching.chosen(manifest, file) if dataset else ():
                _print(f"  {entry.path} ({fetching.size_in_words(entry)}): {entry.purpose}")
        return
    if dataset is None or out_dir is None:
        raise InputError(f"name a data set ({', '.join(manifests.names())}, or FILE.toml) and a folder to fetch into")
    outcomes = fetching.fetch(
        dataset, out_dir, file, accept_license=accept_license, unpack=unpack, force=force, dry_run=dry_run
    )
    for one in outcomes:
        note = f", {one.note}" if one.note else ""
        _print(f"{one.target} ({fetching.size_in_words(one.file)}): {one.status}{note}")
    if any(one.status == "failed" for one in outcomes):
        raise typer.Exit(1)


@app.command(epilog="Example: cellica ingest rxrx1 rxrx1/ plates/ --experiment HUVEC-01 --plate 1")
def ingest(
    kind: Annotated[Kind, typer.Argument(help="Layout of the source.")],
    source: Annotated[Path, typer.Argument(help="Folder of the data set, or the CSV of an own screen.")],
    out_dir: Annotated[Path, typer.Argument(help="Folder for the plates, one OME-Zarr store each.")],
    metadata: Annotated[Path | None, typer.Option("--metadata", help="File or folder of the tables.")] = None,
    column: Annotated[
        list[str] | None, typer.Option("--column", help="role=SPEC for tables, as in well=Well; repeatable.")
    ] = None,
    experiment: Annotated[list[str] | None, typer.Option("--experiment", help="Only this one; repeatable.")] = None,
    plate: Annotated[list[str] | None, typer.Option("--plate", help="Only this one; repeatable.")] = None,
    control: Controls = None,
    intensity_range: Annotated[
        tuple[float, float] | None,
        typer.Option("--intensity-range", help="LOW HIGH of 16-bit images, which become 0 and 255."),
    ] = None,
    intensity_percentiles: Annotated[
        tuple[float, float] | None,
        typer.Option(
            "--intensity-percentiles", help="Instead: percentiles LOW HIGH of each plate and channel, as in 0.1 99.9."
        ),
    ] = None,
    intensity_from: Annotated[
        str, typer.Option("--intensity-from", help="Wells that give the percentiles: all, or negative controls.")
    ] = "all",
    z: Annotated[
        str | None, typer.Option("--z", help="Of z-stacks: max, mean, or the number of a plane from 0.")
    ] = None,
    t: Annotated[
        int | None, typer.Option("--t", min=0, help="Of time series: the number of a time point from 0.")
    ] = None,
    pixel_size: Annotated[float | None, typer.Option("--pixel-size", help="Side of a pixel in micrometres.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 2 where anything was set aside.")] = False,
    keep_empty: Annotated[
        bool,
        typer.Option("--keep-empty", help="Write a plate without sites where no image of it can be used."),
    ] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Write plates again that table or options would now make otherwise.")
    ] = False,
    dry_run: DryRun = False,
    force: Force = False,
) -> None:
    """Write the images of a screen to OME-Zarr plates, and list every site that was set aside and why."""
    from cellica import plates, screen, shards

    planes = _planes(z)
    for option, given, fits in (
        ("--column", column, kind is Kind.TABLE),
        ("--control", control, kind is Kind.TABLE),
        ("--metadata", metadata, kind is not Kind.TABLE),
    ):
        if given and not fits:
            raise InputError(f"{option} is not for 'ingest {kind.value}': see cellica ingest --help")
    if kind is Kind.TABLE:
        table = screen.read_table(source, _pairs(column), controls=control or (), z=planes, t=t)
    else:
        table = (screen.read_rxrx1 if kind is Kind.RXRX1 else screen.read_rxrx3_core)(source, metadata)
    wanted = _only(_only(table, "experiment", experiment), "plate", plate)
    rules: dict[str, Any] = {"intensity_range": intensity_range, "pixel_size": pixel_size}
    how: dict[str, Any] = {"keep_empty": keep_empty, "update": update, "force": force}
    if kind is Kind.RXRX3_CORE and not any(str(name).startswith(screen.PATH) for name in table):
        if intensity_percentiles or intensity_from != "all" or z is not None or t is not None:
            raise InputError(
                "images in parquet shards are single planes of 8 bits: leave out --intensity-percentiles, "
                "--intensity-from, --z and --t"
            )
        names = {f"{one}_{other}" for one, other in zip(wanted["experiment"], wanted["plate"])}
        only = names if len(wanted) < len(table) else None
        if dry_run:
            return _print_table(shards.plan(table, source, out_dir, plates=only, **rules))
        report = shards.ingest(table, source, out_dir, plates=only, **rules, **how)
    else:
        rules |= {"intensity_percentiles": intensity_percentiles, "intensity_from": intensity_from, "z": planes, "t": t}
        if dry_run:
            return _print_table(plates.plan(wanted, out_dir, **rules))
        report = plates.ingest(wanted, out_dir, **rules, **how, count_unlisted=kind is not Kind.TABLE)
    _print(report.summary())
    if len(report.set_aside):
        _print(f"what was set aside, and why: {out_dir / 'set_aside.csv'}")
    if update and report.outdated:
        raise typer.Exit(2)
    if len(report.set_aside) or report.outdated:
        raise typer.Exit(2 if strict else 1)


@app.command(
    epilog="Example: cellica embed plates/HUVEC-01_1.zarr --out sites/HUVEC-01_1.h5ad --encoder openphenom --weights model.safetensors"
)
def embed(
    plate: Annotated[list[Path], typer.Argument(help="Plates (OME-Zarr stores), of cellica or of other tools.")],
    out: Annotated[
        Path, typer.Option("--out", help="Site embeddings: a .h5ad or .zarr file, or a folder for one file a plate.")
    ],
    encoder: Annotated[str, typer.Option("--encoder", help="openphenom, camae-mini, camae, or timm/NAME.")],
    weights: Annotated[
        str | None,
        typer.Option("--weights", help="File, its folder, or 'random'. [default: from the Hugging Face cache]"),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")] = "float32",
    channels: Annotated[str, typer.Option("--channels", help="mean over channels, or concat.")] = "mean",
    chunk_size: Annotated[
        int | None,
        typer.Option("--chunk-size", min=1, help="Fields embedded together. [default: what the device takes]"),
    ] = None,
    nuclei: Annotated[
        str | None, typer.Option("--nuclei", help="Channel in which cells are counted. [default: the first]")
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(
            "--verify",
            help="Published embeddings of the same wells to compare with: well_id or site_id, and feature_0 "
            "... (.parquet, .csv, .tsv), or AnnData.",
        ),
    ] = None,
    layout: Annotated[
        Path | None, typer.Option("--layout", help="Plate map that adds columns to the sites of the plates.")
    ] = None,
    intensity_range: Annotated[
        tuple[float, float] | None,
        typer.Option("--intensity-range", help="LOW HIGH of other tools' 16-bit plates, which become 0 and 255."),
    ] = None,
    z: Annotated[
        str | None, typer.Option("--z", help="Of other tools' z-stacks: max, mean, or the number of a plane from 0.")
    ] = None,
    t: Annotated[
        int | None, typer.Option("--t", min=0, help="Of other tools' time series: the number of a time point from 0.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for another run that writes the same file, rather than refuse.")
    ] = False,
    dry_run: DryRun = False,
    force: Force = False,
    random_state: Seed = 0,
) -> None:
    """Embed every site of the plates; the same command goes on with a run that was stopped."""
    from cellica import artifacts, parts, plates, profiles
    from cellica import encoder as encoders

    single = out.suffix in artifacts.SUFFIXES
    if single:
        artifacts.check_adata_name(out, force=force)
    elif out.suffix or out.is_file():
        raise InputError(f"--out {str(out)!r} is neither a folder nor a file that ends in .h5ad or .zarr")
    targets = [out if single else out / f"{store.absolute().stem}.h5ad" for store in plate]
    if not single and len(set(targets)) < len(targets):
        raise InputError(
            f"two plates of one name would be written to one file in {out}: embed them into separate folders"
        )
    for target in targets:
        artifacts.refuse_inputs(target, plate)
    planes = _planes(z)
    if dry_run and not any(path.exists() for path in plate):
        encoders.load(encoder, weights, device=device, dtype=dtype, channels=channels, random_state=random_state)
        return _print("no plate is there yet: the options were checked, and nothing else")
    stores = [plates.Plate(path, layout=layout, intensity_range=intensity_range, z=planes, t=t) for path in plate]
    model = encoders.load(encoder, weights, device=device, dtype=dtype, channels=channels, random_state=random_state)
    published = encoders.read_published(verify) if verify else None
    if published:
        for store in (one for one in stores if len(one.sites)):
            published.check(store.sites, model.n_features * (len(store.channels) if channels == "concat" else 1))

    twice = first_few(name for name, n in Counter(site for one in stores for site in one.sites.index).items() if n > 1)
    if single and twice:
        raise InputError(f"sites of these plates have the same ids ({twice}): name each plate once")
    if dry_run:
        return _print_table(_embedding_plan(stores, targets, model))

    failed, unlike, skipped, outdated = [], 0, 0, []
    for target, group in [(out, stores)] if single else zip(targets, ([store] for store in stores)):
        try:
            with parts.claimed(target, wait=wait) as folder:
                if target.exists() and not (single or force):
                    progress.say(f"{target} is there already and was skipped (--force writes it again)")
                    skipped += 1
                    outdated += [] if encoders.is_embedded(target, group[0], model, nuclei=nuclei) else [target.name]
                    if published and outdated[-1:] != [target.name]:
                        unlike += not _verified(artifacts.read_adata(target), published)
                    continue
                embedded = [
                    encoders.embed(
                        store, model, chunk_size=chunk_size, parts=folder / f"{i}-{store.name}", nuclei=nuclei
                    )
                    for i, store in enumerate(group)
                ]
                sites = profiles.join(embedded) if single else embedded[0]
                if published:
                    unlike += not _verified(sites, published)
                artifacts.write_adata(sites, target, force=force)
        except (OutputBusyError, DiskFullError, NotWritableError):
            raise
        except CellicaError as error:
            if single:
                raise
            failed.append(f"{target.stem}: {error}")
    if single:
        _print(f"{sites.n_obs} sites of {len(stores)} plates embedded: {out}")
    else:
        _print(f"{len(stores) - skipped - len(failed)} plates embedded, {skipped} there already: {out}")
    if outdated:
        _print(
            f"{len(outdated)} of these are not what these plates and options give, or are damaged (--force writes them "
            f"again): {first_few(outdated)}"
        )
    for text in failed:
        _print(f"failed: {text}")
    incomplete = [store for store in stores if not store.ours and len(store.set_aside)]
    for store in incomplete:
        reasons = first_few(store.set_aside["reason"].str.split(":").str[0].unique())
        _print(f"{store.path}: {len(store.set_aside)} wells or fields set aside ({reasons})")
    if failed or unlike or incomplete or outdated:
        raise typer.Exit(2 if len(failed) == len(stores) else 1)


@app.command(epilog="Example: cellica pretrain plates/*.zarr --out model.safetensors --steps 2000")
def pretrain(
    plate: Annotated[list[Path], typer.Argument(help="Plates (OME-Zarr stores), of one number of channels.")],
    out: Annotated[Path, typer.Option("--out", help="The model (.safetensors); .csv and .png are written beside it.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of the optimiser.")],
    geometry: Annotated[str, typer.Option("--geometry", help="openphenom or camae-mini.")] = "camae-mini",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Crops a step.")] = 64,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", help="The highest, for batches of that size.")
    ] = 1e-4,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    checkpoint_minutes: Annotated[
        float, typer.Option("--checkpoint-minutes", min=0, help="Minutes between checkpoints.")
    ] = 5.0,
    dry_run: DryRun = False,
    force: Force = False,
    random_state: Seed = 0,
) -> None:
    """Train a channel-agnostic masked autoencoder on plates; the same command goes on with a run that was stopped."""
    from cellica import pretrain as training

    settings = training.Settings(
        steps=steps, batch_size=batch_size, learning_rate=learning_rate, dtype=dtype, random_state=random_state
    )
    if dry_run:
        return _print_table(training.plan(plate, out, settings, geometry=geometry, force=force))
    curve = training.run(
        plate, out, settings, geometry=geometry, device=device, checkpoint_minutes=checkpoint_minutes, force=force
    )
    last = curve.iloc[-1]
    _print(
        f"{steps} steps, mean squared error {last['mse']:.4f}, held out {last['held_out_mse']:.4f} (1: nothing learned): {out}"
    )
    _print(f"loss curve: {out.with_suffix('.csv')}")
    _print(f"painted crops: {out.with_suffix('.png')}")


@app.command(
    "import",
    epilog="Example: cellica import table profiles.csv --out wells.h5ad --column perturbation={compound}@{dose} --control DMSO@0",
)
def import_(
    kind: Annotated[Kind, typer.Argument(help="Layout of the files.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Tables of embeddings or profiles.")],
    out: Annotated[Path, typer.Option("--out", help="Wells: a .h5ad or .zarr file.")],
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--metadata",
            help="FILE:left=right,... joins a further table (tables); a file or folder (rxrx1, rxrx3-core).",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option("--column", help="role=SPEC: a column, {a}@{b}, or column:^(regex); repeatable."),
    ] = None,
    control: Controls = None,
    features: Annotated[
        str | None, typer.Option("--features", help="Regular expression of the feature columns' names.")
    ] = None,
    force: Force = False,
) -> None:
    """Turn published embeddings or a table of profiles into AnnData."""
    from cellica import artifacts, parts, profiles

    artifacts.check_adata_name(out, force=force)
    if kind is Kind.TABLE:
        adata = profiles.read_table(
            files, metadata=metadata or (), columns=_pairs(column), controls=control or (), features=features
        )
    else:
        for option, given in (("--column", column), ("--control", control)):
            if given:
                raise InputError(f"{option} is for 'import table': {kind.value} has columns and controls of its own")
        if metadata and len(metadata) > 1:
            raise InputError(f"import {kind.value} takes one --metadata, a file or a folder, and got {len(metadata)}")
        adata = profiles.read_embeddings(files, metadata[0] if metadata else None, kind.value, features=features)
    with parts.claimed(out):
        artifacts.write_adata(adata, out, force=force)
    _print(f"{adata.n_obs} rows x {adata.n_vars} features: {out}")
    _print_account(adata, "import")


@app.command(epilog="Example: cellica profile sites/*.h5ad --out wells.h5ad")
def profile(
    files: Annotated[list[Path], typer.Argument(metavar="SITES...", help="Site embeddings, one file a plate.")],
    out: Annotated[Path, typer.Option("--out", help="Wells: a .h5ad or .zarr file.")],
    left_out: Annotated[
        list[str] | None,
        typer.Option("--left-out", help="PLATE=REASON, for the account: a plate that is not among them; repeatable."),
    ] = None,
    force: Force = False,
) -> None:
    """Average the sites of each well, and join the wells of all plates."""
    from cellica import artifacts, parts, profiles

    artifacts.check_adata_name(out, force=force)
    artifacts.refuse_inputs(out, files)
    sites = [artifacts.read_adata(file) for file in files]
    inputs = {file.name: artifacts.sha256(file) for file in files}
    wells = profiles.wells(sites, inputs=inputs, left_out=_pairs(left_out, "--left-out"))
    with parts.claimed(out):
        artifacts.write_adata(wells, out, force=force)
    _print(f"{wells.n_obs} wells x {wells.n_vars} features: {out}")
    _print_account(wells, "profile")


# ------------------------------------------------------------------------------------------- correction and scores


@app.command(epilog="Example: cellica correct wells.h5ad --out corrected.h5ad --method ica --method center+sphere")
def correct(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="IN", help="Wells.")],
    out: Annotated[Path, typer.Option("--out", help="The same wells with corrections in obsm.")],
    method: Annotated[list[str] | None, typer.Option("--method", help="NAME, or NAME+NAME; repeatable.")] = None,
    rep: Annotated[str | None, typer.Option("--rep", help="Key of obsm to correct. [default: X]")] = None,
    batch_key: BatchKey = "experiment",
    label_key: LabelKey = "perturbation",
    strata_key: StrataKey = None,
    control: Controls = None,
    anchor: Anchors = None,
    n_components: Annotated[int | None, typer.Option("--n-components", min=1, help="Components to look for.")] = None,
    ridge: Annotated[
        float | None, typer.Option("--ridge", min=0, help="Ridge, as a multiple of the mean variance.")
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Choose the ridge by replicates in batches that are left out in turn.")
    ] = False,
    mixed: Annotated[
        str | None,
        typer.Option("--mixed", help="Components of batch and biology: keep, remove or regress. [default: keep]"),
    ] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Keep the fitted correction in this file.")] = None,
    apply: Annotated[
        Path | None,
        typer.Option("--apply", help="Apply a saved correction instead; it knows its options, so give no others."),
    ] = None,
    dry_run: DryRun = False,
    force: Force = False,
    random_state: Seed = 0,
) -> None:
    """Correct wells for batch effects by one or more methods."""
    from cellica import artifacts, parts
    from cellica import correct as corrections

    if (method is None) == (apply is None):
        given = "neither" if method is None else "both"
        raise InputError(
            f"{given} of --method and --apply given: name one, --method {'|'.join(corrections.METHODS)} (or a chain of "
            "these, joined by +) or --apply FILE"
        )
    if save and (method is None or len(method) > 1):
        raise InputError("--save keeps one fitted correction: name one --method with it")
    artifacts.check_adata_name(out, force=force)
    if save:
        artifacts.refuse_inputs(save, [file, out])
        artifacts.refuse_existing(save, force=force)
    if apply:
        artifacts.require_file(apply, "saved correction")
        _refuse_beside(
            context,
            "--apply",
            "keeps these as they were in its fit",
            ("file", "out", "rep", "apply", "force", "dry_run"),
        )
    options: dict[str, Any] = {
        key: value
        for key, value in (("n_components", n_components), ("ridge", ridge), ("mixed", mixed))
        if value is not None
    }
    for name in method or ():
        corrections.parse(name, options)
    keys = _keys(batch_key, label_key, strata_key, control, anchor)
    if dry_run:
        return _print_design(file, keys)
    adata = artifacts.read_adata(file)
    inputs = {file.name: artifacts.sha256(file)}
    with parts.claimed(out), _beside(save, force) as saved:
        if apply:
            inputs[apply.name] = artifacts.sha256(apply)
            corrector = corrections.load(apply)
            corrector.transform(adata, use_rep=rep)
            done = [corrector.method]
        else:
            done = list(dict.fromkeys(method or ()))
            for name in progress.track(done, "correct"):
                corrections.run(
                    adata, name, use_rep=rep, random_state=random_state, save=saved, tune=tune, **keys, **options
                )
        artifacts.name_inputs(adata, inputs, steps=len(done))
        artifacts.write_adata(adata, out, force=force)
    said: set[str] = set()
    for name in done:
        _print(f"obsm['X_{name}'] written: {out}")
        for note in adata.uns["cellica"][name]["notes"]:
            if note not in said:
                _print(f"  {note}")
            said |= {note} if note.startswith("confounding:") else set()


@app.command(epilog="Example: cellica evaluate corrected.h5ad --out scores.csv --class-key moa --group-key compound")
def evaluate(
    file: Annotated[Path, typer.Argument(metavar="IN", help="Wells with representations in obsm.")],
    out: Annotated[Path, typer.Option("--out", help="Table of scores (CSV).")],
    rep: Rep = None,
    batch_key: BatchKey = "experiment",
    label_key: LabelKey = "perturbation",
    strata_key: StrataKey = None,
    class_key: ClassKey = None,
    group_key: GroupKey = None,
    control: Controls = None,
    anchor: Anchors = None,
    truth: Truth = None,
    clusters: Clusters = None,
    compound_gene: CompoundGene = None,
    gene_positions: GenePositions = None,
    guide_key: GuideKey = None,
    score: Score = None,
    activity_pairs: ActivityPairs = None,
    max_queries: MaxQueries = MANY_QUERIES,
    details: Details = None,
    store: Annotated[
        Path | None, typer.Option("--store", help="Also write the wells with the scores in uns['cellica']['scores'].")
    ] = None,
    device: RankDevice = "cpu",
    force: Force = False,
    random_state: Seed = 0,
) -> None:
    """Score representations: retrieval across batches, activity, accuracy, known relationships, batch effect."""
    from cellica import artifacts, parts, retrieval

    artifacts.refuse_existing(out, force=force)
    artifacts.refuse_inputs(out, [file])
    if store:
        artifacts.check_adata_name(store, force=force)
        artifacts.refuse_inputs(store, [file, out])
    if details and not force and details.exists() and any(details.glob("*.csv")):
        raise OutputExistsError(
            f"{details} holds tables already: use --force to replace them, or choose another folder"
        )
    keys = _keys(batch_key, label_key, strata_key, control, anchor)
    scored: dict[str, Any] = {
        "scores": score,
        "class_key": class_key,
        "group_key": group_key,
        "truth": truth,
        "clusters": clusters,
        "compound_gene": compound_gene,
        "gene_positions": gene_positions,
        "guide_key": guide_key,
        "activity_pairs": {
            key: columns.split(",") for key, columns in _pairs(activity_pairs, "--activity-pairs").items()
        },
        "max_queries": max_queries or None,
        "device": device,
    }
    adata = artifacts.read_adata(file)
    with parts.claimed(out), _beside(store, force) as stored:
        scores = retrieval.evaluate(adata, rep, **keys, **scored, random_state=random_state)
        if stored:
            artifacts.write_adata(adata, stored)
        with artifacts.atomic(out, force=force) as table:  # it has its name when all else is whole
            artifacts.write_table(scores, table)
            _write_details(scores, details, force)
    _print_scores(scores)
    if scores["value"].isna().all():
        raise typer.Exit(1)


@app.command(epilog="Example: cellica compare wells.h5ad --out comparison.csv --class-key moa --group-key compound")
def compare(
    file: Annotated[Path, typer.Argument(metavar="IN", help="Wells.")],
    out: Annotated[Path, typer.Option("--out", help="Table of scores (CSV).")],
    method: Annotated[
        list[str] | None, typer.Option("--method", help="NAME, or NAME+NAME; repeatable. [default: all peers]")
    ] = None,
    batch_key: BatchKey = "experiment",
    label_key: LabelKey = "perturbation",
    strata_key: StrataKey = None,
    class_key: ClassKey = None,
    group_key: GroupKey = None,
    control: Controls = None,
    anchor: Anchors = None,
    truth: Truth = None,
    clusters: Clusters = None,
    compound_gene: CompoundGene = None,
    gene_positions: GenePositions = None,
    guide_key: GuideKey = None,
    score: Score = None,
    activity_pairs: ActivityPairs = None,
    max_queries: MaxQueries = MANY_QUERIES,
    reference: Annotated[str, typer.Option("--reference", help="Method over which gains are given.")] = "none",
    held_out: Annotated[
        bool, typer.Option("--held-out/--no-held-out", help="Also score wells of batches that no fit has seen.")
    ] = True,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Picture of batch effect against retrieval (PNG, SVG, PDF).")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Methods at a time. [default: the cores, 1 for large data]")
    ] = None,
    device: RankDevice = "cpu",
    dry_run: DryRun = False,
    force: Force = False,
    random_state: Seed = 0,
) -> None:
    """Correct by each method and score each: one table. A run that was stopped goes on where it was."""
    from cellica import artifacts, parts, plot, retrieval
    from cellica import correct as corrections
    from cellica.drawing import figure_of

    artifacts.refuse_existing(out, force=force)
    artifacts.refuse_inputs(out, [file])
    if figure:
        artifacts.refuse_existing(figure, force=force)
        artifacts.refuse_inputs(figure, [file, out])
        if figure.suffix not in (".png", ".svg", ".pdf"):
            raise InputError(f"--figure {str(figure)!r} has no known ending: use .png, .svg or .pdf")
    for name in method or ():
        corrections.parse(name)
    keys = _keys(batch_key, label_key, strata_key, control, anchor)
    scored: dict[str, Any] = {
        "scores": score,
        "class_key": class_key,
        "group_key": group_key,
        "truth": truth,
        "clusters": clusters,
        "compound_gene": compound_gene,
        "gene_positions": gene_positions,
        "guide_key": guide_key,
        "activity_pairs": {
            key: columns.split(",") for key, columns in _pairs(activity_pairs, "--activity-pairs").items()
        },
        "max_queries": max_queries or None,
        "device": device,
    }
    if dry_run:
        _print(f"methods: {', '.join(method or corrections.DEFAULT_COMPARISON)}")
        return _print_design(file, keys)
    adata = artifacts.read_adata(file)
    with parts.claimed(out) as folder:
        scores = retrieval.compare(
            adata,
            method,
            **keys,
            **scored,
            random_state=random_state,
            reference=reference,
            held_out=held_out,
            n_jobs=jobs,
            parts=folder,
        )
        with artifacts.atomic(out, force=force) as table:  # it has its name when all else is whole
            artifacts.write_table(scores, table)
            if figure:
                try:
                    drawn = figure_of(plot.tradeoff(scores))
                    with parts.claimed(figure), artifacts.atomic(figure, force=force) as temporary:
                        drawn.savefig(temporary, format=figure.suffix[1:], dpi=150)
                except InputError as error:
                    _print(f"no figure: {error}")
    _print_scores(scores)
    if scores["gain"].notna().any():
        _print(
            f"gain over {reference}, paired, with 95 % intervals over perturbations (class_map: over what --group-key names):"
        )
        _print(retrieval.gains(scores).to_string(na_rep="-"))
    if (scores["metric"] == "all").any() or scores["value"].isna().all():
        raise typer.Exit(1)


@app.command(
    epilog="Example: cellica benchmark rxrx3-core OpenPhenom_rxrx3_core_embeddings.parquet --metadata metadata_rxrx3_core.csv "
    "--truth benchmark_annotations/ --compound-gene compound_gene_interactions.csv --out rxrx3.csv"
)
def benchmark(
    kind: Annotated[Benchmark, typer.Argument(help="Whose task.")],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Published embeddings, or wells of your own (.h5ad, .zarr).")
    ],
    out: Annotated[Path, typer.Option("--out", help="Table of scores (CSV).")],
    metadata: Annotated[Path | None, typer.Option("--metadata", help="The data set's table, or its folder.")] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="NAME, or NAME+NAME; repeatable. [default: several]")
    ] = None,
    truth: Truth = None,
    compound_gene: CompoundGene = None,
    gene_positions: GenePositions = None,
    force: Force = False,
    random_state: Seed = 0,
) -> None:
    """Score corrections of a published screen as its authors do: RxRx1's siRNAs, RxRx3-core's genes and compounds."""
    from cellica import artifacts, benchmarks, parts, profiles
    from cellica import correct as corrections

    artifacts.refuse_existing(out, force=force)
    artifacts.refuse_inputs(out, files)
    for name in method or ():
        corrections.parse(name)
    if kind is Benchmark.RXRX1 and (truth or compound_gene or gene_positions):
        raise InputError("--truth, --compound-gene and --gene-positions are for rxrx3-core: leave them out")
    if kind is Benchmark.RXRX3_CORE and not (truth or compound_gene):
        raise InputError("rxrx3-core is scored by --truth FOLDER, --compound-gene CSV, or both: name one")
    own = [file for file in files if file.suffix in (".h5ad", ".zarr")]
    if own and (len(files) > 1 or metadata):
        raise InputError(
            "wells of your own are one file, which knows its metadata: leave out the others and --metadata"
        )
    adata = artifacts.read_adata(own[0]) if own else profiles.read_embeddings(files, metadata, kind.value)
    if not own:
        _print(f"{adata.n_obs} rows x {adata.n_vars} features")
        _print_account(adata, "import")
    given: dict[str, Any] = {"random_state": random_state, **({"methods": method} if method else {})}
    if kind is Benchmark.RXRX1:
        scores = benchmarks.rxrx1(adata, **given)
    else:
        scores = benchmarks.rxrx3_core(
            adata, truth=truth, compound_gene=compound_gene, gene_positions=gene_positions, **given
        )
    with parts.claimed(out):
        artifacts.write_table(scores, out, force=force)
    main = ~scores["metric"].str.contains(r"_q\d+$") & scores["group"].map(lambda group: not _is_number(group))
    _print_scores(scores[main].reset_index(drop=True))
    _print(f"{len(scores)} scores, with those of single concentrations, intervals and notes: {out}")
    if (scores["metric"] == "all").any() or scores["value"].isna().all():
        raise typer.Exit(1)


@app.command(epilog="Example: cellica report corrected.h5ad --out report.html --scores scores.csv")
def report(
    file: Annotated[Path, typer.Argument(metavar="IN", help="Wells with corrections.")],
    out: Annotated[Path, typer.Option("--out", help="HTML file.")],
    scores: Annotated[Path | None, typer.Option("--scores", help="Table that evaluate or compare wrote.")] = None,
    plate: Annotated[list[Path] | None, typer.Option("--plate", help="Plate to show pictures of; repeatable.")] = None,
    force: Force = False,
) -> None:
    """Write one self-contained HTML page: what was done, dropped, removed and scored."""
    from cellica import artifacts, parts
    from cellica import report as pages

    artifacts.refuse_existing(out, force=force)
    artifacts.refuse_inputs(out, [file, *([scores] if scores else [])])
    table = pages.read_scores(scores) if scores else None
    adata = artifacts.read_adata(file)
    with parts.claimed(out):
        page = pages.write(adata, out, scores=table, plates=plate or (), force=force)
    _print(f"report: {page}")


# ------------------------------------------------------------------------------------------------------ plumbing


def _versions(asked: bool) -> None:
    if asked:
        _print(f"cellica {__version__} (Python {sys.version.split()[0]})")
        for package in PACKAGES:
            _print(f"{package} {installed(package)}")
        raise typer.Exit


@app.callback()
def _root(
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no notes on stderr.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="More notes on stderr.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_versions, help="Versions of what matters.")
    ] = False,
) -> None:
    progress.show(not quiet)
    level = logging.ERROR if quiet else logging.DEBUG if verbose else logging.WARNING
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("cellica").setLevel(level)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    flags = [flag for flag in ("--quiet", "--verbose") if flag in given]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows no letters beyond ASCII fails no run
    try:
        code = app([*flags, *(word for word in given if word not in flags)], prog_name="cellica", standalone_mode=False)
    except (CellicaError, OSError) as error:
        message = error if isinstance(error, CellicaError) else f"{type(error).__name__}: {error}"
        _fail(str(message))
        code = 2
    except typer.Abort:
        code = 130
    except Exception as error:
        if hasattr(error, "exit_code"):  # usage errors of the parser carry their own text and code
            error.show()  # type: ignore[attr-defined]
            code = error.exit_code
        elif "--verbose" in flags:
            raise
        else:
            _fail(f"{type(error).__name__}: {error}\nThis was not foreseen: --verbose shows where it happened.")
            code = 2
    raise SystemExit(code or 0)


def _fail(message: str) -> None:
    Console(stderr=True).print(f"error: {message}", style="bold red", markup=False, highlight=False, soft_wrap=True)


def _print(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def _verified(sites: Any, published: Any) -> bool:
    """Compare embeddings with published ones, print how they agree, and tell whether they do."""
    from cellica import encoder as encoders

    verification = encoders.verify(sites, published)
    _print(verification.summary())
    return verification.agrees


def _print_table(table: Any) -> None:
    """A table on stdout, as CSV."""
    _print(table.to_csv(index=False).rstrip())


def _print_design(file: Path, keys: dict[str, Any]) -> None:
    """What a correction would find: the design, and what it can tell apart; options alone where there are no wells yet."""
    from cellica import artifacts
    from cellica import correct as corrections

    if not file.exists():
        return _print(f"{file} is not there yet: the options were checked, and nothing else")
    adata = artifacts.read_adata(file)
    design = corrections.confounding(adata, **keys)
    _print(f"{adata.n_obs} wells x {adata.n_vars} features")
    for sentence in design.sentences:
        _print(sentence)
    _print_table(design.table)


def _embedding_plan(stores: Sequence[Any], targets: Sequence[Path], model: Any) -> Any:
    """What embed would do, one row a plate."""
    import pandas as pd

    from cellica import encoder as encoders

    rows = [
        (store.name, len(store.sites), encoders.crops_of(store, model), str(target), target.exists())
        for store, target in zip(stores, targets)
    ]
    return pd.DataFrame(rows, columns=["plate", "sites", "crops", "output", "there_already"])


def _print_account(adata: Any, key: str) -> None:
    """What a stage left out, as its record in ``uns["cellica"]`` tells."""
    for name, value in adata.uns["cellica"].get(key, {}).items():
        values = value.tolist() if hasattr(value, "tolist") else value
        if values != []:
            _print(f"  {name.replace('_', ' ')}: {first_few(values) if isinstance(values, list) else values}")


def _print_scores(scores: Any) -> None:
    """The scores as a table on stdout: representations down, metrics across, chance last."""
    import pandas as pd

    from cellica import retrieval
    from cellica.scores import chances

    width = max(100, Console().width)
    table = retrieval.summary(scores).dropna(axis=1, how="all")
    if table.empty:
        _print("nothing could be scored:")
    else:
        text = table.map(lambda value: "-" if pd.isna(value) else f"{value:.3f}")
        text.loc["chance"] = pd.Series(chances(scores))
        _print(text.to_string(line_width=width))
    for caution in retrieval.cautions(scores):
        _print(f"mind: {caution}")


@contextlib.contextmanager
def _beside(output: Path | None, force: bool) -> Iterator[Path | None]:
    """A temporary path for a second output of a verb, which has its name when the block succeeds; None where none is asked for."""
    from cellica import artifacts, parts

    if output is None:
        yield None
        return
    with parts.claimed(output), artifacts.atomic(output, force=force) as temporary:
        yield temporary


def _write_details(scores: Any, folder: Path | None, force: bool) -> None:
    """The tables that scores sum up, ``NAME.csv`` each with a column for the representation."""
    import pandas as pd

    from cellica import artifacts, parts
    from cellica.scores import DETAILS

    if folder is None:
        return
    of_name: dict[str, list[Any]] = {}
    for (rep, name), detail in scores.attrs[DETAILS].items():
        table = detail.table if detail.table.index.name is None else detail.table.reset_index()
        of_name.setdefault(name, []).append(table.assign(rep=rep))
    if not of_name:
        _print(f"{folder}: no score that was asked for has a table of its own")
    with contextlib.ExitStack() as whole:
        for name, tables in of_name.items():
            file = folder / f"{name}.csv"
            whole.enter_context(parts.claimed(file))
            table = whole.enter_context(artifacts.atomic(file, force=force))
            artifacts.write_table(pd.concat(tables, ignore_index=True), table)
            _print(str(file))


def _refuse_beside(context: typer.Context, option: str, why: str, allowed: Sequence[str]) -> None:
    """Raise an InputError where options were given that another one leaves without effect."""
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in allowed
        and (source := context.get_parameter_source(str(parameter.name))) is not None
        and source.name == "COMMANDLINE"
    ]
    if given:
        raise InputError(f"{option} {why}: leave out {', '.join(given)}")


def _keys(
    batch_key: str, label_key: str, strata_key: str | None, controls: list[str] | None, anchors: list[str] | None
) -> dict[str, Any]:
    strata = {None: "auto", "none": None}.get(strata_key, strata_key)
    return {
        "batch_key": batch_key,
        "label_key": label_key,
        "strata_key": strata,
        "controls": controls or None,
        "anchors": anchors or None,
    }


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9.eE+-]+", text) is not None


def _planes(z: str | None) -> int | str | None:
    return int(z) if z and re.fullmatch("[0-9]+", z) else z


def _pairs(entries: Sequence[str] | None, option: str = "--column") -> dict[str, str]:
    """``role=SPEC`` entries as a dict."""
    pairs = {}
    for entry in entries or ():
        role, equals, spec = entry.partition("=")
        if not (role and equals and spec):
            raise InputError(f"{option} {entry!r} is not understood: write {EXAMPLES[option]}")
        pairs[role] = spec
    return pairs


def _only(table: Any, key: str, wanted: Sequence[str] | None) -> Any:
    if not wanted:
        return table
    absent = sorted(set(wanted) - set(table[key].astype(str)))
    if absent:
        known = sorted(set(table[key].astype(str)))
        raise InputError(
            f"--{key} {', '.join(absent)} is not in the screen table, which has {', '.join(known[:12])}"
            + (" ..." if len(known) > 12 else "")
        )
    return table[table[key].astype(str).isin(wanted)]


if __name__ == "__main__":
    main()
