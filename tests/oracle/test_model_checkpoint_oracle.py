"""ModelCheckpoint against MindSpore's own: the same runs leave the same names and the same content."""

import os
from pathlib import Path

import mindspore as ms
import pytest

import tiny_training as tiny
from swansong.mindspore import CheckpointConfig, ModelCheckpoint

pytestmark = pytest.mark.mindspore

EXISTING = ("net-1_1.ckpt", "net_3-2_2.ckpt", "netz-1_1.ckpt", "other-9_9.ckpt")


class Aged(ms.train.Callback):
    """Sets file times apart: MindSpore goes by them, and steps here take less than a file system's tick."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.seen = directory, []

    def on_train_step_end(self, run_context) -> None:
        files = [path for path in self.directory.rglob("*") if path.suffix in (".ckpt", ".safetensors")]
        for path in sorted(files, key=lambda path: path.stat().st_mtime_ns):
            if path not in self.seen:
                self.seen.append(path)
                os.utime(path, (1e9 + len(self.seen), 1e9 + len(self.seen)))


def left_by(directory: Path, config_class, callback_class, row) -> tuple[list[str], str, dict[str, bytes]]:
    """Run a row; return the names left, the name called latest, and the content of the newest file."""
    directory.mkdir()
    for name in row.get("existing", ()):
        (directory / name).write_bytes(b"x")
    where = row.get("directory", lambda base: str(base))(directory)
    callback = callback_class(row.get("prefix", "net"), where, config_class(**row.get("config", {})))
    model = tiny.model()
    others = [Aged(directory), tiny.StopAt(row.get("stop", -1))]
    if "error" in row:
        others.append(tiny.RaiseAt(row["error"]))
    try:
        model.train(row.get("epochs", 1), tiny.generated(), callbacks=[callback, *others])
    except RuntimeError as error:
        assert "boom" in str(error)  # noqa: PT017 - only some rows raise
    names = sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and ".swansong" not in path.parts
    )
    latest = callback.latest_ckpt_file_name
    content = {}
    if latest:
        how = {"format": "safetensors"} if latest.endswith(".safetensors") else {}
        content = {
            name: value if isinstance(value, str) else value.asnumpy().tobytes()
            for name, value in ms.load_checkpoint(latest, **how).items()
        }
        latest = str(Path(latest).relative_to(directory.resolve()))
    return names, latest, content


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"config": {}, "epochs": 2}, id="defaults"),
        pytest.param(
            {"config": {"save_checkpoint_steps": 4, "keep_checkpoint_max": 50}, "epochs": 3}, id="steps"
        ),
        pytest.param({"config": {"save_checkpoint_steps": 5}, "epochs": 2}, id="not a divisor"),
        pytest.param({"config": {"save_checkpoint_steps": 100}, "epochs": 2}, id="end only"),
        pytest.param({"config": {"save_checkpoint_steps": 6}, "epochs": 2}, id="end is due anyway"),
        pytest.param({"config": {"keep_checkpoint_max": 1}}, id="keep one"),
        pytest.param({"config": {"keep_checkpoint_max": 0}}, id="keep zero is keep one"),
        pytest.param({"config": {"keep_checkpoint_max": 3}, "epochs": 2, "stop": 8}, id="requested stop"),
        pytest.param({"config": {"format": "safetensors"}}, id="safetensors"),
        pytest.param({"config": {"save_checkpoint_steps": 4}, "existing": EXISTING}, id="collision"),
        pytest.param({"existing": ("net-1_1_breakpoint.ckpt",)}, id="breakpoints do not collide"),
        pytest.param({"prefix": "", "config": {"save_checkpoint_steps": 4}}, id="empty prefix"),
        pytest.param(
            {"prefix": lambda now: f"at{now.cur_step_num}", "config": {"keep_checkpoint_max": 50}},
            id="function for prefix",
        ),
        pytest.param(
            {"directory": lambda base: lambda now: str(base / f"e{now.cur_epoch_num}"), "epochs": 2},
            id="function for directory",
        ),
        pytest.param({"directory": lambda base: str(base / "a" / "b")}, id="missing directories"),
        pytest.param(
            {
                "config": {"append_info": ["epoch_num", "step_num", {"x": 2, "s": "é", "b": True}]},
                "epochs": 2,
            },
            id="appended",
        ),
        pytest.param({"config": {"exception_save": True}, "epochs": 2, "error": 8}, id="exception"),
        pytest.param(
            {"config": {"save_checkpoint_steps": 3, "async_save": True}, "epochs": 2}, id="background"
        ),
    ],
)
def test_names_latest_and_content_are_mindspores(tmp_path, row):
    theirs = left_by(tmp_path / "theirs", ms.train.CheckpointConfig, ms.train.ModelCheckpoint, row)
    ours = left_by(tmp_path / "ours", CheckpointConfig, ModelCheckpoint, row)
    assert ours == theirs
