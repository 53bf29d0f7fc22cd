"""Headers of GGUF model files: metadata and tensor sizes, read from bytes that somebody else has opened."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Scalar: TypeAlias = "int | float | bool | str"
Value: TypeAlias = "Scalar | tuple[Scalar, ...] | Elided"

#: The largest numeric array that is kept; per-layer figures are far below, vocabularies far above.
KEPT = 4096

_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
#: Deepest nesting of arrays in metadata that is read.
_DEEPEST = 4


class GGUFError(ValueError):
    """Raised when bytes are no GGUF header that can be read; the message says what is wrong and where."""


@dataclass(frozen=True, slots=True)
class Elided:
    """An array whose values are not kept, such as a vocabulary."""

    count: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: its shape, innermost dimension first, its type's name and its bytes."""

    name: str
    shape: tuple[int, ...]
    type: str
    size: int

    @property
    def layer(self) -> int | None:
        """The layer it belongs to (`blk.7.attn_q.weight` -> 7); None for input and output tensors."""
        parts = self.name.split(".", 2)
        return int(parts[1]) if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() else None


@dataclass(frozen=True, slots=True)
class Header:
    """One file's header."""

    version: int
    metadata: dict[str, Value] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()

    @property
    def architecture(self) -> str:
        """`general.architecture`; "clip" is a projector."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def splits(self) -> int:
        """Of how many files the model is; 1 when it is not split."""
        count = self.metadata.get("split.count", 1)
        return count if isinstance(count, int) and count > 0 else 1

    def number(self, key: str, default: float = 0) -> int:
        """A whole number of the metadata; `key` without the architecture. The default for arrays and absent keys."""
        return _whole(self.metadata.get(f"{self.architecture}.{key}", default), int(default))

    def per_layer(self, key: str, layers: int, default: int = 0) -> list[int]:
        """A figure of each layer, which files give as one number or as an array with one for each layer."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, tuple):
            found = [_whole(one, default) for one in value[:layers]]
            return found + [found[-1] if found else default] * (layers - len(found))
        return [_whole(value, default)] * layers


def _whole(value: object, default: int) -> int:
    """A number as a whole one; the default for anything else, not-a-number and infinity included."""
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else default


def merged(headers: Sequence[Header]) -> Header:
    """One header for the files of a split model: the first one's metadata, everybody's tensors."""
    return Header(headers[0].version, headers[0].metadata, tuple(t for header in headers for t in header.tensors))


def read_header(data: memoryview | bytes) -> Header:
    """Read a header from the beginning of a file (bytes, or a memory map as memoryview).

    Touches only the header, and the tensors' bytes are computed, not read. Raises GGUFError.
    """
    if bytes(data[:4]) != b"GGUF":
        raise GGUFError("not a GGUF file (it does not begin with GGUF)")
    reader = _Reader(data)
    version = reader.number("<I")
    if version not in (2, 3):
        hint = " (big-endian files are not read)" if version & 0xFFFF == 0 else ""
        raise GGUFError(f"GGUF version {version} is not known{hint}")
    tensor_count, pair_count = reader.number("<Q"), reader.number("<Q")
    # Every tensor and every pair takes at least some bytes: a broken count must not run for hours.
    if tensor_count + pair_count > len(data):
        raise GGUFError("the header is broken: it announces more entries than the file has bytes")
    metadata: dict[str, Value] = {}
    for _ in range(pair_count):
        key = reader.text()
        metadata[key] = reader.value(reader.number("<I"))
    sizes = _type_sizes()
    tensors = tuple(_tensor(reader, sizes) for _ in range(tensor_count))
    return Header(version, metadata, tensors)


def row_bytes(type_name: str, elements: int) -> int:
    """Bytes of so many elements of a type ("f16", "q8_0"), in whole blocks. Raises GGUFError for unknown types."""
    block, size = _block(type_name)
    return -(-elements // block) * size


def block_elements(type_name: str) -> int:
    """Elements that a type stores together. Raises GGUFError for unknown types."""
    return _block(type_name)[0]


def _block(type_name: str) -> tuple[int, int]:
    for name, block, size in _type_sizes().values():
        if name == type_name.lower():
            return block, size
    raise GGUFError(f'unknown tensor type "{type_name}"')


class _Reader:
    """The place in the header; every read is checked against the end of the data."""

    def __init__(self, data: memoryview | bytes) -> None:
        self._data = data
        self._place = 4

    def take(self, count: int) -> memoryview | bytes:
        end = self._place + count
        if count < 0 or end > len(self._data):
            raise GGUFError(f"the header is cut short at byte {self._place}")
        part = self._data[self._place : end]
        self._place = end
        return part

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def text(self) -> str:
        return bytes(self.take(self.number("<Q"))).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Value:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(depth)
        form = _NUMBERS.get(kind)
        if form is None:
            raise GGUFError(f"the header is broken at byte {self._place}: value type {kind} does not exist")
        found: Scalar = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return found

    def _array(self, depth: int) -> Value:
        kind, count = self.number("<I"), self.number("<Q")
        form = _NUMBERS.get(kind)
        if form is not None:
            data = self.take(count * struct.calcsize(form))
            return tuple(struct.unpack(f"<{count}{form[1]}", data)) if count <= KEPT else Elided(count)
        if depth >= _DEEPEST or kind not in (_STRING, _ARRAY) or count > len(self._data):
            raise GGUFError(f"the header is broken at byte {self._place}: an array that cannot be")
        for _ in range(count):
            if kind == _STRING:
                self.take(self.number("<Q"))
            else:
                self._array(depth + 1)
        return Elided(count)


def _tensor(reader: _Reader, sizes: dict[int, tuple[str, int, int]]) -> Tensor:
    name = reader.text()
    dimensions = reader.number("<I")
    if dimensions > 8:
        raise GGUFError(f'tensor "{name}" has {dimensions} dimensions')
    shape = tuple(reader.number("<Q") for _ in range(dimensions))
    kind = reader.number("<I")
    reader.number("<Q")  # where its data is; of no use for arithmetic
    if kind not in sizes:
        raise GGUFError(f'tensor "{name}" has the unknown type {kind}; a newer gguf package may know it')
    type_name, block, size = sizes[kind]
    return Tensor(name, shape, type_name, -(-_product(shape) // block) * size)


def _product(shape: Iterable[int]) -> int:
    result = 1
    for one in shape:
        result *= one
    return result


def _type_sizes() -> dict[int, tuple[str, int, int]]:
    """Type number -> (name, elements in a block, bytes of a block), as the gguf package knows them."""
    import gguf  # here, because it brings numpy, which the service has no use for

    return {
        int(kind): (kind.name.lower(), int(block), int(size)) for kind, (block, size) in gguf.GGML_QUANT_SIZES.items()
    }
