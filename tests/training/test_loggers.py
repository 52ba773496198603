import csv
import json
import math
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from minillama.ablation.runner import run as run_ablation
from minillama.config import RunConfig
from minillama.config.ablation import AblationConfig
from minillama.errors import ConfigError, InterruptedRunError
from minillama.training import loggers
from minillama.training.loggers import build_loggers, check_loggers
from minillama.training.metrics import MetricsLogger, filter_metrics, read_metrics
from minillama.training.trainer import train

TENSORBOARD = RunConfig(loggers=["tensorboard"])

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
    built = build_loggers(TENSORBOARD, tmp_path)
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
        built = build_loggers(TENSORBOARD, tmp_path, step)
        for later in (step + 1, step + 2):
            built[1].log({"step": later, "loss": value})
        for logger in built:
            logger.close()
    assert scalars_of(tmp_path / "tensorboard")["loss"] == [(1, 1.0), (2, 3.0), (3, 3.0)]


# -------------------------------------------------------------------------- csv and others


def tmp_folder(config):
    return Path(config.out_dir)


def rows_of(folder):
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_the_lines_of_metrics_but_for_probes(tiny):
    config = tiny(loggers=["csv"], **{"train.probe_every": 2})
    train(config, progress=False)
    folder = tmp_folder(config)
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "probe" not in line]
    rows = rows_of(folder)
    assert [int(row["step"]) for row in rows] == [line["step"] for line in lines]
    for key in ("loss", "val_loss", "grad_norm"):
        found = [float(row[key]) for row in rows if row[key]]
        assert found == [line[key] for line in lines if key in line]


def test_csv_of_a_resumed_run_has_each_step_once(tiny, before_step):
    config = tiny(loggers=["csv"], **{"train.save_every": 3})
    before_step(6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(InterruptedRunError):
        train(config, progress=False)
    before_step(None, None)
    train(config, resume=True, progress=False)
    steps = [int(row["step"]) for row in rows_of(tmp_folder(config)) if row["loss"]]
    assert steps == list(range(1, config.train.steps + 1))


class Failing:
    """A logger that fails at its start, at its first line, or when it is closed."""

    def __init__(self, when):
        self.when, self.calls = when, []

    def __call__(self, config, folder, step):
        self._call("start")
        return self

    def _call(self, name, *_):
        self.calls.append(name)
        if name == self.when:
            raise SystemExit(2) if name == "close" else RuntimeError("no server\nat all")

    def log(self, line):
        self._call("log")

    def sync(self):
        self._call("sync")

    def close(self):
        self._call("close")


@pytest.mark.parametrize("when", ["start", "log", "sync", "close"])
def test_a_logger_that_fails_ends_no_run_and_warns_once(tiny, monkeypatch, caplog, when):
    failing = Failing(when)
    monkeypatch.setitem(loggers._LOGGERS, "wandb", failing)
    monkeypatch.setattr(loggers, "check_loggers", lambda names: None)
    config = tiny(loggers=["wandb", "csv"])
    assert train(config, progress=False)["finished"]
    assert failing.calls.count(when) == 1
    assert failing.calls[-1] == when
    warnings = [record for record in caplog.records if "wandb has failed" in record.message]
    assert len(warnings) == 1
    assert "\n" not in warnings[0].message
    assert len(rows_of(tmp_folder(config))) > config.train.steps


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_logger_that_is_not_installed_is_named_with_its_extra(monkeypatch, name):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(loggers.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=rf'pip install "minillama\[{name}\]"'):
        check_loggers(["csv", name])


TRACKIO_LOGS = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage as store
names = store.get_runs("minillama")
print(json.dumps({n: [store.get_run_config("minillama", n), store.get_logs("minillama", n)]
                  for n in names}))
"""


def read_trackio(folder):
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO_LOGS],
        env={**os.environ, "TRACKIO_DIR": str(folder)},
        capture_output=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_cells_of_an_ablation_are_one_group_in_trackio(tiny, tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    base = tiny(loggers=["trackio"]).model_dump(
        mode="json", exclude={"name", "out_dir", "group", "arm"}
    )
    config = AblationConfig(
        name="grid",
        out_dir=str(tmp_path / "grid"),
        base=base,
        arms={"rms": {}, "none": {"model.norm.kind": "none"}},
        baseline="rms",
        lr=[1e-3],
        seeds=[7],
        runner={"workers": 1, "threads": 1},
    )
    run_ablation(config, progress=False)
    found = read_trackio(tmp_path / "store")
    assert {settings["_Group"] for settings, _ in found.values()} == {"grid"}
    assert {settings["arm"] for settings, _ in found.values()} == {"rms", "none"}
    for settings, logs in found.values():
        assert (settings["lr"], settings["seed"]) == (1e-3, 7)
        folder = tmp_path / "grid" / "cells" / settings["arm"] / "lr-0.001" / "seed-7"
        lines = read_metrics(folder / "metrics.jsonl")
        assert [log["loss"] for log in logs if "loss" in log] == [
            line["loss"] for line in lines if "loss" in line
        ]


def test_wandb_offline_gets_the_lines_the_group_and_the_config(tiny, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny(loggers=["wandb"], group="grid", arm="rms")
    train(config, progress=False)
    [path] = tmp_folder(config).glob("wandb/offline-run-*/run-*.wandb")
    assert path.stem == f"run-{(tmp_folder(config) / 'wandb_id').read_text()}"
    losses, settings, group = read_wandb(path)
    lines = read_metrics(tmp_folder(config) / "metrics.jsonl")
    assert losses == [line["loss"] for line in lines if "loss" in line]
    assert (group, settings["arm"], settings["lr"]) == ("grid", "rms", config.optim.lr)


def wandb_records(path):
    """Yield the records of an offline file: LevelDB's log format after a header of 7 bytes."""
    data, place, record = path.read_bytes(), 7, b""
    while place < len(data):
        left = 32768 - place % 32768
        if left < 7:  # the rest of a block, too short for the header of a chunk
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last chunk of one
            yield record
            record = b""


def read_wandb(path):
    """Return the losses, the config and the group in an offline file of wandb."""
    from wandb.proto import wandb_internal_pb2

    losses, settings, group = [], {}, None
    for data in wandb_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            group = record.run.run_group or group
            updates = record.run.config.update
            settings |= {item.key: json.loads(item.value_json) for item in updates}
        for item in record.history.item:
            if (item.key or "/".join(item.nested_key)) == "loss":
                losses.append(json.loads(item.value_json))
    return losses, settings, group
