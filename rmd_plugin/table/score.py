"""Score a table of any number of files: one file of scores for each, which appears whole or not at all."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import xxhash
from pytorch_ood.api import Detector, RequiresFittingException

from rmd_plugin.detectors.base import StatefulDetector, load_detector
from rmd_plugin.detectors.calibrated import Calibrated, bare
from rmd_plugin.detectors.files import content_digest
from rmd_plugin.table.engines import check_engine, map_files
from rmd_plugin.table.fit import OnBad, check_on_bad, note, refuse
from rmd_plugin.table.places import ENDINGS, Paths, TableFile, exists, join, list_files, opened, replacing
from rmd_plugin.table.reading import Columns, check_files, read_features
from rmd_plugin.untrusted import DataFormatError

#: in the metadata of a file of scores: what it was made of
_MADE_OF = b"rmd_plugin.scores_of"
#: rows of a row group
_GROUP = 1 << 20


def score_table(
    detector: Detector,
    paths: Paths,
    out: str | os.PathLike[str],
    features: str = "embedding",
    engine: str = "local",
    *,
    workers: int | None = None,
    on_bad: OnBad = "raise",
) -> list[str]:
    """Score Parquet or Arrow files into Parquet files of the same names, row by row in the same order.

    The columns are ``score`` and, of a :class:`rmd_plugin.Calibrated` detector, ``p_value`` and ``is_ood``. Files that
    were finished in a run before, by the same detector and of the same table, are not scored again.

    Args:
        detector: fitted, one of ours, with a calibration or without.
        paths: a file, a folder (with all below it), or several, as :func:`rmd_plugin.fit_table` takes them.
        out: folder of the scores, local or of an object store, which all workers must see.
        features: name of the column of features, lists of D floats.
        engine: ``"local"``, processes on this machine, or ``"ray"``, tasks of the Ray cluster that is connected.
        workers: processes of the local engine; by default one per processor. With 1 all is done in this process.
        on_bad: what to do with a file that cannot be read: ``"raise"``, or ``"skip"`` it with a warning in the log. A
            row with NaN or infinite features has the score NaN.

    Returns:
        Paths of the files of scores, without those of skipped files.

    Raises:
        DataFormatError: a ValueError with the file: if it is bad, or its columns differ from those of the others. The
            columns of all files are looked at before the work starts.
        ValueError: if ``out`` holds a file of such a name that is none of scores: it is not replaced.

    Example:
        >>> import tempfile, torch, pyarrow as pa, pyarrow.parquet as pq
        >>> from rmd_plugin import RMD, score_table
        >>> detector = RMD().fit_features(torch.randn(100, 4), torch.arange(100) % 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pq.write_table(pa.table({"embedding": torch.randn(50, 4).tolist()}), f"{folder}/new.parquet")
        ...     (scores,) = score_table(detector, f"{folder}/new.parquet", f"{folder}/scores", workers=1)
        ...     pq.read_table(scores).schema.names
        ['score']
    """
    check_engine(engine, workers)
    check_on_bad(on_bad)
    inner = bare(detector)
    if not isinstance(inner, StatefulDetector):
        raise ValueError(f"{type(inner).__name__} is no detector of rmd_plugin, which worker processes could load.")
    if not inner.fitted or (isinstance(detector, Calibrated) and detector.calibration is None):
        raise RequiresFittingException(f"{detector!r} is not fitted or not calibrated, so it cannot score a table.")
    content, columns = io.BytesIO(), Columns(features)
    detector.save(content)  # type: ignore[attr-defined]
    files = list_files(paths)
    work = _ScoresOf(content.getvalue(), columns, inner.num_features, os.fspath(out))
    for file in files:
        work.check_target(file)
    tell = refuse if on_bad == "raise" else note
    files, _ = check_files(files, columns, inner.num_features, tell)
    if not files:
        return []
    for file, reason in zip(files, map_files(engine, work, files, workers), strict=True):
        if reason:
            tell(DataFormatError(file.path, reason))
    return [target for target in map(work.target, files) if exists(target)]


@dataclass(frozen=True)
class _ScoresOf:
    """From a file to a file of its scores, unless that is there; what is wrong with a bad file, or an empty text."""

    detector: bytes
    columns: Columns
    width: int
    out: str

    def __call__(self, file: TableFile) -> str:
        target, made_of = self.target(file), self._made_of(file)
        if _made_of_what(target) == made_of:
            return ""
        try:
            self._write(file, target, made_of)
        except DataFormatError as error:
            return error.reason  # not raised: the other files go on
        return ""

    def target(self, file: TableFile) -> str:
        """Where the scores of a file go."""
        return join(self.out, file.name if file.name.lower().endswith(ENDINGS[0]) else f"{file.name}{ENDINGS[0]}")

    def check_target(self, file: TableFile) -> None:
        """Refuse to write over a file that is none of scores."""
        target = self.target(file)
        if exists(target) and _made_of_what(target) is None:
            raise ValueError(f"{target} is there and was not written by score_table. Choose another folder as out.")

    def _made_of(self, file: TableFile) -> bytes:
        content = repr((file.path, file.version, self.columns, content_digest(self.detector)))
        return xxhash.xxh3_128_hexdigest(content.encode()).encode()

    def _write(self, file: TableFile, target: str, made_of: bytes) -> None:
        detector = _loaded(self.detector)
        fields = [("score", pa.float32())]
        if isinstance(detector, Calibrated):
            fields += [("p_value", pa.float32()), ("is_ood", pa.bool_())]
        schema = pa.schema(fields, metadata={_MADE_OF: made_of})
        with replacing(target) as stream, pq.ParquetWriter(stream, schema) as writer:
            for features, _ in read_features(file, self.columns, self.width):
                if isinstance(detector, Calibrated):
                    scores, _, p_values, decisions = detector.judge(features)
                    arrays = [scores.float(), p_values.float(), decisions]
                else:
                    arrays = [detector.predict_features(features).float()]  # type: ignore[attr-defined]
                writer.write_batch(pa.record_batch([pa.array(array.numpy()) for array in arrays], schema), _GROUP)


@lru_cache(maxsize=1)
def _loaded(content: bytes) -> Detector:
    """A detector, which a worker loads once for all its files."""
    return load_detector(io.BytesIO(content))


def _made_of_what(target: str) -> bytes | None:
    """What a file of scores was made of; None if it is none."""
    if not exists(target):
        return None
    try:
        with opened(target) as stream, pq.ParquetFile(stream) as parquet:
            return (parquet.schema_arrow.metadata or {}).get(_MADE_OF)
    except (pa.ArrowException, OSError):
        return None
