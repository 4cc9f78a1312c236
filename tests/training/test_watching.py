"""How often, and on how many images, the monitor measures."""

import pytest

import moatlab
from moatlab.report.page import write_report
from moatlab.runtime.device import Machine
from moatlab.training.making import make_recipe
from moatlab.training.run_folder import RunFolder
from moatlab.training.trainer import rehearsal

ACCURACIES = ("clean", "fgsm", "pgd7", "alignment")


@pytest.fixture
def small(tiny):
    def options(**more):
        fields = {"preset": "laptop", "width": 8, "batch_size": 32, "holdout": 16, "threads": 1}
        return {"model": "preact_resnet18", "data": str(tiny), **fields, **more}

    return options


def watched(folder):
    """The epochs that have accuracies; the others have none of them."""
    lines = RunFolder(folder).read_metrics()
    for line in lines:
        assert len({line[name] is None for name in ACCURACIES}) == 1
        assert line["pgd7"] is not None or not line["comparable"]
    return [line["epoch"] for line in lines if line["pgd7"] is not None]


def test_a_run_that_is_watched_less_has_the_same_weights_and_every_page_works(small, tmp_path):
    plain = moatlab.train(**small(method="fgsm", epochs=5), out=tmp_path / "plain")
    rare = moatlab.train(**small(method="fgsm", epochs=5, monitor_every=2), out=tmp_path / "rare")
    assert watched(rare.folder) == [2, 4, 5]
    assert len(RunFolder(rare.folder).read_metrics()) == 5
    assert (rare.folder / "model.safetensors").read_bytes() == (plain.folder / "model.safetensors").read_bytes()
    lines, others = RunFolder(plain.folder).read_metrics(), RunFolder(rare.folder).read_metrics()
    for epoch in (2, 4, 5):
        assert [lines[epoch - 1][name] for name in ACCURACIES] == [others[epoch - 1][name] for name in ACCURACIES]
    assert rare.record.best["epoch"] in (2, 4, 5)
    assert rare.record.monitoring["forwards"] == plain.record.monitoring["forwards"] * 3 / 5
    assert write_report([plain.folder, rare.folder], out=tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("method", "epochs", "every", "measured"),
    [
        ("fgsm", 7, 3, [3, 6, 7]),
        ("fgsm", 3, 100, [3]),
        ("moat:2", 9, 1, [*range(1, 10)]),
        ("moat:2", 9, 2, [3, 6, 9]),
        ("moat:2", 9, 3, [3, 6, 9]),
        ("moat:2", 14, 4, [6, 12, 14]),
    ],
)
def test_cycles_are_watched_at_their_ends_and_every_run_at_its_last_epoch(small, method, epochs, every, measured):
    options = small(epochs=epochs, monitor_every=every)
    del options["threads"]
    images = moatlab.load_images(options["data"])
    with rehearsal(make_recipe(method, **options), Machine("cpu", 1), images) as trainer:
        assert [epoch + 1 for epoch in range(epochs) if trainer.session.is_watched(epoch)] == measured


@pytest.mark.parametrize("monitor", ["holdout", "train", "test"])
def test_only_the_first_images_are_watched(small, monitor):
    options = small(epochs=1)
    del options["threads"]
    images = moatlab.load_images(options["data"])
    found = []
    for count in (None, 5, 1000):
        recipe = make_recipe("fgsm", **options, monitor=monitor, monitor_images=count)
        with rehearsal(recipe, Machine("cpu", 1), images) as trainer:
            found.append(trainer.session.watched_x)
    everything, few, many = found
    assert len(few) == 5 < len(everything) == len(many)
    assert few.equal(everything[:5])


def test_the_alarm_is_raised_at_the_next_check(small, tmp_path, monkeypatch):
    from moatlab.training import trainer

    course = [{"clean": 0.8, "fgsm": 0.30, "pgd7": 0.28, "alignment": 0.9}]
    course += [{"clean": 0.8, "fgsm": 0.60, "pgd7": 0.01, "alignment": 0.05}] * 3
    monkeypatch.setattr(trainer, "measure", lambda *_, **__: course.pop(0))
    run = moatlab.train(**small(method="fgsm", epochs=6, monitor_every=2), out=tmp_path / "run")
    assert run.record.alarms == [4]
    assert (run.record.outcome, run.record.collapsed_at) == ("collapsed", 4)
