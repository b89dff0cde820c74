"""Every score that is given has words, and every function that they name exists."""

from pathlib import Path

from cellica import glossary, retrieval, simulate


def test_every_score_of_evaluate_is_explained():
    wells = simulate.profiles("small", n_features=12, random_state=0)
    kinds = ["retrieval", "batch", "activity", "accuracy", "probes"]
    found = retrieval.evaluate(wells, ["X"], scores=kinds, class_key="moa", baselines=False)
    found = [
        *found["metric"],
        "recall_0.05_0.95",
        "compound_gene_ap_q25",
        "sirna_accuracy_knn",
        "replicate_map_held_out",
    ]
    for name in found:
        assert glossary.metric_of(name) is not None, name
    assert glossary.metric_of("accuracy") is None


def test_words_name_functions_that_are_there():
    for name, metric in glossary.METRICS.items():
        function = getattr(retrieval, metric.function)
        assert metric.better in ("higher", "lower", "neither", "nearer .5"), name
        assert function.__doc__


def test_the_readme_lists_every_score():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    missing = [name for name in glossary.METRICS if f"`{name}" not in readme]
    assert not missing


def test_every_function_gives_direction_chance_and_source():
    for name, metric in glossary.METRICS.items():
        words = getattr(retrieval, metric.function).__doc__.lower()
        for what in ("chance", "source", "higher is|lower is|nearer .5 is|no better end"):
            assert any(one in words for one in what.split("|")), (name, what)
