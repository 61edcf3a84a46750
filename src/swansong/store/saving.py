"""Making a checkpoint exist: data, manifest, one rename, then the rest. docs/format.md, section 2."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from swansong.errors import SaveError, SwansongError, UnrepresentableError
from swansong.state import tree
from swansong.state.boxes import Box
from swansong.state.tensors import HostTensor
from swansong.store import catalog, ckpt, clock, crypt, naming, safetensors
from swansong.store.checkpoint import Content, Kind, Point, Saved, SaveOptions, new_id, short
from swansong.store.ckpt_cipher import MindSporeEncoding
from swansong.store.clock import Clock, SystemClock
from swansong.store.crypt import Key, PieceMac, SealedEncoding
from swansong.store.files import BLOCK
from swansong.store.layout import Layout
from swansong.store.manifest import Chunk, FileRecord, Manifest, TensorRecord, encode
from swansong.store.pieces import PIECE, Encoding, Plain
from swansong.store.publishing import publish_directory
from swansong.store.series import Series
from swansong.store.sweeping import retire_others
from swansong.store.writer import PieceMacFunction, Writer, save_error
from swansong.version import VERSION


def save(
    series: Series,
    writer: Writer,
    name: str,
    content: Content,
    point: Point,
    *,
    kind: Kind,
    seq: int,
    options: SaveOptions,
    time: Clock | None = None,
) -> Saved:
    """Write `content` as checkpoint `name` (a file's full name, or a directory's) and commit it, durably.

    `seq` was drawn from the series when the content was captured. An earlier checkpoint of the same name is
    replaced in one step. When this returns, the checkpoint survives a power cut. Raises SaveError
    (DiskFullError among them) with nothing half-made visible, UnrepresentableError, ConfigError.
    """
    naming.checked_name(name)
    identity = new_id()
    created = clock.iso((time or SystemClock()).wall())
    with (
        _as_save_error(series.directory / name, content),
        series.space.reserve(name, short(identity)) as place,
    ):
        draft = Draft(series, writer, name, identity, created, options)
        if options.container == "directory":
            return draft.save_directory(place, content, point, kind, seq)
        return draft.save_single(place, content, point, kind, seq)


class Draft:
    """One checkpoint on its way to existence."""

    def __init__(
        self, series: Series, writer: Writer, name: str, identity: str, created: str, options: SaveOptions
    ) -> None:
        self._series, self._writer, self._name, self._options = series, writer, name, options
        self._id, self._id8, self._created = identity, short(identity), created
        self._space, self._files = series.space, writer.files
        self._target = series.directory / name
        self._direct = True

    def save_single(self, place: Path, content: Content, point: Point, kind: Kind, seq: int) -> Saved:
        """A single file, its manifest, and the file for the rest."""
        if content.boxes:
            raise UnrepresentableError(f"{self._target}: a single file holds whole tensors, these are split")
        self._check_names(content)
        layout = single_layout(content, self._options)
        record = self._write(place, self._name, layout, single_protection(self._options))
        written = catalog.identity(place)
        made: list[Path] = []
        try:
            records = [record]
            tensors = tensor_records({**content.tensors, **content.appended}, layout, 0)
            if content.rest:
                path = self._space.control / naming.rest(
                    self._name, self._id8, sealed=self._options.key is not None
                )
                made.append(path)
                rest = safetensors.layout(content.rest)
                name = f"{naming.CONTROL}/{path.name}"
                records.append(self._write(path, name, rest, native_protection(self._options.key)))
                tensors |= tensor_records(content.rest, rest, 1)
            path = self._space.control / naming.sidecar(self._name, self._id8)
            made.append(path)
            manifest = self._manifest(content, point, kind, seq, records, tensors)
            self._files.write_small(path, encode(manifest, self._options.key))
            self._files.sync_directory(self._space.control)
            self._files.rename(place, self._target)
        except BaseException:
            # An interrupt may have come after the rename; a file that is committed needs its manifest.
            if catalog.identity(self._target) != written:
                for path in made:
                    with suppress(OSError):
                        self._files.unlink(path)
            raise
        self._files.sync_directory(self._series.directory)
        with suppress(OSError):  # it is saved by now; what stays behind is swept another time
            retire_others(
                self._space, self._name, self._id8, lambda: catalog.identity(self._target) == written
            )
        return self._saved(seq, records)

    def save_directory(self, place: Path, content: Content, point: Point, kind: Kind, seq: int) -> Saved:
        """A native directory by one writer."""
        self._check_names(content)
        if content.rest:
            raise UnrepresentableError(f"{self._target}: rest: only a single file leaves anything out")
        for tensor, (shape, box) in content.boxes.items():
            if box != Box.whole(shape):
                raise UnrepresentableError(
                    f"{self._target}: tensor {tensor!r}: {box} is not all of {list(shape)}; the other boxes "
                    "take other writers (store.parts)"
                )
        content = replace(content, tensors={**content.tensors, **content.appended})
        self._files.make_directory(place, 0o700)
        key = self._options.key
        names = (
            naming.data_file(0, number, self._id8, sealed=key is not None) for number in itertools.count()
        )
        records, tensors, direct = write_data(self._writer, place, content, names, key)
        self._direct &= direct
        manifest = self._manifest(content, point, kind, seq, records, tensors)
        self._files.write_small(place / naming.MANIFEST, encode(manifest, key))
        publish_directory(self._space, place, self._target, [record.name for record in records])
        return self._saved(seq, records)

    def _check_names(self, content: Content) -> None:
        if twice := sorted(set(content.tensors) & (set(content.rest) | set(content.append_info))):
            raise UnrepresentableError(f"{self._target}: {', '.join(twice[:3])}: two values of one name")

    def _write(self, path: Path, name: str, layout: Layout, how: Protection) -> FileRecord:
        record, direct = write_file(self._writer, path, name, layout, how)
        self._direct &= direct
        return record

    def _manifest(
        self,
        content: Content,
        point: Point,
        kind: Kind,
        seq: int,
        files: list[FileRecord],
        tensors: dict[str, TensorRecord],
    ) -> Manifest:
        return manifest_of(
            self._series,
            point,
            id=self._id,
            name=self._name,
            container=self._options.container,
            kind=kind,
            seq=seq,
            created=self._created,
            files=files,
            tensors=tensors,
            aliases=dict(content.aliases),
            objects=objects_of(content),
            rank_objects={
                str(rank): {"state": None, "extra": own} for rank, own in content.rank_objects.items()
            },
            append_info=append_info_of(content),
            inexact=[dict(entry) for entry in content.inexact],
        )

    def _saved(self, seq: int, records: list[FileRecord]) -> Saved:
        return Saved(
            path=self._target, id=self._id, seq=seq, nbytes=sum(r.size for r in records), direct=self._direct
        )


@dataclass(frozen=True, slots=True)
class Protection:
    """How one file is encrypted and authenticated, if at all."""

    encoding: Encoding
    salt: bytes | None = None
    mac: PieceMacFunction | None = None


def single_protection(options: SaveOptions) -> Protection:
    """MindSpore's own encryption, and our authentication of its blocks."""
    if options.key is None:
        return Protection(Plain())
    salt = crypt.new_salt()
    return Protection(
        MindSporeEncoding(options.key.material, options.mode), salt, PieceMac(options.key, salt)
    )


def native_protection(key: Key | None) -> Protection:
    """The native container's encryption, which authenticates by itself."""
    if key is None:
        return Protection(Plain())
    salt = crypt.new_salt()
    return Protection(SealedEncoding(key, salt), salt)


def write_file(
    writer: Writer, path: Path, name: str, layout: Layout, how: Protection
) -> tuple[FileRecord, bool]:
    """Write one data file; return its record under `name`, and whether it went as directly as was wanted."""
    written = writer.write(path, layout, how.encoding, mac=how.mac)
    record = FileRecord(
        name=name,
        size=written.size,
        piece=PIECE,
        digests=written.digests,
        scheme=how.encoding.scheme,
        salt=how.salt.hex() if how.salt is not None else None,
        macs=written.macs,
    )
    return record, written.direct or written.size < writer.options.direct_from_bytes


def write_data(
    writer: Writer, place: Path, content: Content, names: Iterator[str], key: Key | None
) -> tuple[list[FileRecord], dict[str, TensorRecord], bool]:
    """Write a writer's tensors as safetensors files into `place`, each under the next of `names`."""
    records: list[FileRecord] = []
    tensors: dict[str, TensorRecord] = {}
    direct = True
    for index, group in enumerate(safetensors.split(content.tensors) or [{}]):
        aliases = {alias: of for alias, of in content.aliases.items() if of in group}
        metadata = {"swansong.aliases": json.dumps(aliases)} if aliases else {}
        layout = safetensors.layout(group, metadata=metadata)
        name = next(names)
        record, went_directly = write_file(writer, place / name, name, layout, native_protection(key))
        records.append(record)
        direct &= went_directly
        tensors |= tensor_records(group, layout, index, content.boxes)
    return records, tensors, direct


def write_single(
    writer: Writer, place: Path, name: str, content: Content, options: SaveOptions
) -> tuple[FileRecord, dict[str, TensorRecord]]:
    """Write all of a writer's tensors as one file into `place`, in the container of single files."""
    layout = single_layout(content, options)
    record, _ = write_file(writer, place / name, name, layout, single_protection(options))
    return record, tensor_records({**content.tensors, **content.appended}, layout, 0)


def single_layout(content: Content, options: SaveOptions) -> Layout:
    """The plain bytes of a single file."""
    if options.container == "ckpt":
        return ckpt.layout(content.tensors, content.append_info, crc=options.crc)
    appended = {}
    for name, value in content.append_info.items():
        if isinstance(value, str):
            raise UnrepresentableError(
                f"append_info[{name!r}]: a safetensors file holds no strings, got {value!r}"
            )
        appended[name] = value if isinstance(value, HostTensor) else _scalar(name, value)
    return safetensors.layout(dict(content.tensors) | appended, metadata={"format": "ms"})


def tensor_records(
    tensors: Mapping[str, HostTensor], layout: Layout, file: int, boxes: Mapping[str, Any] | None = None
) -> dict[str, TensorRecord]:
    """Where each tensor lies in a file's plain bytes. UnrepresentableError if a box has another shape than
    the tensor that is to fill it.
    """
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in tensors}
    for extent in layout.extents():
        if extent.name in ranges:
            ranges[extent.name].append((extent.start, extent.stop))
    records = {}
    for name, tensor in tensors.items():
        shape, box = (boxes or {}).get(name, (tensor.shape, None))
        if box is not None and box.shape != tensor.shape:
            raise UnrepresentableError(f"tensor {name!r} of shape {list(tensor.shape)} cannot fill {box}")
        chunk = Chunk(
            file=file,
            ranges=ranges[name],
            offset=box.offset if box is not None else None,
            shape=box.shape if box is not None else None,
        )
        records[name] = TensorRecord(dtype=tensor.dtype.name, shape=tuple(shape), chunks=[chunk])
    return records


def manifest_of(series: Series, point: Point, **fields: Any) -> Manifest:
    """A manifest of a series at a point of training; `fields` are the others."""
    return Manifest(
        series=series.name,
        stem=series.stem,
        run=series.run,
        parent=series.parent,
        step=point.step,
        boundary_step=point.boundary_step if point.boundary_step is not None else point.step,
        epoch=point.epoch,
        step_in_epoch=point.step_in_epoch,
        world_size=point.world_size,
        software={"swansong": VERSION},
        **fields,
    )


def objects_of(content: Content) -> dict[str, Any]:
    """The manifest's `objects`: the state's structure, and whatever else there is."""
    extra = plain_skeleton(content.objects, "objects") if content.extra is None else content.extra
    return {"state": content.skeleton, "extra": extra}


def append_info_of(content: Content) -> Any:
    """The manifest's `append_info`."""
    return plain_skeleton(_without_tensors(content.append_info), "append_info")


def plain_skeleton(value: Any, where: str) -> Any:
    """Nested plain objects as tagged JSON. UnrepresentableError if a tensor or anything unknown is in it."""
    flat = tree.flatten(value, lambda _: None)
    if flat.tensors:
        raise UnrepresentableError(
            f"{where}: tensors do not belong here: {', '.join(list(flat.tensors)[:3])}"
        )
    return flat.skeleton


def _without_tensors(info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in info.items() if not isinstance(value, HostTensor)}


def _scalar(name: str, value: object) -> HostTensor:
    """An appended number as MindSpore stores it: int as int64 (from 2^63 on uint64), float as float32."""
    match value:
        case bool():
            array = np.array(value)
        case int() if -(1 << 63) <= value < 1 << 64:
            array = np.array(value, np.uint64 if value >= 1 << 63 else np.int64)
        case float():
            with np.errstate(over="ignore"):  # 1e300 becomes infinity; the manifest has it exactly
                array = np.array(value, np.float32)
        case _:
            raise UnrepresentableError(
                f"append_info[{name!r}]: wanted bool, int of 64 bits, float or a tensor, got {value!r}"
            )
    return HostTensor.of(array, name=name)


def _room(content: Content) -> int:
    """Bytes of disk that a save takes, about: whole blocks of data, and a manifest of two."""
    return -(-content.nbytes // BLOCK) * BLOCK + 2 * BLOCK


@contextmanager
def _as_save_error(target: Path, content: Content) -> Iterator[None]:
    """Whatever the operating system refuses becomes the save's error; our own errors pass."""
    try:
        yield
    except SaveError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        # Raised by the writer, which knows the temporary name only.
        raise save_error(error.__cause__, target, _room(content)) from error.__cause__
    except SwansongError:
        raise
    except OSError as error:
        raise save_error(error, target, _room(content)) from error
    except MemoryError as error:
        raise SaveError(f"{target}: not saved: out of memory", path=str(target)) from error
