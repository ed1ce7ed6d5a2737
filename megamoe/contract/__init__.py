"""What backend and executor authors import: programs, cases, rows, devices, errors; imports no other room."""

# ruff: noqa: F401 (these names are for authors)

from megamoe.contract.backend import (
    Backend,
    Borrowed,
    DeviceError,
    DeviceFacts,
    DeviceLostError,
    Execution,
    Executor,
    Flush,
    LoadedProgram,
    LoadingExecutor,
    NoProgramError,
    RunOptions,
    Stopwatch,
    TimedExecutor,
    UnsupportedError,
    as_program,
    backend_names,
    device_of,
    executor_names,
    load_backend,
    load_executor,
)
from megamoe.contract.case import STATUSES, AxisValue, Case, Row, Status, Temperature, file_name, spell
from megamoe.contract.program import (
    TARGETS,
    AnyProgram,
    BufferArg,
    Dim3,
    HostArg,
    HostProgram,
    KernelArg,
    Launch,
    PackedFields,
    PreparedCall,
    Program,
    PythonProgram,
    ScalarArg,
    ShapeArg,
    StreamArg,
    Swizzle,
    Target,
    TensorArg,
    TensorMapArg,
)
from megamoe.contract.trace import Trace
