"""What each score asks, which way is better, what chance is, and where its definition comes from."""

import re
from typing import NamedTuple


class Metric(NamedTuple):
    """Words for a metric; its formula is in the docstring of ``function``, in `cellica.retrieval`."""

    question: str
    better: str
    chance: str
    source: str
    function: str


_RANDOM, _SHUFFLED = "mean over random rankings, exact", "permuted labels"
_COPAIRS, _EFAAR = "Kalinin et al., 2025 (copairs)", "Celik et al., 2024 (EFAAR)"
_OURS = "cellica"
METRICS: dict[str, Metric] = {
    "replicate_map": Metric(
        "do wells find the same perturbation in other batches?", "higher", _RANDOM, _COPAIRS, "replicate_retrieval"
    ),
    "replicate_map_other_well": Metric(
        "... in other batches and another well position?", "higher", _RANDOM, _COPAIRS, "replicate_retrieval"
    ),
    "class_map": Metric(
        "do wells find other compounds of their class in other batches?", "higher", _RANDOM, _OURS, "class_retrieval"
    ),
    "replicate_map_held_out": Metric(
        "replicate_map of batches that the correction was not fitted on", "higher", _RANDOM, _OURS, "held_out_retrieval"
    ),
    "class_map_held_out": Metric(
        "class_map of batches that the correction was not fitted on", "higher", _RANDOM, _OURS, "held_out_retrieval"
    ),
    "nsc": Metric(
        "is a treatment's nearest neighbour of another compound of its class?",
        "higher",
        "share of positives among candidates",
        "Ljosa et al., 2013",
        "nearest_neighbor",
    ),
    "nscb": Metric(
        "... of another compound and batch?", "higher", "share of positives", "Ando et al., 2017", "nearest_neighbor"
    ),
    "batch_share": Metric(
        "how much of the variance of anchors lies between batches?", "lower", "0", "adjusted eta squared", "batch_effect"
    ),
    "batch_share_weighted": Metric("... weighted by variance?", "lower", "0", "adjusted eta squared", "batch_effect"),
    "batch_probe": Metric(
        "can a linear classifier name the batch of controls?", "lower", _SHUFFLED, _OURS, "batch_probe"
    ),
    "activity_map": Metric(
        "do wells find their replicates rather than controls?", "higher", _RANDOM, _COPAIRS, "activity"
    ),
    "active_share": Metric("share of perturbations that are active", "higher", "0", _COPAIRS, "activity"),
    "consistency_map": Metric(
        "do active perturbations of a class find each other?", "higher", _RANDOM, _COPAIRS, "consistency"
    ),
    "class_consistent_share": Metric("share of classes that are consistent", "higher", "0", _COPAIRS, "consistency"),
    "replicate_cosine": Metric(
        "how alike are the replicates of a perturbation?", "higher", "mean of the null", _EFAAR, "replicate_consistency"
    ),
    "consistent_share": Metric(
        "share of perturbations with p of at most .05", "higher", ".05", _EFAAR, "replicate_consistency"
    ),
    "magnitude": Metric(
        "energy distance of a perturbation's wells from controls, unbiased, in units of the representation",
        "neither",
        "0",
        _EFAAR,
        "magnitude",
    ),
    "distinct_share": Metric("share of perturbations with p of at most .05", "higher", ".05", _EFAAR, "magnitude"),
    "knn_accuracy": Metric(
        "do 5 neighbours in other batches name a well's perturbation?",
        "higher",
        "best constant guess",
        "RxRx1's task",
        "knn_accuracy",
    ),
    "probe_accuracy": Metric(
        "does a discriminant trained on other batches?", "higher", "best constant guess", "RxRx1's task", "probe_accuracy"
    ),
    "sirna_accuracy": Metric(
        "RxRx1: name the siRNA in the 18 test experiments", "higher", "1 / siRNAs", "Sypetkowski et al., 2023", "sirna_accuracy"
    ),
    "recall": Metric(
        "share of known pairs among the most similar and most opposed of all",
        "higher",
        "low + 1 - high",
        _EFAAR,
        "relationship_recall",
    ),
    "cluster_share": Metric(
        "share of known clusters more similar within than without", "higher", _SHUFFLED, _EFAAR, "cluster_scores"
    ),
    "cluster_statistic": Metric(
        "their mean Kolmogorov-Smirnov statistic", "higher", _SHUFFLED, _EFAAR, "cluster_scores"
    ),
    "compound_gene_ap": Metric(
        "do compounds find the genes of their targets, by |cosine|?",
        "higher",
        _RANDOM,
        "Kraus et al., 2025 (RxRx3-core)",
        "compound_gene",
    ),
    "compound_gene_auroc": Metric("the same as AUROC", "higher", ".5", "RxRx3-core", "compound_gene"),
    "guide_map": Metric("do guides of a gene find each other?", "higher", _RANDOM, _OURS, "guide_agreement"),
    "guide_auroc": Metric("... as AUROC", "higher", ".5", _OURS, "guide_agreement"),
    "arm_auroc": Metric(
        "do genes look like others of their chromosome arm?", "nearer .5", ".5", "after Lazar et al., 2024", "arm_bias"
    ),
    "holdout_auroc": Metric(
        "does a probe tell perturbation from control in a batch it has not seen?", "higher", ".5", "arXiv:2603.11970", "holdout_auroc"
    ),
    "probe_hoyer": Metric("how sparse are its weights?", "neither", "of permuted labels", "Hoyer, 2004", "holdout_auroc"),
    "probe_top_quarter": Metric(
        "share of them that a quarter of the features holds", "neither", "of permuted labels", "arXiv:2603.11970", "holdout_auroc"
    ),
    **{
        name: Metric(question, "higher", _SHUFFLED, "scIB, by scib-metrics", "integration")
        for name, question in (
            ("bras", "are batches mixed within perturbations? (silhouette)"),
            ("ilisi", "how many batches are among neighbours?"),
            ("kbet", "have neighbourhoods the batches of the whole?"),
            ("pcr_comparison", "how much of the batch's share of components is gone?"),
            ("graph_connectivity", "are the wells of a perturbation connected?"),
            ("kmeans_nmi", "do clusters agree with perturbations? (grows on noise)"),
            ("kmeans_ami", "... corrected for chance"),
            ("kmeans_ari", "... by pairs, corrected for chance"),
        )
    },
}  # fmt: skip
_VARIANTS = (("recall", r"recall_[\d.]+_[\d.]+"), ("compound_gene_ap", r"compound_gene_ap_q\d+"), ("sirna_accuracy", r"sirna_accuracy_\w+"))  # fmt: skip


def metric_of(name: str) -> Metric | None:
    """What is known of a metric of a score table; None for one that is not of `cellica.retrieval`.

    >>> metric_of("recall_0.05_0.95").chance
    'low + 1 - high'
    """
    if name in METRICS:
        return METRICS[name]
    return next((METRICS[kind] for kind, pattern in _VARIANTS if re.fullmatch(pattern, name)), None)
