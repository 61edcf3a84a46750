"""One of two data-parallel ranks; started by test_ranks.py. Prints what it saw as one line of JSON."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
from mindspore.communication import get_rank, init

import tiny_training as tiny
from swansong.errors import LoadError, NotSupportedError, SwansongWarning
from swansong.mindspore import CheckpointConfig, ModelCheckpoint, resume
from swansong.mindspore.ranks import Ranks
from swansong.store import catalog

EPOCHS = 3
STEPS = 3  # 60 samples in batches of 10, half of them for each rank


def dataset() -> ds.Dataset:
    """This rank's half of the samples, shuffled."""
    source = ds.GeneratorDataset(tiny.Samples(), ["x", "y"], shuffle=True, num_shards=2, shard_id=get_rank())
    return source.batch(tiny.BATCH)


def trained(directory: Path | None, stop: int = 99, config: CheckpointConfig | None = None):
    """Train, resuming if there is something; return point and model."""
    model, data = tiny.model(), dataset()
    if directory is None:
        model.train(EPOCHS, data)
        return None, model
    point = resume(model, directory, "net", data)
    callback = ModelCheckpoint("net", directory, config or CheckpointConfig(1, keep_checkpoint_max=50))
    model.train(EPOCHS, data, callbacks=[callback, tiny.StopAt(stop)], initial_epoch=point.initial_epoch)
    return point, model


def damage(path: Path) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shared(out: Path, want: dict[str, bytes]) -> dict[str, object]:
    """Both ranks in one directory: stopped in the middle of an epoch, and resumed."""
    trained(out, stop=5)
    Ranks.current().gather([0])  # rank 0 has saved
    runs = {found.manifest.run for found in catalog.scan(out)}
    steps = sorted(found.manifest.step for found in catalog.scan(out))
    point, model = trained(out)
    Ranks.current().gather([0])
    worlds = {found.manifest.world_size for found in catalog.scan(out)}
    return {
        "runs": len(runs),
        "steps": steps,
        "resumed": point.step,
        "equal": tiny.state(model) == want,
        "worlds": sorted(worlds),
        "files": sorted(path.name for path in out.glob("*.ckpt")),
    }


def apart(out: Path, want: dict[str, bytes]) -> dict[str, object]:
    """A directory per rank, and the newest on rank 1 is damaged."""
    own = out / f"rank{get_rank()}"
    trained(own, stop=5)
    if get_rank() == 1:
        damage(own / "net-2_2.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SwansongWarning)
        point, model = trained(own)
    said = " ".join(str(w.message) for w in caught if w.category is SwansongWarning)
    return {
        "resumed": point.step,
        "equal": tiny.state(model) == want,
        "named": "net-2_2.ckpt is passed over" in said,
        "not every rank": "not every rank" in said,
    }


def one_fails(out: Path) -> str:
    """The network of rank 1 is another one: resuming fails on both."""
    model = tiny.model() if get_rank() == 0 else tiny.model(8)
    try:
        resume(model, out, "net", dataset())
    except LoadError as error:
        return str(error)
    return "resumed"


def redundancy(out: Path) -> list[object]:
    """Redundancy is removed by the shared directory; in separate ones it cannot be."""
    config = CheckpointConfig(9, remove_redundancy=True)
    trained(out / "together", config=config)
    Ranks.current().gather([0])
    files = sorted(path.name for path in (out / "together").glob("*.ckpt"))
    try:
        trained(out / f"apart{get_rank()}", config=config)
    except NotSupportedError as error:
        return [files, str(error)]
    return [files, "saved"]


def main() -> None:
    out = Path(sys.argv[1])
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    init()
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True, device_num=2
    )
    _, model = trained(None)
    want = tiny.state(model)
    report = {
        "rank": get_rank(),
        "shared": shared(out / "shared", want),
        "apart": apart(out / "apart", want),
        "one fails": one_fails(out / "shared"),
        "redundancy": redundancy(out / "redundancy"),
    }
    (out / f"report{get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
