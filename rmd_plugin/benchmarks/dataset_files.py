"""The user's own files, found and read without torch, so that a mistake in them is told at once.

Rows are a data frame with the columns ``label`` and ``split``, whose index is the position of each item.
"""

import glob
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.dataset as ds  # type: ignore[import-untyped]
from safetensors import safe_open

from rmd_plugin.files import PICTURE_ENDINGS, DataFormatError, is_picture

DATA_DIR_VARIABLE = "RMD_DATA_DIR"
#: how the option is named on the command line beside the Python one
DOWNLOAD = "download=True (benchmark.download=true on the command line)"
TRAIN, VAL, TEST, OOD = "train", "val", "test", "ood:"
TEXT_ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
_ARROW_FORMATS = {
    # the checksums of pages, where a file has them: a flipped bit would change numbers silently
    ".parquet": ds.ParquetFileFormat(
        default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    ),
    ".arrow": "ipc",
    ".feather": "ipc",
}
VECTOR_ENDINGS = (*_ARROW_FORMATS, ".npy", ".npz", ".safetensors")


class DataNotFoundError(FileNotFoundError):
    """Data that a benchmark needs is not on disk. The message names what, where, and the remedy."""


class ChecksumError(DataFormatError):
    """A file's checksum is not the published one."""


class DownloadError(OSError):
    """A download did not succeed. Nothing is left behind."""


# -- where files lie --------------------------------------------------------------------------------------------------


def resolve_data_dir(data_dir: str | Path | None, wanted: str) -> Path:
    """Folder that holds the data sets: ``data_dir``, or else the environment variable ``RMD_DATA_DIR``.

    Args:
        data_dir: the folder, or None for the environment variable.
        wanted: what will be looked for in it, for the error.

    Raises:
        DataNotFoundError: neither the argument nor the variable is given. The folder itself need not exist.
    """
    chosen = data_dir if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE)
    if not chosen:
        raise DataNotFoundError(
            f"{wanted} is looked for in a data folder, but data_dir is not given and the environment variable "
            f"{DATA_DIR_VARIABLE} is not set. "
            f"Pass data_dir=FOLDER (paths.data_dir=FOLDER on the command line) or export {DATA_DIR_VARIABLE}=FOLDER."
        )
    return Path(chosen).expanduser()


def fetch(url: str, sha256: str, path: Path, *, download: bool, kind: str) -> Path:
    """Download a file unless it is there already, and check its hash either way; ``kind`` says what it is, in errors.

    Raises:
        DataNotFoundError: it is not there, and ``download`` does not allow to fetch it.
        ChecksumError: the content is not the published one; a download is not kept.
        DownloadError: the server could not be reached, or the disk is full.
    """
    import torch

    if not path.exists() and not download:
        raise DataNotFoundError(f"no {kind}: looked for {path}. Set {DOWNLOAD} to fetch {url}, or put it there.")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), sha256, progress=sys.stderr.isatty())
    except RuntimeError as error:  # so torch calls a wrong hash
        raise ChecksumError(path, f"{url} did not give the published file: {error}. Not kept.") from error
    except OSError as error:
        raise DownloadError(f"could not download {url} to {path}: {error}. Put it there by hand") from error
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise ChecksumError(path, f"its sha256 is not the published {sha256}. Fetch the file again.")
    return path


def find_path(path: str | Path, data_dir: str | Path | None, kind: str) -> Path:
    """A file or folder of the user's: as given, or else in the data folder; ``kind`` says what it is, in errors."""
    path = Path(path).expanduser()
    candidates = [path]
    if not path.exists() and not path.is_absolute():
        candidates.append(resolve_data_dir(data_dir, f"no {kind}: looked for {path}; else it") / path)
    if candidates[-1].exists():
        return candidates[-1]
    raise DataNotFoundError(
        f"no {kind}: looked for {'; '.join(map(str, candidates))}. Set path (benchmark.path=... on the command line)."
    )


def split_files(folder: Path, endings: Sequence[str], *, folders: bool = False) -> dict[str, Path]:
    """``train.*``, ``val.*``, ``test.*`` and ``ood/NAME.*`` of a folder, by split; where allowed, folders of that name.

    Raises:
        DataFormatError: if a split has two files.
    """
    files: dict[str, Path] = {}
    for prefix, directory in (("", folder), (OOD, folder / "ood")):
        for item in sorted(directory.glob("[!.]*")):
            ending = next((ending for ending in endings if item.name.endswith(ending)), "")
            key = prefix + item.name.removesuffix(ending)
            if (ending or (folders and item.is_dir())) and (prefix or key in (TRAIN, VAL, TEST)):
                if key in files:
                    raise DataFormatError(folder, f"has two files for {key}: {files[key].name}, {item.name}. Keep one")
                files[key] = item
    return files


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Errors of the libraries about the content of a file as ours, with its name."""
    try:
        yield
    except DataFormatError:
        raise
    except Exception as error:  # the libraries raise nearly every kind on garbage
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise DataFormatError(path, f"cannot be read: {' '.join(str(error).split())[:300]}") from error


# -- columns of any file ----------------------------------------------------------------------------------------------


def read_columns(path: Path, names: Sequence[str | None] | None = None) -> dict[str, np.ndarray]:
    """Columns or arrays by name, all or those of these names: lists of numbers as (N, D), others as (N,).

    Of ``a.npy``, which has no names, the array is the first of ``names``, and ``label`` is ``a.label.npy``. Nothing is
    unpickled, and the checksums that a file has are verified.
    """
    ending = ".parquet" if path.is_dir() else path.suffix.lower()
    with naming(path):
        if ending in (".csv", ".tsv"):
            separator = "\t" if ending == ".tsv" else ","
            frame = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False, encoding="utf-8-sig")
        elif ending == ".jsonl":
            lines = path.read_text(encoding="utf-8-sig").split("\n")
            frame = pd.DataFrame([json.loads(line) for line in lines if line.strip()], dtype=object)
        elif ending in _ARROW_FORMATS:
            dataset = _dataset(path)
            table = dataset.to_table([name for name in dataset.schema.names if names is None or name in names])
            plain = table.to_pandas(integer_object_nulls=True)
            return {
                name: np.stack(plain[name]) if pa.types.is_nested(table[name].type) else plain[name].to_numpy()
                for name in table.column_names
            }
        elif ending == ".npy":
            main, *others = [name for name in names or ["features"] if name is not None]
            files = {name: path.with_suffix(f".{name}.npy") for name in others}
            arrays = {name: np.load(file, allow_pickle=False) for name, file in files.items() if file.is_file()}
            return {main: np.load(path, mmap_mode="r", allow_pickle=False), **arrays}
        elif ending == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files if names is None or name in names}
        elif ending == ".safetensors":
            from safetensors.torch import load_file  # numpy has no bfloat16

            return {
                name: (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
                for name, tensor in load_file(path).items()
                if names is None or name in names
            }
        else:
            endings = sorted({*TEXT_ENDINGS, *VECTOR_ENDINGS})
            raise DataFormatError(path, f"this kind of file is not read; endings are {', '.join(endings)}")
    return {str(name).strip(): column.to_numpy() for name, column in frame.items()}


def _dataset(path: Path) -> Any:
    """A Parquet or Arrow file, or a folder of Parquet files in which others are ignored."""
    files = [path]
    if path.is_dir():
        # by name: exclude_invalid_files would pass over a damaged one, too
        files = sorted(file for file in path.rglob("*.parquet") if not file.name.startswith((".", "_")))
    if not files:
        raise DataFormatError(path, "is a folder without Parquet files")
    return ds.dataset(files, format=_ARROW_FORMATS[files[0].suffix.lower()])


def column_names(path: Path) -> list[str] | None:
    """Names of the columns or arrays of a file, without reading them; None if that cannot be had cheaply."""
    ending = ".parquet" if path.is_dir() else path.suffix.lower()
    with naming(path):
        if ending in _ARROW_FORMATS:
            return list(_dataset(path).schema.names)
        if ending == ".safetensors":
            with safe_open(path, "numpy") as file:
                return list(file.keys())
        if ending == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return list(archive.files)
    return None


# -- rows -------------------------------------------------------------------------------------------------------------


def make_rows(
    path: str | Path, columns: Mapping[str, Any], count: int, label: str | None, split: str | None, key: str | None
) -> pd.DataFrame:
    """Label (a text, or None) and split of each row.

    Args:
        path: the file, for errors.
        columns: its columns; one whose name the user chose must be there.
        count: number N of rows.
        label: column of the labels.
        split: column of the splits.
        key: the split that the whole file belongs to, if it has no such column.
    """
    for name, usual in ((label, "label"), (None if key else split, "split")):
        if name not in (None, usual, *columns) and not (key or "").startswith(OOD):
            raise DataFormatError(path, f"has no column or array {name!r}; it has {', '.join(columns)[:300]}")
    if count == 0:
        raise DataFormatError(path, "has no rows")
    for name in filter(None, (label, split)):
        if name in columns and np.shape(columns[name]) != (count,):  # pandas would repeat a single one
            raise DataFormatError(path, f"{name!r} has the length {len(np.atleast_1d(columns[name]))}, not {count}")
    with naming(path):
        words = {"label": columns.get(label or ""), "split": key or columns.get(split or "", TRAIN)}
        rows = pd.DataFrame(words, index=range(count), dtype=object)
    rows["label"] = rows["label"].map(_label_text)
    rows["split"] = rows["split"].astype(str).str.strip().replace({"validation": VAL, "ood": f"{OOD}ood"})
    inside = ~rows["split"].str.startswith(OOD)
    for wrong, reason in (
        (inside & ~rows["split"].isin([TRAIN, VAL, TEST]), "is none of train, val, test, ood and ood:NAME"),
        (inside & rows["label"].isna(), "needs labels, texts or whole numbers; only OOD rows can do without"),
    ):
        if wrong.any():
            row = int(np.argmax(wrong))
            raise DataFormatError(path, f"row {row + 1}: the split {rows['split'][row]!r} {reason}")
    return rows


def _label_text(value: object) -> str | None:
    if isinstance(value, float | np.floating) and float(value).is_integer():  # so pandas keeps whole numbers and gaps
        value = int(value)
    is_label = isinstance(value, str | int | np.integer) and not isinstance(value, bool)
    return (str(value) or None) if is_label else None


def read_table(path: Path, item: str, label: str, split: str | None, key: str | None = None) -> pd.DataFrame:
    """Rows of a table with a column ``item`` of texts; ``key`` is the split that the whole file belongs to."""
    columns = read_columns(path, [item, label, split])
    if item not in columns:
        raise DataFormatError(path, f"has no column {item!r}; it has {', '.join(columns)[:300] or 'nothing'}")
    check_texts(path, item, columns[item])
    return make_rows(path, columns, len(columns[item]), label, split, key).assign(item=columns[item])


def check_texts(path: str | Path, name: str, texts: Iterable[object]) -> None:
    """Refuse a column of texts of which one is missing or empty."""
    for row, value in enumerate(texts, 1):
        if not isinstance(value, str) or not value.strip():
            raise DataFormatError(path, f"row {row}: {name!r} is missing or empty, a text is expected")


def read_texts(path: Path, text: str, label: str, split: str | None) -> pd.DataFrame:
    """Rows of a file of texts, or of a folder with a file for each split."""
    if not path.is_dir():
        return read_table(path, text, label, split)
    files = split_files(path, TEXT_ENDINGS)
    if TRAIN not in files:
        raise DataFormatError(path, f"has no train file; endings are {', '.join(TEXT_ENDINGS)}")
    return pd.concat([read_table(file, text, label, None, key) for key, file in files.items()], ignore_index=True)


def read_vectors(
    path: Path, features: str | None, label: str | None, split: str | None, key: str | None = None
) -> tuple[np.ndarray, pd.DataFrame]:
    """Feature vectors of shape (N, D), float32, and their rows.

    Args:
        path: a Parquet, Arrow, npy, npz or safetensors file, or a folder of Parquet files.
        features: column of lists, or array; None takes the only one, or else all columns of floats.
        label: column or array of the labels.
        split: column or array of the splits.
        key: the split that the whole table belongs to, if it has no such column.
    """
    wanted = [features or "features", label, split]
    columns = read_columns(path, None if features is None and path.suffix.lower() != ".npy" else wanted)
    others = {name: column for name, column in columns.items() if name not in (label, split)}
    names = [name for name, column in others.items() if column.ndim == 2]
    names = names or [name for name, column in others.items() if column.dtype.kind == "f"]
    if not names or (len(names) > 1 and others[names[0]].ndim == 2):
        shown = ", ".join(column_names(path) or columns)[:300]
        raise DataFormatError(
            path, f"has no features {features!r}: set benchmark.features=NAME or null; it has {shown}"
        )
    matrix = others[names[0]] if others[names[0]].ndim == 2 else np.column_stack([others[name] for name in names])
    rows = make_rows(path, columns, len(matrix), label, split, key)
    return np.asarray(check_matrix(path, names[0], matrix), dtype=np.float32), rows


def vector_files(path: Path, label: str | None, split: str | None) -> dict[str, Path]:
    """The table of each split, if these have tables of their own; else nothing."""
    files = split_files(path, VECTOR_ENDINGS, folders=True) if path.is_dir() else {}
    beside = tuple(f".{name}" for name in (label, split) if name)
    return {key: file for key, file in files.items() if not (file.suffix == ".npy" and key.endswith(beside))}


def check_matrix(path: str | Path, name: str, rows: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """Features of shape (N, D); refused if they are no real numbers or one is not finite in the type of the items."""
    if rows.ndim != 2 or rows.dtype.kind not in "fiu" or rows.shape[1] == 0:
        raise DataFormatError(path, f"{name!r} must be numbers of shape (N, D), got {rows.dtype} of shape {rows.shape}")
    with np.errstate(over="ignore"):  # a float64 beyond float32's range is infinite there
        bad = np.argwhere(~np.isfinite(rows.astype(dtype, copy=False)))
    if len(bad):
        row, column = bad[0]
        raise DataFormatError(path, f"{name!r}, row {row}, column {column} is not finite: {rows[row, column]}")
    return rows


# -- pictures ---------------------------------------------------------------------------------------------------------


def list_pictures(path: Path) -> pd.DataFrame:
    """Rows of pictures, with their paths as ``item``: of folders ``train/CLASS/**``, ``ood/NAME/**``, or of a table."""
    if not path.is_dir():
        rows = read_table(path, "path", "label", "split")
        return rows.assign(item=[str(path.parent / item) for item in rows["item"]])
    if not (path / TRAIN).is_dir():
        raise DataFormatError(path, "has no folder train; expected is train/CLASS/*.png, and ood/NAME/*.png")
    frames = []
    for key in (TRAIN, VAL, TEST, "ood"):
        folders = sorted(item for item in (path / key).glob("[!.]*") if item.is_dir())
        if not folders and (path / key).is_dir():
            raise DataFormatError(path / key, "holds no folders; each class and each OOD set has a folder of its own")
        for folder in folders:
            # in the order of torchvision's ImageFolder; glob passes over what begins with a dot
            names = filter(is_picture, glob.iglob("**", root_dir=folder, recursive=True))
            paths = sorted((os.path.join(folder, name) for name in names), key=os.path.split)
            if not paths:
                raise DataFormatError(folder, f"holds no picture; endings of pictures are {', '.join(PICTURE_ENDINGS)}")
            split = OOD + folder.name if key == "ood" else key
            frames.append(pd.DataFrame({"label": folder.name, "split": split, "item": paths}))
    return pd.concat(frames, ignore_index=True)


# -- checks before torch is imported ----------------------------------------------------------------------------------


class FeatureArrays(NamedTuple):
    """Names of the arrays of one split of a file of features; logits are optional."""

    split: str
    features: str
    labels: str | None
    logits: str


def feature_arrays(path: Path, names: Sequence[str]) -> list[FeatureArrays]:
    """The splits of a file of features by the names of its arrays; one that would be ignored is refused."""
    if "features" in names:
        splits = [FeatureArrays(TRAIN, "features", "labels", "logits")]
    else:
        keys = [TRAIN, VAL, TEST] if "val_features" in names else [TRAIN, TEST]
        splits = [FeatureArrays(key, f"{key}_features", f"{key}_labels", f"{key}_logits") for key in keys]
    known = ["head_weight", "head_bias", *(name for split in splits for name in split[1:])]
    for name in names:
        if name.startswith(("near_", "far_")) and not name.endswith("_logits"):
            splits.append(FeatureArrays(OOD + name.partition("_")[2], name, None, f"{name}_logits"))
    ignored = set(names).difference(known, *splits)
    if ignored:
        listed = f"{', '.join(map(str, known))}, near_NAME, near_NAME_logits, far_NAME and far_NAME_logits"
        raise DataFormatError(path, f"the array {min(ignored)!r} would be ignored; known are {listed}")
    return splits


def check_data(options: Mapping[str, Any]) -> None:
    """Check paths and columns of a benchmark of your own data, by its config, without importing torch.

    Args:
        options: the node ``benchmark`` of a config: ``_target_`` and the options; other classes pass.

    Raises:
        DataNotFoundError: there is no such file.
        DataFormatError: a column or a folder is missing, or a row has no label.

    Example:
        >>> from rmd_plugin.benchmarks import DataNotFoundError, check_data
        >>> try:
        ...     check_data({"_target_": "rmd_plugin.benchmarks.TextFile", "path": "/nowhere/texts.csv"})
        ... except DataNotFoundError as error:
        ...     print(error)
        no data for TextFile: looked for /nowhere/texts.csv. Set path (benchmark.path=... on the command line).
    """
    kind = str(options.get("_target_", "")).removeprefix("rmd_plugin.benchmarks.")
    if kind not in ("ImageFolder", "TextFile", "Embeddings", "Features"):
        return
    path = find_path(options["path"], options.get("data_dir"), f"data for {kind}")
    if kind == "ImageFolder":
        list_pictures(path)
    elif kind == "TextFile":
        read_texts(path, *(options.get(name, name) for name in ("text", "label", "split")))
    elif kind == "Features":
        feature_arrays(path, column_names(path) or [])
    elif (features := options.get("features", "embedding")) is not None:
        names = (options.get("labels", "label"), options.get("split", "split"))
        for table in list(vector_files(path, *names).values()) or [path]:
            columns = column_names(table)
            if columns is not None and features not in columns:
                raise DataFormatError(table, f"has no column or array {features!r}; it has {', '.join(columns)[:300]}")
