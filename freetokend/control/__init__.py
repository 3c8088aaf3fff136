"""The control plane: state of the service, health, gRPC services on two sockets, metrics."""

from __future__ import annotations

from freetokend.control.operations import ServiceOperations
from freetokend.control.plane import ControlPlane, check_control, serve_control

__all__ = ["ControlPlane", "ServiceOperations", "check_control", "serve_control"]
