"""Images to embeddings: `Encoder`, which takes crops, and `embed`, which takes the fields of a plate.

Fields are read, judged, cut into crops and hashed by threads of their own while the encoder computes, and a run that was
killed goes on from what it had written. `cellica.encoder` is the public face of both.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from cellica import __version__, artifacts, images, progress, quality
from cellica.camae import CAMAE
from cellica.fused import FusedCAMAE
from cellica.parts import Parts
from cellica.plates import Plate
from cellica.schema import InputError, PlateError, first_few

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHANNELS = ("mean", "concat")
TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 65536}  # one 6-channel S/16 crop at a time is fastest on a CPU
BYTES_A_TOKEN = 64  # and feature: what a block keeps of a token, generously
KEPT = "screen_"  # what precedes the name of a screen's column that is also a measurement's
ROUNDS = 4  # parts that each thread of a CPU gets at once, so that few wait for the last
READERS = {"cpu": 1, "cuda": 16}  # a GPU takes fields faster than one thread reads and measures them

Forward = Callable[[Tensor], tuple[Tensor | None, Tensor]]


@dataclasses.dataclass(frozen=True, eq=False)
class Encoder:
    """Images to embeddings. Made by `cellica.encoder.load`; call it with images.

    Attributes
    ----------
    model
        The module with the weights; a CA-MAE is computed by its inference form (`cellica.fused`), made of the weights
        as they are at the first call.
    name, img_size
        Name given to `load`, side of the square images that it takes (pixels).
    n_features
        Length D of a channel's features, and of an embedding unless channels are concatenated.
    max_channels
        Most channels of an image; None where there is no limit.
    weights, weights_sha256
        What the weights are, in words, and the SHA-256 of their file (of the tensors where they are random).
    device, dtype
        Where it runs, and in which precision the matrix products are done.
    channels
        Whether an embedding is the mean over channels ("mean") or holds them one after another ("concat").
    """

    model: nn.Module = dataclasses.field(repr=False)
    name: str
    n_features: int
    img_size: int
    max_channels: int | None
    weights: str
    weights_sha256: str
    device: torch.device
    dtype: str
    channels: str = "mean"

    def __call__(self, images: np.ndarray | Tensor) -> Tensor:
        """Embedding of each image: mean over the tokens of each channel, class token left out, then over channels.

        Parameters
        ----------
        images
            uint8, (N, C, img_size, img_size), channels in any order.

        Returns
        -------
        float32 (N, D), on the encoder's device; (N, C * D) where channels are concatenated.

        Raises
        ------
        InputError
            The images are not uint8, not of that shape, or have more channels than the encoder takes.
        """
        if self.channels == "concat":
            return self.channelwise(images)
        return self._collect(images, lambda _, channels: channels.mean(dim=1))

    def channelwise(self, images: np.ndarray | Tensor) -> Tensor:
        """Mean over each channel's own tokens, in channel order: float32 (N, C * D). Images as in calling it."""
        return self._collect(images, lambda _, channels: channels.flatten(1))

    def class_token(self, images: np.ndarray | Tensor) -> Tensor:
        """Class token: float32 (N, D). Images as in calling it; an InputError where the model has none."""

        def take(token: Tensor | None, _: Tensor) -> Tensor:
            if token is None:
                raise InputError(f"{self.name} reads channels one by one and has no class token: call the encoder")
            return token

        return self._collect(images, take)

    def images_at_once(self, n_channels: int) -> int:
        """Images that the device computes together: as many as keep it busy and fit well into its memory."""
        tokens = TOKENS_AT_ONCE[self.device.type]
        if self.device.type == "cuda":  # all of its memory, not what is free now: the same in every run
            memory = torch.cuda.get_device_properties(self.device).total_memory
            tokens = min(tokens, memory // 2 // (BYTES_A_TOKEN * self.n_features))
        return max(1, tokens // (n_channels * (self.img_size // 16) ** 2))

    def check_channels(self, n_channels: int) -> None:
        """Raise an InputError where an image has more channels than the encoder takes."""
        if self.max_channels is not None and n_channels > self.max_channels:
            raise InputError(f"images have {n_channels} channels, {self.name} takes at most {self.max_channels}")

    def _collect(self, images: np.ndarray | Tensor, take: Callable[[Tensor | None, Tensor], Tensor]) -> Tensor:
        images, forward = self._checked(images), self._forward

        @torch.inference_mode()
        def run(part: Tensor) -> Tensor:
            return take(*forward(part.to(self.device, non_blocking=True))).float()

        parts = images.split(self.images_at_once(images.shape[1]))
        return torch.cat(_side_by_side(run, parts) if self.device.type == "cpu" else [run(part) for part in parts])

    @functools.cached_property
    def _forward(self) -> Forward:
        dtype = DTYPES[self.dtype]
        if isinstance(self.model, CAMAE):
            return FusedCAMAE(self.model, dtype)
        low = dtype != torch.float32

        def autocast(images: Tensor) -> tuple[Tensor | None, Tensor]:
            with torch.autocast(self.device.type, dtype=dtype if low else None, enabled=low):
                return self.model(images)

        return autocast

    def _checked(self, images: np.ndarray | Tensor) -> Tensor:
        size, dtype = self.img_size, str(getattr(images, "dtype", type(images).__name__)).removeprefix("torch.")
        if dtype != "uint8":
            raise InputError(f"images are {dtype}, {self.name} takes uint8: bring them to 8 bits first")
        if images.ndim != 4 or tuple(images.shape[2:]) != (size, size) or images.shape[1] == 0:
            raise InputError(
                f"images have the shape {tuple(images.shape)}, {self.name} takes (N, C, {size}, {size}): "
                "cut fields into crops of that size with cellica.images.crops"
            )
        self.check_channels(images.shape[1])
        return images if isinstance(images, Tensor) else torch.from_numpy(np.require(images, requirements=["C", "W"]))


def _side_by_side(function: Callable[[Tensor], Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """Parts on one thread each: threads that share products as small as these wait for one another."""
    threads = torch.get_num_threads()
    if min(threads, len(parts)) == 1:
        return [function(part) for part in parts]
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(threads, len(parts))) as pool:
            return list(pool.map(function, parts))
    finally:
        torch.set_num_threads(threads)


def embed(
    plate: Plate | artifacts.PathLike,
    encoder: Encoder,
    *,
    chunk_size: int | None = None,
    parts: artifacts.PathLike | None = None,
    nuclei: str | None = None,
) -> ad.AnnData:
    """Embed every site of a plate, and measure its fields on the way.

    A field larger than the encoder's images is cut into the fewest crops that cover it (`cellica.images.crops`; they
    overlap where the size does not divide a side), and its embedding is the mean of theirs.

    Parameters
    ----------
    plate
        A `cellica.plates.Plate`, or the path of one.
    chunk_size
        Fields that are read and embedded together; changes memory and speed, and of the result no more than the last
        bits. By default as many as keep the device busy; what is computed at once is halved where memory is short.
    parts
        Folder for parts of the result, written about once a minute: a run that finds parts of an earlier one of the same
        plate, encoder and options goes on from there, if their pixels are still the same. It is the caller's to remove,
        when the result is safe.
    nuclei
        Name of the channel that shows nuclei, for the count of cells; by default the first.

    Returns
    -------
    AnnData of float32 ``X`` (sites x features; no rows of a plate that ingest kept without sites), ``obs`` the plate's
    sites and what `cellica.quality.measure` says of the
    fields (``intensity_{channel}`` and more; a column of the screen of that name is kept as ``screen_{name}``),
    ``uns["cellica"]["provenance"]``. There the plate's SHA-256 is that of the ids and the SHA-256 of the pixels of all
    fields, as they were read.

    Raises
    ------
    InputError
        The plate has no sites, more channels than the encoder takes or fields smaller than its images; an embedding is
        not finite; not even one crop fits into memory.
    PlateError
        A field is missing or damaged.
    """
    if isinstance(plate, str | os.PathLike):
        plate = Plate(plate)
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"chunk_size is {chunk_size}: it must be 1 or more")
    if not (len(plate.sites) or plate.shape[1]):  # an ingest kept it without sites
        return _site_embeddings(plate, encoder, _no_rows(plate, encoder), nuclei, 1)
    _refuse_unfit(plate, encoder, nuclei)
    reader = _Reader(plate, encoder, plate.channels.index(nuclei) if nuclei else 0)
    device = _Device(encoder, len(plate.channels))
    size = chunk_size or max(1, device.at_once // reader.crops_a_field)
    n_sites = len(plate.sites)
    with Parts(parts, _settings(plate, encoder, nuclei)) as kept:
        if kept.n_found and not np.array_equal(reader.digests(kept.n_found), kept.rows()["sha256"]):
            kept.forget("the pixels of its plate were others")
        if kept.n_found:
            progress.say(f"{plate.name}: {kept.n_found} of {n_sites} sites are embedded already, by a run that stopped")
        starts = range(kept.n_found, n_sites, size)
        description = f"embed {plate.name}" + (f", chunks of {size} sites" if size > 1 else "")
        for chunk, result in progress.track(_computed(reader, device, starts), description, total=len(starts)):
            embedding = result.reshape(len(chunk.sites), -1, result.shape[1]).mean(axis=1)
            _refuse_not_finite(embedding, chunk.sites, encoder)
            kept.add({"embedding": embedding, "sha256": chunk.sha256, **chunk.measures})
        return _site_embeddings(plate, encoder, kept.rows(), nuclei, reader.crops_a_field)


# ---------------------------------------------------------------------------------------------- reading and computing


class _Chunk(NamedTuple):
    sites: pd.DataFrame
    crops: Tensor
    measures: dict[str, np.ndarray]
    sha256: np.ndarray


class _Reader:
    """Reads fields ahead, in threads: decoding, hashing, measuring and cutting do not wait for Python."""

    def __init__(self, plate: Plate, encoder: Encoder, nuclei: int) -> None:
        self.plate, self.size, self.nuclei = plate, encoder.img_size, nuclei
        self.on_gpu = encoder.device.type == "cuda"
        self.threads = min(READERS[encoder.device.type], os.cpu_count() or 1)
        self.crops_a_field = _crops_a_field(plate, encoder)

    def chunks(self, starts: range) -> Iterator[_Chunk]:
        waiting: deque[Future[_Chunk]] = deque()
        with ThreadPoolExecutor(self.threads, thread_name_prefix="read") as pool:
            try:
                for start in starts:
                    waiting.append(pool.submit(self._read, start, starts.step))
                    if len(waiting) > self.threads:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def digests(self, n_sites: int) -> np.ndarray:
        """SHA-256 of the pixels of each of the first fields, as they are now: uint8 (n, 32)."""

        def digest(site: int) -> np.ndarray:
            return _digests(next(self.plate.fields(1, start=site))[1])

        with ThreadPoolExecutor(self.threads) as pool:
            found = progress.track(pool.map(digest, range(n_sites)), f"check {self.plate.name}", total=n_sites)
            return np.concatenate(list(found))

    def _read(self, start: int, size: int) -> _Chunk:
        sites, fields = next(self.plate.fields(size, start=start))
        expected = self.plate.sites.index[start : start + size]
        if list(sites.index) != list(expected):
            raise PlateError(
                f"{self.plate.name} gave the sites {first_few(sites.index)} where {first_few(expected)} were expected"
            )
        crops = torch.from_numpy(images.crops(fields, self.size))
        return _Chunk(
            sites,
            crops.pin_memory() if self.on_gpu else crops,
            quality.measure(fields, self.plate.channels, nuclei=self.nuclei),
            _digests(fields),
        )


def _digests(fields: np.ndarray) -> np.ndarray:
    """SHA-256 of the pixels of each field: uint8 (n, 32)."""
    digests = [hashlib.sha256(np.ascontiguousarray(field).data).digest() for field in fields]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


class _Device:
    """Runs crops on the encoder's device; where memory is short, half as many at once."""

    def __init__(self, encoder: Encoder, n_channels: int) -> None:
        self.encoder = encoder
        on_cpu = encoder.device.type == "cpu"
        self.at_once = encoder.images_at_once(n_channels) * (ROUNDS * torch.get_num_threads() if on_cpu else 1)
        self.copies = torch.cuda.Stream(encoder.device) if encoder.device.type == "cuda" else None

    def start(self, crops: Tensor) -> Callable[[], np.ndarray]:
        """Begin to embed crops; the function that is returned waits for the embeddings."""
        if self.copies is None:
            return self._run(crops).numpy
        result = self._run(crops).to("cpu", non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.encoder.device))

        def wait() -> np.ndarray:
            done.synchronize()
            return result.numpy()

        return wait

    def _run(self, crops: Tensor) -> Tensor:
        while True:
            try:
                return torch.cat([self.encoder(self._copied(part)) for part in crops.split(self.at_once)])
            except torch.OutOfMemoryError as error:
                too_many = min(self.at_once, len(crops))
                if too_many == 1:
                    raise InputError(
                        f"{self.encoder.device} has not enough memory for a single crop ({error}): free some of it, "
                        'choose device="cpu" or a smaller dtype'
                    ) from error
            self.at_once = too_many // 2
            progress.say(f"out of memory: going on with {self.at_once} crops at a time")
            if self.copies is not None:
                torch.cuda.empty_cache()

    def _copied(self, crops: Tensor) -> Tensor:
        """Crops on the device, by a copy beside the computation of the chunk before."""
        if self.copies is None:
            return crops
        with torch.cuda.stream(self.copies):
            copied = crops.to(self.encoder.device, non_blocking=True)
        computing = torch.cuda.current_stream(self.encoder.device)
        computing.wait_stream(self.copies)
        copied.record_stream(computing)
        return copied


def _computed(reader: _Reader, device: _Device, starts: range) -> Iterator[tuple[_Chunk, np.ndarray]]:
    """Chunks and the embeddings of their crops; the next chunk is begun before a result is waited for."""
    begun: tuple[_Chunk, Callable[[], np.ndarray]] | None = None
    for chunk in reader.chunks(starts):
        previous, begun = begun, (chunk, device.start(chunk.crops))
        if previous:
            yield previous[0], previous[1]()
    if begun:
        yield begun[0], begun[1]()


# ---------------------------------------------------------------------------------------------- checks and the result


def _refuse_unfit(plate: Plate, encoder: Encoder, nuclei: str | None) -> None:
    channels, height, width = plate.shape
    if not len(plate.sites):
        raise InputError(f"{plate.name} has no sites to embed")
    if min(height, width) < encoder.img_size:
        raise InputError(
            f"{plate.name} has fields of {height} x {width} pixels, {encoder.name} needs {encoder.img_size} x "
            f"{encoder.img_size} at least: choose an encoder of smaller images"
        )
    encoder.check_channels(channels)
    if nuclei is not None and nuclei not in plate.channels:
        raise InputError(f"{plate.name} has no channel {nuclei!r} of nuclei: it has {', '.join(plate.channels)}")
    try:
        quality.measure(np.empty((0, *plate.shape), np.uint8), plate.channels)
    except ValueError as error:
        raise InputError(f"{plate.name} cannot be measured: {error}") from error


def _refuse_not_finite(embedding: np.ndarray, sites: pd.DataFrame, encoder: Encoder) -> None:
    bad = sites.index[~np.isfinite(embedding).all(axis=1)]
    if len(bad):
        remedy = "check the weights" if encoder.dtype == "float32" else 'try dtype="float32"'
        raise InputError(f"embeddings of {len(bad)} sites are not finite ({first_few(list(bad))}): {remedy}")


def _settings(plate: Plate, encoder: Encoder, nuclei: str | None) -> dict[str, Any]:
    """All that decides the rows of a plate; where it is the same, parts of an earlier run are good."""
    known = [plate.provenance, list(plate.sites.index), list(plate.shape), plate.channels]
    return {
        "plate": hashlib.sha256(json.dumps(known, default=str).encode()).hexdigest(),
        "encoder": encoder.name,
        "weights": encoder.weights_sha256,
        "dtype": encoder.dtype,
        "device": encoder.device.type,
        "channels": encoder.channels,
        "crop_size": encoder.img_size,
        "nuclei": nuclei,
        "torch": torch.__version__,
        "cellica": __version__,
    }


def _parameters(plate: Plate, encoder: Encoder, nuclei: str | None) -> dict[str, Any]:
    return {
        "encoder": encoder.name,
        "dtype": encoder.dtype,
        "channels": encoder.channels,
        "crop_size": encoder.img_size,
        "nuclei": nuclei or plate.channels[0],
        "plate_channels": plate.channels,
    }


def crops_of(plate: Plate, encoder: Encoder) -> int:
    """Crops that `embed` would cut a plate's fields into; raises what it would raise of a plate that does not fit."""
    if not len(plate.sites):
        return 0
    _refuse_unfit(plate, encoder, None)
    return len(plate.sites) * _crops_a_field(plate, encoder)


def _crops_a_field(plate: Plate, encoder: Encoder) -> int:
    rows, columns = (len(images.crop_starts(length, encoder.img_size)) for length in plate.shape[1:])
    return rows * columns


def is_embedded(file: artifacts.PathLike, plate: Plate, encoder: Encoder, *, nuclei: str | None = None) -> bool:
    """Whether a ``.h5ad`` file is what `embed` made of this plate, with this encoder and these options.

    Compared are provenance, what is known of the sites, and the pixels of all fields, which are read for it; not the
    device.
    """
    try:
        adata = artifacts.read_adata(file)
        steps = [one for one in artifacts.provenance(adata) if one["verb"] != "verify"]
    except InputError:
        return False
    *before, last = steps or [{}]
    asked = _parameters(plate, encoder, nuclei)
    return (
        before == json.loads(json.dumps(plate.provenance, default=str))
        and last.get("weights_sha256") == encoder.weights_sha256
        and {key: last.get("parameters", {}).get(key) for key in asked} == asked
        and list(adata.obs_names) == list(map(str, plate.sites.index))
        and _same_sites(adata.obs, plate.sites)
        and last.get("inputs") == _inputs(plate, _Reader(plate, encoder, 0).digests(len(plate.sites)))
    )


def _same_sites(obs: pd.DataFrame, sites: pd.DataFrame) -> bool:
    """Whether obs, as read from a file, holds what the plate and its layout say of the sites."""

    def plain(column: pd.Series) -> list[str | None]:
        return [None if pd.isna(value) else str(value) for value in column.astype(object)]

    return all(
        name in obs and plain(obs[name]) == plain(column)
        for name, column in _renamed(sites, [str(name) for name in sites if f"{KEPT}{name}" in obs]).items()
        if "/" not in str(name)
    )


def _renamed(sites: pd.DataFrame, measured: Sequence[str]) -> pd.DataFrame:
    """Sites whose columns of the names of what is measured have another name."""
    return sites.rename(columns={name: f"{KEPT}{name}" for name in measured})


def _inputs(plate: Plate, digests: np.ndarray) -> dict[str, str]:
    """The plate by name, and the SHA-256 of its ids and of the SHA-256 of each field's pixels."""
    digest = hashlib.sha256()
    for site_id, pixels in zip(plate.sites.index, digests):
        digest.update(str(site_id).encode() + b"\0" + pixels.tobytes())
    return {Path(plate.path).absolute().name: digest.hexdigest()}


def _no_rows(plate: Plate, encoder: Encoder) -> dict[str, np.ndarray]:
    """What is kept of the sites of a plate, for one that has none."""
    channels, side = len(plate.channels), encoder.img_size
    return {
        "embedding": np.empty((0, encoder.n_features * (channels if encoder.channels == "concat" else 1)), np.float32),
        "sha256": np.empty((0, 32), np.uint8),
        **quality.measure(np.empty((0, channels, side, side), np.uint8), plate.channels),
    }


def _site_embeddings(
    plate: Plate, encoder: Encoder, rows: dict[str, np.ndarray], nuclei: str | None, crops_a_field: int
) -> ad.AnnData:
    embeddings, digests = rows.pop("embedding"), rows.pop("sha256")
    if len(embeddings) != len(plate.sites):
        raise PlateError(f"{plate.name} lists {len(plate.sites)} sites and gave {len(embeddings)}")
    taken = [name for name in plate.sites if name in rows]
    if taken:
        progress.say(f"{plate.name}: columns {first_few(taken)} of the screen are kept as {KEPT}NAME")
    obs = _renamed(plate.sites, taken).assign(**rows)
    var = pd.DataFrame(index=[f"feature_{i}" for i in range(embeddings.shape[1])])
    adata = ad.AnnData(embeddings, obs=obs, var=var)
    for known in plate.provenance:
        artifacts.add_step(adata, known)
    parameters = {
        **_parameters(plate, encoder, nuclei),
        "weights": encoder.weights,
        "device": encoder.device.type,
        "crops_per_field": crops_a_field,
    }
    model = {"weights_sha256": encoder.weights_sha256, "torch": torch.__version__}
    artifacts.add_step(adata, artifacts.step("embed", parameters, _inputs(plate, digests), **model))
    return adata
