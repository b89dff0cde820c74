"""Errors, and how they name values. It imports nothing, so that the command line answers at once."""

from collections.abc import Iterable


class CellicaError(Exception):
    """Base of every error that names a value, what is allowed, and the remedy."""


class InputError(CellicaError, ValueError):
    """A table, an option or an AnnData is not what a stage needs."""


class MissingFileError(CellicaError, FileNotFoundError):
    """A file or folder that was named is not there."""


class OutputExistsError(CellicaError, FileExistsError):
    """An output is there already and overwriting was not asked for."""


class OutputBusyError(CellicaError, OSError):
    """Another run is writing this output now."""


class DiskFullError(CellicaError, OSError):
    """An output could not be written: the disk is full."""


class NotWritableError(CellicaError, OSError):
    """An output's folder does not allow writing, or its name cannot be had."""


class ImageError(CellicaError, OSError):
    """An image file is absent, truncated or not an image."""


class PlateError(CellicaError, ValueError):
    """A store is not a readable plate."""


class FetchError(CellicaError, OSError):
    """A file could not be fetched, or is not the file that it should be."""


class WeightsError(CellicaError, ValueError):
    """A checkpoint is absent or does not fit the encoder."""


def first_few(values: Iterable[object], most: int = 5) -> str:
    """Name the first values of many, as errors and notes do.

    >>> first_few("abcdefg")
    "'a', 'b', 'c', 'd', 'e' and 2 more"
    """
    named = list(values)
    shown = ", ".join(repr(str(value) if isinstance(value, str) else value) for value in named[:most])
    return shown + (f" and {len(named) - most} more" if len(named) > most else "")
