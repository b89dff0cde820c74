"""Probes of one data set: each perturbation against controls on batches left out, and the batch of controls, in every arm.

    python workflows/microscopy/probe.py wells.h5ad --probes probes.csv --batches batches.csv [options]

``probes.csv``: a row a perturbation, held-out batch, arm, rotation and penalty: AUROC and sparsity of the probe's weights.
``batches.csv``: a row a fold, arm and rotation: how often a linear discriminant names the batch of a control, cross-validated
over the controls of all batches. Whitening, ICA, what is dropped and both probes' C see training batches only.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression

from cellica import artifacts, probes
from cellica.batch_effects import batch_probe
from cellica.errors import CellicaError
from cellica.roles import Roles, roles_of
from cellica.schema import CONTROL, EXPERIMENT, PERTURBATION, InputError, require_columns

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import arms
import validation

CS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of the L1 penalty, to choose from
CHOOSING = 12  # perturbations by which the C of an arm and fold is chosen
L1 = {"l1_ratio": 1.0} if LogisticRegression().penalty == "deprecated" else {"penalty": "l1"}
COLUMNS = ["perturbation", "held_out", "auroc", "hoyer", "top_quarter", "C", "n_perturbed", "n_controls"]


@dataclass
class Task:
    """Wells of one data set: features, roles, and codes of perturbation (-1: control), batch and group of batches."""

    x: np.ndarray
    roles: Roles
    names: np.ndarray
    batches: np.ndarray
    label: np.ndarray
    batch: np.ndarray
    group: np.ndarray

    def take(self, rows: np.ndarray) -> "Task":
        """Some of the wells; names and codes stay."""
        arrays = {name: getattr(self, name)[rows] for name in ("x", "label", "batch", "group")}
        return replace(self, roles=self.roles.take(rows), **arrays)


def task_of(
    wells: ad.AnnData, label_key: str, batch_key: str, max_batches: int, max_controls: int | None, random_state: int
) -> Task:
    """Controls and perturbed wells of batches that have both; perturbations that lie in two groups of batches.

    Raises
    ------
    InputError
        There are no controls, one batch, several cell types, or no perturbation in two batches.
    """
    require_columns(wells.obs, [label_key, batch_key, CONTROL], "obs")
    roles = roles_of(wells.obs, batch_key=batch_key, label_key=label_key)
    if len(np.unique(roles.strata.astype(str))) > 1:
        raise InputError("wells are of several cell types: keep one, as in --where cell_type=HUVEC")
    roles.require(roles.control, "negative control", "the probe")
    roles.require_batches("the probe")
    batches, batch = np.unique(roles.batch.astype(str), return_inverse=True)
    with_controls = np.isin(batch, batch[roles.control])
    kept = np.flatnonzero((roles.control | roles.treated) & with_controls & np.isfinite(wells.X).all(axis=1))
    if max_controls is not None:
        kept = thinned(kept, roles.control, batch, max_controls, random_state)
    _, code = np.unique(batch[kept], return_inverse=True)
    group = probes.batch_groups(code, np.zeros_like(code), most=max_batches, random_state=random_state)
    text = np.where(roles.control[kept], "", roles.label[kept].astype(str))
    places = pd.DataFrame({"label": text, "group": group}).groupby("label")["group"].transform("nunique")
    repeated = (places > 1).to_numpy()
    if not repeated[text != ""].any():
        raise InputError(
            f"no perturbation of obs[{label_key!r}] lies in two batches of obs[{batch_key!r}] that have negative controls"
        )
    kept, group, text = kept[repeated], group[repeated], text[repeated]
    names, label = np.unique(text, return_inverse=True)
    label = label - (names[0] == "")
    x = np.asarray(wells.X[kept], dtype=np.float64)
    return Task(x, roles.take(kept), names[names != ""], batches, label, batch[kept], group)


def thinned(rows: np.ndarray, control: np.ndarray, batch: np.ndarray, most: int, random_state: int) -> np.ndarray:
    """Rows with at most so many controls a batch, at random."""
    order = np.random.default_rng(random_state).permutation(rows)
    order = order[control[order]]
    place = pd.Series(batch[order]).groupby(batch[order]).cumcount().to_numpy()
    return np.sort(np.concatenate([rows[~control[rows]], order[place < most]]))


def l2_probes(x: np.ndarray, task: Task, held: int, random_state: int) -> pd.DataFrame:
    """cellica's own probes, of all perturbations."""
    found = probes.held_out_probes(x, task.label, task.batch, task.group, held, random_state=random_state)
    values = [found.label, found.batch, found.auroc, found.hoyer, found.top_share]
    return table_of(task, [*values, found.C, found.n_perturbed, found.n_controls])


def l1_probes(x: np.ndarray, task: Task, held: int, random_state: int, chosen: np.ndarray) -> pd.DataFrame:
    """Probes with an L1 penalty, of the perturbations of these codes; one C for all of them.

    C has the best mean AUROC over the batches of three parts of the training groups, each left out in turn, of
    the first few of these perturbations; the smallest of equals.
    """
    training = task.group != held
    scale = x[training].std(axis=0)
    z = (x - x[training].mean(axis=0)) / np.where(scale > 0, scale, np.inf)
    groups = np.random.default_rng(random_state).permutation(np.unique(task.group[training]))
    parts = [part for part in np.array_split(groups, min(probes.INNER_FOLDS, len(groups))) if len(groups) > 1]
    areas = {C: [] for C in CS}
    for part in parts:
        aside = training & np.isin(task.group, part)
        for C, found in areas.items():
            found += [row[2] for row in l1_rows(z, task, training & ~aside, aside, C, chosen[:CHOOSING])]
    scores = np.round([np.mean(found) if found else 0.0 for found in areas.values()], 9)
    rows = l1_rows(z, task, training, ~training, CS[int(np.argmax(scores))], chosen)
    return table_of(task, [np.array(column) for column in zip(*rows)] if rows else [np.zeros(0, int)] * len(COLUMNS))


def l1_rows(
    z: np.ndarray, task: Task, fitted: np.ndarray, asked: np.ndarray, C: float, chosen: np.ndarray
) -> list[tuple[float, ...]]:
    """The columns of a probe for each perturbation and batch that is asked for, where it has controls."""
    control = task.label < 0
    rows = []
    for code in chosen:
        mine = task.label == code
        at = fitted & (mine | control)
        if not (fitted & mine).any() or not (asked & mine).any():
            continue
        model = LogisticRegression(C=C, solver="liblinear", intercept_scaling=10, max_iter=1000, random_state=0, **L1)
        weights = model.fit(z[at], mine[at]).coef_
        hoyer, share = probes.hoyer_sparsity(weights)[0], probes.top_share(weights)[0]
        for b in np.unique(task.batch[asked & mine]):
            here = task.batch == b
            own, others = z[here & mine] @ weights[0], z[here & control] @ weights[0]
            if len(others):
                area = probes.share_below(own, others).mean()
                rows.append((code, b, area, hoyer, share, C, len(own), len(others)))
    return rows


def table_of(task: Task, columns: list[np.ndarray]) -> pd.DataFrame:
    table = pd.DataFrame(dict(zip(COLUMNS, columns)))
    table["perturbation"], table["held_out"] = task.names[columns[0]], task.batches[columns[1]]
    return table


def named_batches(x: np.ndarray, task: Task, random_state: int) -> dict[str, float]:
    """How often the batch of a control is named, and how often where batches are permuted."""
    control = task.roles.control
    obs = pd.DataFrame({EXPERIMENT: task.batches[task.batch], CONTROL: "negative", PERTURBATION: "control"})
    wells = ad.AnnData(x[control], obs=obs[control].set_index(np.flatnonzero(control).astype(str)))
    row = batch_probe(wells, random_state=random_state).iloc[0]
    return {"batch_probe": row["value"], "batch_chance": row["chance"]}


def probed(
    task: Task,
    *,
    n_components: int | str | None = "auto",
    n_rotations: int = 2,
    l1_perturbations: int | None = None,
    always: list[str] | None = None,
    random_state: int = 0,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Probes of perturbations and of batches, over folds and arms."""
    present = task.names[np.unique(task.label[task.label >= 0])]
    chosen = np.searchsorted(task.names, present[drawn(present, l1_perturbations, always or [], random_state)])
    found, batches = [], []
    for held in np.unique(task.group):
        training = task.group != held
        options = {"n_components": n_components, "n_rotations": n_rotations, "random_state": random_state}
        for arm in arms.fold_arms(task.x, task.roles, training, **options):
            at = {"arm": arm.name, "rotation": arm.rotation}
            found.append(l2_probes(arm.x, task, held, random_state).assign(**at, penalty="l2"))
            found.append(l1_probes(arm.x, task, held, random_state, chosen).assign(**at, penalty="l1"))
            counts = {"n_features": arm.x.shape[1], "n_dropped": arm.n_dropped, "n_converged": arm.n_converged}
            batches.append({"fold": held, **at, **named_batches(arm.x, task, random_state), **counts})
    return pd.concat(found, ignore_index=True), pd.DataFrame(batches)


def drawn(names: np.ndarray, most: int | None, always: list[str], random_state: int) -> np.ndarray:
    """Codes of perturbations, at random where there are more than ``most``; those in ``always`` first.

    Raises
    ------
    InputError
        One of ``always`` is not there.
    """
    absent = sorted(set(always) - set(names))
    if absent:
        raise InputError(f"no perturbation in two batches is called {absent[0]!r}")
    order = np.random.default_rng(random_state).permutation(len(names))
    first = np.isin(names[order], always)
    return np.concatenate([order[first], order[~first]])[:most]


def components(text: str) -> int | str | None:
    return {"all": None, "auto": "auto"}[text] if text in ("all", "auto") else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wells", type=Path)
    parser.add_argument("--probes", type=Path, required=True)
    parser.add_argument("--batches", type=Path, required=True)
    parser.add_argument("--label-key", default=PERTURBATION)
    parser.add_argument("--batch-key", default=EXPERIMENT)
    parser.add_argument("--where", help="COLUMN=VALUE: use these wells alone")
    parser.add_argument(
        "--components", type=components, default="auto", help="a number, all, or auto, by the number of wells"
    )
    parser.add_argument("--rotations", type=int, default=2)
    parser.add_argument("--max-batches", type=int, default=12, help="more are left out in ten groups")
    parser.add_argument("--perturbations", type=int, help="used at all, drawn at random")
    parser.add_argument("--max-controls", type=int, help="a batch, drawn at random")
    parser.add_argument("--l1-perturbations", type=int, help="with an L1 probe, drawn at random")
    parser.add_argument("--always", nargs="*", help="perturbations that are among these")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        wells = artifacts.read_adata(options.wells)
        if options.where:
            column, _, value = options.where.partition("=")
            require_columns(wells.obs, [column], "obs")
            wells = wells[(wells.obs[column].astype(str) == value).to_numpy()]
        keys = (options.label_key, options.batch_key, options.max_batches, options.max_controls, options.seed)
        task = task_of(wells, *keys)
        if options.perturbations is not None:
            chosen = drawn(task.names, options.perturbations, options.always or [], options.seed)
            task = task.take(np.isin(task.label, [-1, *chosen]))
        found, batches = probed(
            task,
            n_components=options.components,
            n_rotations=options.rotations,
            l1_perturbations=options.l1_perturbations,
            always=options.always,
            random_state=options.seed,
        )
    except CellicaError as error:
        parser.exit(2, f"Error: {error}\n")
    validation.write(found, options.probes)
    validation.write(batches, options.batches)


if __name__ == "__main__":
    main()
