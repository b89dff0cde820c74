"""Latents of pretrained models of which two runs are at hand, as .npy files that compare.py takes.

    python workflows/identifiability/extract.py timm IMAGES OUT.npy --model vit_small_patch16_224.dino --weights model.safetensors
    python workflows/identifiability/extract.py timm IMAGES OUT.npy --model resnet18 --layer fc --weights resnet18_seed1.safetensors
    python workflows/identifiability/extract.py pythia TEXT OUT.npy --model EleutherAI/pythia-160m --revision step143000

IMAGES is a folder of PNG or JPEG files, in the order of their names, or a .npy (n, height, width, 3) of bytes. TEXT is a text
file, a row an input; the latent is the last layer's state of its last token. --weights none draws weights from --seed: an untrained
model, for trying things. Nothing is fetched unless --fetch is given.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from cellica import artifacts, progress
from cellica.errors import CellicaError

sys.path.insert(0, str(Path(__file__).parents[1]))
IMAGES = (".png", ".jpg", ".jpeg")
AT_ONCE = 32


def images(source: Path) -> list[Any]:
    """Pictures, or their files."""
    if source.is_dir():
        found = sorted(file for file in source.rglob("*") if file.suffix.lower() in IMAGES)
        if not found:
            raise ValueError(f"{source} holds no {', '.join(IMAGES)}")
        return found
    artifacts.require_file(source, "pictures")
    rows = np.load(source, allow_pickle=False)
    if rows.dtype != np.uint8 or rows.ndim != 4 or rows.shape[-1] != 3:
        raise ValueError(f"{source} holds {rows.dtype} {rows.shape}: uint8 (n, height, width, 3) is needed")
    return list(rows)


def picture(one: Any) -> Image.Image:
    return (Image.open(one) if isinstance(one, Path) else Image.fromarray(one)).convert("RGB")


def of_images(options: argparse.Namespace) -> np.ndarray:
    import timm

    found = images(options.source)
    torch.manual_seed(options.seed)
    model = timm.create_model(options.model, pretrained=options.fetch)
    if options.weights not in (None, "none"):
        timm.models.load_checkpoint(model, options.weights)
    if options.layer == "features":
        model.reset_classifier(0)
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    model.eval().to(options.device)
    parts = []
    for i in progress.track(range(0, len(found), AT_ONCE), "pictures"):
        batch = torch.stack([prepare(picture(one)) for one in found[i : i + AT_ONCE]])
        with torch.inference_mode():
            parts.append(model(batch.to(options.device)).float().cpu().numpy())
    return np.concatenate(parts)


def of_text(options: argparse.Namespace) -> np.ndarray:
    try:
        import transformers
    except ImportError as error:
        raise ValueError("pythia needs the package transformers: pip install transformers") from error
    lines = [
        line for line in artifacts.require_file(options.source, "text").read_text(encoding="utf-8").splitlines() if line
    ]
    where = {"revision": options.revision, "local_files_only": not options.fetch}
    try:
        tokens = transformers.AutoTokenizer.from_pretrained(options.model, **where)
        model = transformers.AutoModel.from_pretrained(options.model, **where).eval().to(options.device)
    except OSError as error:
        raise ValueError(f"{options.model} is not on this machine: fetch it by --fetch, or name its folder") from error
    rows = []
    for line in progress.track(lines, "lines"):
        with torch.inference_mode():
            found = model(**tokens(line, return_tensors="pt", truncation=True).to(options.device))
        rows.append(found.last_hidden_state[0, -1].float().cpu().numpy())
    return np.stack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["timm", "pythia"])
    parser.add_argument("source", type=Path, help="pictures, or text")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights", help="a file, or none: an untrained model")
    parser.add_argument(
        "--layer", choices=["features", "fc"], default="features", help="before, or after the classifier"
    )
    parser.add_argument("--revision", help="of a model of the Hugging Face Hub")
    parser.add_argument("--fetch", action="store_true", help="fetch weights that are not on this machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    progress.show()
    if options.kind == "timm" and options.weights is None and not options.fetch:
        parser.exit(
            2, "error: name a file by --weights, fetch the published weights by --fetch, or say --weights none\n"
        )
    try:
        found = of_images(options) if options.kind == "timm" else of_text(options)
    except (ValueError, RuntimeError, FileNotFoundError, CellicaError) as error:
        parser.exit(2, f"error: {error}\n")
    with artifacts.atomic(options.out, force=True) as part, part.open("wb") as stream:
        np.save(stream, found)
    print(f"{options.out}: {found.shape[0]} rows of {found.shape[1]}")


if __name__ == "__main__":
    main()
