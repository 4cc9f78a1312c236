"""MLflow with its local store, and Weights & Biases offline. `make test-trackers` installs both and runs this."""

import json
import struct

import pytest

import moatlab
from moatlab.training.run_folder import RunFolder
from moatlab.training.trackers import numbers


@pytest.fixture
def train(tiny, alone, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{alone}/mlflow.db")
    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)

    def run(name="run", **options):
        fields = {"preset": "laptop", "width": 8, "batch_size": 16, "holdout": 16, "epochs": 3, "threads": 1, **options}
        return moatlab.train("preact_resnet18", str(tiny), method="moat:2", out=alone / name, **fields)

    return run


def wanted(run):
    """epoch -> the numbers of its line"""
    return {line.pop("epoch"): numbers(line) for line in RunFolder(run.folder).read_metrics()}


def identity(run, name):
    return json.loads((run.folder / f"tracker-{name}.json").read_text())


def in_mlflow(run):
    """epoch -> the numbers that the store has; each once"""
    from mlflow import MlflowClient

    client, found = MlflowClient(), {}
    run_id = identity(run, "mlflow")["run"]
    for name in client.get_run(run_id).data.metrics:
        for one in client.get_metric_history(run_id, name):
            assert name not in found.setdefault(one.step, {})
            found[one.step][name] = one.value
    return found


def wandb_records(path):
    """The parts of an offline file, which is a log in LevelDB's format: blocks of 32 KiB, in which each part has a
    header with its checksum, length and kind (1: whole, 2, 3, 4: first, middle and last piece)."""
    content, place, pieces = path.read_bytes(), 7, []
    while place + 7 <= len(content):
        if (left := 2**15 - place % 2**15) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        pieces.append(content[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):
            yield b"".join(pieces)
            pieces = []


def in_wandb(run):
    """epoch -> the numbers in the offline files; each once"""
    from wandb.proto import wandb_internal_pb2

    found, run_id = {}, identity(run, "wandb")["run"]
    for path in sorted((run.folder / "wandb").glob(f"offline-run-*/run-{run_id}.wandb")):
        for content in wandb_records(path):
            record = wandb_internal_pb2.Record.FromString(content)
            if record.WhichOneof("record_type") == "history":
                items = {".".join(one.nested_key) or one.key: one.value_json for one in record.history.item}
                epoch = record.history.step.num
                assert epoch not in found
                found[epoch] = {name: json.loads(value) for name, value in items.items() if name[0] != "_"}
    return found


def without_schema(lines):
    return {epoch: {k: v for k, v in line.items() if k != "schema"} for epoch, line in lines.items()}


def test_mlflow_holds_every_metric_of_a_run_that_was_stopped_and_resumed(train):
    mlflow = pytest.importorskip("mlflow")
    train(trackers=["mlflow"], max_steps=7)
    client = mlflow.MlflowClient()
    run_id = client.search_runs([client.get_experiment_by_name("moatlab").experiment_id])[0].info.run_id
    assert client.get_run(run_id).info.status == "KILLED"
    run = train(trackers=["mlflow"], resume=True)
    assert identity(run, "mlflow") | {"run": run_id, "epochs": 3} == identity(run, "mlflow")
    found = in_mlflow(run)
    tests = {name: value for name, value in found[3].items() if name.startswith("test/")}
    assert tests == {f"test/{name}": value for name, value in run.record.final.items() if name != "images"}
    shown = {epoch: {k: v for k, v in line.items() if k not in tests} for epoch, line in found.items()}
    assert shown == without_schema(wanted(run))
    stored = client.get_run(run_id)
    assert (stored.info.status, stored.info.run_name) == ("FINISHED", "run")
    assert (stored.data.params["method"], stored.data.params["epochs"]) == ("moat:2", "3")
    assert stored.data.tags["outcome"] == run.record.outcome
    assert {"metrics.jsonl", "recipe.toml", "run.json"} <= {file.path for file in client.list_artifacts(run_id)}


def test_mlflow_gets_the_whole_history_of_a_run_that_it_does_not_know(train, alone, monkeypatch):
    pytest.importorskip("mlflow")
    train(trackers=["mlflow"], max_steps=7)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{alone}/another.db")
    run = train(trackers=["mlflow"], resume=True)
    assert set(in_mlflow(run)) == {1, 2, 3}


def test_weights_and_biases_holds_every_metric_of_a_run_that_was_stopped_and_resumed(train):
    pytest.importorskip("wandb")
    train(trackers=["wandb"], max_steps=7)
    run = train(trackers=["wandb"], resume=True)
    assert identity(run, "wandb")["epochs"] == 3
    found = in_wandb(run)
    texts = {epoch: line.pop("stage") for epoch, line in found.items()}
    assert texts == {1: "mixup", 2: "fast", 3: "pgd:2"}
    assert {line.pop("monitor") for line in found.values()} == {"holdout"}
    assert found == without_schema(wanted(run))


def test_services_that_can_not_be_reached_do_not_stop_a_run_or_change_its_bits(
    moat_process, alone, tiny_options, monkeypatch
):
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    nowhere = "http://127.0.0.1:9"
    variables = {"WANDB_API_KEY": 40 * "a", "WANDB_BASE_URL": nowhere, "WANDB_INIT_TIMEOUT": "2"}
    variables |= {"MLFLOW_TRACKING_URI": nowhere, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name, trackers in {"plain": (), "run": ("--track", "wandb", "--track", "mlflow")}.items():
        ended = moat_process("train", "fgsm", *tiny_options, "--epochs", 2, "--out", name, *trackers)
        _, err = ended.communicate(timeout=300)
        assert ended.returncode == 0, err
    assert (alone / "run/model.safetensors").read_bytes() == (alone / "plain/model.safetensors").read_bytes()
    warnings = [line for line in err.splitlines() if "is left out from here on: start failed" in line]
    assert ["WandB" in warnings[0], "MLflow" in warnings[1], len(warnings)] == [True, True, 2]
