"""How well latents name the factors they came from: MCC, InfoMEC, DCI and MIG, of arrays of factors and latents."""

import warnings
from typing import Any

import numpy as np
from scipy.stats import rankdata
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils import check_random_state

from cellica.alignment import paired
from cellica.ica import matched_correlation
from cellica.information import binned, coded, counted_information, jittered, mutual_information
from cellica.whitening import Whitening

PRUNING = ("range", "iqr", "none")
METHODS = ("pearson", "spearman")
DEPTHS = (2, 4, 8, 16, None)
NOTHING = 1e-12  # normalised information that is rounding


def mcc(a: np.ndarray, b: np.ndarray, *, method: str = "pearson") -> float:
    """Mean correlation coefficient of the columns of a with those of b, matched one to one: at most 1, higher is better.

    max over matchings m of the mean over the columns j of a of |corr(a_j, b_m(j))|, by Hungarian assignment (Hyvarinen and
    Morioka, 2016; Khemakhem et al., 2020). Matched and measured on the same rows. Of independent columns it is not 0 but
    grows with their number, near sqrt(2 log(d) / n): compare with shuffled rows. Where b has fewer columns than a,
    those of a that are left over count as 0; where it has more, b's are left over and cost nothing.

    Parameters
    ----------
    a
        (n, d): the true factors, or one representation. No column may be constant.
    b
        (n, e): the latents, or the other representation. A constant column correlates 0 with all; not all may be constant.
    method
        ``"pearson"``: up to a scale and an offset of each column. ``"spearman"`` (of ranks): up to any rising function of each.

    Examples
    --------
    >>> a = np.random.default_rng(0).normal(size=(500, 3))
    >>> round(mcc(a, -2 * a[:, [2, 0, 1]]), 6)
    1.0
    >>> round(mcc(a, a[:, :2]), 3)
    0.667
    >>> mcc(a, np.exp(3 * a)) < 0.7, round(mcc(a, np.exp(3 * a), method="spearman"), 6)
    (True, 1.0)
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not known: use one of {', '.join(map(repr, METHODS))}")
    a, b = paired(("a", "b"), a, b)
    if len(a) < 3:
        raise ValueError(f"{len(a)} rows are too few: any two columns of 2 rows correlate, give 3 or more")
    if (constant := np.ptp(a, axis=0) == 0).any():
        raise ValueError(
            f"column {int(np.argmax(constant))} of a is constant and correlates with nothing: leave it out"
        )
    b = np.where(np.ptp(b, axis=0) > 0, b, 0.0)
    if not b.any():
        raise ValueError("all columns of b are constant: there is nothing to match")
    if method == "spearman":
        a, b = rankdata(a, axis=0), rankdata(b, axis=0)
    return float(matched_correlation(a, b).mean())


def infomec(
    sources: np.ndarray,
    latents: np.ndarray,
    *,
    discrete_latents: bool = False,
    pruning: str = "range",
    n_shuffles: int = 0,
    random_state: int = 0,
) -> dict[str, Any]:
    """InfoModularity, InfoExplicitness and InfoCompactness of latents for discrete sources (arXiv 2305.18378).

    With NMI_ij = I(source_i; latent_j) / H(source_i), n_s sources and n_a active latents:

    - InfoM = (mean over active j of max_i NMI_ij / sum_i NMI_ij - 1 / n_s) / (1 - 1 / n_s): does a latent speak of one source?
    - InfoC = the same for each source over the active latents, with n_a for n_s: is a source in one latent?
    - InfoE = mean over i of 1 - H_i / log(number of values of source i), H_i the log-loss in sample of a multinomial logistic
      regression on all latents without penalty, with balanced classes (so constant input gives log of their number): can
      a linear classifier read the sources?

    Higher is better, 1 at best. Continuous latents: I by 10 nearest neighbours (Ross, 2014), as scikit-learn's
    ``mutual_info_classif`` with that seed for each latent; latents standardised in the regression. Discrete latents: I by
    counts, one-hot in the regression.

    The published InfoE stops the solver after 100 iterations, so that an ill-conditioned representation loses InfoE
    to the solver alone, and gains it by whitening, which tells a linear classifier nothing new. ``infoe_converged`` is the same
    loss near its minimum: a linear classifier reads invertible linear maps of the latents equally well, so it is fitted on
    whitened ones, where it converges (to about .001 of the minimum, where classes are many or nearly apart). Use that to
    compare linear maps of one representation.

    Chance is not 0: estimates of no information are noise, cut at 0, and their largest is a fair share of their sum.
    Ask for ``n_shuffles`` to see it.

    Parameters
    ----------
    sources
        (n, n_s) discrete factors, 2 or more, of numbers; each takes 2 values or more, with 2 rows a value on average at least.
    latents
        (n, d), with n > d.
    discrete_latents
        Whether latents are codes rather than magnitudes.
    pruning
        Which latents are active, for InfoM and InfoC. ``"range"`` (published): range > largest range / 20. ``"iqr"``: interquartile
        range > largest / 10, which outliers do not sway. ``"none"``, and with discrete latents always: all that vary. As it compares
        magnitudes, whitened latents are all active, noise included.
    n_shuffles
        Shuffles of the rows of the latents, for the chance level.
    random_state
        Seed of the jitter that parts equal values, and of the shuffles.

    Returns
    -------
    Dict of ``infom``, ``infoe``, ``infoc`` and ``infoe_converged``; ``nmi`` (n_s, d), ``active`` (d,) of bool, ``n_active``,
    ``n_silent``: active latents that tell nothing of any source, which count as spread evenly (0 / 0 in the published code);
    and, with shuffles, ``chance``, a dict of the four scores. ``infoc`` is NaN where one latent is active.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> sources = rng.integers(0, 4, size=(2000, 2))
    >>> latents = sources + 0.05 * rng.normal(size=(2000, 2))
    >>> found = infomec(sources, latents)
    >>> [round(found[name], 1) for name in ("infom", "infoe", "infoc")]
    [1.0, 1.0, 1.0]
    >>> turned = infomec(sources, latents @ np.array([[0.8, 0.6], [-0.6, 0.8]]))
    >>> turned["infom"] < 0.5, turned["infoe"] > 0.95
    (True, True)
    """
    if pruning not in PRUNING:
        raise ValueError(f"pruning={pruning!r} is not known: use one of {', '.join(map(repr, PRUNING))}")
    if not isinstance(n_shuffles, int | np.integer) or n_shuffles < 0:
        raise ValueError(f"n_shuffles={n_shuffles!r} is not allowed: use a whole number of 0 or more")
    codes, latents = _factors(sources, latents)
    if codes.shape[1] < 2:
        raise ValueError("there is 1 source: InfoM says how far a latent keeps to one of several, give 2 or more")
    if len(latents) <= latents.shape[1]:
        raise ValueError(
            f"{len(latents)} rows are too few for {latents.shape[1]} latents, a linear classifier could name any sources: "
            f"give more rows than latents"
        )
    spread = active_latents(latents, "none" if discrete_latents else pruning)
    found = _scores(codes, latents, spread, discrete_latents, random_state)
    if n_shuffles > 0:
        rng = np.random.default_rng(random_state)
        runs = [
            _scores(codes, latents[rng.permutation(len(latents))], spread, discrete_latents, random_state)
            for _ in range(n_shuffles)
        ]
        names = ("infom", "infoe", "infoc", "infoe_converged")
        found["chance"] = {name: float(np.mean([run[name] for run in runs])) for name in names}
    return found


def dci(sources: np.ndarray, latents: np.ndarray, *, n_trees: int = 100, random_state: int = 0) -> dict[str, Any]:
    """Disentanglement, completeness and informativeness by random forests (Eastwood and Williams, 2018).

    A forest a source is grown on a random half of the rows; R_ij is the importance of latent j (mean decrease in impurity).

    - disentanglement = sum over j of w_j (1 - entropy of R_.j over sources, base n_s), w_j the share of latent j in sum R
    - completeness = sum over i of v_i (1 - entropy of R_i. over latents, base d), v_i the share of source i
    - informativeness = mean over i of the accuracy on the other half

    Higher is better, 1 at best; of noise, disentanglement and completeness are near 0, informativeness is near
    ``informativeness_chance``, the mean share of the commonest value. Of the published regressors (lasso, and forests whose
    depth is tuned for each source; elsewhere gradient boosting) this takes the forests, for classes: the depth, of 2, 4, 8,
    16 and no limit, that is most accurate on a quarter of the first half, the least where equal. The depth matters:
    full trees go on to split by latents that say nothing, and a good but noisy code looks entangled. Each split chooses among
    all latents for the same reason. Scores of other regressors are not comparable.

    Parameters
    ----------
    sources, latents
        (n, n_s) discrete factors, and (n, d), 2 or more of each.

    Returns
    -------
    Dict of ``disentanglement``, ``completeness``, ``informativeness``, ``informativeness_chance`` and ``importance`` (n_s, d).

    Examples
    --------
    >>> sources = np.random.default_rng(0).integers(0, 3, size=(600, 2))
    >>> found = dci(sources, sources + 0.0, n_trees=10)
    >>> [round(found[name], 6) for name in ("disentanglement", "completeness", "informativeness")]
    [1.0, 1.0, 1.0]
    """
    if not isinstance(n_trees, int | np.integer) or n_trees < 1:
        raise ValueError(f"n_trees={n_trees!r} is not allowed: use a whole number of 1 or more")
    codes, latents = _factors(sources, latents)
    if min(codes.shape[1], latents.shape[1]) < 2:
        raise ValueError(
            f"there are {codes.shape[1]} sources and {latents.shape[1]} latents: DCI is about several of each, give 2 or more"
        )
    active_latents(latents, "none")
    latents = StandardScaler().fit_transform(
        latents
    )  # which changes no tree, and keeps float32 from losing small steps
    order = check_random_state(random_state).permutation(len(codes))
    train, test = order[: (len(order) + 1) // 2], order[(len(order) + 1) // 2 :]
    importance, accuracy = np.zeros((codes.shape[1], latents.shape[1])), np.zeros(codes.shape[1])
    for i, code in enumerate(codes.T):
        forest = _forest(latents[train], code[train], n_trees, random_state).fit(latents[train], code[train])
        importance[i], accuracy[i] = forest.feature_importances_, forest.score(latents[test], code[test])
    return {
        "disentanglement": _one_sidedness(importance.T),
        "completeness": _one_sidedness(importance),
        "informativeness": float(accuracy.mean()),
        "informativeness_chance": float(np.mean([np.bincount(code[test]).max() / len(test) for code in codes.T])),
        "importance": importance,
    }


def mig(sources: np.ndarray, latents: np.ndarray, *, n_bins: int = 20, discrete_latents: bool = False) -> float:
    """Mutual information gap (Chen et al., 2018): mean over sources of (largest - second I(source; latent)) / H(source).

    Continuous latents are cut into ``n_bins`` bins of equal width (20: Locatello et al., 2019). Higher is better, 1 at best, of
    noise near 0. A source that two latents hold gets 0, so it asks for compactness; a latent that holds two sources costs nothing.

    Parameters
    ----------
    sources, latents
        (n, n_s) discrete factors, and (n, d), 2 latents or more.

    Examples
    --------
    >>> sources = np.array([[i, j] for i in range(4) for j in range(3)])
    >>> mig(sources, sources + 0.0), mig(sources, sources[:, [0, 0, 1]])
    (1.0, 0.5)
    """
    if not isinstance(n_bins, int | np.integer) or n_bins < 2:
        raise ValueError(f"n_bins={n_bins!r} is not allowed: use a whole number of 2 or more")
    codes, latents = _factors(sources, latents)
    if latents.shape[1] < 2:
        raise ValueError("there is 1 latent: a gap is one between two, give 2 or more")
    active_latents(latents, "none")
    columns = coded(latents if discrete_latents else binned(latents, n_bins)).T
    information = np.array([[counted_information(code, column) for column in columns] for code in codes.T])
    largest = np.sort(information, axis=1)[:, ::-1]
    return float(np.mean((largest[:, 0] - largest[:, 1]) / [counted_information(code, code) for code in codes.T]))


def active_latents(latents: np.ndarray, pruning: str = "range") -> np.ndarray:
    """Which columns (d,) vary enough to count, by a rule of `infomec`.

    >>> active_latents(np.array([[0.0, 0.0, 1.0], [10.0, 0.2, 1.0]]))
    array([ True, False, False])
    """
    spread = np.ptp(latents, axis=0)
    if not spread.any():
        raise ValueError(f"all {latents.shape[1]} latents are constant: there is nothing to score")
    if pruning == "none":
        return spread > 0
    if pruning == "iqr":
        spread = np.subtract(*np.percentile(latents, [75, 25], axis=0))
        if not spread.any():
            raise ValueError(
                "no latent varies within its middle half: use pruning='range', or leave out the rows that repeat"
            )
    return spread > spread.max() / (10 if pruning == "iqr" else 20)


def _factors(sources: np.ndarray, latents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sources as codes 0, 1, ... and latents as float32 or float64, with a row each for the same inputs."""
    narrow = getattr(latents, "dtype", None) == np.float32  # standardised as they are, as in the published code
    sources, latents = paired(("sources", "latents"), sources, latents)
    latents = latents.astype(np.float32) if narrow else latents
    codes = coded(sources)
    n_values = codes.max(axis=0) + 1
    if (n_values < 2).any():
        raise ValueError(
            f"source {int(np.argmin(n_values))} takes one value only, so there is nothing to know of it: leave it out"
        )
    if (n_values > len(codes) / 2).any():
        i = int(np.argmax(n_values))
        raise ValueError(
            f"source {i} takes {n_values[i]} values in {len(codes)} rows: sources are discrete here, with 2 rows a value on "
            f"average at least; bin it, or use mcc"
        )
    return codes, latents


def _scores(
    codes: np.ndarray, latents: np.ndarray, active: np.ndarray, discrete: bool, random_state: int
) -> dict[str, Any]:
    """The scores of one pairing of sources and latents."""
    nmi = _normalized_information(codes, latents, discrete, random_state)
    told = nmi[:, active]
    published, converged = _explicitness(codes, latents, discrete)
    return {
        "infom": _peak_share(told.T),
        "infoe": published,
        "infoc": _peak_share(told),
        "infoe_converged": converged,
        "nmi": nmi,
        "active": active,
        "n_active": int(active.sum()),
        "n_silent": int((told.sum(axis=0) <= NOTHING).sum()),
    }


def _normalized_information(codes: np.ndarray, latents: np.ndarray, discrete: bool, random_state: int) -> np.ndarray:
    """I(source; latent) / H(source), (n_s, d)."""
    if discrete:
        information = [[counted_information(code, column) for column in coded(latents).T] for code in codes.T]
    else:
        columns = jittered(latents, random_state).T
        information = [[mutual_information(column, code) for column in columns] for code in codes.T]
    return np.array(information) / np.array([[counted_information(code, code)] for code in codes.T])


def _peak_share(told: np.ndarray) -> float:
    """Mean over rows of the largest entry's share of the row, scaled to 0 for even rows and 1 for rows of one entry."""
    n = told.shape[1]
    if n < 2:
        return float("nan")
    total = told.sum(axis=1)
    share = np.where(total > NOTHING, told.max(axis=1) / np.maximum(total, NOTHING), 1 / n)
    return float((share.mean() - 1 / n) / (1 - 1 / n))


def _explicitness(codes: np.ndarray, latents: np.ndarray, discrete: bool) -> tuple[float, float]:
    """InfoE with the published settings, and near the minimum of the loss."""
    if discrete:
        published = OneHotEncoder().fit_transform(latents)
        converged = Whitening().fit_transform(published.toarray())
    else:
        published = StandardScaler().fit_transform(latents)
        converged = Whitening().fit_transform(published)  # of columns of one scale, so that none falls below rounding
    scores = []
    for features, settings in ((published, {"max_iter": 100}), (converged, {"max_iter": 200, "tol": 1e-5})):
        model = LogisticRegression(C=np.inf, class_weight="balanced", **settings)
        scores.append(float(np.mean([_predicted_share(model, features, code) for code in codes.T])))
    return scores[0], scores[1]


def _predicted_share(model: LogisticRegression, features: Any, code: np.ndarray) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ConvergenceWarning
        )  # stopped as published, or classes apart: the loss only falls
        probability = model.fit(features, code).predict_proba(features)
    return 1 - log_loss(code, probability) / np.log(code.max() + 1)


def _forest(latents: np.ndarray, code: np.ndarray, n_trees: int, random_state: int) -> RandomForestClassifier:
    """A forest, not fitted, of the depth that names the code best on the last quarter of the rows."""
    forest = RandomForestClassifier(min(n_trees, 25), max_features=None, random_state=random_state)
    cut = max(1, 3 * len(code) // 4)
    scores = [
        forest.set_params(max_depth=depth).fit(latents[:cut], code[:cut]).score(latents[cut:], code[cut:])
        for depth in DEPTHS
    ]
    return forest.set_params(n_estimators=n_trees, max_depth=DEPTHS[int(np.argmax(scores))])


def _one_sidedness(importance: np.ndarray) -> float:
    """1 - entropy of each row over its columns, in units of even rows; mean weighted by the rows' sums."""
    total = importance.sum(axis=1)
    share = importance / np.where(total > 0, total, 1)[:, None]
    entropy = -np.sum(share * np.log(np.where(share > 0, share, 1)), axis=1) / np.log(importance.shape[1])
    return float(np.average(1 - entropy, weights=total)) if total.sum() > 0 else 0.0
