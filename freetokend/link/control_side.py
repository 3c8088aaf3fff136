"""The control process's face of the link: the server, and the supervisor that is the gateway."""

from freetokend.link.handover import PoolHandover
from freetokend.link.liveness import LivenessLimits
from freetokend.link.server import LinkServer
from freetokend.link.session import EngineEnd, EngineLaunch
from freetokend.link.supervisor import EngineSupervisor
from freetokend.link.trace_requests import TraceRecording

__all__ = [
    "EngineEnd",
    "EngineLaunch",
    "EngineSupervisor",
    "LinkServer",
    "LivenessLimits",
    "PoolHandover",
    "TraceRecording",
]
