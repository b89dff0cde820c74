"""Scores of an AnnData: does a representation find what belongs together, and how much batch is left in it?

The public face of `neighbors`, `relationships`, `generalization`, `batch_effects`, `evaluation` and `comparison`; the tables they give are
described in `scores`.
"""

from cellica.batch_effects import batch_effect, batch_probe
from cellica.comparison import compare
from cellica.compounds import compound_gene, compound_gene_detail
from cellica.evaluation import evaluate
from cellica.generalization import holdout_auroc, holdout_probes, knn_accuracy, probe_accuracy, sirna_accuracy
from cellica.guides import arm_bias, correct_arms, genes_of_guides, guide_agreement
from cellica.integration import integration
from cellica.neighbors import (
    activity,
    average_precision,
    class_retrieval,
    consistency,
    nearest_neighbor,
    replicate_retrieval,
)
from cellica.relationships import cluster_scores, cluster_test, relationship_recall
from cellica.replicates import magnitude, replicate_consistency, replicate_scores
from cellica.scores import cautions, gains, summary
from cellica.unseen import held_out_retrieval

__all__ = [
    "activity",
    "arm_bias",
    "average_precision",
    "batch_effect",
    "batch_probe",
    "cautions",
    "class_retrieval",
    "cluster_scores",
    "cluster_test",
    "compare",
    "compound_gene",
    "compound_gene_detail",
    "consistency",
    "correct_arms",
    "evaluate",
    "gains",
    "genes_of_guides",
    "guide_agreement",
    "held_out_retrieval",
    "holdout_auroc",
    "holdout_probes",
    "integration",
    "knn_accuracy",
    "magnitude",
    "nearest_neighbor",
    "probe_accuracy",
    "relationship_recall",
    "replicate_consistency",
    "replicate_retrieval",
    "replicate_scores",
    "sirna_accuracy",
    "summary",
]
