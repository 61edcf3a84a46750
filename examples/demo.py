"""Shows what the library promises, and fails if it does not hold. Needs two minutes at most.

    make demo

1. LeNet5 learns handwritten digits; checkpoints are saved by policy.
2. The same run is killed in the middle of an epoch and resumed in a new process. Its final parameters are
   those of the run that was never disturbed, bit for bit; without the position in the data they are not.
3. The commands list and verify what was saved, and notice one flipped bit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path("demo_out")
EPOCHS = 5
SAVE_STEPS = 40
KEEP = 4
KILL_AT = 391  # the 35th of 89 steps in epoch 5, and 31 after the last save
RESUME_AT = 360


def main() -> int:
    """Run the demonstration; return the exit code."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    claims = Claims()
    undisturbed = learn(claims)
    interrupt(claims, undisturbed)
    inspect(claims)
    return claims.verdict()


def learn(claims: Claims) -> dict[str, np.ndarray]:
    """Part 1: an undisturbed run."""
    heading(f"1. LeNet5 learns handwritten digits; saved every {SAVE_STEPS} steps, the last {KEEP} kept")
    train("undisturbed")
    final = parameters("undisturbed")
    accuracy = float(final.pop("accuracy"))
    files = sorted((OUT / "undisturbed").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    print("  files:", ", ".join(path.name for path in files))
    claims.check(accuracy > 0.9, f"accuracy on digits never seen: {accuracy:.1%}, more than 90 %")
    claims.check(len(files) == KEEP, f"{KEEP} checkpoints are left, the last one of the last step")
    return final


def interrupt(claims: Claims, undisturbed: dict[str, np.ndarray]) -> None:
    """Part 2: the same run, killed and resumed; and a control."""
    heading(f"2. The same run, killed with SIGKILL at step {KILL_AT}, in the middle of epoch 5")
    code = train("disturbed", "--kill-at", str(KILL_AT), check=False)
    claims.check(code == -signal.SIGKILL, f"the process is gone, without a word; step {RESUME_AT} is on disk")
    shutil.copytree(OUT / "disturbed", OUT / "control")
    print("\n  A new process resumes at the next batch:")
    train("disturbed", "--resume")
    resumed = parameters("disturbed")
    resumed.pop("accuracy")
    same = all(np.array_equal(undisturbed[name], resumed[name]) for name in undisturbed)
    claims.check(
        same and undisturbed.keys() == resumed.keys(),
        f"all {len(undisturbed)} parameters, the optimizer's too, equal those never disturbed, bit for bit",
    )
    print("\n  Control: a new process loads the same parameters, but not the position in the data:")
    train("control", "--parameters-only")
    control = parameters("control")
    weights = [name for name in undisturbed if name.startswith(("conv", "fc"))]
    furthest = max(float(np.abs(undisturbed[name] - control[name]).max()) for name in weights)
    claims.check(furthest > 0, f"epoch 5 began again, and weights differ by up to {furthest:.2g}")


def inspect(claims: Claims) -> None:
    """Part 3: the commands."""
    heading("3. What is on disk")
    directory = OUT / "disturbed"
    claims.check(command("list", directory) == 0, "the checkpoints are listed, newest first")
    claims.check(command("verify", directory) == 0, "every byte of them is what was saved")
    victim = max(directory.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    flip_one_bit(victim)
    print(f"\n  One bit of {victim.name} is flipped:")
    claims.check(command("verify", directory) == 1, "the damage is found, and where it is")


class Claims:
    """What was claimed, and whether it held."""

    def __init__(self) -> None:
        self._failed: list[str] = []

    def check(self, holds: bool, claim: str) -> None:
        """Print a claim with its verdict, and remember it if it failed."""
        print(f"  {'[ok]' if holds else '[FAILED]'} {claim}")
        if not holds:
            self._failed.append(claim)

    def verdict(self) -> int:
        """Print the result; return the exit code."""
        heading("All claims hold." if not self._failed else f"Failed: {'; '.join(self._failed)}")
        return 1 if self._failed else 0


def heading(text: str) -> None:
    """Print a heading."""
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def train(name: str, *options: str, check: bool = True) -> int:
    """Run `run` below in a process of its own; return its exit code."""
    sys.stdout.flush()
    quiet = {**os.environ, "GLOG_v": "3"}  # MindSpore: errors only
    command_line = [sys.executable, __file__, "--run", name, *options]
    return subprocess.run(command_line, env=quiet, check=check).returncode


def parameters(name: str) -> dict[str, np.ndarray]:
    """The final parameters that a run has left."""
    with np.load(OUT / f"{name}.npz") as saved:
        return dict(saved)


def command(name: str, path: Path) -> int:
    """Run one of swansong's commands; return its exit code."""
    print(f"\n  $ swansong {name} {path}", flush=True)
    return subprocess.run([sys.executable, "-m", "swansong.cli", name, str(path)], check=False).returncode


def flip_one_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def run(arguments: argparse.Namespace) -> None:
    """One training run, as in lenet5.py."""
    import lenet5
    import mindspore as ms
    from digits import write_digits
    from mindspore.train import Callback

    from swansong.mindspore import (
        CheckpointConfig,
        ModelCheckpoint,
        latest_checkpoint,
        load_checkpoint,
        resume,
    )

    class Watch(Callback):
        """Prints the loss at the end of each epoch; kills the process at a step."""

        def on_train_step_end(self, run_context: Any) -> None:
            if run_context.original_args().cur_step_num == arguments.kill_at:
                print(f"  step {arguments.kill_at}: kill -9", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_epoch_end(self, run_context: Any) -> None:
            now = run_context.original_args()
            loss = float(now.net_outputs.asnumpy())
            print(f"  epoch {now.cur_epoch_num}, step {now.cur_step_num}: loss {loss:.4f}", flush=True)

    ms.set_context(mode=ms.GRAPH_MODE)
    net, model = lenet5.create_model()
    data_path = write_digits(OUT / "MNIST_Data")
    dataset = lenet5.create_dataset(data_path)
    directory = OUT / arguments.run
    initial_epoch = 0
    if arguments.resume:
        point = resume(model, directory, "LeNet5", dataset)
        initial_epoch = point.initial_epoch
        where = f"step {point.step}, the {point.step_in_epoch}th of epoch {initial_epoch + 1}"
        print(f"  resumed from {point.path.name}: {where}")
    if arguments.parameters_only:
        load_checkpoint(latest_checkpoint(directory, "LeNet5"), model.train_network)
        initial_epoch = RESUME_AT // dataset.get_dataset_size()
    config = CheckpointConfig(save_checkpoint_steps=SAVE_STEPS, keep_checkpoint_max=KEEP, saved_network=net)
    saving = ModelCheckpoint(prefix="LeNet5", directory=directory, config=config)
    model.train(EPOCHS, dataset, callbacks=[saving, Watch()], initial_epoch=initial_epoch)
    accuracy = model.eval(lenet5.create_dataset(data_path, part="test"))["accuracy"]
    final = {p.name: p.asnumpy() for p in model.train_network.get_parameters()}
    np.savez(OUT / f"{arguments.run}.npz", accuracy=accuracy, **final)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Demonstrate swansong with MindSpore.")
    parser.add_argument("--run", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--parameters-only", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    sys.exit(run(parsed) if parsed.run else main())
