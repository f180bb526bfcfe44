"""The Machine Vision system of OPC 40100-1 in an address space: nodes, states, results as values.

It knows the companion specification and asyncua, nothing of jobs and triggers (`opcua`). The types
come from the OPC Foundation's own nodeset (`nodesets/`); what is instantiated of them is what this
station can do, see docs/SPARKPLUG_OPCUA.md.
"""

from __future__ import annotations

import gzip
import logging
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import resources
from typing import Any, Final

from asyncua import Node, Server, ua
from asyncua.common.instantiate_util import instantiate

# It warns of attributes that a variable type does not have and a variable needs not be given.
logging.getLogger("asyncua.common.copy_node_util").setLevel(logging.ERROR)

NODESET = "Opc.Ua.MachineVision.NodeSet2.xml.gz"
MACHINE_VISION = "http://opcfoundation.org/UA/MachineVision"
RESULT_STATES: Final = {"completed": 1, "partial": 1, "aborted": 3, "failed": 4}
"""ResultStateDataType of OPC 40100-1, 12.19: 1 completed, 2 processing, 3 aborted, 4 failed."""
STATES: Final = {
    "PREOPERATIONAL": "Preoperational",
    "OPERATIONAL": "Operational",
    "ERROR": "Error",
    "HALTED": "Halted",
}
MODES: Final = {
    "INITIALIZED": "Initialized",
    "READY": "Ready",
    "SINGLE": "SingleExecution",
    "CONTINUOUS": "ContinuousExecution",
}
IDS_BASE: Final = "BinaryIdBaseDataType"
CONTENT: Final = ("verdict", "reason", "score", "defectiveCells", "text")
"""The elements of ResultContent, in this order."""


class Model:
    """One VisionSystem; get one from `build`. Every call belongs into the server's event loop."""

    def __init__(self, server: Server, types: Mapping[str, Node], namespace: int) -> None:
        self._server = server
        self._types = types
        self._namespace = namespace
        self._events: dict[str, Any] = {}
        self.system: Node
        self.machine: Node
        self.automatic: Node
        self.management: Node
        self._latest: Node
        self._fields: dict[str, Node] = {}

    async def create(self, name: str) -> None:
        """Instantiate the system below Objects, with the optional parts that are used."""
        system = await self._object(self._server.nodes.objects, name, "VisionSystemType", name)
        self.system = system
        self.machine = await self.child(system, "VisionStateMachine")
        self.automatic = await self._object(
            self.machine, "AutomaticModeStateMachine", "VisionAutomaticModeStateMachineType", name
        )
        self.management = await self._object(
            system, "ResultManagement", "ResultManagementType", name
        )
        results = await self._object(self.management, "Results", "ResultFolderType", name)
        (self._latest, *_) = await instantiate(
            results,
            self._types["ResultType"],
            ua.NodeId(f"{name}.Results.Latest", self._own),
            ua.QualifiedName("Latest", self._own),
            instantiate_optional=True,
        )
        self._fields = {
            (await node.read_browse_name()).Name: node for node in await self._latest.get_children()
        }
        # The nodeset leaves its type to the default, which asyncua reads as no type at all.
        anything = ua.Variant(ua.NodeId(ua.ObjectIds.BaseDataType), ua.VariantType.NodeId)
        await self._fields["ResultContent"].write_attribute(
            ua.AttributeIds.DataType, ua.DataValue(anything)
        )
        for event in ("ResultReadyEventType", "JobStartedEventType", "ReadyEventType"):
            self._events[event] = await self._server.get_event_generator(
                self._types[event], emitting_node=system
            )

    async def child(self, parent: Node, *names: str) -> Node:
        """A node below `parent` by browse names of the companion specification."""
        return await parent.get_child([f"{self._namespace}:{name}" for name in names])

    async def tell_state(self, state: str, mode: str | None) -> None:
        """Set both state machines. `state` and `mode` are keys of `STATES` and `MODES`."""
        await self._tell(self.machine, "VisionStateMachineType", STATES[state])
        told = MODES[mode or "INITIALIZED"] if state == "OPERATIONAL" else None
        await self._tell(self.automatic, "VisionAutomaticModeStateMachineType", told)

    async def tell_result(self, result: Any, text: str) -> None:
        """Write the latest result and fire ResultReady. `result` is a ResultDataType."""
        for name, node in self._fields.items():
            if getattr(result, name) is not None:
                await self._write(node, ua.Variant(getattr(result, name), _kind(name)))
        await self._write(self._latest, ua.Variant(result, ua.VariantType.ExtensionObject))
        event = self._events["ResultReadyEventType"].event
        for name in (
            "ResultId", "IsPartial", "IsSimulated", "ResultState", "PartId", "ProductId", "JobId",
            "MeasId", "InternalRecipeId", "InternalConfigurationId", "CreationTime",
            "ProcessingTimes", "ResultContent",
        ):  # fmt: skip
            setattr(event, name, getattr(result, name))
            event.data_types[name] = _kind(name)
        await self._events["ResultReadyEventType"].trigger(message=text)

    async def tell_job(self, event: str, job: str) -> None:
        """Fire JobStarted or Ready (`JobStartedEventType`, `ReadyEventType`) of a job."""
        self._events[event].event.JobId = ua.JobIdDataType(Id=job)
        await self._events[event].trigger(message=f"{event.removesuffix('EventType')} {job}")

    @property
    def _own(self) -> int:
        return int(self._namespace + 1)

    async def _object(self, parent: Node, name: str, type_name: str, system: str) -> Node:
        below = parent != self._server.nodes.objects
        identifier = f"{system}.{name}" if below else name
        space = self._namespace if below else self._own
        return await parent.add_object(
            ua.NodeId(identifier, self._own),
            ua.QualifiedName(name, space),
            self._types[type_name].nodeid,
            instantiate_optional=False,
        )

    async def _write(self, node: Node, value: Any) -> None:
        """Past the checks of the server, which hold a new value against the first one's type."""
        now = datetime.now(timezone.utc)
        told = ua.DataValue(value, SourceTimestamp=now, ServerTimestamp=now)
        await self._server.write_attribute_value(node.nodeid, told)

    async def _tell(self, machine: Node, type_name: str, state: str | None) -> None:
        """Write CurrentState and its Id; None: this machine is in no state now."""
        current = await machine.get_child(["0:CurrentState"])
        identity = await current.get_child(["0:Id"])
        if state is None:
            inactive = ua.StatusCode(ua.StatusCodes.BadStateNotActive)
            for node in (current, identity):
                await node.write_value(ua.DataValue(StatusCode=inactive))
            return
        found = await self.child(self._types[type_name], state)
        await current.write_value(ua.LocalizedText(state, "en"))
        await identity.write_value(ua.Variant(found.nodeid, ua.VariantType.NodeId))


async def build(server: Server, uri: str, name: str) -> Model:
    """Load the companion nodeset into a server that is initialised, and create the system."""
    loaded = await server.import_xml(xmlstring=_nodeset())
    namespace = await server.get_namespace_index(MACHINE_VISION)
    own = await server.register_namespace(uri)
    if own != namespace + 1:
        raise RuntimeError(f"namespace {uri} has index {own}, expected {namespace + 1}")
    types = {}
    for identifier in loaded:
        node = server.get_node(identifier)
        if identifier.NamespaceIndex == namespace and await node.read_node_class() in (
            ua.NodeClass.ObjectType, ua.NodeClass.VariableType, ua.NodeClass.DataType,
        ):  # fmt: skip
            types[(await node.read_browse_name()).Name] = node
    model = Model(server, types, namespace)
    await model.create(name)
    return model


def _nodeset() -> str:
    """The XML of the companion nodeset, with one thing filled in: three ids inherit the fields of
    an abstract base and have an empty definition, from which clients cannot tell what is in them.
    """
    packed = (resources.files(__package__) / "nodesets" / NODESET).read_bytes()
    text = gzip.decompress(packed).decode()
    found = re.search(rf'<Definition Name="1:{IDS_BASE}">(.*?)</Definition>', text, re.DOTALL)
    assert found is not None
    return re.sub(
        r'<Definition Name="(1:\w+)" />',
        lambda empty: f'<Definition Name="{empty[1]}">{found[1]}</Definition>',
        text,
    )


def result_of(verdict: Mapping[str, Any], job: str, meas: str) -> Any:
    """A ResultDataType of a verdict (`Verdict.to_dict()`). `meas` is the client's MeasId."""
    model = verdict.get("model") or {"name": "none", "version": "", "sha256": ""}
    reasons = verdict["reasons"]
    scores = [item["score"] for item in verdict["checks"] if item["score"] is not None]
    cells = sum(len(grid["cells"]) for grid in verdict.get("grids", ()))
    times: Mapping[str, float] = verdict.get("timings_ms", {})
    ended = _time(verdict.get("end_time"))
    content = (
        verdict["outcome"],
        reasons[0]["code"] if reasons else "",
        float(min(scores, default=float("nan"))),
        cells,
        "; ".join(reason["text"] for reason in reasons)[:1000],
    )
    kinds = (
        ua.VariantType.String, ua.VariantType.String, ua.VariantType.Double,
        ua.VariantType.UInt32, ua.VariantType.String,
    )  # fmt: skip
    capture = times.get("capture", 0.0)
    return ua.ResultDataType(
        ResultId=ua.ResultIdDataType(Id=verdict["result_id"]),
        HasTransferableDataOnFile=False,
        IsPartial=False,
        IsSimulated=bool(verdict.get("simulated", False)),
        ResultState=RESULT_STATES["failed" if verdict["outcome"] == "ERROR" else "completed"],
        MeasId=ua.MeasIdDataType(Id=meas),
        PartId=ua.PartIdDataType(Id=verdict["serial"]),
        InternalRecipeId=ua.RecipeIdInternalDataType(Id=model["name"], Version=model["version"]),
        ProductId=ua.ProductIdDataType(Id=verdict["product"]),
        InternalConfigurationId=ua.ConfigurationIdDataType(
            Id=(verdict.get("scan", {}).get("calibration") or "none")[:16]
        ),
        JobId=ua.JobIdDataType(Id=job),
        CreationTime=ended,
        ProcessingTimes=ua.ProcessingTimesDataType(
            StartTime=_time(verdict.get("begin_time")),
            EndTime=ended,
            AcquisitionDuration=capture,
            ProcessingDuration=max(0.0, times.get("total", 0.0) - capture),
        ),
        ResultContent=[ua.Variant(value, kind) for value, kind in zip(content, kinds, strict=True)],
    )


def _kind(name: str) -> Any:
    """The variant type of a field of ResultDataType by itself."""
    kinds = {
        "IsPartial": ua.VariantType.Boolean,
        "IsSimulated": ua.VariantType.Boolean,
        "HasTransferableDataOnFile": ua.VariantType.Boolean,
        "ResultState": ua.VariantType.Int32,
        "CreationTime": ua.VariantType.DateTime,
        "ResultContent": ua.VariantType.Variant,
    }
    return kinds.get(name, ua.VariantType.ExtensionObject)


def _time(rfc3339: str | None) -> datetime:
    if not rfc3339:
        return datetime.now(timezone.utc)
    return datetime.fromisoformat(rfc3339.replace("Z", "+00:00"))
