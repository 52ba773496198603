import json
import math

import pytest

from minillama.errors import ConfigError
from minillama.training import loggers
from minillama.training.loggers import build_loggers, check_loggers
from minillama.training.metrics import MetricsLogger, filter_metrics, read_metrics

LINES = [
    {"step": 1, "loss": 0.1 + 0.2, "clipped": True},
    {"step": 1, "probe": {"layer_0": {"kurtosis": 1.5}}},
    {"step": 2, "loss": 2.0, "clipped": False},
    {"step": 2, "val_loss": 1.0, "val_bits_per_byte": None},
]


def write(path, lines):
    logger = MetricsLogger(path)
    for line in lines:
        logger.log(line)
    logger.sync()
    logger.close()


def test_what_is_logged_is_read_back_to_the_bit(tmp_path):
    write(tmp_path / "metrics.jsonl", LINES)
    assert read_metrics(tmp_path / "metrics.jsonl") == LINES


def test_each_line_is_in_the_file_before_the_next(tmp_path):
    logger = MetricsLogger(tmp_path / "metrics.jsonl")
    for count, line in enumerate(LINES, start=1):
        logger.log(line)
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == count
    logger.close()


def test_what_is_not_finite_is_valid_json_and_read_back_as_a_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    probe = {"layer_0": {"kurtosis": math.nan}}
    write(path, [{"step": 3, "loss": math.inf, "grad_norm": -math.inf, "probe": probe}])

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    raw = json.loads(path.read_text(), parse_constant=refuse)
    assert raw["loss"] == "Infinity"
    (line,) = read_metrics(path)
    assert (line["loss"], line["grad_norm"]) == (math.inf, -math.inf)
    assert math.isnan(line["probe"]["layer_0"]["kurtosis"])


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b"\x00\x00\x00", b"\xff\xfe", b"17", b"{}"])
def test_a_torn_line_is_left_out_with_a_word(tmp_path, caplog, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, LINES)
    with path.open("ab") as file:
        file.write(torn)
    assert read_metrics(path) == LINES
    assert "line 5 is incomplete" in caplog.text


def test_missing_metrics_are_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_cutting_keeps_only_what_is_wanted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    filter_metrics(path, lambda line: True)  # nothing to cut is no error
    assert not path.exists()
    write(path, [*LINES, {"step": 3, "loss": math.nan}])
    filter_metrics(path, lambda line: line["step"] >= 2)
    lines = read_metrics(path)
    assert lines[:2] == LINES[2:]
    assert math.isnan(lines[2]["loss"])


def scalars_of(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_gets_every_number_by_its_path(tmp_path):
    pytest.importorskip("tensorboard")
    built = build_loggers(["tensorboard"], tmp_path)
    for line in LINES:
        for logger in built:
            logger.log(line)
    for logger in built:
        logger.sync()
        logger.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == LINES
    scalars = scalars_of(tmp_path / "tensorboard")
    assert scalars["loss"] == [(1, pytest.approx(0.3)), (2, 2.0)]
    assert scalars["probe/layer_0/kurtosis"] == [(1, 1.5)]
    assert scalars["val_loss"] == [(2, 1.0)]
    assert "val_bits_per_byte" not in scalars


def test_tensorboard_hides_what_was_logged_after_the_resumed_step(tmp_path):
    pytest.importorskip("tensorboard")
    for step, value in ((0, 1.0), (1, 3.0)):
        built = build_loggers(["tensorboard"], tmp_path, step)
        for later in (step + 1, step + 2):
            built[1].log({"step": later, "loss": value})
        for logger in built:
            logger.close()
    assert scalars_of(tmp_path / "tensorboard")["loss"] == [(1, 1.0), (2, 3.0), (3, 3.0)]


def test_tensorboard_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    check_loggers([])
    monkeypatch.setattr(loggers.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r'pip install "minillama\[tensorboard\]"'):
        check_loggers(["tensorboard"])
