"""Sparkplug B payloads: metrics <-> the protobuf bytes that the specification prescribes.

It knows no topic, no session and no verdict. The message types are written down below after the
Sparkplug 3.0 specification (chapter 6, package `org.eclipse.tahu.protobuf`, proto2) and built when
this module is imported, in a pool of their own: no compiler, no generated file to keep in step,
no clash with another package that registers the same names. Templates, metadata and extensions
are left out: a decoder skips what it does not know, and this station sends none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from forge_station.errors import InputError

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
except ImportError as error:
    raise ImportError("Sparkplug needs protobuf: install forge-station[sparkplug]") from error


class DataType(IntEnum):
    """Indexes of data types, as far as they are used here."""

    INT32 = 3
    INT64 = 4
    UINT32 = 7
    UINT64 = 8
    FLOAT = 9
    DOUBLE = 10
    BOOLEAN = 11
    STRING = 12
    DATETIME = 13
    DATASET = 16
    BYTES = 17


@dataclass(frozen=True)
class DataSet:
    """A table; every row has one value a column. Columns of STRING, INT32, DOUBLE or BOOLEAN."""

    columns: tuple[str, ...]
    types: tuple[DataType, ...]
    rows: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True)
class Metric:
    """One value. `name` is empty where the alias stands for it (NDATA).

    `value` None is Sparkplug's null. `timestamp` is in ms since 1970, UTC.
    """

    name: str
    value: Any
    datatype: DataType | None
    timestamp: int | None = None
    alias: int | None = None
    historical: bool = False
    properties: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class Payload:
    """One message; `seq` None only in NDEATH and NCMD."""

    metrics: tuple[Metric, ...]
    timestamp: int | None = None
    seq: int | None = None


_U32, _U64, _STRING, _BOOL = "uint32", "uint64", "string", "bool"
_VALUES = {  # name of the field in the oneof `value` of each message that has one
    "Payload.Metric": {
        "int_value": (10, _U32), "long_value": (11, _U64), "float_value": (12, "float"),
        "double_value": (13, "double"), "boolean_value": (14, _BOOL), "string_value": (15, _STRING),
        "bytes_value": (16, "bytes"), "dataset_value": (17, "Payload.DataSet"),
    },
    "Payload.PropertyValue": {
        "int_value": (3, _U32), "long_value": (4, _U64), "float_value": (5, "float"),
        "double_value": (6, "double"), "boolean_value": (7, _BOOL), "string_value": (8, _STRING),
    },
    "Payload.DataSet.DataSetValue": {
        "int_value": (1, _U32), "long_value": (2, _U64), "float_value": (3, "float"),
        "double_value": (4, "double"), "boolean_value": (5, _BOOL), "string_value": (6, _STRING),
    },
}  # fmt: skip
_FIELDS = {  # number, type, repeated
    "Payload": {
        "timestamp": (1, _U64, False), "metrics": (2, "Payload.Metric", True),
        "seq": (3, _U64, False), "uuid": (4, _STRING, False), "body": (5, "bytes", False),
    },
    "Payload.Metric": {
        "name": (1, _STRING, False), "alias": (2, _U64, False), "timestamp": (3, _U64, False),
        "datatype": (4, _U32, False), "is_historical": (5, _BOOL, False),
        "is_transient": (6, _BOOL, False), "is_null": (7, _BOOL, False),
        "properties": (9, "Payload.PropertySet", False),
    },
    "Payload.PropertySet": {
        "keys": (1, _STRING, True), "values": (2, "Payload.PropertyValue", True),
    },
    "Payload.PropertyValue": {"type": (1, _U32, False), "is_null": (2, _BOOL, False)},
    "Payload.DataSet": {
        "num_of_columns": (1, _U64, False), "columns": (2, _STRING, True),
        "types": (3, _U32, True), "rows": (4, "Payload.DataSet.Row", True),
    },
    "Payload.DataSet.DataSetValue": {},
    "Payload.DataSet.Row": {"elements": (1, "Payload.DataSet.DataSetValue", True)},
}  # fmt: skip
_PACKAGE = "org.eclipse.tahu.protobuf"


def _build() -> Any:
    """The class of `Payload`."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="sparkplug_b.proto", package=_PACKAGE, syntax="proto2"
    )
    made: dict[str, descriptor_pb2.DescriptorProto] = {}

    def add(owner: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str) -> Any:
        entry = owner.field.add(name=name, number=number, label=kinds.LABEL_OPTIONAL)
        if kind in _FIELDS:
            entry.type, entry.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
        else:
            entry.type = getattr(kinds, f"TYPE_{kind.upper()}")
        return entry

    for path in _FIELDS:
        outer, _, name = path.rpartition(".")
        made[path] = made[outer].nested_type.add(name=name) if outer else file.message_type.add()
        made[path].name = name
    for path, fields in _FIELDS.items():
        for name, (number, kind, repeated) in fields.items():
            entry = add(made[path], name, number, kind)
            if repeated:
                entry.label = kinds.LABEL_REPEATED
        if path in _VALUES:
            made[path].oneof_decl.add(name="value")
            for name, (number, kind) in _VALUES[path].items():
                add(made[path], name, number, kind).oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Payload"))


_Payload: Final = _build()
_INT32: Final = frozenset({DataType.INT32, DataType.UINT32})
_INT64: Final = frozenset({DataType.INT64, DataType.UINT64, DataType.DATETIME})


def encode(payload: Payload, *, types: bool = False) -> bytes:
    """The bytes of a message. Raises ValueError or TypeError for a value its type cannot hold.

    A metric without a name has been born, with its data type: that is repeated only with `types`.
    """
    found = _Payload()
    if payload.timestamp is not None:
        found.timestamp = payload.timestamp
    if payload.seq is not None:
        found.seq = payload.seq
    for metric in payload.metrics:
        _add(found, metric, bool(metric.name) or types)
    encoded: bytes = found.SerializeToString()
    return encoded


def decode(body: bytes, types: Mapping[int, DataType] | None = None) -> Payload:
    """Read a message. `types`: alias -> data type, of the birth, for metrics without one.

    Raises InputError when the bytes are no such message.
    """
    found = _Payload()
    try:
        found.ParseFromString(body)
        metrics = tuple(_metric(item, types or {}) for item in found.metrics)
    except (message.DecodeError, ValueError) as error:
        got = f"{len(body)} bytes, {error}"
        raise InputError("not a Sparkplug B payload", got=got) from error
    return Payload(
        metrics,
        found.timestamp if found.HasField("timestamp") else None,
        found.seq if found.HasField("seq") else None,
    )


def _add(found: Any, metric: Metric, typed: bool) -> None:
    entry = found.metrics.add()
    if metric.name:
        entry.name = metric.name
    if metric.alias is not None:
        entry.alias = metric.alias
    if metric.timestamp is not None:
        entry.timestamp = metric.timestamp
    if typed and metric.datatype is not None:
        entry.datatype = metric.datatype
    if metric.historical:
        entry.is_historical = True
    for key, text in metric.properties.items():
        entry.properties.keys.append(key)
        kind = DataType.INT32 if isinstance(text, int) else DataType.STRING
        _set(entry.properties.values.add(type=kind), kind, text)
    if metric.value is None:
        entry.is_null = True
    elif isinstance(metric.value, DataSet):
        _set_table(entry.dataset_value, metric.value)
    else:
        _set(entry, metric.datatype or _kind_of(metric.value), metric.value)


def _set_table(entry: Any, table: DataSet) -> None:
    entry.num_of_columns = len(table.columns)
    entry.columns.extend(table.columns)
    entry.types.extend(table.types)
    for row in table.rows:
        line = entry.rows.add()
        for kind, value in zip(table.types, row, strict=True):
            _set(line.elements.add(), kind, value)


def _set(entry: Any, kind: DataType, value: Any) -> None:
    if kind in _INT32:
        entry.int_value = value & 0xFFFFFFFF
    elif kind in _INT64:
        entry.long_value = value & 0xFFFFFFFFFFFFFFFF
    elif kind is DataType.FLOAT:
        entry.float_value = value
    elif kind is DataType.DOUBLE:
        entry.double_value = value
    elif kind is DataType.BOOLEAN:
        entry.boolean_value = value
    elif kind is DataType.STRING:
        entry.string_value = value
    else:
        entry.bytes_value = value


def _kind_of(value: object) -> DataType:
    kinds: Sequence[tuple[type, DataType]] = (
        (bool, DataType.BOOLEAN), (int, DataType.INT64), (float, DataType.DOUBLE),
        (str, DataType.STRING), (bytes, DataType.BYTES),
    )  # fmt: skip
    return next(kind for python, kind in kinds if isinstance(value, python))


def _metric(entry: Any, types: Mapping[int, DataType]) -> Metric:
    if not isinstance(entry.name, str):
        raise ValueError("a name that is no UTF-8 text")  # protobuf hands out the bytes then
    alias = entry.alias if entry.HasField("alias") else None
    kind = types.get(alias) if alias is not None else None
    if entry.HasField("datatype"):
        try:
            kind = DataType(entry.datatype)
        except ValueError:
            kind = None  # a type that this station neither sends nor takes
    properties = {
        key: _value(value, DataType.INT32)
        for key, value in zip(entry.properties.keys, entry.properties.values, strict=False)
    }
    return Metric(
        entry.name,
        None if entry.is_null else _value(entry, kind),
        kind,
        entry.timestamp if entry.HasField("timestamp") else None,
        alias,
        entry.is_historical,
        properties,
    )


def _value(entry: Any, kind: DataType | None) -> Any:
    name = entry.WhichOneof("value")
    if name is None:
        return None
    found = getattr(entry, name)
    if name == "dataset_value":
        columns = tuple(found.columns)
        kinds = tuple(DataType(item) for item in found.types)
        rows = (
            tuple(_value(cell, kind) for cell, kind in zip(row.elements, kinds, strict=True))
            for row in found.rows
        )
        return DataSet(columns, kinds, tuple(rows))
    if name == "int_value" and kind is DataType.INT32 and found >= 1 << 31:
        return found - (1 << 32)
    if name == "long_value" and kind is DataType.INT64 and found >= 1 << 63:
        return found - (1 << 64)
    return found
