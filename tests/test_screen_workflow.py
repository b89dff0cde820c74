"""The screen workflow, on this machine and on a real SLURM with two stand-in GPUs."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import typer
import yaml

from cellica import artifacts, cli, correct, encoder, plates, profiles, screen, simulate

SCREEN = Path(__file__).parents[1] / "workflows" / "screen"
BROKEN, ABSENT = "HUVEC-02_2", "HUVEC-03_1"
CONFIG = {
    "out": "results of µ",
    "screen": {"kind": "rxrx1", "source": "screen"},
    "embed": {"encoder": "camae-mini", "channels": "concat", "device": "cpu"},
    "correct": {"method": ["sphere", "center+sphere"]},
    "compare": {"method": ["none", "center+sphere"], "class-key": "moa", "held-out": False},
    "report": {"pictures": 2},
}
# The interval of status checks is made for jobs of hours; sacct needs a database that the test cluster does not have.
FOR_TESTS = {"latency-wait": 10, "slurm-init-seconds-before-status-checks": 2, "slurm-status-command": "squeue"}


def load_settings():
    spec = importlib.util.spec_from_file_location("screen_settings", SCREEN / "settings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


settings = load_settings()


def a_screen(folder):
    """Six plates, of which one has no readable image, one no image at all, and one a broken image."""
    sizes = {"n_experiments": 3, "n_plates": 2, "n_treatments": 8, "n_controls": 4, "n_anchors": 2, "n_classes": 2}
    simulate.screen(folder / "screen", **sizes, image_size=64)
    images = folder / "screen" / "images"
    for file in (images / "HUVEC-02" / "Plate2").iterdir():
        file.write_bytes(b"")
    shutil.rmtree(images / "HUVEC-03" / "Plate1")
    next(iter(sorted((images / "HUVEC-01" / "Plate1").iterdir()))).write_bytes(b"no image")


def environment(**more):
    """This environment's programs first, and no number of threads but the workflow's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, **more}


def command(folder, *arguments, profile=SCREEN / "profiles" / "local", config=CONFIG):
    (folder / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    program = [sys.executable, "-m", "snakemake", "-s", str(SCREEN / "Snakefile"), "--configfile", "config.yaml"]
    return [*program, "--workflow-profile", str(profile), *arguments]


def snakemake(folder, *arguments, code=0, env=None, **options):
    done = subprocess.run(
        command(folder, *arguments, **options),
        cwd=folder,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def jobs(log):
    """Rules that a run is going to execute, and how often."""
    table = log.split("Job stats:")[1].split("\n\n")[0].splitlines()[3:] if "Job stats:" in log else []
    return {rule: int(count) for rule, count in map(str.split, table) if rule not in ("all", "total")}


def the_same_by_hand(folder):
    """Wells as the stages make them, without workflow."""
    report = plates.ingest(screen.read_rxrx1(folder / "screen"), folder / "by hand")
    model = encoder.load("camae-mini", channels="concat", device="cpu")
    return profiles.wells([encoder.embed(plate, model) for plate in report.plates])


def check_results(folder):
    """The wells are whole and right, the report names what was lost, and nothing half-made is left."""
    out = folder / CONFIG["out"]
    wells, expected = ad.read_h5ad(out / "wells.h5ad"), the_same_by_hand(folder)
    assert list(wells.obs_names) == list(expected.obs_names)
    np.testing.assert_allclose(wells.X, expected.X, rtol=1e-4, atol=1e-5)
    lost = [f"{BROKEN}: empty file", f"{ABSENT}: no image of the plate"]
    assert sorted(wells.uns["cellica"]["profile"]["plates_without_sites"]) == sorted(lost)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert all(text in page for text in lost)
    assert "HUVEC-01_1 (1)" in page  # the broken image, with its plate
    assert set(ad.read_h5ad(out / "corrected.h5ad").obsm) == {"X_sphere", "X_center+sphere"}
    assert {"X_none", "X_center+sphere"} <= set(pd.read_csv(out / "comparison.csv")["rep"])
    left = [str(file) for file in out.rglob(".*") if file.name.endswith((".part", ".parts"))]
    assert left == []


def test_a_screen_on_this_machine(tmp_path):
    a_screen(tmp_path)
    first = snakemake(tmp_path, "--cores", "2")
    check_results(tmp_path)
    assert all(f"  {lost} (" in first for lost in (f"{BROKEN}: empty file", f"{ABSENT}: no image of the plate"))

    assert "Nothing to be done" in snakemake(tmp_path, "--cores", "2")
    ridge = {**CONFIG, "correct": {**CONFIG["correct"], "ridge": 0.1}}
    again = snakemake(tmp_path, "--cores", "2", config=ridge)
    assert jobs(again) == {"correct": 1, "evaluate": 1, "report": 1}
    assert "options of compare" not in again

    table = tmp_path / "screen" / "metadata.csv"
    rows = pd.read_csv(table, dtype=str)
    rows.loc[rows["site_id"].str.startswith("HUVEC-01_2_"), "moa"] = "another"
    rows.to_csv(table, index=False)
    snakemake(tmp_path, "--cores", "2", "--until", "plates", config=ridge)
    planned = snakemake(tmp_path, "--cores", "2", "-n", config=ridge)
    after = ("profile", "correct", "compare", "evaluate", "report")
    assert jobs(planned) == {"ingest": 1, "embed": 1, **dict.fromkeys(after, 1)}
    assert "plate=HUVEC-01_2" in planned


# ------------------------------------------------------------------------------------------------ SLURM


@pytest.fixture
def slurm(tmp_path):
    """Environment of a running cluster, and its stop."""
    script = str(SCREEN / "cluster.sh")
    done = subprocess.run([script, "install"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"SLURM cannot be installed: {done.stderr[-300:]}")
    if os.geteuid():
        pytest.skip("slurmd has to be started by root")
    folder = tmp_path / "cluster"
    subprocess.run([script, "start", str(folder)], check=True, stdout=subprocess.DEVNULL)
    try:
        yield {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{folder / 'bin'}{os.pathsep}{environment()['PATH']}"}
    finally:
        subprocess.run([script, "stop", str(folder)], check=True)


def ask(slurm, *words):
    return subprocess.run(words, env=environment(**slurm), capture_output=True, text=True, check=True).stdout


def watch_gpus(slurm, seen, stop):
    """Which GPU each running job has, by its rule."""
    while not stop.wait(0.3):
        for job in ask(slurm, "scontrol", "show", "job", "-d").split("\n\n"):
            rule = re.search(r"Comment=rule_(\w+?)(_wildcards_\S+)?\s", job)
            if rule and "JobState=RUNNING" in job:
                seen.add((rule[1], *re.findall(r"GRES=gpu:1\(IDX:(\d)\)", job)))


def wait_for(found, what, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s for {what}")


@contextlib.contextmanager
def started(folder, log, env, profile):
    """A workflow that runs beside the test, and ends with it."""
    with log.open("w") as file:
        process = subprocess.Popen(command(folder, profile=profile), cwd=folder, env=env, stdout=file, stderr=file)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def held(folder):
    """A plate that is being embedded and the process that does, which is stopped; None where there is none."""
    for lock in (folder / CONFIG["out"] / "sites").glob(".*.h5ad.lock"):
        plate = lock.name[1 : -len(".h5ad.lock")]
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().decode().split("\0")
                if "embed" in words and any(word.endswith(f"/{plate}.zarr") for word in words) and "-c" not in words:
                    os.kill(int(process.name), signal.SIGSTOP)
                    if lock.exists():
                        return plate, int(process.name)
                    os.kill(int(process.name), signal.SIGCONT)
    return None


def test_a_screen_on_slurm_survives_kills_and_does_nothing_twice(tmp_path, slurm):
    a_screen(tmp_path)
    profile = tmp_path / "profile"
    profile.mkdir()
    shipped = yaml.safe_load((SCREEN / "profiles" / "slurm" / "config.yaml").read_text(encoding="utf-8"))
    (profile / "config.yaml").write_text(yaml.safe_dump({**shipped, **FOR_TESTS}), encoding="utf-8")
    seen, stop, env = set(), threading.Event(), environment(**slurm)
    watcher = threading.Thread(target=watch_gpus, args=(slurm, seen, stop))
    watcher.start()
    try:
        # A workflow is killed while a plate is embedded; the job stays, and is held so that the next run meets it.
        with started(tmp_path, tmp_path / "first.log", env, profile) as first:
            left_over, process = wait_for(lambda: held(tmp_path), "a job that embeds")
            first.kill()
        assert "LockException" in snakemake(tmp_path, profile=profile, env=env, code=1)
        snakemake(tmp_path, "--unlock", profile=profile, env=env)

        log = tmp_path / "second.log"
        with started(tmp_path, log, env, profile) as second:
            said = tmp_path / CONFIG["out"] / "logs" / "embed" / f"{left_over}.txt"
            wait_for(lambda: said.exists() and "waiting for it" in said.read_text(), "the second job of the plate")
            os.kill(process, signal.SIGCONT)
            profiling = wait_for(
                lambda: re.findall(r"(\d+) R rule_profile", ask(slurm, "squeue", "-h", "-o", "%i %t %k")),
                "a job to kill",
            )
            ask(slurm, "scancel", "--signal=KILL", "--full", profiling[0])
            assert second.wait(timeout=300) == 0, log.read_text()
    finally:
        stop.set()
        watcher.join()
    assert "Trying to restart job" in log.read_text()
    check_results(tmp_path)
    assert {entry for entry in seen if entry[0] == "embed"} == {("embed", "0"), ("embed", "1")}
    assert {("ingest",), ("profile",)} <= seen
    assert all(len(entry) == 1 for entry in seen if entry[0] != "embed")
    assert "Nothing to be done" in snakemake(tmp_path, profile=profile, env=env)


# ------------------------------------------------------------------------------------------------ the configuration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed": {"encodr": "openphenom"}}, r"embed: 'encodr' is not known; known are encoder, weights"),
        ({"embed": {"weights": "w"}}, r"embed: 'encoder' is a required property"),
        ({"embed": {"encoder": "resnet50"}}, r"embed.encoder is 'resnet50': choose openphenom, camae-mini"),
        ({"correct": {"method": ["icaa"]}}, r"correct.method.0 is 'icaa': choose methods of `cellica correct"),
        ({"out": "a{b}"}, r"out is 'a\{b\}': choose a path without braces"),
        ({"screen": {"kind": "table", "source": "--force"}}, r"screen.source is '--force': choose a path"),
        ({"roles": {"control": [1]}}, r"roles.control.0 is 1: 1 is not of type 'string'"),
        ({"correct": {"method": "ica"}}, r"correct.method is 'ica': .* is not of type 'array'"),
        ({"screen": {"kind": "tables", "source": "x"}}, r"screen.kind is 'tables': .* is not one of \['rxrx1'"),
        ({"screen": {"kind": "table", "source": "x", "intensity-range": [1]}}, r"screen.intensity-range is \[1\]"),
        ({"outt": "x"}, r"the configuration: 'outt' is not known; known are out, screen, roles, embed"),
    ],
)
def test_a_wrong_configuration_says_where_and_what_is_allowed(change, message):
    with pytest.raises(ValueError, match=message):
        settings.Run({**CONFIG, **change})


def test_all_faults_of_a_configuration_are_said_at_once():
    with pytest.raises(ValueError, match=r"(?s)'out' is a required.*correct: 'mehtod'.*correct: 'method' is a req"):
        settings.Run({key: value for key, value in CONFIG.items() if key != "out"} | {"correct": {"mehtod": []}})


def test_a_wrong_configuration_stops_the_workflow_without_a_traceback(tmp_path):
    said = snakemake(tmp_path, "--cores", "1", "--config", "embed={encodr: x}", code=1)
    assert "embed: 'encodr' is not known" in said
    assert "Traceback" not in said


def test_options_that_do_not_go_together_are_found_before_any_work(tmp_path):
    a_screen(tmp_path)
    wrong = {**CONFIG, "correct": {"method": ["center"], "ridge": 0.1}}
    said = snakemake(tmp_path, "--cores", "1", code=1, config=wrong)
    assert "error: center has no option 'ridge': it has min_controls" in said
    assert "the options of correct in the configuration have to be mended" in said
    assert not (tmp_path / CONFIG["out"] / "plates").exists()


def test_files_that_a_configuration_names_are_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("screen", "weights"):
        (tmp_path / folder).mkdir()
    for name in ("screen/metadata.csv", "screen/notes.txt", "weights/model.safetensors", "own.csv", "lay{1}.csv"):
        (tmp_path / name).write_text("")
    run = settings.Run({**CONFIG, "embed": {**CONFIG["embed"], "weights": "weights", "layout": "lay{1}.csv"}})
    assert run.files("screen") == ["screen/metadata.csv"]
    assert run.files("embed") == ["lay{{1}}.csv", "weights/model.safetensors"]
    assert run.files("compare") == []
    assert settings.Run({**CONFIG, "screen": {"kind": "table", "source": "own.csv"}}).files("screen") == ["own.csv"]


def test_an_own_table_with_joined_columns_and_weights_that_are_not_there(tmp_path):
    a_screen(tmp_path)
    rows = screen.read_rxrx1(tmp_path / "screen").reset_index(drop=True)
    rows.assign(dose="1").to_csv(tmp_path / "own.csv", index=False)
    own = {"kind": "table", "source": "own.csv", "column": {"perturbation": "{perturbation}@{dose}"}}
    table = {**CONFIG, "screen": own}
    snakemake(tmp_path, "--cores", "1", "--until", "plates", config=table)
    assert len(pd.read_csv(tmp_path / CONFIG["out"] / "plates.csv")) == 6
    absent = {**table, "embed": {"encoder": "camae", "weights": "nowhere/"}}
    said = snakemake(tmp_path, "--cores", "1", code=1, config=absent)
    assert "the options of embed in the configuration have to be mended" in said
    assert not (tmp_path / CONFIG["out"] / "plates").exists()


@pytest.mark.parametrize(
    ("verb", "folder", "message"), [("stop", "no cluster", "holds no cluster"), ("start", "a space", "spaces")]
)
def test_the_script_of_the_cluster_touches_nothing_else(tmp_path, verb, folder, message):
    if verb == "start" and (os.geteuid() or not shutil.which("slurmctld")):
        pytest.skip("SLURM is not installed, or this is not root")
    (tmp_path / folder / "state").mkdir(parents=True)
    done = subprocess.run([SCREEN / "cluster.sh", verb, tmp_path / folder], capture_output=True, text=True)
    assert (done.returncode, message in done.stderr) == (1, True)
    assert (tmp_path / folder / "state").is_dir()


def test_plates_that_are_left_out_are_no_jobs_and_must_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "o").mkdir()
    row = "E-1_{0},E-1,{0},1,1,to do,{0}\n"
    rows = "name,experiment,plate,wells,sites,state,sha256\n" + "".join(row.format(i) for i in range(1, 6))
    (tmp_path / "o" / "plates.csv").write_text(rows)
    run = settings.Run({**CONFIG, "out": "o", "screen": {**CONFIG["screen"], "leave-out": {"E-1_2": "out of focus"}}})
    assert run.plates() == ["E-1_1", "E-1_3", "E-1_4", "E-1_5"]
    assert run.left_out() == "--left-out 'E-1_2=out of focus'"
    assert run.pictures() == "--plate o/plates/E-1_1.zarr --plate o/plates/E-1_5.zarr"
    assert run.ingest("E-1_3") == "cellica ingest rxrx1 screen o/plates --experiment E-1 --plate 3"
    assert run.fingerprint("E-1_1") != run.fingerprint("E-1_3")
    run = settings.Run({**CONFIG, "out": "o", "screen": {**CONFIG["screen"], "leave-out": {"E-9_9": "?"}}})
    with pytest.raises(ValueError, match=r"leave-out names \['E-9_9'\], which are no plates: E-1_1"):
        run.plates()


def test_the_schema_knows_the_options_of_the_command_line():
    """Every option of the configuration is one of the verb, and every method one of cellica's."""
    schema = yaml.safe_load(settings.SCHEMA.read_text(encoding="utf-8"))
    verbs = typer.main.get_command(cli.app).commands
    of_workflow = {"kind", "source", "leave-out", "pictures", "experiment"}
    for section, verb in (("screen", "ingest"), ("roles", "correct"), ("roles", "compare"), ("roles", "evaluate")):
        allowed = {name.removeprefix("--") for option in verbs[verb].params for name in option.opts}
        assert set(schema["properties"][section]["properties"]) - of_workflow <= allowed
    for verb in ("embed", "correct", "compare", "evaluate"):
        allowed = {name.removeprefix("--") for option in verbs[verb].params for name in option.opts}
        assert set(schema["properties"][verb]["properties"]) <= allowed
    pattern = re.compile(schema["$defs"]["method"]["pattern"])
    assert all(pattern.search(name) and pattern.search(f"{name}+sphere") for name in correct.METHODS)
    assert set(re.findall(r"\w+", schema["$defs"]["method"]["pattern"])) == set(correct.METHODS)


def test_the_example_configuration_is_right():
    example = yaml.safe_load((SCREEN / "config.yaml").read_text(encoding="utf-8"))
    run = settings.Run(example)
    assert run.ingest() == (
        "cellica ingest rxrx1 data/rxrx1 results/plates --experiment HUVEC-01 --experiment HUVEC-02"
    )


def test_a_left_out_plate_is_in_the_account(tmp_path):
    sites = ad.AnnData(
        np.ones((1, 2), np.float32),
        obs=pd.DataFrame({"experiment": "E", "plate": "1", "well": "A01", "site": 1}, index=["E_1_A01_1"]),
    )
    artifacts.write_adata(sites, tmp_path / "sites.h5ad")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["profile", str(tmp_path / "sites.h5ad"), "--out", str(tmp_path / "w.h5ad"), "--left-out", "E_2=dust"])
    assert list(artifacts.read_adata(tmp_path / "w.h5ad").uns["cellica"]["profile"]["plates_left_out"]) == ["E_2: dust"]
