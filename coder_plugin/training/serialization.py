"""Convert a training state to tensors and JSON, and back, bit for bit.

Unpickling a file can run code, so a state is split into tensors, which safetensors stores, and strict JSON. JSON alone would
turn a tuple into a list, the key 3 into "3", and NaN into something that parsers may reject. Each such value becomes an object
whose key ``$`` names its kind. A dict that has a ``$`` key is written as a list of items, so it cannot be confused with such an
object. A value of any other type is an error that names its path.

Not stored: the device (all tensors return on the CPU), strides, requires_grad, and storage that tensors share.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coder_plugin.errors import CoderError

_MARK = "$"
# A module's state is an OrderedDict; MultiStepLR's has a Counter.
_MAPPINGS: dict[str, type] = {"dict": dict, "odict": OrderedDict, "counter": Counter}
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}
_EXACT_INT = 2**53  # JSON readers other than Python's round larger integers
_LONG = 16  # integer sequences of this length or more are stored as tensors: random.getstate() has 625
_DEEP = 100  # maximal depth: above any real state and below Python's recursion limit; catches a tree that contains itself
_NUMBERS, _TEXTS = "biufcMm", "SU"  # numpy kinds that are plain bytes; the others hold pointers or fields
# Dtypes that every supported version of safetensors stores; others are stored as integers of the same width.
_NATIVE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8}
    | {torch.int64, torch.int32, torch.int16, torch.int8}
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALLOWED = "dicts, lists, tuples, str, int, float, bool, None, dense tensors, numpy arrays and numpy numbers"


def pack(tree: Any, *, root: str = "") -> tuple[dict[str, Tensor], Any]:
    """Split a tree into named tensors and a strict-JSON skeleton.

    Tensors are named by their paths, so a module's state dict keeps its keys and any safetensors reader can open it. A
    contiguous, unshared tensor on the CPU is not copied: write the result before the next optimizer step.

    Args:
        tree: nested dicts, lists and tuples of tensors, arrays, numbers, text and None.
        root: name of the tree in error messages.

    Returns:
        The tensors by name, and the skeleton.

    Raises:
        CoderError: a value or key of a type that cannot be stored, or a tree that is nested too deeply.

    Example:
        >>> tensors, skeleton = pack({"weight": torch.zeros(2), "step": 3})
        >>> list(tensors), skeleton
        (['weight'], {'weight': {'$': 'tensor', 'name': 'weight'}, 'step': 3})
        >>> unpack(tensors, skeleton)
        {'weight': tensor([0., 0.]), 'step': 3}
    """
    packer = _Packer(root)
    return packer.tensors, packer.value(tree, "", 0)


def unpack(tensors: dict[str, Tensor], skeleton: Any) -> Any:
    """Join what :func:`pack` split. The tree may share memory with ``tensors``.

    Raises:
        CoderError: a malformed skeleton, or a tensor that is missing or not mentioned.
    """
    unpacker = _Unpacker(tensors)
    try:
        tree = unpacker.value(skeleton)
    except CoderError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CoderError(f"the state's description is malformed: {type(error).__name__}: {error}") from error
    if unused := tensors.keys() - unpacker.used:
        raise CoderError(f"the state's description does not mention the tensor {min(unused)!r}")
    return tree


class _Packer:
    def __init__(self, root: str) -> None:
        self.root = root
        self.tensors: dict[str, Tensor] = {}
        self.storages: set[int] = set()

    def value(self, tree: Any, path: str, depth: int) -> Any:
        """Only exact types are stored: a subclass (IntEnum, np.float64, DTensor) would come back as its base class."""
        kind = type(tree)
        if depth > _DEEP:
            raise CoderError(f"{self.where(path[:80])} is nested over {_DEEP} levels deep, or contains itself")
        if kind in (type(None), bool, int, float, str):
            return _scalar(tree)
        if kind in _MAPPINGS.values():
            return self.mapping(tree, path, depth)
        if kind in _SEQUENCES.values():
            return self.sequence(tree, path, depth)
        if kind is Tensor or kind is torch.nn.Parameter:
            return self.tensor(tree, path)
        if kind is np.ndarray and _plain(tree.dtype, _NUMBERS + _TEXTS):
            raw = torch.from_numpy(np.frombuffer(bytearray(tree.tobytes()), np.uint8))
            return {_MARK: "array", "name": self.store(raw, path), "dtype": tree.dtype.str, "shape": list(tree.shape)}
        if isinstance(tree, np.generic) and _plain(tree.dtype, _NUMBERS):
            return {_MARK: "number", "dtype": tree.dtype.str, "bytes": tree.tobytes().hex()}
        detail = f" of {tree.dtype}" if isinstance(tree, np.ndarray) else ""
        raise CoderError(f"{self.where(path)} is a {_name(kind)}{detail}; a checkpoint holds {_ALLOWED}")

    def mapping(self, tree: dict, path: str, depth: int) -> Any:
        values = [self.value(value, _join(path, key), depth + 1) for key, value in tree.items()]
        if type(tree) is dict and all(type(key) is str and key != _MARK and not _surrogates(key) for key in tree):
            return dict(zip(tree, values, strict=True))
        kind = next(name for name, cls in _MAPPINGS.items() if cls is type(tree))
        node = {_MARK: kind, "items": [[self.key(key, path), v] for key, v in zip(tree, values, strict=True)]}
        if hasattr(tree, "_metadata"):  # a module's state dict has version numbers, which load_state_dict reads
            node["metadata"] = self.value(tree._metadata, _join(path, "_metadata"), depth + 1)
        return node

    def key(self, key: Any, path: str) -> Any:
        if type(key) is tuple:
            return {_MARK: "tuple", "items": [self.key(item, path) for item in key]}
        if type(key) not in (type(None), bool, int, str):
            allowed = "str, int, bool, None and tuples of them"
            raise CoderError(f"{self.where(path)} has a key that is a {_name(type(key))}; keys are {allowed}")
        return _scalar(key)

    def sequence(self, tree: list | tuple, path: str, depth: int) -> Any:
        kind = "list" if type(tree) is list else "tuple"
        if len(tree) >= _LONG and all(type(item) is int and -(2**63) <= item < 2**63 for item in tree):
            name = self.store(torch.tensor(tree, dtype=torch.int64), path)
            return {_MARK: "integers", "of": kind, "name": name}
        items = [self.value(item, _join(path, index), depth + 1) for index, item in enumerate(tree)]
        return items if kind == "list" else {_MARK: kind, "items": items}

    def tensor(self, tensor: Tensor, path: str) -> Any:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
            kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else tensor.layout
            raise CoderError(f"{self.where(path)} is a {kind} tensor; a checkpoint holds {_ALLOWED}")
        plain = tensor.detach().resolve_conj().resolve_neg()
        if tensor.dtype in _NATIVE:
            return {_MARK: "tensor", "name": self.store(plain, path)}
        try:
            wide = tensor.dtype is torch.complex128
            plain = torch.view_as_real(plain) if wide else plain.view(_INTEGERS[tensor.element_size()])
        except (KeyError, RuntimeError) as error:
            raise CoderError(f"{self.where(path)} is a tensor of {tensor.dtype}, which has no plain bytes") from error
        return {_MARK: "tensor", "name": self.store(plain, path), "dtype": str(tensor.dtype).removeprefix("torch.")}

    def store(self, tensor: Tensor, path: str) -> str:
        tensor = tensor.cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in self.storages:  # safetensors refuses two tensors in one storage
            tensor = tensor.clone()
        self.storages.add(tensor.untyped_storage().data_ptr())
        stem = path.encode("utf-8", "replace").decode() or "tensor"
        name, count = stem, 1
        while name in self.tensors or name == "__metadata__":  # the keys 3 and "3" share a path
            count += 1
            name = f"{stem}#{count}"
        self.tensors[name] = tensor
        return name

    def where(self, path: str) -> str:
        return ".".join(part for part in (self.root, path) if part) or "the state"


class _Unpacker:
    """Read a skeleton without trusting it: every marker is checked, and none names a class or a function."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.used: set[str] = set()

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if not isinstance(node, dict):
            return node
        if _MARK not in node:
            return {key: self.value(value) for key, value in node.items()}
        kind = node[_MARK]
        if kind in _MAPPINGS:
            mapping = _MAPPINGS[kind]()
            mapping.update({self.value(key): self.value(value) for key, value in node["items"]})
            if "metadata" in node:
                mapping._metadata = self.value(node["metadata"])
            return mapping
        if kind == "tuple":
            return tuple(self.value(item) for item in node["items"])
        if kind == "integers":
            return _SEQUENCES[node["of"]](self.tensor(node["name"]).tolist())
        if kind == "int":
            return int(node["hex"], 16)
        if kind == "float":
            return struct.unpack(">d", bytes.fromhex(node["bits"]))[0]
        if kind == "str":
            return bytes.fromhex(node["utf8"]).decode("utf-8", "surrogatepass")
        if kind == "tensor":
            return _typed(self.tensor(node["name"]), node.get("dtype"))
        if kind == "array":
            return _array(self.tensor(node["name"]).numpy(), node["dtype"], node["shape"])
        if kind == "number":
            return _array(np.frombuffer(bytes.fromhex(node["bytes"]), np.uint8), node["dtype"], [])[()]
        raise CoderError(f"the state's description uses {kind!r}, which this version does not know")

    def tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise CoderError(f"the tensor {name!r} is missing")
        self.used.add(name)
        return self.tensors[name]


def _scalar(value: None | bool | int | float | str) -> Any:
    if type(value) is int and abs(value) > _EXACT_INT:
        return {_MARK: "int", "hex": hex(value)}  # hexadecimal also escapes Python's limit of 4300 decimal digits
    if type(value) is float and not math.isfinite(value):
        return {_MARK: "float", "bits": struct.pack(">d", value).hex()}
    if type(value) is str and _surrogates(value):  # JSON would join two of them into one character
        return {_MARK: "str", "utf8": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _typed(tensor: Tensor, dtype: str | None) -> Tensor:
    if dtype is None:
        return tensor
    target = getattr(torch, dtype)
    if not isinstance(target, torch.dtype):
        raise CoderError(f"torch.{dtype} is not a dtype")
    return torch.view_as_complex(tensor) if target is torch.complex128 else tensor.view(target)


def _array(raw: np.ndarray, dtype: str, shape: list[int]) -> np.ndarray:
    target = np.dtype(dtype)
    if not _plain(target, _NUMBERS + _TEXTS):  # an object dtype would interpret these bytes as pointers
        raise CoderError(f"a checkpoint cannot hold the numpy dtype {dtype!r}")
    if raw.size != math.prod(shape) * target.itemsize:
        raise CoderError(f"an array of {dtype} and shape {shape} does not have {raw.size} bytes")
    array = np.empty(shape, target)
    array.reshape(-1).view(np.uint8)[:] = raw
    return array


def _plain(dtype: np.dtype, kinds: str) -> bool:
    return dtype.kind in kinds and dtype.itemsize > 0 and np.dtype(dtype.str) == dtype


def _surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _join(path: str, key: Any) -> str:
    return f"{path}.{_label(key)}" if path else _label(key)


def _label(key: Any) -> str:
    if type(key) is tuple:
        return f"({', '.join(map(_label, key))})"
    return hex(key) if type(key) is int and abs(key) > _EXACT_INT else str(key)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
