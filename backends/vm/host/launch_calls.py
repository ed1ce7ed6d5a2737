"""Kernel launches: each is checked, recorded and run on the machine."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import Final

from backends.vm.faults import LaunchError
from backends.vm.host.abi import HostError, LaunchAttribute, LaunchConfig, copy_from
from backends.vm.host.runtime import INT, POINTER, SIZE, LaunchRecord, Runtime, answers
from backends.vm.machine.machine import LaunchRequest, launch_shape
from backends.vm.machine.special import Dim3

MOST_ATTRIBUTES: Final = 32
PORTABLE_CLUSTER, LARGEST_CLUSTER = 8, 16
INVALID_CLUSTER_SIZE: Final = 912
"""cudaErrorInvalidClusterSize, which an H200 returns without the opt-in, also if the kernel declares its cluster."""
CLUSTER, COOPERATIVE, PROGRAMMATIC_SERIALIZATION = 4, 2, 6
# cudaLaunchAttributeID. All but the cluster size only order or place work. Running launches one after another, and
# admitting each CTA when the earlier ones wait, satisfies them. A launch that may begin early (programmatic
# serialization) is checked for early accesses if the launch before it is the latest work in its stream.
ATTRIBUTES: Final[Mapping[int, str]] = {
    0: "Ignore", 1: "AccessPolicyWindow", COOPERATIVE: "Cooperative", 3: "SynchronizationPolicy",
    CLUSTER: "ClusterDimension", 5: "ClusterSchedulingPolicyPreference",
    PROGRAMMATIC_SERIALIZATION: "ProgrammaticStreamSerialization", 7: "ProgrammaticEvent", 8: "Priority",
    9: "MemSyncDomainMap", 10: "MemSyncDomain", 11: "PreferredClusterDimension", 12: "LaunchCompletionEvent",
    14: "PreferredSharedMemoryCarveout",
}  # fmt: skip


@answers("_cudaLaunchKernelEx", POINTER, POINTER, POINTER)
def launch_kernel_ex(runtime: Runtime, config: int, kernel: int, params: int) -> None:
    """Run a kernel with launch attributes to its end."""
    size = ctypes.sizeof(LaunchConfig)
    asked = LaunchConfig.from_buffer_copy(copy_from(config, size, "the launch configuration"))
    entry = runtime.kernel_name(kernel)
    attributes = _attributes(asked, entry)
    record = LaunchRecord(
        entry,
        (asked.grid[0], asked.grid[1], asked.grid[2]),
        (asked.block[0], asked.block[1], asked.block[2]),
        _cluster(attributes),
        asked.dynamic_smem,
        asked.stream,
        attributes,
        _params(runtime, entry, params),
    )
    _run(runtime, record)


@answers("_cudaLaunchKernel", POINTER, INT, INT, INT, INT, INT, INT, POINTER, SIZE, POINTER)
def launch_kernel(
    runtime: Runtime, kernel: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, params: int, smem: int,
    stream: int,
) -> None:  # fmt: skip
    """Run a kernel without launch attributes to its end."""
    entry = runtime.kernel_name(kernel)
    values = _params(runtime, entry, params)
    _run(runtime, LaunchRecord(entry, (gx, gy, gz), (bx, by, bz), (1, 1, 1), smem, stream, {}, values))


def _run(runtime: Runtime, record: LaunchRecord) -> None:
    runtime.check_stream(record.stream, f"the launch of {record.entry}")
    function = runtime.module.entry(record.entry)
    cooperative = bool(record.attributes.get(COOPERATIVE, (0,))[0])
    shape = launch_shape(
        function, record.grid, record.block, record.cluster, record.dynamic_smem, explicit=CLUSTER in record.attributes
    )
    # The kernel itself may declare its cluster.
    _check_opted_in(runtime, record, shape.cluster_ctas)
    if cooperative:
        runtime.device.check_cooperative(record.entry, shape, function.static_shared)
    runtime.launches.append(record)
    early = bool(record.attributes.get(PROGRAMMATIC_SERIALIZATION, (0,))[0])
    dependent, runtime.last_in = early and runtime.last_in == record.stream, record.stream
    runtime.machine.perform(LaunchRequest(function, shape, record.params, dependent, cooperative))


def _attributes(config: LaunchConfig, entry: str) -> dict[int, tuple[int, ...]]:
    count = config.attribute_count
    if count > MOST_ATTRIBUTES:
        raise HostError(
            f"the launch of {entry} has {count} attributes; at most {MOST_ATTRIBUTES} are plausible, so that the "
            f"launch configuration seems to have another layout than this runtime's (56 bytes, count at byte 48)"
        )
    size = ctypes.sizeof(LaunchAttribute)
    found: dict[int, tuple[int, ...]] = {}
    for index in range(count):
        raw = copy_from(config.attributes + size * index, size, f"launch attribute {index} of {entry}")
        attribute = LaunchAttribute.from_buffer_copy(raw)
        if attribute.id not in ATTRIBUTES:
            raise LaunchError(f"{entry}: launch attribute {attribute.id} (cudaLaunchAttributeID), unknown to the VM")
        found[attribute.id] = struct.unpack_from("<3I", raw, 8)
    return found


def _cluster(attributes: Mapping[int, tuple[int, ...]]) -> Dim3:
    x, y, z = attributes.get(CLUSTER, (1, 1, 1))
    return x, y, z


def _params(runtime: Runtime, entry: str, params: int) -> tuple[bytes, ...]:
    declared = runtime.module.entry(entry).code.function.params
    pointers = copy_from(params, 8 * len(declared), f"the parameter list of {entry}")
    return tuple(
        copy_from(pointer, variable.size, f"parameter `{variable.name}` of {entry}")
        for variable, (pointer,) in zip(declared, struct.iter_unpack("<Q", pointers), strict=True)
    )


def _check_opted_in(runtime: Runtime, record: LaunchRecord, ctas: int) -> None:
    static = runtime.module.entry(record.entry).static_shared
    limit = runtime.dynamic_smem_limit.get(record.entry, runtime.device.attribute(8) - static)
    if record.dynamic_smem > limit:
        raise LaunchError(
            f"{record.entry}: {record.dynamic_smem} bytes of dynamic shared memory, where {limit} are allowed; more is "
            f"opted in to by the kernel attribute MaxDynamicSharedMemorySize"
        )
    if ctas > LARGEST_CLUSTER or (ctas > PORTABLE_CLUSTER and record.entry not in runtime.large_clusters):
        raise LaunchError(
            f"{record.entry}: clusters of {ctas} CTAs; {PORTABLE_CLUSTER} are possible everywhere, {LARGEST_CLUSTER} "
            f"after the kernel attribute NonPortableClusterSizeAllowed",
            INVALID_CLUSTER_SIZE,
        )
