"""Train one autoencoder and write the codes of the pictures to be scored; a run that was killed goes on.

    python workflows/disentanglement/train.py PICTURES.npz OUT.npz --model ae --architecture small --steps 4000
    python workflows/disentanglement/train.py scenes OUT.npz --image-size 64 --architecture published --steps 200000 --device cuda

OUT.npz: ``latents`` (n, d) float32 and ``classes`` (n, f) of the scored pictures, their ``cross_entropy`` and its least
value, their ``entropy`` (means over pixels), ``curve`` (step, training loss), some ``pictures`` and what was ``painted``
of them. OUT.safetensors: the weights. AdamW, gradients clipped at norm 1. --seed is that of the weights, of the order
of the pictures and of the noise.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import pictures as sources
import torch
from models import ARCHITECTURES, KINDS, Autoencoder, Shape, numbers_of
from safetensors import safe_open
from safetensors.torch import save

from cellica import artifacts, progress

LEARNING_RATE = 1e-3
CHECKPOINT_SECONDS = 120
N_PAINTED = 16
SCORED_AT_ONCE = 500
LINES = 100  # of the training curve


class Training:
    """A model and its optimizer, at a step; pictures and noise of a step hang on the seed and the step alone."""

    def __init__(self, shape: Shape, data: sources.Pictures, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.data, self.options = data, options
        self.model = Autoencoder(shape).to(options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=options.weight_decay)
        self.step, self.curve = 0, []
        self.epoch, self.order = -1, np.empty(0, dtype=int)

    def rows(self) -> np.ndarray:
        """Pictures of this step: all are seen once before one is seen again."""
        size = min(self.options.minibatch, self.data.n_train)
        epoch, place = divmod(self.step, self.data.n_train // size)
        if epoch != self.epoch:
            self.order = np.random.default_rng([self.options.seed, epoch]).permutation(self.data.n_train)
            self.epoch = epoch
        return self.order[place * size : (place + 1) * size]

    def advance(self) -> float:
        generator = torch.Generator(self.options.device).manual_seed(1_000_003 * self.options.seed + self.step)
        batch = numbers_of(self.data.train(self.rows()), self.options.device)
        self.model.train()
        loss = self.model.loss(batch, generator, self.data.n_train)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    def save(self, file: Path) -> None:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": value for name, value in state.items()}
        said = {"step": str(self.step), "curve": json.dumps(self.curve), "run": self.said()}
        with artifacts.atomic(file, force=True) as part:
            part.write_bytes(save({name: value.contiguous().cpu() for name, value in tensors.items()}, said))

    def restore(self, file: Path) -> bool:
        """Go on from a checkpoint of the same run."""
        if not file.exists():
            return False
        with safe_open(file, "pt") as found:
            said = found.metadata()
            if said["run"] != self.said():
                return False
            tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
        self.model.load_state_dict({name[6:]: value for name, value in tensors.items() if name.startswith("model.")})
        state: dict[int, dict] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, i, what = name.split(".")
                state.setdefault(int(i), {})[what] = value
        whole = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**whole, "state": state})
        self.step, self.curve = int(said["step"]), json.loads(said["curve"])
        return True

    def said(self) -> str:
        """What makes two runs the same but for their length."""
        named = {name: str(value) for name, value in vars(self.options).items() if name not in ("steps", "minutes")}
        return json.dumps(named, sort_keys=True)


def train(training: Training, out: Path) -> None:
    options, checkpoint = training.options, out.with_suffix(".checkpoint")
    if training.restore(checkpoint):
        progress.say(f"going on from step {training.step}: {checkpoint}")
    started = saved = time.monotonic()
    until = started + 60 * options.minutes if options.minutes else float("inf")
    every = max(1, options.steps // LINES)
    running: list[torch.Tensor] = []
    for _ in progress.track(range(training.step, options.steps), f"{options.model}, seed {options.seed}"):
        running.append(training.advance())
        if training.step % every == 0:
            training.curve.append([training.step, float(torch.stack(running).mean())])
            if not np.isfinite(training.curve[-1][1]):
                raise ValueError(f"the loss is {training.curve[-1][1]} at step {training.step}: this run diverged")
            running = []
        if time.monotonic() > saved + CHECKPOINT_SECONDS:
            training.save(checkpoint)
            saved = time.monotonic()
        if time.monotonic() > until:
            break
    seconds = time.monotonic() - started
    write(training, out, seconds)
    checkpoint.unlink(missing_ok=True)


@torch.inference_mode()
def write(training: Training, out: Path, seconds: float) -> None:
    model, data, device = training.model.eval(), training.data, training.options.device
    codes, losses, least = [], [], []
    for i in range(0, len(data.scored), SCORED_AT_ONCE):
        batch = numbers_of(data.scored[i : i + SCORED_AT_ONCE], device)
        code = model.code(batch)
        logits = model.decoder(code)
        pixels = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch, reduction="none")
        codes.append(code.cpu().numpy())
        losses.append(pixels.mean().item() * len(batch))
        least.append(torch.special.entr(batch).add(torch.special.entr(1 - batch)).mean().item() * len(batch))
        if i == 0:
            painted = (255 * torch.sigmoid(logits[:N_PAINTED])).round().to(torch.uint8).cpu().numpy()
    shape = json.dumps(vars(model.shape))
    with artifacts.atomic(out.with_suffix(".safetensors"), force=True) as part:
        weights = {name: value.contiguous().cpu() for name, value in model.state_dict().items()}
        part.write_bytes(save(weights, {"shape": shape}))
    with artifacts.atomic(out, force=True) as part, part.open("wb") as stream:
        np.savez(
            stream,
            latents=np.concatenate(codes),
            classes=data.classes,
            factors=np.array(data.factors),
            cross_entropy=sum(losses) / len(data.scored),
            entropy=sum(least) / len(data.scored),
            curve=np.array(training.curve).reshape(-1, 2),
            pictures=data.scored[:N_PAINTED],
            painted=painted,
            steps=training.step,
            seconds=seconds,
            shape=np.array(shape),
            weight_decay=training.options.weight_decay,
            seed=training.options.seed,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a file of pictures.py, or the name of a set")
    parser.add_argument("out", type=Path)
    sources.add_options(parser)
    parser.add_argument("--model", choices=KINDS, default="ae")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="published")
    parser.add_argument("--n-latents", type=int, help="by default twice the number of factors")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--minutes", type=float, help="stop after so long, with the steps made")
    parser.add_argument("--minibatch", type=int, default=128)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    progress.show()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        data = sources.chosen(options.data, options, options.device)
        n_latents = options.n_latents or 2 * len(data.factors)
        _, n_channels, side, _ = data.scored.shape
        training = Training(Shape(options.model, options.architecture, side, n_channels, n_latents), data, options)
        train(training, options.out)
    except (ValueError, FileNotFoundError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
